"""Least expected harm in milliseconds, given what every engine holds and is busy with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from policies.terms import (
    STALE_LOAD_S,
    copied_tokens,
    decode_ms,
    late_ms,
    memory_ms,
    money,
    queue_ms,
    slo_ms,
    tier_load_ms,
    weights_over,
)
from router.core import Cost, Snapshot

WEIGHTS: Mapping[str, float] = {
    "queue": 1.0,
    "prefill": 1.0,
    "neighbours": 0.15,
    "duplication": 1.0,
    "crowding": 0.4,
    "memory": 1.0,
    "decode": 0.0,
    "price": 0.0,
}
"""Chosen by replaying three traces of Mooncake (FAST '25), agentic sessions and made-up loads around their knees on 4,
8 and 16 simulated engines (8B, H100), in the waiting room: `make bench-policies`. Neighbours, duplication and crowding
hardly matter within a factor of two; at 1.0 a copy is worth making once the queue is twice its prefill. Decode is off:
it sends all new prompts to whoever has the fewest tokens in memory, which costs conversations on 16 engines 7 points of
goodput, and crowding spreads answers as well. The weight of price is the ms of delay that one unit of money is worth,
which nobody but the operator knows."""


class KvAware:
    """cost = Σ weight × term (`policies/terms.py`): queue, prefill, neighbours, duplication, crowding, memory,
    decode, price.

    Where there is a TTFT objective, a term `slo` without a weight puts those that would miss it behind those that meet.

    Overlap counts relative to the other candidates by itself: a block that everybody holds shortens every candidate's
    prefill alike. With nothing cached anywhere what remains is least outstanding work.
    """

    joint = True  # it can choose among the engines that have room

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None:
        self._weights = weights_over(WEIGHTS, weights)
        self._by_term = tuple(self._weights[term] for term in WEIGHTS)

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        """The terms written out: called one by one for every candidate of every request, they take twice as long.

        A test holds them against `policies/terms.py`, which says what each of them means.
        """
        w_queue, w_prefill, w_neighbours, w_duplication, w_crowding, w_memory, w_decode, w_price = self._by_term
        tokens, output, objective = snapshot.tokens, snapshot.output_tokens, snapshot.ttft_slo_ms
        best, sent = 0, False
        for candidate in snapshot.candidates:
            if candidate.hit_tokens > best:
                best = candidate.hit_tokens
            if candidate.expected_tokens:
                sent = True
        if sent:  # seldom: else the best hit is what there is to copy
            best = copied_tokens(snapshot.candidates)
        costs: list[Cost] = []
        late: list[float] = []
        for candidate in snapshot.candidates:
            rates, hit, booked = candidate.rates, candidate.hit_tokens, candidate.booked_kv_tokens
            requests, capacity = candidate.booked_requests, candidate.capacity_tokens
            queue, batch = candidate.booked_prefill_ms, requests - candidate.booked_prefills
            pinned: float = booked
            if candidate.load_age_s <= STALE_LOAD_S:
                if candidate.waiting > requests:
                    queue = queue_ms(snapshot, candidate)
                if candidate.kv_usage:
                    pinned = candidate.kv_usage * capacity + candidate.unreported_kv_tokens
                if candidate.running > batch:
                    batch = candidate.running
            c1, c2, uncached, missing = rates.c1_ms, rates.c2_ms, tokens - hit, best - hit
            own = c1 * uncached + c2 * uncached * (tokens - uncached / 2)
            if len(candidate.held_tokens) > 1:
                own += tier_load_ms(candidate)
            if objective is not None:
                late.append(late_ms(snapshot, queue_ms=queue, own_prefill_ms=own))
            queue, prefill = w_queue * queue, w_prefill * own
            neighbours = w_neighbours * (own * batch) if batch else 0.0
            duplication = w_duplication * (c1 * missing + c2 * missing * (best - missing / 2)) if missing > 0 else 0.0
            crowding = w_crowding * (output * (rates.c3_ms * tokens + rates.c4_ms) * requests)
            full = capacity and pinned + tokens + output > capacity
            memory = w_memory * memory_ms(snapshot, candidate, pinned=pinned) if full else 0.0
            decode = w_decode * decode_ms(snapshot, candidate, pinned=pinned, decoding=batch) if w_decode else 0.0
            price = w_price * money(snapshot, candidate, own_prefill_ms=own, decoding=batch) if w_price else 0.0
            parts = {
                "queue": queue,
                "prefill": prefill,
                "neighbours": neighbours,
                "duplication": duplication,
                "crowding": crowding,
                "memory": memory,
                "decode": decode,
                "price": price,
            }
            value = queue + prefill + neighbours + duplication + crowding + memory + decode + price
            costs.append(Cost(value, parts))
        return costs if objective is None else _with_slo(costs, late)


def _with_slo(costs: Sequence[Cost], late: Sequence[float]) -> list[Cost]:
    highest = max([cost.value for cost in costs], default=0.0)
    added = [slo_ms(ms, cost_ms=cost.value, highest_ms=highest) for cost, ms in zip(costs, late, strict=True)]
    return [Cost(cost.value + slo, {**cost.parts, "slo": slo}) for cost, slo in zip(costs, added, strict=True)]
