"""How long an attempt may take: to its first token, between two reads, in all, and to the end of a finished stream.

Streams are many and their chunks more, so no chunk sets a timer: every attempt is looked at about once a second (more
often where a limit is shorter), and one whose count of bytes has not moved since is as old as that look says.
"""

from __future__ import annotations

import asyncio
import itertools
from math import inf
from typing import Protocol

import msgspec

from router.errors import EngineError, EngineTimeout
from router.serving.failover import FIRST_TOKEN_TIMEOUT, TOTAL_TIMEOUT

_DRAIN_S = 5.0  # from the end of the stream to the end of the engine's answer; then its connection is cut
_LOOK_S = 1.0
_SHARDS = 8  # looked at in turn: no tick is to take long


class TimeLimits(msgspec.Struct, frozen=True):
    """Seconds. first_byte_s: to the first token of a stream, or the first byte of an answer that is none."""

    first_byte_s: float = 600.0
    between_s: float = 300.0
    total_s: float | None = None  # from the request's arrival


class Timed(Protocol):
    """received: bytes of the answer so far. held_back: no more are read, since the client reads slowly."""

    received: int

    @property
    def held_back(self) -> bool: ...

    def cancel(self, error: EngineError | None = None) -> None: ...


class Watch(msgspec.Struct, eq=False):
    """Over the time of one attempt. It does not know which: an attempt holds its watch, and two that hold each other
    are left to the garbage collector, with all that hangs on them.

    due        of what is waited for now
    total_due  of the whole
    has_begun  its first token is there
    seen       of `received`, when last looked at
    """

    _shard: dict[Watch, Timed]
    _loop: asyncio.AbstractEventLoop
    due: float
    between_s: float
    total_due: float
    has_begun: bool = False
    draining: bool = False
    seen: int = 0

    def begun(self) -> None:
        """The first token is there."""
        self.has_begun = True
        self.due = self._loop.time() + self.between_s

    def drain(self) -> None:
        """The stream has ended; what is left is the end of the engine's answer."""
        self.draining = True
        self.due = self._loop.time() + _DRAIN_S

    def end(self) -> None:
        self._shard.pop(self, None)

    def look(self, attempt: Timed, now: float) -> None:
        """End the attempt if its time is over."""
        error = self._overdue(attempt, now)
        if error is not None or (self.draining and now >= self.due):
            self.end()
            attempt.cancel(error)

    def _overdue(self, attempt: Timed, now: float) -> EngineTimeout | None:
        if self.draining:
            return None
        if now >= self.total_due:
            return EngineTimeout("The answer took longer than the request may take.", code=TOTAL_TIMEOUT)
        if self.has_begun and (attempt.received != self.seen or attempt.held_back):
            self.seen = attempt.received
            self.due = now + self.between_s
        if now < self.due:
            return None
        if self.has_begun:
            return EngineTimeout("The engine stopped in the middle of its answer.", code="stall_timeout")
        return EngineTimeout("The engine did not begin to answer in time.", code=FIRST_TOKEN_TIMEOUT)


class Deadlines:
    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._shards: list[dict[Watch, Timed]] = [{} for _ in range(_SHARDS)]
        self._next = itertools.cycle(self._shards).__next__  # which an attempt is put into
        self._turn = itertools.cycle(self._shards).__next__  # which is looked at
        self._look_s = _LOOK_S
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, attempt: Timed, limits: TimeLimits, *, first_byte_s: float, age_s: float = 0.0) -> Watch:
        """Watch an attempt of a request that came `age_s` ago. `first_byte_s`: what counts of `limits` here."""
        now = self._loop.time()
        total_due = inf if limits.total_s is None else now - age_s + limits.total_s
        shard = self._next()
        watch = Watch(shard, self._loop, now + first_byte_s, limits.between_s, total_due)
        shard[watch] = attempt
        shortest = min(first_byte_s, limits.between_s, total_due - now)
        if shortest < self._look_s:
            self._look_s = max(0.01, shortest)
        if self._timer is None:
            self._keep_looking()
        return watch

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _keep_looking(self) -> None:
        self._timer = self._loop.call_later(self._look_s / _SHARDS, self._look)

    def _look(self) -> None:
        self._timer = None
        now, shard = self._loop.time(), self._turn()
        for watch, attempt in list(shard.items()):
            watch.look(attempt, now)
        if self._timer is None and any(self._shards):
            self._keep_looking()
        elif self._timer is None:
            self._look_s = _LOOK_S
