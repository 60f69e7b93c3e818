"""LMetric (OSDI '26, arXiv 2603.15202): the product of prefill work and batch size, without a weight to tune."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Candidate, Cost, Snapshot


class LMetric:
    """P × B, the least wins. P = prefill tokens queued there + this prompt's uncached tokens (>= 1); B = requests + 1.

    Without the paper's detector of hot prefixes, which needs state over requests. It only ranks: tokens × requests is
    no time.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        weights_over({}, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        return [self._cost(snapshot, candidate) for candidate in snapshot.candidates]

    def _cost(self, snapshot: Snapshot, candidate: Candidate) -> Cost:
        work = candidate.booked_prefill_tokens + max(1, snapshot.tokens - candidate.hit_tokens)
        batch = max(candidate.booked_requests, candidate.running + candidate.waiting) + 1
        value = float(work * batch)
        return Cost(value, {"work_x_batch": value}, "rank")
