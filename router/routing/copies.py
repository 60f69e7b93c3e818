"""How often the same block lies in several caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from router.routing.slots import GPU, Slot


class Copies(msgspec.Struct, frozen=True):
    """Of the GPU tier, in blocks.

    held: over all slots, so a block counts once for each that holds it. distinct: each block once.
    shared: of the distinct ones, those in more than one slot. shared_of: by slot, those of its blocks that are shared.
    """

    held: int
    distinct: int
    shared: int
    shared_of: dict[Slot, int]

    @property
    def duplicate_share(self) -> float:
        """Of all that is held, what is a further copy of a block that another slot has too, 0..1."""
        return (self.held - self.distinct) / self.held if self.held else 0.0

    @property
    def shared_share(self) -> float:
        """Of the distinct blocks, those that more than one slot has, 0..1."""
        return self.shared / self.distinct if self.distinct else 0.0


def count_copies(slots: Sequence[Slot]) -> Copies:
    """Among `slots` of one index that are fed by events. Looks at every block: some tenths of a second for millions.

    Blocks of different size are never the same block, nor are those under different salts, adapters or models.
    """
    holdings = {slot: slot.tiers[GPU] for slot in slots if GPU in slot.tiers}
    by_bit = {slot.bit: slot for slot in holdings}
    members = sum(by_bit)
    blocks_by_holders: Counter[int] = Counter()
    for shard in next(iter(holdings.values())).shards if holdings else ():  # the index has one map for all slots
        blocks_by_holders.update(shard.values())
    held = distinct = shared = 0
    shared_of = dict.fromkeys(holdings, 0)
    for mask, blocks in blocks_by_holders.items():
        holders = mask & members
        count = holders.bit_count()
        held += count * blocks
        distinct += blocks if count else 0
        if count > 1:
            shared += blocks
            while holders:
                bit = holders & -holders
                holders ^= bit
                shared_of[by_bit[bit]] += blocks
    return Copies(held, distinct, shared, shared_of)
