"""Stay in the zone: among engines of one zone the cheapest prefill wins; crossing to another costs a fixed time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from router.core import Candidate, Cost, Snapshot


class NearestZone:
    """Queue and prefill there, plus `crossing_ms` (20 by default) for an engine whose label `zone` is not "near"."""

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._crossing_ms = weights.get("crossing_ms", 20.0)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        return [self._cost(snapshot, candidate) for candidate in snapshot.candidates]

    def _cost(self, snapshot: Snapshot, candidate: Candidate) -> Cost:
        own = candidate.rates.prefill_ms(snapshot.uncached(candidate), snapshot.tokens)
        crossing = 0.0 if candidate.labels.get("zone") == "near" else self._crossing_ms
        parts = {"queue": candidate.booked_prefill_ms, "prefill": own, "crossing": crossing}
        return Cost(sum(parts.values()), parts)
