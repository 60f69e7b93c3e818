"""Counting in this process: exact, since nothing else runs between the look and the taking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.serving.limits.holds import Charge, Hold, Taken
from router.serving.limits.meters import Meter
from router.serving.limits.refusals import refusal


class InThisProcess:
    """For one gateway alone.

    `unwritten`: what was settled of windows that a restart must not forget, by limit and first second of the window,
    since it was last taken to be written.
    """

    def __init__(self) -> None:
        self.unwritten: dict[tuple[str, int], int] = {}

    def take(self, hold: Hold, charges: Sequence[Charge], now: float) -> None:
        for meter, amount in charges:
            if now >= meter.ends:
                meter.roll(now)
            if meter.used + amount > meter.amount:
                raise refusal([each for each in charges if not _has_room(*each, now)], now)
        for meter, amount in charges:
            meter.used += amount
            hold.taken.append(Taken(meter, meter.start, amount))

    def settle(self, hold: Hold, actual: Sequence[int]) -> None:
        for (meter, start, reserved), amount in zip(hold.taken, actual, strict=True):
            meter.settle(start, reserved, amount)
            if amount and meter.window is not None and meter.window.is_kept:
                counted = (meter.id, start)
                self.unwritten[counted] = self.unwritten.get(counted, 0) + amount

    def figures(self) -> Mapping[str, float]:
        return {"mode_memory": 1.0, "mode_redis": 0.0, "mode_local": 0.0}


def _has_room(meter: Meter, amount: int, now: float) -> bool:
    used = meter.used if now < meter.ends else 0
    return used + amount <= meter.amount
