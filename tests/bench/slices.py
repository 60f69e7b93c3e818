"""KV events, the whole path on one loop: how long does a flood of them keep everything else waiting?

python -m tests.bench.slices

A publisher in a process of its own sends what vLLM does (32 blocks stored and 32 removed a batch); adapter, reader and
index take it in, as in the gateway. A chain of `call_soon` on the same loop sees how long each turn of the loop took:
by the clock (where the machine is shared, that includes what others took) and in CPU time of the thread. Slices are the
turns of 50 µs or more: those in which something was done.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import uvloop
import zmq

from adapters.vllm import VllmAdapter
from router.core import EngineFacts, EventSource, Instance
from router.routing.bookings import Bookings
from router.routing.confidence import Confidence
from router.routing.fleet import Fleet
from router.routing.index import BlockIndex
from router.routing.reader import FeedCounts, Reader
from tests.bench.fake_engine import batches
from tests.bench.processes import GATEWAY_CORE, LOAD_CORE
from tests.bench.table import Row, report

TAKES_S = 15
SECONDS = 4.0
BLOCKS = 32  # a batch
BLOCKS_PER_S = 50_000
FLOOD_BATCHES = 12_500  # 400,000 blocks, some 20 MB: within what the adapter lets wait


def run() -> dict[str, Any]:
    return {
        "quiet": _measured(batches_per_s=0.0, count=0),
        "50k blocks/s": _measured(batches_per_s=BLOCKS_PER_S / BLOCKS, count=int(SECONDS * BLOCKS_PER_S / BLOCKS)),
        "flat out": _measured(batches_per_s=float("inf"), count=FLOOD_BATCHES),
    }


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    quiet = figures["quiet"]
    for name in ("50k blocks/s", "flat out"):
        run = figures[name]
        wanted = BLOCKS_PER_S if name != "flat out" else None
        yield Row(f"{name}: blocks stored (and as many removed)", run["blocks_per_s"], "/s", wanted, "sent")
        yield Row(f"{name}: batches lost", run["lost"], "", target="0")
        for clock in ("cpu", "wall"):
            yield Row(f"{name}: median slice, {clock}", run[f"p50_{clock}_us"], "µs")
            yield Row(f"{name}: p99.9 slice, {clock}", run[f"p99.9_{clock}_us"], "µs", target="≤ 1 ms")
            longest = f"longest_{clock}_us"
            yield Row(f"{name}: longest slice, {clock}", run[longest], "µs", quiet[longest], "no events")
        yield Row(f"{name}: share of a core spent in slices", run["core_share"], "")


def _measured(*, batches_per_s: float, count: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    publisher = context.Process(target=_publish, args=(theirs, batches_per_s, count), daemon=True)
    publisher.start()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {GATEWAY_CORE})
    try:
        return uvloop.run(_take_in(mine.recv(), mine, count))
    finally:
        os.sched_setaffinity(0, before)
        publisher.terminate()
        publisher.join()


def _publish(pipe: Connection, batches_per_s: float, count: int) -> None:
    """Empty batches until told that one has arrived; then `count` batches."""
    os.sched_setaffinity(0, {LOAD_CORE})
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.sndhwm = 0
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    payloads = batches(1200, blocks=BLOCKS)
    seq = 0
    while not pipe.poll(0.01):
        socket.send_multipart([b"", seq.to_bytes(8, "big"), b"\x93\xcb" + bytes(8) + b"\x90\xc0"])
        seq += 1
    due = time.monotonic()
    for n in range(count):
        while time.monotonic() < due:
            time.sleep(0.0005)
        socket.send_multipart([b"", (seq + n).to_bytes(8, "big"), payloads[n % len(payloads)]])
        due += 1 / batches_per_s
    time.sleep(60)


async def _take_in(port: int, pipe: Connection, count: int) -> dict[str, Any]:
    adapter = VllmAdapter()
    counts, reading = _reader(adapter, EventSource(0, f"tcp://127.0.0.1:{port}"))
    try:
        while not counts.batches:  # noqa: ASYNC110 (a plain counter)
            await asyncio.sleep(0.02)
        gc.collect()
        gc.freeze()  # as the gateway does at the end of its start
        pipe.send("heard")
        return await _turns(counts, count)
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await adapter.aclose()


def _reader(adapter: VllmAdapter, source: EventSource) -> tuple[FeedCounts, asyncio.Task[None]]:
    clock = time.monotonic
    fleet, index, counts = Fleet(), BlockIndex(b"bench", clock=clock), FeedCounts()
    instance = Instance("e", "http://127.0.0.1:1", "vllm", "m")
    fleet.add(instance, now=clock())
    fleet.learn("e", EngineFacts(served=("m",), block_size=16, sources=(source,)), now=clock())
    (rank,) = fleet.ranks("e")
    rank.slot = index.open("e", 0, model="m", block_size=16)
    rank.confidence = Confidence(clock=clock)
    reader = Reader(
        instance,
        source,
        adapter=adapter,
        ranks=lambda: fleet.ranks("e"),
        shared=False,
        index=index,
        bookings=Bookings[Any](),
        counts=counts,
        clock=clock,
        dice=random.Random(1),
    )
    return counts, asyncio.create_task(reader.run())


async def _turns(counts: FeedCounts, count: int) -> dict[str, Any]:
    """Watches the loop until all has been taken in, or for SECONDS where nothing comes; a minute at most."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    wall, cpu = Turns(time.perf_counter), Turns(time.thread_time)
    until = wall.last + (60 if count else SECONDS)

    def turn() -> None:
        wall.ended()
        cpu.ended()
        if (count and counts.stored >= count * BLOCKS) or wall.last > until:
            done.set()
        else:
            loop.call_soon(turn)

    loop.call_soon(turn)
    await done.wait()
    return {
        "blocks_per_s": round(counts.stored / wall.total),
        "lost": count - counts.stored // BLOCKS,
        **{f"{name}_wall_us": value for name, value in wall.figures().items()},
        **{f"{name}_cpu_us": value for name, value in cpu.figures().items()},
        "core_share": round(cpu.in_slices / wall.total, 3),
    }


class Turns:
    """The lengths of a loop's turns by one clock. Short ones are not kept: an idle loop has millions."""

    SHORT_S = 50e-6

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self.last = clock()
        self._long: list[float] = []

    def ended(self) -> None:
        now = self._clock()
        if now - self.last > self.SHORT_S:
            self._long.append(now - self.last)
        self.last = now

    @property
    def total(self) -> float:
        return self.last - self._began

    @property
    def in_slices(self) -> float:
        return sum(self._long)

    def figures(self) -> dict[str, float]:
        """In µs; 0: every turn was too short to be kept."""
        lengths = sorted(self._long) or [0.0]
        return {
            "p50": round(lengths[len(lengths) // 2] * 1e6, 1),
            "p99.9": round(lengths[int(len(lengths) * 0.999)] * 1e6, 1),
            "longest": round(lengths[-1] * 1e6, 1),
        }


if __name__ == "__main__":
    report(__doc__, run, rows)
