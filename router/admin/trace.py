"""The record of served requests as JSON lines, with the names of Mooncake's traces. A client of `core.Live`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import msgspec
from xxhash import xxh3_64_intdigest

from router.core import Live
from router.routing.trace_log import TracedRequest, unpack

_KEY_BYTES = 8
_AT_ONCE = 2_000  # keys before the loop gets its turn: less than a millisecond
_ROW = 20  # a row takes as long as so many keys


class TraceLine(msgspec.Struct, omit_defaults=True):
    """One served request.

    hash_ids: one a block of `block_size` tokens, each standing for its block and all before it. They end where the
    prompt was not known to the gateway, and name no partial block. All ids are hashes under a salt made for this one
    answer: equal within it, without meaning beside it.
    """

    timestamp: float  # arrival, wall clock, ms
    input_length: int  # tokens
    output_length: int
    model: str
    instance: str
    stream: bool
    turn: int
    hash_ids: list[int]
    block_size: int | None = None
    session: int | None = None
    tenant: int | None = None
    ttft_s: float | None = None


_encode = msgspec.json.Encoder().encode


async def trace_lines(live: Live, *, since: float = 0.0, model: str | None = None) -> AsyncIterator[bytes]:
    """Requests in the order in which they ended, some lines at a time.

    since: wall clock, seconds; those that arrived earlier are left out. model: a public name; None: all.
    """
    salt = secrets.randbits(64)
    position: int | None = 0
    lines: list[bytes] = []
    work = 0
    while position is not None:
        rows, position = await live.trace(position)
        for packed in rows:
            row = unpack(packed)
            work += _ROW
            if row.at >= since and model in (None, row.model):
                lines.append(_encode(_line(row, salt)))
                work += len(row.keys) // _KEY_BYTES
            if work >= _AT_ONCE:
                if lines:
                    yield b"\n".join((*lines, b""))
                await asyncio.sleep(0)
                lines, work = [], 0
    if lines:
        yield b"\n".join((*lines, b""))


def _line(row: TracedRequest, salt: int) -> TraceLine:
    keys = row.keys[: row.input_tokens // row.block_size * _KEY_BYTES] if row.block_size else b""
    return TraceLine(
        timestamp=round(row.at * 1e3, 3),
        input_length=row.input_tokens,
        output_length=row.output_tokens,
        model=row.model,
        instance=row.instance,
        stream=row.stream,
        turn=row.turn,
        hash_ids=[xxh3_64_intdigest(keys[at : at + _KEY_BYTES], salt) for at in range(0, len(keys), _KEY_BYTES)],
        block_size=row.block_size or None,
        session=_salted(row.session, salt),
        tenant=_salted(row.tenant, salt),
        ttft_s=row.ttft_s,
    )


def _salted(name: int, salt: int) -> int | None:
    return xxh3_64_intdigest(name.to_bytes(_KEY_BYTES, "little"), salt) if name else None
