"""Least expected harm in milliseconds, given what every engine holds and is busy with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import (
    decode_ms,
    decoding,
    duplication_ms,
    memory_ms,
    neighbours_ms,
    pinned_tokens,
    prefill_ms,
    queue_ms,
    weights_over,
)
from router.core import Candidate, Cost, Snapshot

WEIGHTS: Mapping[str, float] = {
    "queue": 1.0,
    "prefill": 1.0,
    "neighbours": 0.5,
    "duplication": 1.0,
    "decode": 0.15,
    "memory": 1.0,
}
"""Chosen by replaying three traces of Mooncake (FAST '25) at 3 to 4 × their speed on 8 simulated engines (8B, H100).
With less for neighbours the knee comes earlier, with 1.0 long prompts pay for it. Below the knee duplication and decode
hardly matter within a factor of three; at 1.0 a copy is worth making once the queue is twice its prefill."""


class KvAware:
    """cost = Σ weight × term (`policies/terms.py`): queue, prefill, neighbours, duplication, decode, memory.

    Overlap counts relative to the other candidates by itself: a block that everybody holds shortens every candidate's
    prefill alike. With nothing cached anywhere what remains is least outstanding work.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)
        self._by_term = tuple(self._weights[term] for term in WEIGHTS)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        best = max([candidate.hit_tokens for candidate in snapshot.candidates], default=0)
        return [self._cost(snapshot, candidate, best) for candidate in snapshot.candidates]

    def _cost(self, snapshot: Snapshot, candidate: Candidate, best_hit_tokens: int) -> Cost:
        w_queue, w_prefill, w_neighbours, w_duplication, w_decode, w_memory = self._by_term
        own, batch, pinned = prefill_ms(snapshot, candidate), decoding(candidate), pinned_tokens(candidate)
        queue = w_queue * queue_ms(snapshot, candidate)
        prefill = w_prefill * own
        neighbours = w_neighbours * neighbours_ms(own, batch)
        duplication = w_duplication * duplication_ms(candidate, best_hit_tokens)
        decode = w_decode * decode_ms(snapshot, candidate, pinned=pinned, decoding=batch)
        memory = w_memory * memory_ms(snapshot, candidate, pinned=pinned)
        parts = {
            "queue": queue,
            "prefill": prefill,
            "neighbours": neighbours,
            "duplication": duplication,
            "decode": decode,
            "memory": memory,
        }
        return Cost(queue + prefill + neighbours + duplication + decode + memory, parts)
