"""Share of the prompt that is cached, against load relative to the fleet's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Cost, Snapshot

WEIGHTS: Mapping[str, float] = {"beta": 1.0}


class LoadAware:
    """`loadaware` of vLLM's production-stack (pull request 1035). Load = requests in flight.

    score = matched / prompt - beta · (load - mean) / max(1, mean); the highest wins. Nobody scores more than
    1 - beta · (min - mean) / max(1, mean), so the cost is what is missing to that:
    cost = (1 - matched / prompt) + beta · (load - min) / max(1, mean).

    Where nobody holds anything, theirs falls back to the session's place on a hash ring, else to the fewest requests a
    second; here the formula decides, by load.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        tokens = max(1, snapshot.tokens)
        loads = [candidate.booked_requests for candidate in snapshot.candidates]
        least = min(loads)
        per_request = self._weights["beta"] / max(1.0, sum(loads) / len(loads))
        costs: list[Cost] = []
        for candidate, load in zip(snapshot.candidates, loads, strict=True):
            parts = {"unmatched": 1 - candidate.hit_tokens / tokens, "load": per_request * (load - least)}
            costs.append(Cost(sum(parts.values()), parts, "rank"))
        return costs
