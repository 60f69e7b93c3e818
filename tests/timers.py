"""Time and timers in a test's hand."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Timers:
    """Seconds that pass only when the test says so, and what is to be called meanwhile, in the order it falls due."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (max(when, self.now), next(self._serial), call))

    @property
    def timers(self) -> int:
        """How many have not been called yet."""
        return len(self._timers)

    def run_until(self, end: float) -> None:
        while self._timers and self._timers[0][0] <= end:
            self.now, _, call = heapq.heappop(self._timers)
            call()
        self.now = end

    def run_for(self, seconds: float) -> None:
        self.run_until(self.now + seconds)
