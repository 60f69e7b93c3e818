"""What a 1 KB request costs in calls: Python functions entered and C functions called, which no other load changes.

    python -m tests.bench.calls [--kind plain|stream|turns] [--top 40]

The gateway runs in this process with everything on but the admin API; engines and load run in others. Its CPU stands
beside that of a fixed piece of Python work in the same seconds: on a shared machine only their ratio can be compared.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from statistics import quantiles
from types import FrameType
from typing import Any

import uvloop

from router.app import GC_THRESHOLDS, SWITCH_INTERVAL_S, Running
from router.config import load
from router.core import Outcome
from tests.bench.processes import GATEWAY_CORE, LOAD_CORE, fake_engines, written_config
from tests.bench.table import Row, report

TAKES_S = 15
CONNECTIONS = 64
WARM, COUNTED, TIMED = 50, 20, 150  # requests of each connection
KB = {"plain": "1", "stream": "1", "turns": "128"}
WINDOW_S = 0.05
LEAST_COUNTED = 20  # requests of a window that tells


class Calls:
    """Counts them on this thread while it is entered."""

    def __init__(self) -> None:
        self.python: Counter[Any] = Counter()
        self.c: Counter[str] = Counter()

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.python[frame.f_code] += 1
        elif event == "c_call":
            self.c[f"{argument.__qualname__} < {frame.f_code.co_qualname}"] += 1

    def top(self, count: int, requests: int) -> list[tuple[str, float]]:
        """The most frequent functions, in calls a request."""
        names: Counter[str] = Counter(self.c)
        for code, calls in self.python.items():
            names[f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_qualname}"] += calls
        return [(name, round(calls / requests, 2)) for name, calls in names.most_common(count)]


async def _measure(kind: str, top: int, urls: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        engines = [
            {"url": url, "kind": "vllm", "block_size": 16, "events": [{"endpoint": f"tcp://127.0.0.1:{_free_port()}"}]}
            for url in urls
        ]
        port = _free_port()
        file = written_config(
            Path(folder), port=port, engines=engines, model="fake", tokenize="auto", policy="kv_aware"
        )
        ended: list[int] = [0]

        def count(_: Outcome) -> None:
            ended[0] += 1

        async with Running(load(file), admin="off", listeners=(count,)) as running:
            while not (await running.live.readiness())["ready"]:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.5)  # every engine has been looked at
            await _load(kind, port, WARM)
            with Calls() as calls:
                counted = await _load(kind, port, COUNTED)
            cpu, work = await _cpu_us(lambda: ended[0], _load(kind, port, TIMED))
    requests = counted["requests"]
    return {
        "python_calls": round(sum(calls.python.values()) / requests, 1),
        "c_calls": round(sum(calls.c.values()) / requests, 1),
        "cpu_us": round(cpu, 1),
        "fixed_work_us": round(work, 1),
        "top": calls.top(top, requests),
    }


async def _cpu_us(ended: Callable[[], int], load: Coroutine[Any, Any, Any]) -> tuple[float, float]:
    """CPU of this process a request, and of the fixed work, in windows as short as others let us run undisturbed: a
    tenth of them was cheaper than that.
    """
    task = asyncio.create_task(load)
    cpu, work = [], []
    while not task.done():
        count, began = ended(), time.process_time()
        await asyncio.sleep(WINDOW_S)
        count, took = ended() - count, time.process_time() - began
        if count > LEAST_COUNTED:
            cpu.append(took / count * 1e6)
            work.append(_fixed_work_us())
    await task
    return quantiles(cpu, n=10)[0], quantiles(work, n=10)[0]


async def _load(kind: str, port: int, rounds: int) -> dict[str, Any]:
    arguments = ["--port", str(port), "-c", str(CONNECTIONS), "--rounds", str(rounds), "--kb", KB[kind]]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.bench.load", kind, *arguments),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, {LOAD_CORE}),
    )
    output, _ = await process.communicate()
    figures: dict[str, Any] = json.loads(output)
    assert not figures["errors"], figures
    return figures


def _fixed_work_us() -> float:
    """Calls, attributes, dicts and bytes, as a relay has them."""

    class Thing:
        __slots__ = ("name", "seen")

        def __init__(self, name: bytes) -> None:
            self.name = name
            self.seen = 0

        def see(self, data: bytes) -> int:
            self.seen += len(data)
            return data.find(self.name)

    began = time.process_time()
    things = {number: Thing(b"%d" % number) for number in range(1000)}
    for number in range(4_000):
        things[number * 7919 % 1000].see(b"a1b2c3d4")
    return (time.process_time() - began) / 20 * 1e6


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def run(kind: str = "plain", top: int = 40) -> dict[str, Any]:
    os.sched_setaffinity(0, {GATEWAY_CORE})
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    ports = [_free_port() for _ in range(4)]
    with fake_engines("--delay-ms", "0", "--chunks", "20", ports=ports):
        return uvloop.run(_measure(kind, top, [f"http://127.0.0.1:{port}" for port in ports]))


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    yield Row("Python functions entered a request", figures["python_calls"], "")
    yield Row("C functions called a request", figures["c_calls"], "")
    yield Row("CPU a request", figures["cpu_us"], "µs", figures["fixed_work_us"], "200 rounds of fixed work")
    for name, calls in figures["top"]:
        yield Row(f"  {name}", calls, "")


if __name__ == "__main__":
    report(__doc__, run, rows)
