"""A session stays where it was, by hashing alone: no state, the same on every replica."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from policies.terms import weights_over
from router.core import Cost, Snapshot


class Session:
    """Rendezvous hashing (Thaler and Ravishankar, 1998) of the session, else the tenant, over the candidates.

    When a candidate goes, only its own sessions move. A request that names neither goes anywhere.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        weights_over({}, weights)
        self._dice = dice

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        ids = [candidate.id for candidate in snapshot.candidates]
        by_affinity = sorted(range(len(ids)), key=[self._affinity(snapshot, id) for id in ids].__getitem__)
        costs = [Cost(0.0, {}, "rank")] * len(ids)
        for place, index in enumerate(by_affinity):
            costs[index] = Cost(float(place), {"affinity": float(place)}, "rank")
        return costs

    def _affinity(self, snapshot: Snapshot, candidate_id: str) -> float:
        owner = snapshot.session or snapshot.tenant
        if not owner:
            return self._dice.random()
        digest = blake2b(f"{len(owner)}:{owner}{candidate_id}".encode(errors="surrogatepass"), digest_size=8).digest()
        return float(int.from_bytes(digest, "big"))
