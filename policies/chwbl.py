"""Consistent hashing with bounded loads: prompts that begin alike go together, until that is too many."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from policies.terms import weights_over
from router.core import Cost, Snapshot

WEIGHTS: Mapping[str, float] = {"load_factor": 1.25}


class Chwbl:
    """`PrefixHash` of KubeAI (f442a2cd), after Mirrokni et al. (SODA 2018): blind to what is really cached.

    A candidate takes part while its requests <= load_factor · (all requests + 1) / candidates, or nobody has any; the
    first such in hash order wins, and where there is none, the first of all. cost = place in that order.

    KubeAI hashes adapter and first 100 characters; here it is the key of the first block, in which the adapter is, and
    the isolation domain with it. Rendezvous hashing stands for its ring of 256 places per endpoint: the same promise
    that only what was on an endpoint moves when it goes, with even shares. A prompt without a name goes to the fewest
    requests, where KubeAI would send all such to one endpoint.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        candidates = snapshot.candidates
        loads = [candidate.booked_requests for candidate in candidates]
        if not snapshot.prefix:
            return [Cost(float(load), {"requests": float(load)}, "rank") for load in loads]
        total = sum(loads)
        bound = self._weights["load_factor"] * (total + 1) / len(loads)
        order = sorted(
            (total > 0 and load > bound, _affinity(snapshot.prefix, candidate.id), index)
            for index, (candidate, load) in enumerate(zip(candidates, loads, strict=True))
        )
        costs = [Cost(0.0, {}, "rank")] * len(loads)
        for place, (_, _, index) in enumerate(order):
            costs[index] = Cost(float(place), {"place": float(place)}, "rank")
        return costs


def _affinity(prefix: int, candidate_id: str) -> bytes:
    return blake2b(f"{prefix}:{candidate_id}".encode(errors="surrogatepass"), digest_size=8).digest()
