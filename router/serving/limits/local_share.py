"""Counting while Redis is away: each gateway has its part of what was left, and keeps to it."""

from __future__ import annotations

from collections.abc import Sequence

from router.serving.limits.holds import Charge, Hold, Taken
from router.serving.limits.meters import Meter
from router.serving.limits.refusals import refusal, unchecked


class LocalShare:
    """outage: which one it is, from 1 on. gateways: how many shared the limits, and which of them this one is."""

    def __init__(self) -> None:
        self.outage = 0
        self.gateways = (1, 0)

    def begin(self, gateways: tuple[int, int]) -> None:
        self.outage += 1
        self.gateways = gateways

    def take(self, hold: Hold, charges: Sequence[Charge], now: float) -> None:
        full = []
        for meter, amount in charges:
            self._look(meter, now)
            rule = meter.limit.without_redis
            if rule == "refuse" or (rule == "local_share" and meter.limit.measure == "money" and not meter.heard):
                raise unchecked(meter)
            if rule == "local_share" and amount > meter.spare:
                full.append((meter, amount))
        if full:
            raise refusal(full, now)
        for meter, amount in charges:
            meter.spare -= amount
            meter.used += amount
            hold.taken.append(Taken(meter, meter.start, amount))

    def _look(self, meter: Meter, now: float) -> None:
        if now >= meter.ends:
            meter.roll(now)
        elif meter.outage == self.outage:
            return
        meter.outage = self.outage
        meter.spare = self.share(meter.amount - meter.used)

    def share(self, left: int) -> int:
        """Of what is left; the shares of all gateways are all of it."""
        count, number = self.gateways
        each, more = divmod(max(0, left), count)
        return each + (number < more)
