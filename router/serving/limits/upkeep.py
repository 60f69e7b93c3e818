"""Beside the requests: limits are read again from the tables, and what must survive a restart is written to them.

A gateway without Redis that is killed forgets what was settled since it last wrote, `WRITE_S` at most, and longer while
the database is away: limits of long windows then allow as much more. One that ends in peace forgets nothing. Windows
shorter than an hour begin anew with each start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from router.errors import WarmrouteError
from router.serving.limits.book import LimitBook
from router.serving.limits.counters import InThisProcess
from router.store.database import Database
from router.store.limits import add_used, forget_windows, limits_since, used_in

log = logging.getLogger("warmroute")

WRITE_S = 1.0
_DAY_S = 86400.0
_KEPT_S = 40 * 86400
"""So long after their beginning windows that are over stay in the table."""


class Upkeep:
    """`counters`: whose windows are kept; None: Redis keeps them."""

    def __init__(
        self,
        database: Database,
        book: LimitBook,
        counters: InThisProcess | None,
        *,
        refresh_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._book = book
        self._counters = counters
        self._refresh_s = refresh_s
        self._clock = clock
        self._revision = 0
        self._is_away = False
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """With the limits as they are; where the database is away, with those that are read as soon as it is back."""
        await self._try(self.refresh)
        self._tasks.append(asyncio.ensure_future(self._every(self._refresh_s, self.refresh)))
        if self._counters is not None:
            self._tasks.append(asyncio.ensure_future(self._every(WRITE_S, self.write)))
            self._tasks.append(asyncio.ensure_future(self._every(_DAY_S, self.forget)))

    async def aclose(self) -> None:
        """What is being written is written to its end: cut off, it would not be known whether it counted."""
        self._ending.set()
        await asyncio.gather(*self._tasks)
        await self._try(self.write)

    async def refresh(self) -> None:
        """Takes over what has changed. New limits begin with what the tables know of them. Raises StoreUnavailable."""
        changed = await limits_since(self._database, self._revision)
        if not changed:
            self._book.is_read = True
            return
        new = self._book.new_meters(changed)
        if self._counters is not None:
            now = self._clock()
            kept = [meter for meter in new.values() if meter.window is not None and meter.window.is_kept]
            for meter in kept:
                meter.roll(now)
            used = await used_in(self._database, [(meter.id, meter.start) for meter in kept])
            for meter in kept:
                meter.used = used.get((meter.id, meter.start), 0)
        self._book.learn(changed, new)
        self._revision = max(limit.revision for limit in changed)

    async def write(self) -> None:
        """Raises StoreUnavailable; then it is written later, twice if the connection broke just as it was committed."""
        counters = self._counters
        if counters is None or not counters.unwritten:
            return
        taken, counters.unwritten = counters.unwritten, {}
        try:
            await add_used(self._database, taken)
        except BaseException:
            for counted, amount in taken.items():
                counters.unwritten[counted] = counters.unwritten.get(counted, 0) + amount
            raise

    async def forget(self) -> None:
        """Windows that nobody will look at again."""
        before = int(self._clock()) - _KEPT_S
        begun = {meter.id: meter.start for meter in self._book if meter.window is not None and meter.window.is_kept}
        await forget_windows(self._database, {limit: min(start, before) for limit, start in begun.items()})

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), seconds)
                return
            await self._try(work)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # of a database, too, that has no tables yet
            if not self._is_away:
                reason = error.message if isinstance(error, WarmrouteError) else type(error).__name__
                log.warning("limits are not read or written now, those that are known stay in force: %s", reason)
            self._is_away = True
        else:
            self._is_away = False
