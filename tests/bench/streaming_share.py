"""Answers that are not streamed tell no first token: do the streamed ones wait longer when half are not?

python -m tests.bench.streaming_share

Three simulated engines (70B on four H100) in real time, policy kv_aware, Poisson arrivals at three quarters of what the
engines can prefill. The same requests arrive at the same moments twice over: all streamed, and half of them not.
Compared is the mean time to first token of those that are streamed in both. The order is A B B A, every time with text
that nobody has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import orjson
import uvloop

from router.errors import EngineError
from router.http.client import Pool
from router.http.messages import Header
from router.lab.profiles import PROFILES
from tests.bench.load import text
from tests.bench.processes import LOAD_CORE, PORT, gateway, running, wait_for
from tests.bench.table import Row, report

TAKES_S = 85
SECONDS = 15.0
LOAD = 0.75
ENGINES = 3
SIM_PORTS = tuple(range(9150, 9150 + ENGINES))
PROFILE = PROFILES["llama-3.1-70b-tp4-h100"]
MODEL = "demo"
CHARACTERS_A_TOKEN = 2.85  # of the demo tokenizer and the load generator's words
GROUPS, SYSTEM_TOKENS, TAIL_TOKENS, OUTPUT_TOKENS = 24, 2000, 1500, 40
ORDER = ("all streamed", "half streamed", "half streamed", "all streamed")
_HEADERS: list[Header] = [(b"content-type", b"application/json")]


class Arrival(NamedTuple):
    at: float  # seconds from the start
    group: int
    tail_tokens: int
    always_streamed: bool


def arrivals(seed: int = 7) -> list[Arrival]:
    dice = random.Random(seed)
    per_second = LOAD * ENGINES * 1000 / PROFILE.rates.prefill_ms(TAIL_TOKENS, SYSTEM_TOKENS + TAIL_TOKENS)
    made, at = [], dice.expovariate(per_second)
    while at < SECONDS:
        group = min(dice.randrange(GROUPS), dice.randrange(GROUPS))  # some are asked for more often
        made.append(Arrival(at, group, round(dice.expovariate(1 / TAIL_TOKENS)) + 16, dice.random() < 0.5))
        at += dice.expovariate(per_second)
    return made


class Answer:
    """A receiver (`router.http.client`) that notes when the first token came."""

    def __init__(self, due: float) -> None:
        self.due = due
        self.status = 0
        self.ttft_s: float | None = None
        self.done = asyncio.Event()

    def on_head(self, status: int, headers: list[Header]) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        if self.ttft_s is None and b'"content":"' in data and b'"content":""' not in data:
            self.ttft_s = time.monotonic() - self.due

    def on_end(self) -> None:
        self.done.set()

    def on_error(self, error: EngineError) -> None:
        self.status = error.status
        self.done.set()


def run() -> dict[str, Any]:
    pattern = arrivals()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {LOAD_CORE})
    try:
        with simulated_engines(), gateway(engines=_configured(), model=MODEL):
            runs = [(name, uvloop.run(_drive(pattern, label, name == ORDER[0]))) for label, name in enumerate(ORDER)]
    finally:
        os.sched_setaffinity(0, before)
    return {"requests": len(pattern), **{name: _pooled(name, runs, pattern) for name in dict.fromkeys(ORDER)}}


@contextlib.contextmanager
def simulated_engines() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for port in SIM_PORTS:
            command = ["router", "sim-engine", "--port", str(port), "--profile", PROFILE.name, "--model", MODEL]
            measured = stack.enter_context(running(command, core=LOAD_CORE, log=Path(folder) / str(port)))
            wait_for(f"http://127.0.0.1:{port}/health", measured)
        yield


def _configured() -> list[dict[str, Any]]:
    return [{"url": f"http://127.0.0.1:{port}", "kind": "vllm", "rates": PROFILE.name} for port in SIM_PORTS]


async def _drive(pattern: Sequence[Arrival], label: int, all_streamed: bool) -> list[Answer]:
    pool = Pool(f"http://127.0.0.1:{PORT}")
    bodies = [_body(arrival, n, label, all_streamed or arrival.always_streamed) for n, arrival in enumerate(pattern)]
    start = time.monotonic() + 0.5
    answers = []
    for arrival, body in zip(pattern, bodies, strict=True):
        await asyncio.sleep(max(0.0, start + arrival.at - time.monotonic()))
        answer = Answer(start + arrival.at)
        pool.send(b"POST", b"/v1/chat/completions", _HEADERS, body, answer)
        answers.append(answer)
    for answer in answers:
        await answer.done.wait()
    await pool.aclose()
    return answers


def _body(arrival: Arrival, number: int, label: int, stream: bool) -> bytes:
    """New text for every run: a label at the head of both messages."""
    system = f"{label}.{arrival.group} " + text(round(SYSTEM_TOKENS * CHARACTERS_A_TOKEN), arrival.group)
    tail = f"{label}.{number} " + text(round(arrival.tail_tokens * CHARACTERS_A_TOKEN), 1000 + number)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": tail}]
    return orjson.dumps(
        {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": stream}
    )


def _pooled(name: str, runs: Sequence[tuple[str, list[Answer]]], pattern: Sequence[Arrival]) -> dict[str, Any]:
    """Both runs of one kind, over the requests that are streamed in all."""
    chosen = [answers for kind, answers in runs if kind == name]
    compared = [
        [a for a, arrival in zip(answers, pattern, strict=True) if arrival.always_streamed] for answers in chosen
    ]
    times = sorted(a.ttft_s for answers in compared for a in answers if a.ttft_s is not None)
    return {
        "mean_ttft_s": round(mean(times), 4),
        "p90_ttft_s": round(times[int(len(times) * 0.9)], 4),
        "mean_ttft_s_of_each_run": [round(mean(a.ttft_s for a in answers if a.ttft_s), 4) for answers in compared],
        "failed": sum(a.status != 200 for answers in chosen for a in answers),
    }


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    baseline, half = figures["all streamed"], figures["half streamed"]
    yield Row("requests in each run", figures["requests"], "")
    for quantity, target in (("mean_ttft_s", "≤ 1.10 ×"), ("p90_ttft_s", "")):
        name = quantity.replace("_s", "").replace("_", " ")
        yield Row(
            f"half streamed: {name}", half[quantity] * 1e3, "ms", baseline[quantity] * 1e3, "all streamed", target
        )
    for kind, row in (("all", baseline), ("half", half)):
        first, second = row["mean_ttft_s_of_each_run"]
        yield Row(f"{kind} streamed: second run's mean ttft", second * 1e3, "ms", first * 1e3, "the first's")
        if row["failed"]:
            yield Row(f"{kind} streamed: failed", row["failed"], "", target="0")


if __name__ == "__main__":
    report(__doc__, run, rows)
