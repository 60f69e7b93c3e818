"""AIBrix's rule: the longest match among those who are not far busier than the others."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import sqrt

from policies.terms import weights_over
from router.core import Cost, Snapshot

WEIGHTS: Mapping[str, float] = {"imbalance": 16.0, "deviations": 2.0}


class AibrixPrefix:
    """`prefix-cache` of AIBrix (e3e10f9e), with its defaults. Running = requests the gateway has in flight there.

    Eligible: running <= mean + deviations · σ (of the sample); but when max - min > imbalance only who has the least.
    Of those with a match the highest percentage wins, then the fewest running; if there is none, the fewest running of
    all. In one number, R the most running of all: cost = (100 - match) · (R + 1) + running, match 0 where not eligible.

    AIBrix matches blocks of characters that it sent before; here it is what the engine holds, in whole percent of the
    prompt's tokens.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        tokens = max(1, snapshot.tokens)
        running = [candidate.booked_requests for candidate in snapshot.candidates]
        limit, step = self._limit(running), max(running) + 1
        costs: list[Cost] = []
        for candidate, count in zip(snapshot.candidates, running, strict=True):
            match = 100 * candidate.hit_tokens // tokens if count <= limit else 0
            parts = {"unmatched": float((100 - match) * step), "running": float(count)}
            costs.append(Cost(sum(parts.values()), parts, "rank"))
        return costs

    def _limit(self, running: Sequence[int]) -> float:
        least, count = min(running), len(running)
        if max(running) - least > self._weights["imbalance"]:
            return least
        mean = sum(running) / count
        variance = sum((each - mean) ** 2 for each in running) / max(1, count - 1)
        return mean + self._weights["deviations"] * sqrt(variance)
