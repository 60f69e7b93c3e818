"""Counting for several gateways: in Redis, one round trip for each step of a request, none where nothing limits it.

What is said of a request can be said twice and in any order: its hold in Redis has a name, and once settled does
nothing any more for two minutes. So an end that Redis did not confirm is simply told again when it answers.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from asyncio import Future
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from router.serving.limits.errands import Renew, Settle, Take, Used
from router.serving.limits.holds import Charge, Hold
from router.serving.limits.line import Line
from router.serving.limits.local_share import LocalShare

LEASE_S = 10.0
"""What the requests of a gateway have reserved is given back so long after it was last heard."""
_RENEWALS = 3  # in the time of a lease
_RENEWED_AT_ONCE = 200
_TOLD_AT_ONCE = 16
_UNTOLD = 10_000


class OverRedis:
    """`clock`: wall clock of this gateway, for windows that begin while Redis is away.

    Bounds: what Redis has not heard of is kept as one entry a request, up to `_UNTOLD`, beyond it and for requests that
    Redis does not know of as sums, one for each window of each limit.
    """

    def __init__(self, url: str, *, timeout_s: float, clock: Callable[[], float], lease_s: float = LEASE_S) -> None:
        """Within a running loop. Raises ValueError for a url that is none."""
        self._lease_s = lease_s
        self._clock = clock
        self._local = LocalShare()
        name = secrets.token_hex(6)
        self._names = map(f"{name}.{{:x}}".format, itertools.count(1))
        self._line = Line(url, timeout_s=timeout_s, name=name, catch_up=self._catch_up, on_fall=self._local.begin)
        self._open: dict[str, dict[str, Hold]] = {}  # by tenant and name, those that Redis may know of
        self._untold: deque[Settle] = deque()
        self._owed: dict[str, dict[tuple[str, int], Used]] = {}  # by tenant, limit and first second
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._line.start()
        self._renewing = asyncio.ensure_future(self._renew_on())

    async def aclose(self) -> None:
        """What has ended is told, as far as Redis answers."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._line.aclose()

    def figures(self) -> Mapping[str, float]:
        is_up = self._line.is_up
        return {
            "mode_memory": 0.0,
            "mode_redis": float(is_up),
            "mode_local": float(not is_up),
            "gateways": self._line.gateways[0],
            "redis_failures_total": self._line.falls,
            "untold": len(self._untold) + sum(map(len, self._owed.values())),
        }

    # -- a request

    def take(self, hold: Hold, charges: Sequence[Charge], now: float) -> Future[None] | None:
        if not self._line.is_up:
            self._local.take(hold, charges, now)
            return None
        tenant = hold.caller.tenant
        if not hold.name:
            hold.name = next(self._names)
            self._open.setdefault(tenant, {})[hold.name] = hold
        errand = Take(hold, charges, now, lease_s=self._lease_s, otherwise=self._take_here)
        self._line.put(errand)
        return errand.future

    def _take_here(self, hold: Hold, charges: Sequence[Charge]) -> None:
        self._local.take(hold, charges, self._clock())

    def settle(self, hold: Hold, actual: Sequence[int]) -> None:
        used: list[Used] = []
        for (meter, start, reserved), amount in zip(hold.taken, actual, strict=True):
            meter.settle(start, reserved, amount)
            if amount and meter.window is not None:
                used.append(Used(meter.id, start, meter.window.span(start)[1], amount))
        tenant = hold.caller.tenant
        if hold.name:
            self._open.get(tenant, {}).pop(hold.name, None)
            if hold.taken or hold.unanswered:
                self._tell(Settle(tenant, hold.name, used))
        elif used and self._line.is_up:  # begun while Redis was away
            self._tell(Settle(tenant, next(self._names), used))
        else:
            self._owe(tenant, used)

    # -- what Redis has to hear

    def _tell(self, settle: Settle) -> None:
        settle.otherwise = self._tell_later
        if self._line.is_up:
            self._line.put(settle)
        else:
            self._tell_later(settle)

    def _tell_later(self, settle: Settle) -> None:
        if len(self._untold) < _UNTOLD:
            self._untold.append(settle)
        else:
            self._owe(settle.tenant, settle.used)  # its lease gives back what it had reserved

    def _owe(self, tenant: str, used: Sequence[Used]) -> None:
        if not used:
            return
        owed = self._owed.setdefault(tenant, {})
        for each in used:
            before = owed.get(each[:2])
            owed[each[:2]] = each if before is None else each._replace(amount=each.amount + before.amount)

    async def _catch_up(self) -> None:
        """Before anything else is asked: who goes on, and what has ended meanwhile."""
        for renew in self._renewals():
            await self._line.run([renew])
        while self._untold or self._owed:
            while self._owed:
                tenant, used = self._owed.popitem()
                self._untold.append(Settle(tenant, next(self._names), list(used.values())))
            told = list(islice(self._untold, _TOLD_AT_ONCE))
            await self._line.run(told)
            for _ in told:
                self._untold.popleft()

    async def _renew_on(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS)
            for renew in self._renewals():
                if self._line.is_up:
                    self._line.put(renew)
                    await asyncio.sleep(0)

    def _renewals(self) -> Iterator[Renew]:
        """Also for tenants without a hold of ours, until Redis has none either: so those of the dead are given back."""
        for tenant in list(self._open):
            names = iter(list(self._open.get(tenant, ())))
            first = True
            while (some := list(islice(names, _RENEWED_AT_ONCE))) or first:
                first = False
                yield Renew(tenant, some, lease_s=self._lease_s, none_left=self._forget)

    def _forget(self, tenant: str) -> None:
        if not self._open.get(tenant, True):
            del self._open[tenant]
