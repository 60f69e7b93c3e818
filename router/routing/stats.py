"""What the index says of itself."""

from __future__ import annotations

import msgspec

from router.routing.slots import GPU, Slot

# Bytes of one handle (two ints, a dict entry) and of one key in a map (a dict entry, an int for the mask). An int of 64
# bits takes 48 as malloc rounds, a dict entry 46 on the average of its growth; tests/bench/index.py measures both.
HANDLE_BYTES = 144
KEY_BYTES = 80


class SlotStats(msgspec.Struct, frozen=True):
    instance: str
    rank: int
    model: str
    block_size: int | None
    blocks: int
    blocks_by_tier: dict[str, int]
    bytes: int
    stored: int
    removed: int
    unknown: int
    orphaned: int
    ignored: int
    evicted: int


class IndexStats(msgspec.Struct, frozen=True):
    blocks: int
    bytes: int  # estimated
    max_bytes: int
    orphan_blocks: int
    orphans_expired: int
    evicted: int  # blocks dropped for want of memory, not by an engine
    holes: int  # claims of depth that a probe refuted
    retired_generations: int  # not yet swept out
    slots: list[SlotStats]


def slot_stats(slot: Slot) -> SlotStats:
    """`bytes` is an estimate: keys that other slots hold as well are counted for each."""
    counts = slot.counts
    by_tier = {tier: sum(h.size for h in holding.groups.values()) for tier, holding in slot.tiers.items()}
    return SlotStats(
        instance=slot.instance,
        rank=slot.rank,
        model=slot.model,
        block_size=slot.block_size,
        blocks=slot.blocks,
        blocks_by_tier=by_tier or {GPU: slot.blocks},
        bytes=slot.blocks * (HANDLE_BYTES + KEY_BYTES),
        stored=counts.stored,
        removed=counts.removed,
        unknown=counts.unknown,
        orphaned=counts.orphaned,
        ignored=counts.ignored,
        evicted=counts.evicted,
    )
