"""From a snapshot to a decision: pure, but for the dice. And what a candidate's cache is worth to a prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from math import inf

from router.core import Candidate, Cost, Decision, HitRule, Policy, Scored, Snapshot

TIE_MS = 3.0
"""Costs in ms that lie closer than this are a tie: a step of an engine takes twice as long, no prediction is so sharp.
Else the first engine to hold some short common prefix would draw every new session while the fleet is idle."""

LEAST_BOOKED = "least_booked"
"""The name under which a decision appears that was made without the policy."""


def usable_tokens(rule: HitRule, held_tokens: int, prompt_tokens: int, *, confidence: float) -> int:
    """What to expect of `held_tokens`: confidence shortens the prefix, then the engine's own rule applies."""
    if not held_tokens or confidence <= 0:
        return 0
    believed = int(held_tokens * confidence) if confidence < 1 else held_tokens
    return rule.usable(believed, prompt_tokens)


def decide(
    snapshot: Snapshot,
    policy: Policy,
    *,
    name: str,
    dice: random.Random,
    filtered: Mapping[str, str] | None = None,
    reason: str = "",
) -> Decision:
    """The candidates, best first. If the policy breaks a promise, `least_booked` steps in and `reason` says so."""
    costs, broken = _costs(snapshot, policy)
    if broken:
        costs = least_booked(snapshot)
        reason = "; ".join(part for part in (f"policy {name}: {broken}", reason) if part)
        name = LEAST_BOOKED
    candidates = snapshot.candidates
    scored = tuple([Scored(candidates[i], costs[i]) for i in _order(candidates, costs, dice)])
    return Decision(name, scored, {} if filtered is None else filtered, reason)


def least_booked(snapshot: Snapshot) -> list[Cost]:
    return [
        Cost(float(c.booked_requests), {"booked_requests": float(c.booked_requests)}, "rank")
        for c in snapshot.candidates
    ]


def _costs(snapshot: Snapshot, policy: Policy) -> tuple[Sequence[Cost], str]:
    """The policy's answer, and what is wrong with it."""
    try:
        costs = policy.costs(snapshot)
        if len(costs) != len(snapshot.candidates):
            return (), f"{len(costs)} costs for {len(snapshot.candidates)} candidates"
        for cost in costs:
            if not isinstance(cost, Cost) or not 0 <= cost.value < inf:
                return (), f"a cost that is {getattr(cost, 'value', cost)!r}"
    except Exception as error:  # a stranger's code: whatever it does, the request is served
        return (), type(error).__name__
    return costs, ""


def _order(candidates: Sequence[Candidate], costs: Sequence[Cost], dice: random.Random) -> list[int]:
    values = [cost.value for cost in costs]
    order = sorted(range(len(values)), key=values.__getitem__)
    if len(order) == 1:
        return order
    best = costs[order[0]]
    limit = best.value + (TIE_MS if best.unit == "ms" else 0.0)
    if values[order[1]] > limit:
        return order
    tied = 2
    while tied < len(order) and values[order[tied]] <= limit:
        tied += 1
    return sorted(order[:tied], key=_tie_break(candidates, dice)) + order[tied:]


def _tie_break(candidates: Sequence[Candidate], dice: random.Random) -> Callable[[int], tuple[float, float]]:
    """The cache least turned over by recent work goes first, measured by its capacity where all are known."""
    relative = all([c.capacity_tokens for c in candidates])

    def key(index: int) -> tuple[float, float]:
        candidate = candidates[index]
        recent = candidate.recent_tokens / candidate.capacity_tokens if relative else float(candidate.recent_tokens)
        return recent, dice.random()

    return key
