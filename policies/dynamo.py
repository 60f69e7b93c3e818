"""NVIDIA Dynamo's KV router: blocks to prefill, less what is cached, plus blocks in use."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import weights_over
from router.core import Candidate, Cost, Snapshot

BLOCK_TOKENS = 16
"""Only a unit: counted in tokens, candidates with other block sizes compare alike."""

WEIGHTS: Mapping[str, float] = {
    "overlap": 1.0,  # credit of a token on the device
    "overlap_decay": 0.0,  # how much of it a backlog takes away
    "host": 0.75,
    "disk": 0.25,
    "shared": 0.5,
    "prefill": 1.0,
    "requests": 0.0,  # blocks per request
}


class Dynamo:
    """The default cost of Dynamo 1.6.1 in blocks, at temperature 0 (the least wins), with its defaults as weights.

    cost = prefill · max(0, (P + L - credit) / block) + (K + L) / block + requests · R
    credit = overlap · device / (1 + overlap_decay · x) + host · host + disk · disk + shared · remote

    P: uncached tokens sent there and not past their first token; L: the prompt; K: KV tokens of what was sent there; R:
    requests; x: P above the least P of all, in prompts. credit is in tokens, each counted in the fastest tier it is in.

    Dynamo counts a block once that several running requests share, this one included, and leaves answers out; K counts
    it for each, and what they are expected to answer. Its shared tier is one for all workers; here it is what the
    candidate itself reaches there.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        least_backlog = min(candidate.booked_prefill_tokens for candidate in snapshot.candidates)
        return [self._cost(snapshot, candidate, least_backlog) for candidate in snapshot.candidates]

    def _cost(self, snapshot: Snapshot, candidate: Candidate, least_backlog: int) -> Cost:
        weights, tokens, backlog = self._weights, snapshot.tokens, candidate.booked_prefill_tokens
        excess = (backlog - least_backlog) / max(1, tokens)
        credit = self._credit_tokens(candidate, weights["overlap"] / (1 + weights["overlap_decay"] * excess))
        parts = {
            "prefill": weights["prefill"] * max(0.0, backlog + tokens - credit) / BLOCK_TOKENS,
            "decode": (candidate.booked_kv_tokens + tokens) / BLOCK_TOKENS,
            "requests": weights["requests"] * candidate.booked_requests,
        }
        return Cost(sum(parts.values()), parts, "rank")

    def _credit_tokens(self, candidate: Candidate, device: float) -> float:
        """What was only just dispatched there counts as on the device."""
        weights, hit = self._weights, candidate.hit_tokens
        known = hit - candidate.expected_tokens
        worth = {"gpu": device, "host": weights["host"], "disk": weights["disk"], "remote": weights["shared"]}
        credit, below = 0.0, 0
        for tier, depth in candidate.held_tokens.items():
            reached = min(depth, known)
            if reached > below:
                credit += worth.get(tier, weights["shared"]) * (reached - below)
                below = reached
        return credit + device * (hit - below)
