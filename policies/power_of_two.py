"""The less busy of two drawn at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Cost, Snapshot


class PowerOfTwo:
    """Two choices (Mitzenmacher, 2001), compared by requests in flight: `power_of_two` of the SGLang gateway 0.3.2.

    cost = place: the two that were drawn by their load, the first drawn where it is equal, then the others as further
    draws. The gateway compares tokens in use where it polls them of both; here it is always requests, which count at
    once.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        weights_over({}, weights)
        self._dice = dice

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        candidates = snapshot.candidates
        drawn = self._dice.sample(range(len(candidates)), len(candidates))
        drawn[:2] = sorted(drawn[:2], key=lambda index: candidates[index].booked_requests)
        costs = [Cost(0.0, {}, "rank")] * len(candidates)
        for place, index in enumerate(drawn):
            costs[index] = Cost(float(place), {"place": float(place)}, "rank")
        return costs
