"""How much of a trace's input a cache can hold at best, whatever a router does."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from typing import NamedTuple

from router.lab.trace_request import Trace


class HitBounds(NamedTuple):
    """Shares of all input tokens, 0..1.

    infinite: of a cache that never evicts; nothing beats it.
    pooled_lru: of one LRU cache as large as all engines' together, in which no block is held twice. What a router can
        expect of engines that evict by LRU; a better eviction beats it.
    """

    infinite: float
    pooled_lru: float


def hit_bounds(trace: Trace, *, capacity_tokens: int) -> HitBounds:
    """Requests take their turn in the trace's order, each done before the next; answers take no room.

    A hit counts full blocks, and the last prompt token is always recomputed: (input_tokens - 1) // block_size blocks at
    most. As in engines, a partial block is never cached, and of a prompt that ages its end is evicted first.
    """
    size, capacity = trace.block_size, capacity_tokens // trace.block_size
    seen: set[int] = set()
    held: OrderedDict[int, None] = OrderedDict()
    infinite = pooled = total = 0
    for request in trace.requests:
        blocks = request.blocks[: request.input_tokens // size]
        most = min(len(blocks), (request.input_tokens - 1) // size)
        # Where a block is cached, all before it are: so the first that is not can be searched for by halves.
        hits = bisect_left(blocks, True, hi=most, key=lambda block: block not in seen)
        seen.update(blocks[hits:])
        held_hits = bisect_left(blocks, True, hi=most, key=lambda block: block not in held)
        held.update(dict.fromkeys(blocks[held_hits:]))
        for block in reversed(blocks):
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
        infinite += hits
        pooled += held_hits
        total += request.input_tokens
    return HitBounds(infinite * size / total, pooled * size / total) if total else HitBounds(0.0, 0.0)
