"""Anyone, by dice: the floor that knowing something has to be worth more than."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Cost, Snapshot


class RandomChoice:
    """A uniform draw per candidate, the least wins: `random` of the SGLang gateway 0.3.2 and vllm-router 0.1.17."""

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        weights_over({}, weights)
        self._dice = dice

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        draws = [self._dice.random() for _ in snapshot.candidates]
        return [Cost(draw, {"draw": draw}, "rank") for draw in draws]
