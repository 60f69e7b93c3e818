"""Each in turn: the baseline every other policy has to beat."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Cost, Snapshot


class RoundRobin:
    """A turn per model: under one common counter, two models asked for alternately would each meet the same half."""

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        weights_over({}, weights)
        self._turn: dict[str, int] = {}

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        count = len(snapshot.candidates)
        turn = self._turn.get(snapshot.model, 0)
        self._turn[snapshot.model] = turn + 1
        places = [float((index - turn) % count) for index in range(count)]
        return [Cost(place, {"turn": place}, "rank") for place in places]
