"""Traces of lengths and block hashes with recorded arrivals: Mooncake, Qwen-Bailian, and those of lengths only."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from router.lab.trace_lines import BadRow, InputTokens, OutputTokens, at_line, check_blocks, packed, produced, rows
from router.lab.trace_request import TraceRequest

_GRID_S = 0.1  # ticks are whole multiples of it
_JITTER_S = 0.01  # by which recorded ticks miss their place (Mooncake: 3 ms)
_TICKS_S = (1.0, 10.0)  # shorter ones do not matter, longer ones are bursts rather than a coarse clock

BlockTokens = Annotated[int, Meta(ge=1)]


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # ms
    input_length: InputTokens
    hash_ids: list[int]
    output_length: OutputTokens = None
    block_size: BlockTokens | None = None
    session: int | str = ""
    turn: Annotated[int, Meta(ge=1)] = 1
    tenant: int | str = ""


class _BailianRow(msgspec.Struct):
    timestamp: float  # seconds
    input_length: InputTokens
    hash_ids: list[int]
    chat_id: int
    output_length: OutputTokens = None
    parent_chat_id: int = -1
    turn: Annotated[int, Meta(ge=1)] = 1


class _LengthsRow(msgspec.Struct):
    input_length: InputTokens
    output_length: OutputTokens = None
    timestamp: float | None = None  # ms
    t: float | None = None  # seconds
    client: int | str = ""


class _HashRow(Protocol):
    @property
    def input_length(self) -> int: ...
    @property
    def hash_ids(self) -> Sequence[int]: ...


R = TypeVar("R", bound=_HashRow)


def read_mooncake(path: Path, block_size: int) -> list[TraceRequest]:
    """Mooncake (FAST '25): `timestamp` in ms, `input_length`, `output_length`, `hash_ids` used as they are.

    What a gateway exports has `session`, `turn` and `tenant` as well; arrivals are the recorded ones all the same.
    """
    return _by_arrival(
        [
            TraceRequest(
                id=str(number),
                at=row.timestamp / 1e3,
                input_tokens=row.input_length,
                output_tokens=produced(row.output_length),
                blocks=ids,
                session=str(row.session),
                turn=row.turn,
                tenant=str(row.tenant),
            )
            for number, row, ids in _hash_rows(path, _MooncakeRow, block_size)
        ]
    )


def mooncake_block_size(path: Path) -> int | None:
    """As the first row tells; None: it doesn't."""
    for _, row in rows(path, _MooncakeRow):
        return row.block_size
    return None


def read_bailian(path: Path, block_size: int) -> list[TraceRequest]:
    """Qwen-Bailian (ATC '25): Mooncake's fields, but seconds, and `chat_id`, `parent_chat_id` (-1: none), `turn`.

    A chain of chats is a session, named after its first chat. Timestamps are real arrivals and are kept, so turns do
    not wait for the ones before them. The published hashes are described as taken block by block; chaining them makes a
    name stand for all before it, and changes nothing where they are chained already.
    """
    requests = []
    first_chats: dict[int, int] = {}
    for number, row, ids in sorted(_hash_rows(path, _BailianRow, block_size), key=lambda item: item[1].timestamp):
        chat, parent = row.chat_id, row.parent_chat_id
        first = chat if parent < 0 else first_chats.get(parent, parent)  # the trace may begin after the first chat
        first_chats[chat] = first
        requests.append(
            TraceRequest(
                id=str(number),
                at=row.timestamp,
                input_tokens=row.input_length,
                output_tokens=produced(row.output_length),
                blocks=_chained(ids),
                session=str(first),
                turn=row.turn,
            )
        )
    return requests


def read_lengths(path: Path, block_size: int) -> list[TraceRequest]:
    """ServeGen, Azure and others without prompts: `timestamp` in ms or `t` in seconds, lengths, maybe `client`.

    No two requests share a block. A client becomes the tenant.
    """
    requests, next_name = [], 0
    for number, row in rows(path, _LengthsRow):
        if row.timestamp is not None:
            at = row.timestamp / 1e3
        elif row.t is not None:
            at = row.t
        else:
            raise at_line(path, number, "neither `timestamp` (ms) nor `t` (seconds)")
        blocks = range(next_name, next_name + -(-row.input_length // block_size))
        next_name = blocks.stop
        requests.append(
            TraceRequest(str(number), at, row.input_length, produced(row.output_length), blocks, tenant=str(row.client))
        )
    return _by_arrival(requests)


def spread(requests: Sequence[TraceRequest], seed: int) -> None:
    """Where arrivals were recorded by a coarse clock, gives each a uniformly random place within its tick.

    `requests` are in order of arrival and stay so. A clock is coarse when all arrivals lie on multiples of one tick of
    1 to 10 s, counted from the first, and some share theirs. Mooncake's ticks are 3 s: replayed as they stand, ten
    requests at a time arrive at the same instant.
    """
    tick = _tick_s(requests)
    if tick is None:
        return
    start, rng = requests[0].at, random.Random(seed)
    for place, group in groupby(requests, key=lambda request: round((request.at - start) / tick)):
        together = list(group)
        for request, part in zip(together, sorted(rng.random() for _ in together), strict=True):
            request.at = start + (place + part) * tick


def _tick_s(requests: Sequence[TraceRequest]) -> float | None:
    units: set[int] = set()
    for request in requests:
        after_start = request.at - requests[0].at
        unit = round(after_start / _GRID_S)
        if abs(after_start - unit * _GRID_S) > _JITTER_S:
            return None
        units.add(unit)
    tick = math.gcd(*units) * _GRID_S
    shortest, longest = _TICKS_S
    return tick if shortest <= tick <= longest and len(units) < len(requests) else None


def _hash_rows(path: Path, shape: type[R], block_size: int) -> Iterator[tuple[int, R, array[int]]]:
    for number, row in rows(path, shape):
        try:
            check_blocks(len(row.hash_ids), row.input_length, block_size)
            ids = packed(row.hash_ids)
        except BadRow as error:
            raise at_line(path, number, error) from None
        yield number, row, ids


def _chained(ids: array[int]) -> array[int]:
    name = 0
    return array("Q", [name := xxh3_64_intdigest(id.to_bytes(8, "little"), name) for id in ids])


def _by_arrival(requests: list[TraceRequest]) -> list[TraceRequest]:
    return sorted(requests, key=lambda request: request.at)
