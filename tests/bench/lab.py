"""Requests a second of wall time that the engine model alone simulates in virtual time.

    python -m tests.bench.lab [--requests N] [--engines N]

The workload is synthetic conversations shaped like the Mooncake conversation trace (FAST '25): 512-token blocks, about
12,000 input and 340 output tokens, half of the turns go on where another ended. Requests go round robin. The baseline
is an event loop (a heap of engines, one event a step) that does nothing else, for the same number of steps.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from router.lab.engine import EngineModel, EngineRequest, StepResult
from router.lab.profiles import PROFILES
from tests.bench.table import Row, report

TAKES_S = 5
BLOCK = 512


def conversations(requests: int, per_second: float, seed: int = 1) -> list[tuple[float, EngineRequest]]:
    dice = random.Random(seed)
    block_names = iter(range(1 << 60))
    open_turns: list[list[int]] = []
    arrivals, at = [], 0.0
    for n in range(requests):
        at += dice.expovariate(per_second)
        known = open_turns.pop(dice.randrange(len(open_turns))) if open_turns and dice.random() < 0.5 else []
        fresh = min(200, max(1, round(dice.lognormvariate(2.4, 1.0))))
        hashes = [*known, *(next(block_names) for _ in range(fresh))]
        if len(hashes) < 150:
            open_turns.append(hashes)
        prompt = len(hashes) * BLOCK - dice.randrange(BLOCK)
        output = max(1, round(dice.lognormvariate(5.6, 0.7)))
        arrivals.append(
            (at, EngineRequest.from_hashes(str(n), prompt, output_tokens=output, hashes=hashes, block_size=BLOCK))
        )
    return arrivals


class Cluster:
    """Just enough of a discrete-event loop to keep some engines busy in virtual time."""

    def __init__(self, engines: int) -> None:
        self.engines = [EngineModel(PROFILES["llama-3.1-8b-h100"], block_size=BLOCK) for _ in range(engines)]
        self._running: dict[int, tuple[float, StepResult]] = {}  # engine -> end of what it is doing
        self._ends: list[tuple[float, int]] = []
        self.steps = self.events = self.finished = 0

    def run(self, arrivals: list[tuple[float, EngineRequest]]) -> float:
        now = 0.0
        for number, (at, request) in enumerate(arrivals):
            now = self._advance(at)
            index = number % len(self.engines)
            engine, doing = self.engines[index], self._running.get(index)
            if doing is not None and doing[1].steps > 1:
                self._cut(index, at, doing[0] - doing[1].duration_ms / 1000)
            engine.submit(request)
            if index not in self._running:
                self._begin(index, at)
        return max(now, self._advance(float("inf")))

    def _advance(self, until: float) -> float:
        now = 0.0
        while self._ends and self._ends[0][0] <= until:
            now, index = heapq.heappop(self._ends)
            doing = self._running.get(index)
            if doing is None or doing[0] != now:
                continue  # of a leap that was cut
            self._done(doing[1])
            self._begin(index, now)
        return now

    def _begin(self, index: int, now: float) -> None:
        result = self.engines[index].step(now, leap=True)
        if result is None:
            self._running.pop(index, None)
            return
        self._expect(index, now + result.duration_ms / 1000, result)

    def _cut(self, index: int, at: float, began: float) -> None:
        result = self.engines[index].interrupt(at)
        self._expect(index, began + result.duration_ms / 1000, result)

    def _expect(self, index: int, end: float, result: StepResult) -> None:
        self._running[index] = (end, result)
        heapq.heappush(self._ends, (end, index))

    def _done(self, result: StepResult) -> None:
        self.events += 1
        self.steps += result.steps
        self.finished += len(result.finished)


def bare_loop(steps: int, engines: int) -> None:
    ends = [(0.0, index) for index in range(engines)]
    heapq.heapify(ends)
    for _ in range(steps):
        now, index = heapq.heappop(ends)
        heapq.heappush(ends, (now + 0.01, index))


def timed(work: Callable[[], Any]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def run(requests: int = 12_000, engines: int = 8) -> dict[str, float]:
    arrivals = conversations(requests, per_second=6.0)
    cluster = Cluster(engines)
    took = timed(lambda: cluster.run(arrivals))
    assert cluster.finished == requests
    baseline = timed(lambda: bare_loop(cluster.steps, engines))
    hits = sum(engine.hit_tokens for engine in cluster.engines) / sum(e.queried_tokens for e in cluster.engines)
    return {
        "requests": requests,
        "engines": engines,
        "seconds": took,
        "requests_per_second": requests / took,
        "engine_steps": cluster.steps,
        "model_calls": cluster.events,
        "us_per_step": took / cluster.steps * 1e6,
        "bare_event_loop_seconds": baseline,
        "hit_share": hits,
        "preemptions": sum(engine.preemptions for engine in cluster.engines),
    }


def rows(figures: dict[str, float]) -> Iterator[Row]:
    baseline = figures["bare_event_loop_seconds"]
    yield Row("simulating all requests", figures["seconds"], "s", baseline, "a bare event loop")
    yield Row("requests a second", figures["requests_per_second"], "/s")
    yield Row("engine steps", figures["engine_steps"], "", figures["model_calls"], "calls of the model")
    yield Row("time of a step", figures["us_per_step"], "µs")
    yield Row("share of prompt tokens hit", figures["hit_share"], "")
    yield Row("preemptions", figures["preemptions"], "")


if __name__ == "__main__":
    report(__doc__, run, rows)
