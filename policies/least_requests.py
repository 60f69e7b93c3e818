"""Fewest requests in flight: what most load balancers that know nothing of tokens call least connections."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Cost, Snapshot


class LeastRequests:
    """cost = requests sent there and not finished: `least-request` of AIBrix, `LeastLoad` of KubeAI.

    As in both only our own count, since the engine's word about itself is older than the last burst.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        weights_over({}, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        counts = [float(candidate.booked_requests) for candidate in snapshot.candidates]
        return [Cost(count, {"requests": count}, "rank") for count in counts]
