"""How the last requests were decided."""

from __future__ import annotations

from collections import deque
from math import inf

import msgspec

from router.core import Decision

RECEIPTS = 1000
RECEIPT_CANDIDATES = 16
PACE_S = 0.01
BURST_S = 2 * RECEIPTS * PACE_S


class Receipts:
    """All decisions up to 100 a second (two thousand at once); under more load than that, a sample of 100 a second.

    Kept, a decision is some 3 KB of small objects. If each of thousands a second were, every request would write to
    memory that no cache holds, which costs a quarter of what placing it does, for a history of less than a second.
    """

    __slots__ = ("_due", "_kept")

    def __init__(self) -> None:
        self._kept: deque[tuple[str, Decision]] = deque(maxlen=RECEIPTS)
        self._due = -inf  # when the next one is, if they came at an even pace

    def keep(self, request_id: str, decision: Decision, now: float, took_us: float = 0.0) -> None:
        due = self._due
        if due <= now:
            self._due = max(due, now - BURST_S) + PACE_S
            scored = decision.scored[:RECEIPT_CANDIDATES]
            self._kept.append((request_id, msgspec.structs.replace(decision, scored=scored, took_us=took_us)))

    def get(self, request_id: str) -> Decision | None:
        """The last one of that id. None: not kept, or no longer."""
        return next((decision for id, decision in reversed(self._kept) if id == request_id), None)
