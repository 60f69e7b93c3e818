"""What limits cost a request: admit, reserve and settle, against a caller who has none.

python -m tests.bench.limits
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from statistics import median
from typing import Any

import uvloop

from router.core import Caller, Outcome, Usage
from router.serving.limits.book import LimitBook
from router.serving.limits.counters import InThisProcess
from router.serving.limits.holds import Counters
from router.serving.limits.limiter import Limiter
from router.serving.limits.shared import OverRedis
from router.serving.pricing import Price
from router.store.limits import Limit
from tests.bench.table import Row, report
from tests.servers import Redis

TAKES_S = 3
LIMITED = Caller("ten_a", "proj_a", "key_a")
FREE = Caller("ten_b", "proj_b", "key_b")
LIMITS = (
    Limit("lim_1", "key", "key_a", "requests", "1m", 10**9),
    Limit("lim_2", "tenant", "ten_a", "tokens", "1m", 10**12, {"cache_read": 0.1}),
    Limit("lim_3", "key", "key_a", "parallel", "", 10**6),
    Limit("lim_4", "project", "proj_a", "money", "month", 10**18, {}, "USD"),
)
ENDED = Outcome(
    "r", "m", "ten_a", "engine-0", 0, 200, "complete", Usage(1000, 200, 500), 1000, 0, 0, 500, "usage", 0.0, 0.0, 0.1,
    0.5, True,
)  # fmt: skip


PRICE = Price("price_a", "m", None, "USD", (200_000, 20_000, *[200_000] * 3, *[600_000] * 2, 200_000, 600_000), 0.0)


def limiter(counters: Counters) -> Limiter:
    book = LimitBook()
    book.learn(LIMITS, book.new_meters(LIMITS))
    return Limiter(book, counters, price_of=lambda model, tenant: PRICE)


async def one(limits: Limiter, caller: Caller) -> None:
    """What a request does, as the gateway does it."""
    hold = limits.hold(caller)
    if hold is None:
        return
    if (decided := limits.admit(hold)) is not None:
        await decided
    if (decided := limits.reserve(hold, "m", 1000, output_limit=256)) is not None:
        await decided
    limits.settle(hold, ENDED)


async def each_us(work: Callable[[], Awaitable[Any]], rounds: int, *, clock: Callable[[], float]) -> float:
    """Median of nine runs."""
    runs = []
    for _ in range(9):
        began = clock()
        for _ in range(rounds):
            await work()
        runs.append((clock() - began) / rounds * 1e6)
    return median(runs)


async def in_memory() -> dict[str, float]:
    """Time of the processor: the machine may be shared."""
    limits = limiter(InThisProcess())
    return {
        "unlimited_us": await each_us(lambda: one(limits, FREE), 10_000, clock=time.process_time),
        "memory_us": await each_us(lambda: one(limits, LIMITED), 2_000, clock=time.process_time),
    }


async def over_redis(url: str, crowd: int = 32) -> dict[str, float]:
    """One after the other, where a request waits twice; and many at once, where what matters is the work."""
    counters = OverRedis(url, timeout_s=5.0, clock=time.time)
    await counters.start()
    limits = limiter(counters)
    figures = {"redis_in_a_row_us": await each_us(lambda: one(limits, LIMITED), 100, clock=time.perf_counter)}

    async def together() -> None:
        await asyncio.gather(*[one(limits, LIMITED) for _ in range(crowd)])

    figures["redis_crowd_us"] = await each_us(together, 10, clock=time.perf_counter) / crowd
    figures["redis_crowd_cpu_us"] = await each_us(together, 10, clock=time.process_time) / crowd
    await counters.aclose()
    return figures


def run() -> dict[str, float]:
    redis = Redis()
    redis.start()
    try:
        figures = {**uvloop.run(in_memory()), **uvloop.run(over_redis(redis.url))}
    finally:
        redis.close()
    return {name: round(value, 2) for name, value in figures.items()}


def rows(figures: dict[str, float]) -> Iterator[Row]:
    for name, label in LABELS.items():
        yield Row(label, figures[name], "µs", figures["unlimited_us"], "a caller without limits")


LABELS = {
    "memory_us": "four limits, in this process",
    "redis_in_a_row_us": "four limits, over Redis, one request after the other",
    "redis_crowd_us": "four limits, over Redis, 32 at once: each",
    "redis_crowd_cpu_us": "of that, time of our own processor",
}


if __name__ == "__main__":
    report(__doc__, run, rows)
