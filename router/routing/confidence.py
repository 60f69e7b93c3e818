"""How far the index of a rank is to be believed. A wrong belief costs more than none: credit is multiplied by this.

    confidence = completeness · freshness · accuracy          each 0..1

completeness  0 after a gap that could not be replayed; 1 once rebuilt; in between it grows with confirmed hits
freshness     halves every `half_life_s` while nothing is heard although something should be
accuracy      moving mean of delivered / predicted hit tokens
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from router.core import Lost

GRACE_S = 10.0  # from uncached work to its first event: the queue and the first prefill step
HALF_LIFE_S = 10.0
SHARE = 0.2  # how far one outcome moves a mean
STEP_S = 0.05  # a fading value is found anew so often, in which it loses a third of a percent


def freshness(quiet_s: float, *, half_life_s: float = HALF_LIFE_S) -> float:
    """1 as long as `quiet_s`, seconds beyond what is normal, is not positive."""
    return 1.0 if quiet_s <= 0 else 0.5 ** (quiet_s / half_life_s)


def hit_ratio(predicted_tokens: int, delivered_tokens: int, slack_tokens: int) -> float:
    """1 for a hit that was at least as long as said, give or take `slack_tokens` (a block)."""
    if delivered_tokens + slack_tokens >= predicted_tokens:
        return 1.0
    return delivered_tokens / predicted_tokens


def moved(value: float, toward: float) -> float:
    return value + SHARE * (toward - value)


class Confidence:
    """Of one rank. clock: monotonic seconds. `believed` is the value that `at` found last: it stands `until` then."""

    __slots__ = (
        "_accuracy",
        "_clock",
        "_completeness",
        "_gap",
        "_silent_since",
        "_unanswered_since",
        "believed",
        "until",
    )

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._completeness = 1.0
        self._accuracy = 1.0
        self._gap = ""
        self._silent_since: float | None = None  # no connection
        self._unanswered_since: float | None = None  # uncached work, and no event since
        self.believed = 1.0
        self.until = -inf

    @property
    def value(self) -> float:
        return self._completeness * self._accuracy * freshness(self._quiet_s(self._clock()))

    def at(self, now: float) -> float:
        """`value`, up to `STEP_S` old: every decision asks this of every rank, and it has hardly ever changed."""
        if now >= self.until:
            self.believed = self._completeness * self._accuracy * freshness(self._quiet_s(now))
            self.until = self._stays_until(now)
        return self.believed

    def reasons(self) -> list[str]:
        """Why it is below 1. Empty: it is not."""
        reasons = []
        if self._completeness < 1:
            reasons.append(f"events lost ({self._gap}), {self._completeness:.0%} rebuilt")
        quiet_s = self._quiet_s(self._clock())
        if quiet_s > 0:
            reasons.append(
                f"no connection for {quiet_s:.0f} s"
                if self._silent_since is not None
                else f"no event for {quiet_s + GRACE_S:.0f} s after uncached work was sent"
            )
        if self._accuracy < 1:
            reasons.append(f"{self._accuracy:.0%} of the predicted hits were delivered")
        return reasons

    def lost(self, lost: Lost) -> None:
        """What the event stream says of itself.

        restart: the index of the rank is emptied by the caller; what fills it from now on is believed.
        gap: nothing is believed until `rebuilt`, or until hits confirm what is left.
        silent: believed less and less until `heard`.
        """
        self.until = -inf
        if lost.kind == "restart":
            self.rebuilt()
            self._accuracy = 1.0
        elif lost.kind == "gap":
            self._completeness = 0.0
            self._gap = lost.reason
        elif self._silent_since is None:
            self._silent_since = self._clock()

    def rebuilt(self) -> None:
        """The index holds what the events say from a known state on: all were replayed, or it began empty."""
        self._completeness = 1.0
        self._gap = ""
        self.until = -inf
        self.heard()

    def heard(self) -> None:
        """A batch came."""
        if self._silent_since is not None or self._unanswered_since is not None:
            self._silent_since = self._unanswered_since = None
            self.until = -inf

    def dispatched(self, uncached_blocks: int, *, at: float | None = None) -> None:
        """Work was sent that must make the engine store blocks; `at` None: now."""
        if uncached_blocks > 0 and self._unanswered_since is None:
            self._unanswered_since = self._clock() if at is None else at
            self.until = -inf

    def withdrawn(self, at: float, *, next_at: float | None) -> None:
        """What was sent `at` was given up before its prefill was seen: that no event came of it says nothing.

        `next_at`: when the oldest of what is still waited for was sent.
        """
        if self._unanswered_since == at:
            self._unanswered_since = next_at
            self.until = -inf

    def answered(self, *, predicted_tokens: int, delivered_tokens: int, slack_tokens: int) -> None:
        """A request's hit, as the engine reports it, against the prediction before confidence was applied to it."""
        if predicted_tokens <= 0:
            return
        self.until = -inf
        ratio = hit_ratio(predicted_tokens, delivered_tokens, slack_tokens)
        self._accuracy = _snapped(moved(self._accuracy, ratio))
        if ratio == 1.0:
            self._completeness = _snapped(moved(self._completeness, 1.0))

    def _quiet_s(self, now: float) -> float:
        """Seconds of silence beyond what is normal."""
        if self._silent_since is not None:
            return now - self._silent_since
        if self._unanswered_since is not None:
            return now - self._unanswered_since - GRACE_S
        return 0.0

    def _stays_until(self, now: float) -> float:
        """As long as nothing is told, the value at `now` stands until then."""
        if self._silent_since is not None:
            return now + STEP_S
        if self._unanswered_since is not None:
            return max(now + STEP_S, self._unanswered_since + GRACE_S)
        return inf


def _snapped(value: float) -> float:
    """A mean that has come within 1 % of certain is certain: nobody wants to read "99.99 % rebuilt" for ever."""
    return 1.0 if value > 0.99 else value
