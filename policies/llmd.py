"""llm-d's precise prefix-cache profile: a weighted sum of scores between 0 and 1."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Candidate, Cost, Snapshot

WEIGHTS: Mapping[str, float] = {"prefix": 2.0, "queue": 1.0, "kv_usage": 1.0}
HOST_WORTH = 0.8
"""Of a block in host memory. Of tiers it has no figure for, llm-d counts a block whole."""


class Llmd:
    """The sample profile for precise prefix caching in llm-d-router (ebab6879), which has these weights.

    score = 2 · match + 1 · (max - q) / (max - min) + 1 · (1 - KV usage); the highest wins. match: matched blocks / the
    prompt's blocks; q: requests waiting, by the engine's last word (the term is 1 where all are equal).
    cost = sum of weights - score: of each term its weight × what it lacks to 1.

    Matches are counted in tokens, since candidates may differ in block size. llm-d gives engines whose metrics were
    never read no load score; here they look idle until they are read.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        weights, tokens = self._weights, max(1, snapshot.tokens)
        queues = [candidate.waiting for candidate in snapshot.candidates]
        shortest = min(queues)
        span = max(queues) - shortest
        costs: list[Cost] = []
        for candidate in snapshot.candidates:
            parts = {
                "prefix": weights["prefix"] * (1 - _matched_tokens(candidate) / tokens),
                "queue": weights["queue"] * (candidate.waiting - shortest) / span if span else 0.0,
                "kv_usage": weights["kv_usage"] * candidate.kv_usage,
            }
            costs.append(Cost(sum(parts.values()), parts, "rank"))
        return costs


def _matched_tokens(candidate: Candidate) -> float:
    """What was only just dispatched there counts as on the GPU."""
    hit, held = candidate.hit_tokens, candidate.held_tokens
    on_host = min(hit - candidate.expected_tokens, held.get("host", 0)) - held.get("gpu", 0)
    return hit - (1 - HOST_WORTH) * on_host if on_host > 0 else hit
