"""What stands in the spool: an open mark when a request is sent to an engine, its end, and what engines there were.

A record is a frame: length and CRC-32 of what follows, then MessagePack. Fields are only ever added, at the end and
with a default, so that a spool can be read by a later version.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import msgspec

from router.core import Rates

_HEAD = struct.Struct("<II")
LARGEST_BYTES = 64 * 1024


class Mark(msgspec.Struct, array_like=True, tag="m", frozen=True, gc=False):
    """A request is being sent. Of two with the same serial, the later one counts: it was sent again."""

    serial: str
    shown_id: str  # what the client knows it by, if that is another
    at: float  # wall clock, when it came
    tenant: str
    project: str
    key: str
    model: str
    asked_model: str
    route: str
    instance: str
    stream: bool
    attempts: int
    prompt_tokens: int  # by our count
    output_bound: int  # tokens it may have at most
    end_user: str
    tags: tuple[str, ...]
    best_hit_tokens: int
    predicted_hit_tokens: int
    queue_s: float
    rates: Rates


class End(msgspec.Struct, array_like=True, tag="e", frozen=True, gc=False):
    """A request has ended. Everything a row needs, but for what it cost the engine."""

    serial: str
    shown_id: str
    at: float
    tenant: str
    project: str
    key: str
    model: str
    asked_model: str
    route: str
    instance: str | None
    stream: bool
    status: int
    finish: str
    error: str
    attempts: int
    usage: tuple[Any, ...] | None  # the fields of `core.Usage`, in order
    input_tokens: int  # the engine's count, else ours
    events: int
    events_after_usage: int
    billable: bool
    best_hit_tokens: int
    predicted_hit_tokens: int
    queue_s: float
    ttft_s: float | None
    took_s: float
    end_user: str
    tags: tuple[str, ...]
    blind_hit_tokens: int | None = None  # None: written before there was such a thing


class Seen(msgspec.Struct, array_like=True, tag="s", frozen=True, gc=False):
    """An engine that is there, whether or not it has anything to do. Written every minute."""

    since: float  # wall clock, when this was written before; its own time if it was not
    at: float
    instance: str
    per_hour: str | None  # decimal: what an hour of it costs by the configuration
    ranks: int
    capacity_tokens: int  # of its KV cache, all ranks; 0: unknown


Record = Mark | End | Seen

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode
_pack = _HEAD.pack


def frame(record: Record) -> bytes:
    payload = _encode(record)
    return _pack(len(payload), crc32(payload)) + payload


class Frames:
    """The records in `data`, in order.

    end      where the last one that has been given ends
    strange  records that a later version has written: they are passed over
    torn     at `end` there is a frame that is damaged; one that is merely not whole yet is not
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.end = 0
        self.strange = 0
        self.torn = False

    def __iter__(self) -> Iterator[Record]:
        data = memoryview(self._data)
        while self.end + _HEAD.size <= len(data):
            length, checksum = _HEAD.unpack_from(data, self.end)
            begin = self.end + _HEAD.size
            payload = data[begin : begin + length]
            if length <= LARGEST_BYTES and len(payload) < length:
                return
            if length > LARGEST_BYTES or crc32(payload) != checksum:
                self.torn = True
                return
            self.end = begin + length
            try:
                record = _decode(payload)
            except msgspec.DecodeError:
                self.strange += 1
                continue
            yield record
