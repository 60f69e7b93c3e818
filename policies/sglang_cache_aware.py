"""SGLang's rule: the longest match if it is long enough and load is in balance, else the shortest queue."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Cost, Snapshot

WEIGHTS: Mapping[str, float] = {"cache_threshold": 0.3, "balance_abs": 64.0, "balance_rel": 1.5}


class SglangCacheAware:
    """`cache_aware` of the SGLang model gateway 0.3.2, with its defaults. Load = requests in flight.

    Out of balance when max - min > balance_abs and max > balance_rel · min: then the least load. Else, when the longest
    match / prompt > cache_threshold: whoever has it, whatever its load. Else the least load.
    cost = load, plus 1 for all but the holders of the longest match where that decides; theirs is 0.

    The gateway guesses matches from a radix tree of the characters it sent to each worker, pruned by size once a
    minute; here they are the engine's own, in tokens, and what it evicted no longer attracts. Of equal matches the tree
    names any one; here they tie.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        candidates = snapshot.candidates
        longest = max(candidate.hit_tokens for candidate in candidates)
        by_match = longest > self._weights["cache_threshold"] * snapshot.tokens and not self._out_of_balance(snapshot)
        costs: list[Cost] = []
        for candidate in candidates:
            load = float(candidate.booked_requests)
            if not by_match:
                costs.append(Cost(load, {"load": load}, "rank"))
            elif candidate.hit_tokens == longest:
                costs.append(Cost(0.0, {"shorter_match": 0.0, "load": 0.0}, "rank"))
            else:
                costs.append(Cost(1.0 + load, {"shorter_match": 1.0, "load": load}, "rank"))
        return costs

    def _out_of_balance(self, snapshot: Snapshot) -> bool:
        loads = [candidate.booked_requests for candidate in snapshot.candidates]
        least, most = min(loads), max(loads)
        return most - least > self._weights["balance_abs"] and most > self._weights["balance_rel"] * least
