"""Many streams, clients that vanish, engines that are killed: what is left over afterwards?

python -m tests.bench.crowd

2,000 clients read streams of 20 chunks a second for a minute, in four rounds; a fifth of the requests are left at a
random moment, and every few seconds one of four engines is killed and started again. After each round the gateway must
be as it was: no booking, no connection, no task, no file descriptor more; and memory after the last round as after the
first, but for the record of served requests. Each request has ended in one way, which its client and the gateway's
metrics agree on.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.load import shared_prefix_bodies
from tests.bench.processes import ENGINE_PORTS, LOAD_CORE, PORT, Measured, engine, gateway, metric
from tests.bench.table import Row, report

TAKES_S = 150
CHUNKS, DELAY_MS = 100, 50
VANISH = 0.2
KILL_EVERY_S, DOWN_S = (2.0, 5.0), 1.0
ROUNDS = 4
SETTLE_S = 15.0  # idle connections to engines are kept for 4 s

_SMALL_MEMORY = {"prompt": {"memo_bytes": "1MiB"}, "index": {"max_bytes": "4MiB"}}
"""Full after the first round, so that what grows after it is no cache."""

_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_FINISHED = re.compile(r'^warmroute_requests_total\{[^}]*finish="(\w+)"[^}]*\} ([0-9.e+]+)$', re.MULTILINE)


class Crowd:
    """What became of the requests, as their clients saw it.

    complete   read to [DONE] and the last chunk
    vanished   left by the client; `unseen` of them before any byte of an answer
    failed     an error status, an error event, or a stream that was cut
    lies       a clean end without [DONE], or [DONE] behind an error
    """

    def __init__(self, body: Callable[[], bytes], dice: random.Random, until: float) -> None:
        self.body = body
        self.dice = dice
        self.until = until
        self.counts: Counter[str] = Counter()
        self.open = 0
        self.over = asyncio.Event()

    @property
    def going_on(self) -> bool:
        return time.monotonic() < self.until

    def ended(self) -> None:
        self.open -= 1
        if not self.open and not self.going_on:
            self.over.set()


class Client(asyncio.Protocol):
    """One connection after the other; a request on it after the other."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.transport: Any = None
        self.timer: asyncio.TimerHandle | None = None
        self.running = False
        self.tail = b""
        self.seen = self.done = self.error = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        if not self.crowd.going_on:
            self.transport.close()
            return
        self.running = True
        self.tail = b""
        self.seen = self.done = self.error = False
        body = self.crowd.body()
        self.crowd.counts["sent"] += 1
        self.transport.write(_HEAD % len(body) + body)
        if self.crowd.dice.random() < VANISH:
            after = self.crowd.dice.uniform(0, CHUNKS * DELAY_MS / 1e3)
            self.timer = asyncio.get_running_loop().call_later(after, self.vanish)

    def vanish(self) -> None:
        if self.running:
            self.end("vanished")
            self.crowd.counts["unseen"] += not self.seen
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self.running:
            return
        if not self.seen:
            self.seen = True
            if not data.startswith(b"HTTP/1.1 200"):
                self.end("failed")
                self.transport.abort()
                return
        self.tail = self.tail[-32:] + data
        self.error = self.error or b'data: {"error"' in self.tail
        self.done = self.done or b"data: [DONE]" in self.tail
        if self.tail.endswith(_LAST_CHUNK):
            self.end("complete" if self.done and not self.error else "lies")
            self.next()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.running:
            self.end("lies" if self.done else "failed")
        if self.crowd.going_on:
            asyncio.get_running_loop().call_later(self.crowd.dice.uniform(0.05, 0.3), self.again)
        else:
            self.crowd.ended()

    def again(self) -> None:
        task = asyncio.ensure_future(connect(self))
        task.add_done_callback(lambda done: self.crowd.ended() if done.exception() else None)

    def end(self, how: str) -> None:
        self.running = False
        self.crowd.counts[how] += 1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


async def connect(client: Client) -> None:
    await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", PORT)


def run(streams: int = 2000, seconds: float = 60.0, seed: int = 1) -> dict[str, Any]:
    dice = random.Random(seed)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {LOAD_CORE})
    try:
        with (
            Engines() as engines,
            gateway(
                engines=[engine(i) for i in range(len(ENGINE_PORTS))],
                module="tests.bench.counted_gateway",
                settings=_SMALL_MEMORY,
            ) as at,
        ):
            _crowd(200, 3.0, dice, None)  # what is made once is made
            levels = [_level(at)]
            counts: Counter[str] = Counter()
            ends_before = _ends()
            for _ in range(ROUNDS):
                counts += _crowd(streams, seconds / ROUNDS, dice, engines)
                levels.append(_level(at))
            ends = _ends()
    finally:
        os.sched_setaffinity(0, before)
    return {
        "clients": dict(counts),
        "gateway": {name: round(ends[name] - ends_before.get(name, 0)) for name in sorted(ends)},
        "engines_killed": engines.killed,
        "levels": levels,
    }


def _crowd(streams: int, seconds: float, dice: random.Random, engines: Engines | None) -> Counter[str]:
    async def drive() -> Counter[str]:
        crowd = Crowd(shared_prefix_bodies(1, stream=True), dice, time.monotonic() + seconds)
        killer = asyncio.ensure_future(engines.kill_some(dice, crowd)) if engines is not None else None
        for begun in range(streams):
            crowd.open += 1
            await connect(Client(crowd))
            if begun % 50 == 49:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(crowd.over.wait(), seconds + 120)
        if killer is not None:
            await killer
        return crowd.counts

    return uvloop.run(drive())


class Engines:
    """The fake engines, each a process of its own."""

    def __init__(self) -> None:
        self.killed = 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Engines:
        for port in ENGINE_PORTS:
            self._start(port)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _start(self, port: int) -> None:
        options = ["--ports", str(port), "--chunks", str(CHUNKS), "--delay-ms", str(DELAY_MS)]
        self._processes[port] = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.fake_engine", *options], stderr=subprocess.DEVNULL
        )

    async def kill_some(self, dice: random.Random, crowd: Crowd) -> None:
        while crowd.going_on:
            await asyncio.sleep(dice.uniform(*KILL_EVERY_S))
            port = dice.choice(ENGINE_PORTS)
            self._processes[port].kill()
            self._processes[port].wait()
            self.killed += 1
            await asyncio.sleep(DOWN_S)
            self._start(port)


def _ends() -> dict[str, float]:
    """By `finish`, from the gateway's metrics."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{PORT + 1000}/metrics", timeout=10).read().decode()
    ends: Counter[str] = Counter()
    for how, count in _FINISHED.findall(page):
        ends[how] += float(count)  # type: ignore[assignment]
    return dict(ends)


def _level(at: Measured) -> dict[str, float]:
    """What the gateway holds when nobody asks anything of it."""
    time.sleep(SETTLE_S)
    process = Path(f"/proc/{at.process.pid}")
    memory = re.search(r"VmRSS:\s+(\d+) kB", (process / "status").read_text())
    assert memory is not None
    return {
        "bookings": metric("warmroute_rank_booked_requests"),
        "waiting": metric("warmroute_room_waiting"),
        "file_descriptors": len(list((process / "fd").iterdir())),
        "tasks": _tasks(at),
        "memory_mb": round(int(memory[1]) / 1024, 1),
    }


def _tasks(at: Measured) -> int:
    told = at.log.read_text().count("\ntasks ") + at.log.read_text().startswith("tasks ")
    at.process.send_signal(signal.SIGUSR1)
    for _ in range(100):
        found = re.findall(r"^tasks (\d+)$", at.log.read_text(), re.MULTILINE)
        if len(found) > told:
            return int(found[-1])
        time.sleep(0.05)
    raise RuntimeError("the gateway does not tell its tasks")


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    clients, ends = figures["clients"], figures["gateway"]
    yield Row("requests sent", clients["sent"], "")
    yield Row("engines killed", figures["engines_killed"], "")
    yield Row("broken streams with a clean end", clients.get("lies", 0), "", target="0")
    for ours, theirs in (("complete", "complete"), ("client_gone", "vanished"), ("upstream_failed", "failed")):
        yield Row(f"gateway: {ours}", ends.get(ours, 0), "", target=f"{clients.get(theirs, 0):,} by the clients")
    missing = clients["sent"] - sum(ends.values())
    yield Row("requests without an end", missing, "", target=f"≤ {clients.get('unseen', 0)} left before any answer")
    first, *later = figures["levels"]
    for name in ("bookings", "waiting"):
        yield Row(f"idle after a round, at most: {name}", max(level[name] for level in later), "", target="0")
    for name in ("file_descriptors", "tasks"):
        told = f"idle after a round, at most: {name.replace('_', ' ')}"
        yield Row(told, max(level[name] for level in later), "", first[name], "before", "1 ×")
    memory, once = later[-1]["memory_mb"], later[0]["memory_mb"]
    yield Row("memory after the last round", memory, "MB", once, "after the first", "≤ 1.1 ×")
    yield Row("memory before", first["memory_mb"], "MB")


if __name__ == "__main__":
    report(__doc__, run, rows)
