"""A limiter as a gateway has it: over Redis where there is one, else in this process, and kept up to date."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from router.serving.counting import billed_counts
from router.serving.limits.book import LimitBook
from router.serving.limits.charges import CountsOf, PriceOf, no_price
from router.serving.limits.counters import InThisProcess
from router.serving.limits.limiter import Limiter
from router.serving.limits.shared import LEASE_S, OverRedis
from router.serving.limits.upkeep import Upkeep
from router.serving.pricing import UnknownCached
from router.store.database import Database


@asynccontextmanager
async def open_limits(
    database: Database,
    *,
    redis_url: str | None = None,
    redis_timeout_s: float = 0.05,
    refresh_s: float = 0.5,
    lease_s: float = LEASE_S,
    price_of: PriceOf = no_price,
    counts: CountsOf = billed_counts,
    unknown_cached: UnknownCached = "full_price",
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Limiter]:
    """Until the last request has ended. Raises ValueError for a redis_url that is none."""
    book = LimitBook()
    counters: InThisProcess | OverRedis
    if redis_url is None:
        counters = alone = InThisProcess()
    else:
        counters, alone = OverRedis(redis_url, timeout_s=redis_timeout_s, clock=clock, lease_s=lease_s), None
        await counters.start()
    try:
        upkeep = Upkeep(database, book, alone, refresh_s=refresh_s, clock=clock)
        await upkeep.start()
        try:
            yield Limiter(book, counters, price_of=price_of, counts=counts, unknown_cached=unknown_cached, clock=clock)
        finally:
            await upkeep.aclose()
    finally:
        if isinstance(counters, OverRedis):
            await counters.aclose()
