"""Several gateways that share their limits through one Redis."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Self

from router.serving.limits.line import Errand
from router.serving.limits.shared import OverRedis
from router.store.limits import Limit
from tests.router.serving.limits.stand import MONDAY, SharedClock, Stand, all_told, renew

PATIENT_S = 5.0
"""No test of what Redis says fails since the machine is slow."""


class SharedStand(Stand):
    counters: OverRedis

    async def told(self) -> None:
        await all_told(self.counters)

    async def say(self, *errands: Errand) -> None:
        for errand in errands:
            self.counters._line.put(errand)
        await self.told()

    async def renew(self) -> None:
        await renew(self.counters)
        await self.told()


class Gateways:
    def __init__(self, url: str, clock: SharedClock) -> None:
        self._url = url
        self._clock = clock
        self._stack = AsyncExitStack()
        self.all: list[SharedStand] = []
        self.now = MONDAY

    async def __aenter__(self) -> Self:
        await self._clock.set(self.now)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, count: int, *limits: Limit, timeout_s: float = PATIENT_S, **more: float) -> list[SharedStand]:
        for _ in range(count):
            stand = SharedStand(*limits)
            stand.now = self.now
            counters = OverRedis(self._url, timeout_s=timeout_s, clock=lambda stand=stand: stand.now, **more)  # type: ignore[misc]
            stand.counters = stand.limiter._counters = counters
            await counters.start()
            self._stack.push_async_callback(counters.aclose)
            self.all.append(stand)
        for stand in self.all:  # each hears of the others
            await stand.say(stand.counters._line._beat())
        return self.all

    async def move(self, seconds: float) -> None:
        """Everybody's clock."""
        self.now += seconds
        await self._clock.set(self.now)
        for stand in self.all:
            stand.now = self.now
