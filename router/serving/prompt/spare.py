"""Time of the loop that may be spent on what is not needed: a small share of it, and no more."""

from __future__ import annotations

from collections.abc import Callable

SAVED_S = 1.0  # of the past that unspent time is kept for


class SpareTime:
    """A bucket that fills with `share` of the time that passes. clock: monotonic seconds."""

    __slots__ = ("_at", "_clock", "_left_us", "_share")

    def __init__(self, share: float, *, clock: Callable[[], float]) -> None:
        self._share = share
        self._clock = clock
        self._at = clock()
        self._left_us = share * SAVED_S * 1e6

    def spend(self, us: float) -> bool:
        """Whether `us` microseconds can be spent now; if so, they are."""
        now = self._clock()
        left_us = min(self._share * SAVED_S * 1e6, self._left_us + (now - self._at) * self._share * 1e6)
        self._at = now
        spent = us <= left_us
        self._left_us = left_us - us if spent else left_us
        return spent
