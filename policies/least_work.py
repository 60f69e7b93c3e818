"""Least outstanding work, blind to caches: what a good load balancer that knows prompt lengths would do."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import decode_ms, decoding, pinned_tokens, queue_ms, weights_over
from router.core import Candidate, Cost, Snapshot

WEIGHTS: Mapping[str, float] = {"queue": 1.0, "prefill": 1.0, "decode": 0.05}


class LeastWork:
    """cost = queue + prefill of the whole prompt + decode: the terms of `kv_aware` with every hit taken as zero."""

    joint = True  # it can choose among the engines that have room

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        return [self._cost(snapshot, candidate) for candidate in snapshot.candidates]

    def _cost(self, snapshot: Snapshot, candidate: Candidate) -> Cost:
        weights, tokens, pinned = self._weights, snapshot.tokens, pinned_tokens(candidate)
        parts = {
            "queue": weights["queue"] * queue_ms(snapshot, candidate),
            "prefill": weights["prefill"] * candidate.rates.prefill_ms(tokens, tokens),
            "decode": weights["decode"] * decode_ms(snapshot, candidate, pinned=pinned, decoding=decoding(candidate)),
        }
        return Cost(sum(parts.values()), parts)
