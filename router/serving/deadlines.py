"""Who has waited too long for a first token, and whose connection does not end: one timer for all attempts."""

from __future__ import annotations

import asyncio
from typing import Protocol

from router.errors import EngineError, EngineTimeout

_DRAIN_S = 5.0  # from the end of the stream to the end of the engine's answer; then its connection is cut
_SWEEP_S = 1.0


class Cancellable(Protocol):
    def cancel(self, error: EngineError | None = None) -> None: ...


class Deadlines:
    """Each wait has one length, so each table is in the order of its deadlines and a sweep looks at the first few."""

    def __init__(self, *, first_byte_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._first_byte_s = first_byte_s
        self._loop = loop
        self._waiting: dict[Cancellable, float] = {}
        self._draining: dict[Cancellable, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set_first_byte(self, attempt: Cancellable) -> None:
        self._waiting[attempt] = self._loop.time() + self._first_byte_s
        if self._timer is None:
            self._keep_sweeping()

    def set_drain(self, attempt: Cancellable) -> None:
        self._waiting.pop(attempt, None)
        self._draining[attempt] = self._loop.time() + _DRAIN_S
        if self._timer is None:
            self._keep_sweeping()

    def clear(self, attempt: Cancellable) -> None:
        self._waiting.pop(attempt, None)
        if self._draining:
            self._draining.pop(attempt, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _keep_sweeping(self) -> None:
        self._timer = self._loop.call_later(min(_SWEEP_S, self._first_byte_s), self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = self._loop.time()
        for attempt in _overdue(self._waiting, now):
            attempt.cancel(EngineTimeout("The engine did not begin to answer in time.", code="ttft_timeout"))
        for attempt in _overdue(self._draining, now):
            attempt.cancel()
        if (self._waiting or self._draining) and self._timer is None:
            self._keep_sweeping()


def _overdue(table: dict[Cancellable, float], now: float) -> list[Cancellable]:
    overdue = []
    for attempt, deadline in table.items():
        if deadline > now:
            break
        overdue.append(attempt)
    return overdue
