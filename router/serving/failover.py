"""Whether an attempt that failed is made again, where, and when: before the first byte of its answer, as a rule.

    fault     what happened                                                            did the engine work on it?
    refused   no connection                                                            no
    busy      429 or 503                                                               no
    unable    401, 403 or 404: it refuses us, or does not have the model               no
    died      no answer, or word of its own death; and nobody is there any more        no longer
    reset     the connection broke before an answer, and the engine is there           perhaps
    failed    another 5xx                                                              perhaps
    silent    no first token in time                                                   perhaps
    broken    the stream ended amid its answer, or stalled (`resume.py`)               no longer

By default only what cannot make two engines compute one answer is tried again. An engine that failed is passed over; if
there is no other, one that was busy may be asked once more, not before it said it may be (`wait_s`; by default the
client is told to wait). A share of all requests may be tried again and no more, since an overloaded fleet is not helped
by more load.
"""

from __future__ import annotations

import random
from enum import StrEnum

import msgspec

from router.errors import EngineError, EngineTimeout, EngineTlsError, EngineUnreachable, WarmrouteError
from router.serving.openai_errors import EngineFailure, EngineRefusal

FIRST_TOKEN_TIMEOUT = "ttft_timeout"
TOTAL_TIMEOUT = "total_timeout"
BACKOFF_S = 0.5  # before the second attempt at the same engine, doubled for each further one, ± a half
JITTER_S = 0.05  # before an attempt elsewhere, so that a crowd does not move as one


class Fault(StrEnum):
    REFUSED = "refused"
    BUSY = "busy"
    UNABLE = "unable"
    DIED = "died"
    RESET = "reset"
    FAILED = "failed"
    SILENT = "silent"
    BROKEN = "broken"


SAFE = (Fault.REFUSED, Fault.BUSY, Fault.UNABLE, Fault.DIED)
"""The engine surely did nothing, or does nothing any more."""

_FREE = frozenset((Fault.REFUSED, Fault.UNABLE))  # costs no engine anything, so no budget either
_MAY_COME_BACK = frozenset((Fault.BUSY, Fault.FAILED, Fault.RESET))


class FailoverRule(msgspec.Struct, frozen=True):
    """attempts: at most, the first included. within_s: from the request's arrival; no attempt begins later.

    wait_s: so long a request waits for the engine that failed it, where there is no other.
    move_on_s: an engine without a first token by then is given up if there is another; None: it is waited for.
    resume: a stream that breaks off is gone on with by another engine, where that is sound (`resume.py`).
    """

    attempts: int = 2
    retry_on: frozenset[Fault] = frozenset(SAFE)
    within_s: float = 30.0
    wait_s: float = 0.0
    move_on_s: float | None = None
    resume: bool = False

    def allows(self, fault: Fault) -> bool:
        return self.resume if fault is Fault.BROKEN else fault in self.retry_on


def fault_of(error: WarmrouteError) -> Fault | None:
    """What an engine did wrong, so far as its answer tells. None: it did not, or it cannot be undone."""
    if isinstance(error, EngineTlsError):
        return Fault.REFUSED
    if isinstance(error, EngineUnreachable):
        return Fault.REFUSED if error.code == EngineUnreachable.code else Fault.RESET
    if isinstance(error, EngineFailure):
        if error.engine_status in (429, 503):
            return Fault.BUSY
        if error.engine_status in (401, 403):
            return Fault.UNABLE
        return Fault.DIED if error.died else Fault.FAILED
    if isinstance(error, EngineRefusal):
        return Fault.UNABLE if error.status == 404 else None
    if isinstance(error, EngineTimeout) and error.code == FIRST_TOKEN_TIMEOUT:
        return Fault.SILENT
    return None


def fault_amid(error: WarmrouteError) -> Fault | None:
    """The same of one that has begun its answer. A request whose time is over is not gone on with."""
    return Fault.BROKEN if isinstance(error, EngineError) and error.code != TOTAL_TIMEOUT else None


class RetryBudget:
    """Attempts that may be made again: one for every `1 / share` requests, and up to `burst` at once.

    requests: that have come since one was last to be made. Counted by whoever takes them.
    """

    __slots__ = ("_burst", "_left", "requests", "share")

    def __init__(self, share: float, *, burst: float = 10.0) -> None:
        self.share = share
        self.requests = 0
        self._burst = burst
        self._left = burst

    def spend(self) -> bool:
        self._left = min(self._burst, self._left + self.requests * self.share)
        self.requests = 0
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Tries:
    """The attempts of one request at one model."""

    def __init__(self, rule: FailoverRule, budget: RetryBudget, *, dice: random.Random) -> None:
        self._rule = rule
        self._budget = budget
        self._dice = dice
        self._made = 1
        self.failed: tuple[str, ...] = ()
        """Instances that are passed over."""

    def again(self, fault: Fault, instance: str, *, age_s: float) -> bool:
        """Whether a request that came, or broke off, `age_s` ago is tried once more after `instance` failed it; if so,
        it counts.
        """
        rule = self._rule
        if not rule.allows(fault) or self._made >= rule.attempts or age_s > rule.within_s:
            return False
        if fault not in _FREE and not self._budget.spend():
            return False
        self._made += 1
        self.failed += (instance,)
        return True

    @property
    def left(self) -> int:
        """Attempts that may still be made."""
        return self._rule.attempts - self._made

    def pause_s(self, fault: Fault) -> float:
        """Before an attempt elsewhere."""
        return 0.0 if fault in SAFE and fault is not Fault.BUSY else self._dice.uniform(0.0, JITTER_S)

    def wait_s(self, fault: Fault, retry_after_s: float | None, *, age_s: float) -> float | None:
        """Before the same engine is asked again, since there is no other. None: it is not."""
        if fault not in _MAY_COME_BACK:
            return None
        backoff = BACKOFF_S * 2 ** (self._made - 2) * self._dice.uniform(1.0, 2.0)
        wait = max(backoff, retry_after_s or 0.0)
        return wait if wait <= self._rule.wait_s and age_s + wait <= self._rule.within_s else None
