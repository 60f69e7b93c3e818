"""Time of the loop that may be spent on what is not needed: a small share of it, and none while it is busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

SAVED_S = 1.0  # of the past that unspent time is kept for
BUSY = 0.5
"""Share of the time that the loop's thread computes from which on nothing is spare."""
_LOOK_S = 0.1  # how often it is looked at how busy the loop is


class SpareTime:
    """A bucket that fills with `share` of the time that passes; with less, the busier the thread is that asks.

    clock: monotonic seconds. computed: seconds that this thread has computed so far.
    """

    __slots__ = ("_at", "_clock", "_computed", "_computed_then", "_left_us", "_share")

    def __init__(
        self, share: float, *, clock: Callable[[], float], computed: Callable[[], float] = time.thread_time
    ) -> None:
        self._share = share
        self._clock = clock
        self._computed = computed
        self._at = clock()
        self._computed_then = inf  # of the thread that asks, which need not be the one that is here
        self._left_us = share * SAVED_S * 1e6

    def spend(self, us: float) -> bool:
        """Whether `us` microseconds can be spent now; if so, they are."""
        now = self._clock()
        if now - self._at >= _LOOK_S:
            self._fill(now)
        if us > self._left_us:
            return False
        self._left_us -= us
        return True

    def _fill(self, now: float) -> None:
        passed, computed = now - self._at, self._computed()
        busy = (computed - self._computed_then) / passed
        spare_s = passed * min(1.0, max(0.0, 1 - busy / BUSY))
        self._left_us = min(SAVED_S * self._share * 1e6, self._left_us + spare_s * self._share * 1e6)
        self._at, self._computed_then = now, computed
