"""Whether an engine's KV memory has room for a request that waits, and how much that has to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.core import Ask, Candidate
from router.routing.fleet import Rank
from router.routing.tenant_memory import LEAD, TenantMemory, expected_output

FULL = 0.97
"""Share of its KV memory in use from which on an engine has no room for anybody."""
GROWTH = 0.1
"""Of the answers that are expected there, so much room is left in its memory by a tenant that holds much of it."""


class Needed(NamedTuple):
    """Tokens of KV cache: soon, and by the end of its answer, 0 if that does not count."""

    now: int
    grown: int


NOTHING = Needed(0, 0)


def needed_by(ask: Ask, memory: TenantMemory) -> Needed:
    """With nothing of it cached. By its end counts for a tenant that holds much more than others."""
    tokens, limit = ask.prompt.tokens, ask.max_output_tokens
    now = tokens + expected_output(limit)
    if memory.lead(ask.tenant) <= LEAD:
        return Needed(now, 0)
    return Needed(now, tokens + ask.choices * memory.answer_tokens(ask.tenant, limit))


def lacking(needed: Needed, candidates: Sequence[Candidate]) -> Needed:
    """What none of them has, whatever of the prompt they hold."""
    held = max([candidate.hit_tokens for candidate in candidates])
    return Needed(needed.now - held, needed.grown and max(1, needed.grown - held))


def still_lacks(lacks: Needed | None, free: Sequence[Rank], now: float) -> bool:
    """Whether none of these has what was lacking shortly before."""
    return lacks is not None and not any([has_memory(rank, lacks, 0, now) for rank in free])


def is_full(rank: Rank, now: float) -> bool:
    if rank.load.kv_usage <= FULL or not rank.booked.requests:
        return False
    pinned = rank.pinned_tokens(now)
    return pinned is not None and pinned > FULL * rank.capacity_tokens


def has_memory(rank: Rank, needed: Needed, held: int, now: float) -> bool:
    """Whether its KV cache, which holds so much of a prompt, has room for the rest of the request: else it would wait
    there, or push another one out.

    A request that nothing else is in the way of is the engine's to refuse.
    """
    booked = rank.booked
    if not booked.requests:
        return True
    growth = 0.0
    if needed.grown:  # its tenant holds much: all answers are to find room when they have grown, and others some now
        growth = GROWTH * booked.answer_tokens / (1 + len(rank.peers))
        if not _can_hold(rank, needed.grown - held):
            return False
    pinned = rank.pinned_tokens(now)
    return pinned is None or pinned + needed.now - held + growth <= rank.capacity_tokens


def lasting_tokens(rank: Rank, candidate: Candidate) -> int:
    """What will be left of its hit once all is computed that was sent there, at best: that takes memory which nobody
    uses, and pushes out what is cached in it. What goes to slower tiers is not lost, nor what is computed there now.
    """
    hit = candidate.hit_tokens
    if not rank.capacity_tokens or len(candidate.held_tokens) > 1:
        return hit
    unused = rank.capacity_tokens - rank.booked.fresh_tokens // (1 + len(rank.peers))
    return min(hit, max(unused, candidate.expected_tokens, 0))


def _can_hold(rank: Rank, tokens: int) -> bool:
    """Whether its KV cache has room for so many more once all short requests there have grown to their ends."""
    capacity = rank.capacity_tokens * (1 + len(rank.peers))
    return not capacity or rank.booked.grown_tokens + tokens <= capacity
