"""One limit, and what is used of it in the window that is now."""

from __future__ import annotations

from collections.abc import Mapping

from router.store.limits import Limit
from router.store.windows import Window, read_window

ALWAYS = 1 << 60
"""When a limit without windows ends."""
_PARTS = 1000  # of a weight: a sum of floats would not be the same in every order
_WORDS = {"1s": "second", "1m": "minute", "60s": "minute", "1h": "hour", "1d": "day"}
_SCOPES = {"key": "this API key", "project": "the project of this API key", "tenant": "your organization"}


class Meter:
    """All amounts are whole numbers, in the unit of the limit.

    start, ends    seconds since 1970 of the window that is now; 0 and `ALWAYS` where there is none
    used           in it: settled, and reserved by requests that have not ended. Over Redis: by all, when last heard
    heard          Redis has said once what is used (`shared.py`)
    spare          what may still be taken while Redis is away, as of outage number `outage` (`local_share.py`)
    """

    __slots__ = (
        "amount", "ends", "heard", "id", "limit", "outage", "redis_shape", "redis_shape_until", "spare", "start",
        "used", "weights", "window",
    )  # fmt: skip

    def __init__(self, limit: Limit) -> None:
        """Raises ValueError for a window that cannot be read."""
        self.window: Window | None = read_window(limit.window) if limit.window else None
        self.id = limit.id
        self.start = 0
        self.ends = 0 if self.window is not None else ALWAYS
        self.used = 0
        self.heard = False
        self.spare = 0
        self.outage = 0
        self.redis_shape: tuple[bytes, ...] = ()
        self.redis_shape_until = 0
        self.become(limit)

    def become(self, limit: Limit) -> None:
        """The limit has another amount now; what is used stays used."""
        self.limit = limit
        self.amount = limit.amount
        self.weights: Mapping[str, int] = {name: round(weight * _PARTS) for name, weight in limit.weights.items()}

    def roll(self, now: float) -> None:
        """The window is over, and another begins with nothing used."""
        if self.window is not None:
            self.start, self.ends = self.window.span(now)
        self.used = 0

    def hear(self, start: int, ends: int, used: int) -> None:
        """Redis's word. What it said of an earlier window comes too late."""
        self.heard = True
        if start >= self.start:
            self.start, self.ends, self.used = start, ends, used

    def settle(self, start: int, reserved: int, actual: int) -> None:
        """A request that began in the window from `start` on has ended. Windows that are over are left alone."""
        if start == self.start:
            more = actual - reserved
            self.used += more
            self.spare -= more

    def weighted(self, counts: Mapping[str, int]) -> int:
        """Tokens by class as this limit counts them, rounded up."""
        weights = self.weights
        if not weights:
            return sum(counts.values())
        parts = 0
        for name, count in counts.items():
            parts += count * weights.get(name, _PARTS)
        return -(-parts // _PARTS)

    @property
    def name(self) -> str:
        """Whose limit it is, and of what. The amount of money is not said: a client need not know its budget."""
        limit = self.limit
        scope = _SCOPES[limit.level]
        if limit.measure == "money":
            return f"the budget of {scope} per {_per(limit.window)}"
        if limit.measure == "parallel":
            return f"the limit of {self.amount} requests at once of {scope}"
        return f"the limit of {self.amount} {limit.measure} per {_per(limit.window)} of {scope}"


def _per(window: str) -> str:
    return _WORDS.get(window, window)
