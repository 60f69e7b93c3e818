"""KV events: blocks a second from the bytes on the wire to the index.

python -m tests.bench.events

"prefill": one stored event of 32 blocks a batch. "decode": one stored and one removed block a batch, what a full engine
publishes while it decodes. "step": eight of each a batch. Blocks stored are counted; removals come on top. `unpack` is
the baseline, a bare msgspec decode of the same bytes; `wire` is everything, read from a real socket on uvloop. Seconds
are CPU time of the thread that decodes, best of some rounds: the machine may be shared.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from itertools import repeat
from typing import Any

import msgspec
import uvloop
import zmq

from adapters._events import decode
from adapters._stream import Item
from adapters._zmq import Follower, new_context
from router.core import EventBatch, EventSource
from router.routing.index import BlockIndex
from tests.bench.table import Row, report

TAKES_S = 15
SIZE = 16
MIXES = {"prefill": (32, 0, 1), "decode": (1, 1, 1), "step": (1, 1, 8)}  # blocks stored, removed, times a batch
BATCHES = {"prefill": 2_000, "decode": 20_000, "step": 4_000}
ROUNDS = 3


def run() -> dict[str, Any]:
    return {mix: _figures(mix) for mix in MIXES}


def _figures(mix: str) -> dict[str, int]:
    payloads = _payloads(mix, random.Random(1))
    stored, _, times = MIXES[mix]
    blocks = stored * times * len(payloads)
    unpack = msgspec.msgpack.Decoder().decode
    seconds = {
        "unpack": _best(lambda: deque(map(unpack, payloads), 0)),
        "decode": _best(lambda: deque(map(decode, repeat(0), payloads), 0)),
        "decode_and_apply": _best(lambda: _apply(payloads)),
        "wire": min(uvloop.run(_wire(payloads)) for _ in range(ROUNDS)),
    }
    return {f"{name}_blocks_per_s": round(blocks / took) for name, took in seconds.items()}


def _payloads(mix: str, dice: random.Random) -> list[bytes]:
    """Sequences that grow block by block, the oldest blocks leaving; prefills are each a sequence of their own."""
    stored, removed, times = MIXES[mix]
    names: deque[int] = deque(maxlen=1_000)
    batches = []
    for _ in range(BATCHES[mix]):
        events: list[dict[str, Any]] = []
        for _ in range(times):
            hashes = [dice.getrandbits(64) for _ in range(stored)]
            events.append(_stored(hashes, parent=names[-1] if names and stored == 1 else None, dice=dice))
            if removed and len(names) == names.maxlen:
                events.append({"type": "BlockRemoved", "block_hashes": [names[0]], "medium": "GPU", "group_idx": 0})
            names.append(hashes[-1])
        batches.append(msgspec.msgpack.encode([1.5, events, 0]))
    return batches


def _stored(hashes: list[int], *, parent: int | None, dice: random.Random) -> dict[str, Any]:
    """A BlockStored with the fields of vLLM 0.32."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": dice.choices(range(150_000), k=len(hashes) * SIZE),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["tenant"] if parent is None else None, *[None] * (len(hashes) - 1)],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _apply(payloads: list[bytes]) -> None:
    apply, slot = _index()
    for payload in payloads:
        for event in decode(0, payload).events:
            apply(slot, event)


async def _wire(payloads: list[bytes]) -> float:
    """CPU seconds of the loop from the first batch to the last, all of them already waiting at the socket."""
    context = new_context()
    publisher = context.socket(zmq.PUB)
    publisher.sndhwm = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    source = EventSource(0, f"tcp://127.0.0.1:{port}")
    async with aclosing(Follower(context, source, None, clock=time.monotonic).items()) as items:
        first = await _subscribed(publisher, items)
        for seq, payload in enumerate(payloads, first):
            publisher.send_multipart([b"", seq.to_bytes(8, "big"), payload])
        time.sleep(0.3)  # noqa: ASYNC251  # the loop must not begin before everything is there
        took = await _consumed(items, first + len(payloads) - 1)
    publisher.close(linger=0)
    context.term()
    return took


async def _subscribed(publisher: zmq.Socket[bytes], items: AsyncGenerator[Item]) -> int:
    """Sends empty batches until one arrives; returns the next sequence."""
    arrived = asyncio.ensure_future(anext(items))
    seq = 0
    while not arrived.done():
        publisher.send_multipart([b"", seq.to_bytes(8, "big"), msgspec.msgpack.encode([1.5, [], 0])])
        seq += 1
        await asyncio.sleep(0.01)
    return seq


async def _consumed(items: AsyncGenerator[Item], last: int) -> float:
    apply, slot = _index()
    began = time.thread_time()
    async for item in items:
        assert isinstance(item, EventBatch) or item.first_seq == 0, "the socket pair lost something"
        if isinstance(item, EventBatch):
            for event in item.events:
                apply(slot, event)
            if item.seq == last:
                break
    return time.thread_time() - began


def _index() -> tuple[Callable[..., object], Any]:
    index = BlockIndex(b"bench", clock=time.perf_counter)
    return index.apply, index.open("e", 0, model="m")


def _best(action: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        action()
        best = min(best, time.thread_time() - began)
    return best


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    for mix, row in figures.items():
        unpack = row["unpack_blocks_per_s"]
        for name, rate in row.items():
            step = name.removesuffix("_blocks_per_s").replace("_", " ")
            if step != "unpack":
                yield Row(f"{mix}: {step}", rate, "blocks/s", unpack, "bare unpacking")


if __name__ == "__main__":
    report(__doc__, run, rows)
