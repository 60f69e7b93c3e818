"""One engine watched: what it is, whether it is there, how busy it is. Health follows from what it answers.

    unknown ──answers──▶ ready ◀──▶ sleeping        down: two refused connections, or five other failures, in a row
       └──fails──▶ down ──answers──▶ (looked at anew) ready

An engine that is another process than before (its start time moved), or that was down and has no start time to compare,
holds nothing we know of. One that sleeps has given its cache away.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping

from router.core import Adapter, EngineFacts, Instance, Load
from router.errors import EngineError, EngineTlsError, EngineUnreachable
from router.routing.fleet import Fleet, Health, Rank

log = logging.getLogger("warmroute.feed")

REFUSALS_TO_DOWN = 2
FAILURES_TO_DOWN = 5
"""A busy engine may be slow to answer for a while; that is no reason to send its traffic elsewhere."""


class Watch:
    """Polls `instance` until cancelled, every `poll_s` times `pace()` seconds.

    `learned(facts)` is called with the facts of every look, `forget(rank)` when what a rank held is gone, and
    `restarted()` when the engine's process is a new one.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        fleet: Fleet,
        adapter: Adapter,
        learned: Callable[[EngineFacts], None],
        forget: Callable[[Rank], None],
        restarted: Callable[[], None],
        clock: Callable[[], float],
        dice: random.Random,
        poll_s: float = 1.0,
        pace: Callable[[], float] = lambda: 1.0,
        inspect_s: float = 60.0,
    ) -> None:
        self._instance = instance
        self._fleet = fleet
        self._adapter = adapter
        self._learned = learned
        self._forget = forget
        self._restarted = restarted
        self._clock = clock
        self._dice = dice
        self._poll_s = poll_s
        self._pace = pace
        self._inspect_s = inspect_s
        self._inspect_at = -math.inf
        self._boot_id: str | None = None
        self._seen_at = -math.inf  # when the process of `_boot_id` last answered
        self._refused = 0
        self._failed = 0
        self._was_down = False

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._poll_s * self._pace() * self._dice.uniform(0.8, 1.2))

    async def look(self) -> None:
        """One poll. Never raises."""
        try:
            if self._clock() >= self._inspect_at:
                await self._inspect()
            loads = await self._adapter.load(self._instance)
            self._answered(loads)
        except EngineError as error:
            reason = error.message if isinstance(error, EngineTlsError) else type(error).__name__
            self._fail(reason, refused=isinstance(error, EngineUnreachable))
        except Exception as error:  # an adapter's mistake: the engine is watched on, and counts as not answering
            if not self._failed:  # once, not once a second
                log.warning("looking at %s: %s", self._instance.id, type(error).__name__)
            self._fail(type(error).__name__, refused=False)

    async def _inspect(self) -> None:
        facts = await self._adapter.inspect(self._instance)
        if not isinstance(facts, EngineFacts):
            raise TypeError("no facts")
        self._inspect_at = self._clock() + self._inspect_s * self._dice.uniform(0.9, 1.1)
        self._compare_boot(facts.boot_id)
        self._learned(facts)

    def _answered(self, loads: Mapping[int, Load]) -> None:
        now = self._clock()
        words = {number: load for number, load in loads.items() if _is_sane(load)}
        self._compare_boot(next((load.boot_id for load in words.values() if load.boot_id), None))
        self._refused = self._failed = 0
        self._was_down = False
        self._seen_at = now
        for rank in self._fleet.ranks(self._instance.id):
            load = words.get(rank.rank)
            if load is not None:
                self._fleet.hear(rank, load)
            self._set_health(rank, asleep=load is not None and load.sleeping, now=now)

    def _set_health(self, rank: Rank, *, asleep: bool, now: float) -> None:
        health, reason = (Health.SLEEPING, "asleep") if asleep else (Health.READY, "")
        changed = self._fleet.set_health(self._instance.id, health, reason, now=now, rank=rank.rank)
        if changed and asleep:
            self._forget(rank)

    def _compare_boot(self, boot_id: str | None) -> None:
        """A new process holds nothing. Without a start time to compare, having been down counts as a restart."""
        known, self._boot_id = self._boot_id, boot_id or self._boot_id
        moved = boot_id is not None and known is not None and boot_id != known
        flapped = self._was_down and (boot_id is None or known is None)
        self._was_down = self._was_down and not flapped
        if not (moved or flapped):
            return
        ranks = self._fleet.ranks(self._instance.id)
        if not all(rank.restarted_at > self._seen_at for rank in ranks):  # else the event stream has told already
            self._restarted()

    def _fail(self, reason: str, *, refused: bool) -> None:
        self._failed += 1
        self._refused = self._refused + 1 if refused else 0
        unheard_of = all(rank.health is Health.UNKNOWN for rank in self._fleet.ranks(self._instance.id))
        if not (unheard_of or self._refused >= REFUSALS_TO_DOWN or self._failed >= FAILURES_TO_DOWN):
            return
        self._was_down = not unheard_of or self._was_down
        self._inspect_at = -math.inf  # what comes back may be another engine
        if self._fleet.set_health(self._instance.id, Health.DOWN, reason, now=self._clock()):
            log.warning("%s is down: %s", self._instance.id, reason)


def _is_sane(load: object) -> bool:
    """Numbers go into costs: a load with one that makes no sense is as good as none."""
    if not isinstance(load, Load):
        return False
    numbers = (load.at, load.running, load.waiting, load.kv_usage)
    return all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers) and load.kv_usage <= 1.5
