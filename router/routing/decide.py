"""From a snapshot to a decision: pure, but for the dice."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence
from math import inf

from router.core import Candidate, Cost, Decision, Policy, Scored, Snapshot

TIE_MS = 3.0
"""Costs in ms that lie closer than this are a tie: a step of an engine takes twice as long, no prediction is so sharp.
Else the first engine to hold some short common prefix would draw every new session while the fleet is idle."""

LEAST_BOOKED = "least_booked"
"""The name under which a decision appears that was made without the policy."""


def decide(
    snapshot: Snapshot,
    policy: Policy,
    *,
    name: str,
    dice: random.Random,
    filtered: Mapping[str, str] | None = None,
    reason: str = "",
    among: Container[int] | None = None,
) -> Decision:
    """The candidates, best first. If the policy breaks a promise, `least_booked` steps in and `reason` says so.

    `among`: the indices of those that can be chosen now; the others come behind them.
    """
    candidates = snapshot.candidates
    try:
        costs = policy.costs(snapshot)
        broken = _broken(costs, len(candidates))
    except Exception as error:  # a stranger's code: whatever it does, the request is served
        broken = type(error).__name__
    if broken:
        costs = least_booked(snapshot)
        reason = "; ".join(part for part in (f"policy {name}: {broken}", reason) if part)
        name = LEAST_BOOKED
    order = _ordered(candidates, costs, dice)
    if among is not None:
        order.sort(key=lambda row: row[3] not in among)
    scored = tuple([Scored(candidates[i], costs[i]) for _, _, _, i in order])
    return Decision(name, scored, {} if filtered is None else filtered, reason)


def least_booked(snapshot: Snapshot) -> list[Cost]:
    return [
        Cost(float(c.booked_requests), {"booked_requests": float(c.booked_requests)}, "rank")
        for c in snapshot.candidates
    ]


def _broken(costs: Sequence[Cost], expected: int) -> str:
    """What is wrong with a policy's answer; empty if nothing is."""
    if len(costs) != expected:
        return f"{len(costs)} costs for {expected} candidates"
    for cost in costs:
        if not isinstance(cost, Cost) or not 0 <= cost.value < inf:
            return f"a cost that is {getattr(cost, 'value', cost)!r}"
    return ""


def _ordered(
    candidates: Sequence[Candidate], costs: Sequence[Cost], dice: random.Random
) -> list[tuple[float, float, float, int]]:
    """Cheapest first: what is sorted by, and the index.

    Of those that tie for the least, the cache least turned over by recent work goes first, measured by its capacity
    where all are known.
    """
    best, unit, by_share = inf, "", True
    for candidate, cost in zip(candidates, costs, strict=True):
        if cost.value < best:
            best, unit = cost.value, cost.unit
        if not candidate.capacity_tokens:
            by_share = False
    limit = best + TIE_MS if unit == "ms" else best
    rows: list[tuple[float, float, float, int]] = []
    for i, cost in enumerate(costs):
        if cost.value > limit:
            rows.append((cost.value, 0.0, 0.0, i))
        else:
            candidate = candidates[i]
            recent = candidate.recent_tokens
            rows.append((-1.0, recent / candidate.capacity_tokens if by_share else recent, dice.random(), i))
    rows.sort()
    return rows
