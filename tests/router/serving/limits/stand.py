"""Limits, somebody who is limited by them, and a clock that stands still until a test moves it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis as Client

from router.core import Caller, Outcome, Usage
from router.serving.limits import line, shared
from router.serving.limits.book import LimitBook
from router.serving.limits.counters import InThisProcess
from router.serving.limits.holds import Counters, Hold
from router.serving.limits.limiter import Limiter
from router.serving.limits.shared import OverRedis
from router.serving.pricing import Price
from router.store.limits import Limit
from router.store.schema import TOKEN_CLASSES

MONDAY = 1_790_553_600.0
"""2026-09-28 00:00 UTC."""
CALLER = Caller(tenant="ten_a", project="proj_a", key="key_a")
PARTS = 10**12


def price(currency: str = "USD", **per_million: str) -> Price:
    """Of a million tokens, by class."""
    parts = [int(Decimal(per_million.get(name, "0")) * 10**6) for name in TOKEN_CLASSES]
    return Price("price_a", "m", None, currency, tuple(parts), 0.0)


DOLLARS = price(uncached_input="1", cache_read="0.1", output="10")


def limit(measure: Any, amount: int, window: str = "1m", *, owner: str = "key_a", **more: Any) -> Limit:
    level = {"key": "key", "pro": "project", "ten": "tenant"}[owner[:3]]
    number = more.pop("number", "")
    return Limit(f"lim_{measure}_{owner}{number}", level, owner, measure, window, amount, **more)  # type: ignore[arg-type]


def money(amount: str, window: str = "month", **more: Any) -> Limit:
    return limit("money", int(Decimal(amount) * PARTS), window, currency="USD", **more)


def outcome(usage: Usage | None = None, **more: Any) -> Outcome:
    """Of a request that was answered."""
    plain = Outcome(
        "r", "m", "ten_a", "e", 0, 200, "complete", usage, 0, 0, 0, None, "none", 0.0, 0.0, None, 0.1, False
    )  # fmt: skip
    return msgspec.structs.replace(plain, **more)


class Stand:
    """`now`: what both clocks say, this process's and, with `slow_redis`, Redis's."""

    def __init__(self, *limits: Limit, counters: Counters | None = None, price: Price = DOLLARS) -> None:
        self.now = MONDAY
        self.book = LimitBook()
        self.learn(*limits)
        self.counters = InThisProcess() if counters is None else counters
        self.limiter = Limiter(self.book, self.counters, price_of=lambda model, tenant: price, clock=lambda: self.now)

    def learn(self, *limits: Limit) -> None:
        self.book.learn(limits, self.book.new_meters(limits))

    async def begin(
        self, tokens: int = 0, most: int | None = 0, *, caller: Caller = CALLER, choices: int = 1, **more: Any
    ) -> Hold:
        """Raises what a client would be told; then nothing of it is left."""
        hold = self.limiter.hold(caller)
        assert hold is not None
        try:
            decided = self.limiter.admit(hold)
            if decided is not None:
                await decided
            decided = self.limiter.reserve(hold, "m", tokens, output_limit=most, choices=choices, **more)
            if decided is not None:
                await decided
        except Exception:
            self.end(hold, outcome(instance=None, status=429))
            raise
        return hold

    def end(self, hold: Hold, ended: Outcome | None = None) -> None:
        self.limiter.settle(hold, outcome() if ended is None else ended)

    def used(self, *measures: str) -> list[int]:
        return [meter.used for meter in self.book if not measures or meter.limit.measure in measures]


class SharedClock:
    """Redis's clock as a key, so that a test can move it: the script asks for that instead of the time."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def set(self, now: float) -> None:
        await self._client.set("now", int(now))


def with_clock_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, instead = b"redis.call('TIME')", b"{ redis.call('GET', 'now'), '0' }"
    assert asked in line.SCRIPT
    monkeypatch.setattr(line, "SCRIPT", line.SCRIPT.replace(asked, instead))
    monkeypatch.setattr(shared, "_RENEWALS", 1e-6)  # leases are renewed by hand
    monkeypatch.setattr(line, "BEAT_S", 3600.0)  # and so are beats


async def renew(counters: OverRedis) -> None:
    for errand in counters._renewals():
        counters._line.put(errand)


async def all_told(counters: OverRedis) -> None:
    """Everything that was put in line has been answered."""
    while counters._line._sender is not None:
        await counters._line._sender
