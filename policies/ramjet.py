"""Ramjet: how far a cache trails the warmest, up to a cap, against load."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Cost, Snapshot

UNIT_TOKENS = 512
"""Of overlap: the 2 KB of text that Ramjet fingerprints."""
LOAD_TOKENS = 8192
"""Prefill that weighs as much as a request."""
TIE = 1e-9
"""Of equal scores the deeper overlap wins: less than any difference of scores, however deep."""

WEIGHTS: Mapping[str, float] = {"cap": 32.0, "alpha": 4.0}


class Ramjet:
    """Helix's load balancer (helixml/ramjet, 5319354c), as NVIDIA measured it (ai-dynamo/dynamo, `ramjet.rs`).

    With o the overlap in whole units and W the warmest's, score = min(W, cap) - min(W - o, cap) - alpha · (requests +
    prefill tokens / 8192); the highest wins. cost = min(W, cap) - score = min(W - o, cap) + alpha · (…).

    Requests and prefill tokens are those sent there and not finished, or not past their first token. Ramjet itself caps
    what one request weighs at 8 units; nobody keeps that per request. Its lane for very long prompts is left out.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        cap, alpha = self._weights["cap"], self._weights["alpha"]
        overlaps = [candidate.hit_tokens // UNIT_TOKENS for candidate in snapshot.candidates]
        warmest = max(overlaps)
        costs: list[Cost] = []
        for candidate, overlap in zip(snapshot.candidates, overlaps, strict=True):
            behind = warmest - overlap
            load = candidate.booked_requests + candidate.booked_prefill_tokens / LOAD_TOKENS
            parts = {"affinity": float(min(behind, cap)), "load": alpha * load, "tie": TIE * behind}
            costs.append(Cost(sum(parts.values()), parts, "rank"))
        return costs
