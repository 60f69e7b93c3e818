"""Policies that are scored on live traffic and never act: what another rule would have said, before it is let loose.

note ──the snapshot of a real decision──> queue ──some ms later, between requests──> every shadow's costs ──> counts

A shadow sees what the acting policy saw, and chooses among the engines that it could choose from. What the shadow would
have made of the fleet by having its way all along it does not tell: that is what a replay is for.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import msgspec

from router.core import Candidate, Decision, Policy, Snapshot
from router.routing.decide import LEAST_BOOKED, TIE_MS, decide

PACE_S = 0.01
BURST_S = 1.0
"""All decisions up to 100 a second are scored (100 at once); under more load than that, a sample of 100 a second."""
SCORE_AFTER_S = 0.02
"""What comes within this time is scored in a row, which is cheaper, and when its requests are on their way."""
SLICE_S = 0.0005
"""So long the loop is kept from everything else; one policy's answer for one snapshot is not divided."""
WAITING_MAX = 200
"""Snapshots that wait to be scored; further decisions are left out."""


class ShadowCounts(msgspec.Struct):
    """Of one shadow, since the start. `regret`: in ms where the policy's costs are, else in its own unit."""

    agreed: int = 0
    differed: int = 0
    errors: int = 0  # answers that broke a policy's promises, or that it never gave
    regret: float = 0.0  # sum over decisions: its cost of what was chosen less its cost of what it would have


class _Noted(NamedTuple):
    snapshot: Snapshot
    chosen: Candidate
    among: Sequence[int] | None


class Shadows:
    """`policies` by name. `call_at(when, call)` calls back once at time `when` of `clock`, or as soon as possible."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        *,
        call_at: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float],
        dice: random.Random,
    ) -> None:
        self.counts = {name: ShadowCounts() for name in policies}
        self._policies = policies
        self._call_at = call_at
        self._clock = clock
        self._dice = dice
        self._due = -inf  # when the next decision is scored, if they came at an even pace
        self._waiting: deque[Callable[[], None]] = deque()
        self._called = False  # back soon

    def figures(self) -> dict[str, dict[str, float]]:
        """`counts` by policy and name, as the metrics page takes them."""
        return {name: msgspec.structs.asdict(counts) for name, counts in self.counts.items()}

    def note(self, snapshot: Snapshot, decision: Decision, among: Sequence[int] | None = None) -> None:
        """A decision has been made. `among`: the indices of those that could be chosen; None: all."""
        now, due = snapshot.at, self._due
        if due > now or len(self._waiting) >= WAITING_MAX * len(self._policies):
            return
        if len(snapshot.candidates if among is None else among) < 2:
            return  # there was nothing to choose, and nothing to agree on
        self._due = max(due, now - BURST_S) + PACE_S
        noted = _Noted(snapshot, decision.chosen, among)
        self._waiting.extend([partial(self._score, name, policy, noted) for name, policy in self._policies.items()])
        if not self._called:
            self._called = True
            self._call_at(now + SCORE_AFTER_S, self._work)

    def _work(self) -> None:
        self._called = False
        ends = self._clock() + SLICE_S
        while self._waiting:
            self._waiting.popleft()()
            now = self._clock()
            if self._waiting and now >= ends:
                self._called = True
                self._call_at(now, self._work)
                return

    def _score(self, name: str, policy: Policy, noted: _Noted) -> None:
        counts, among = self.counts[name], noted.among
        decision = decide(noted.snapshot, policy, name=name, dice=self._dice, among=among)
        if decision.policy == LEAST_BOOKED:
            counts.errors += 1
            return
        could = decision.scored if among is None else decision.scored[: len(among)]
        least = min([scored.cost.value for scored in could])
        actual = next(scored.cost for scored in could if scored.candidate is noted.chosen)
        regret = actual.value - least
        counts.regret += regret
        if regret <= (TIE_MS if actual.unit == "ms" else 0.0):
            counts.agreed += 1
        else:
            counts.differed += 1
