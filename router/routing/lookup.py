"""Who holds how many leading blocks of a prompt, over all ranks and tiers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.routing.depth import SHORT, Runs, audited
from router.routing.slots import GPU, SHARDS, SLOWER, Shards, Slot


class Lookup:
    """Reads the maps of all tiers; knows which slot a bit stands for."""

    def __init__(self, tiers: Mapping[str, Shards]) -> None:
        self._tiers = tiers
        self._slots: dict[int, Slot] = {}  # bit → slot
        self._with_size: dict[int, int] = {}  # block size → mask of slots
        self._in_tier: dict[str, int] = {}  # slower tier → mask of slots that ever had something there
        self._dice = 0
        self.holes = 0  # claims of depth that a probe refuted

    def enlist(self, slot: Slot) -> None:
        self._slots[slot.bit] = slot
        if slot.block_size is not None:
            self._with_size[slot.block_size] = self._with_size.get(slot.block_size, 0) | slot.bit

    def delist(self, slot: Slot) -> None:
        """Before the slot's bit or block size changes."""
        del self._slots[slot.bit]
        for size, mask in tuple(self._with_size.items()):
            if mask == slot.bit:
                del self._with_size[size]
            else:
                self._with_size[size] = mask & ~slot.bit
        self._in_tier = {tier: users for tier, mask in self._in_tier.items() if (users := mask & ~slot.bit)}

    def uses(self, slot: Slot, tier: str) -> None:
        """The slot has something in a tier slower than the GPU."""
        self._in_tier[tier] = self._in_tier.get(tier, 0) | slot.bit

    def match(self, keys: Sequence[int], block_size: int) -> list[tuple[Slot, dict[str, int]]]:
        """As `BlockIndex.match`."""
        members = self._with_size.get(block_size, 0)
        if not members or not keys:
            return []
        if not self._in_tier and len(keys) <= SHORT:
            return self._match_short(keys, members)
        runs = self._leading([self._tiers[GPU]], keys, 0, members)
        slower = self._slower(keys, runs) if self._in_tier else {}
        held: list[tuple[Slot, dict[str, int]]] = []
        for depth, mask in runs:
            while mask:
                bit = mask & -mask
                mask ^= bit
                if depth or bit in slower:
                    tiers = {GPU: depth}
                    if bit in slower:
                        tiers.update(slower[bit])
                    held.append((self._slots[bit], tiers))
        return held

    def _match_short(self, keys: Sequence[int], mask: int) -> list[tuple[Slot, dict[str, int]]]:
        """`match` where every key is read, on the GPU only: what most requests of most fleets come to."""
        shards, slots = self._tiers[GPU], self._slots
        held: list[tuple[Slot, dict[str, int]]] = []
        depth = 0
        for key in keys:
            holding = shards[key % SHARDS].get(key, 0) & mask
            if holding != mask:
                if depth:
                    held += _each(slots, mask ^ holding, depth)
                if not holding:
                    return held
                mask = holding
            depth += 1
        return held + _each(slots, mask, depth)

    def _slower(self, keys: Sequence[int], runs: Runs) -> dict[int, dict[str, int]]:
        """Bit → depth per slower tier, for those that such a tier takes further."""
        found: dict[int, dict[str, int]] = {}
        layers = [self._tiers[GPU]]
        for tier in SLOWER:
            users = self._in_tier.get(tier, 0)
            if not users:
                continue
            layers.append(self._tiers[tier])
            deeper: Runs = []
            for depth, mask in runs:
                if mask & ~users:
                    deeper.append((depth, mask & ~users))
                if mask & users:
                    deeper += self._deepen(layers, keys, depth, mask=mask & users, tier=tier, found=found)
            runs = deeper
        return found

    def _deepen(
        self,
        layers: list[Shards],
        keys: Sequence[int],
        start: int,
        *,
        mask: int,
        tier: str,
        found: dict[int, dict[str, int]],
    ) -> Runs:
        runs = self._leading(layers, keys, start, mask)
        for depth, holders in runs:
            while holders and depth > start:
                bit = holders & -holders
                holders ^= bit
                found.setdefault(bit, {})[tier] = depth
        return runs

    def _leading(self, layers: list[Shards], keys: Sequence[int], start: int, mask: int) -> Runs:
        if len(layers) == 1:
            shards = layers[0]

            def at(position: int) -> int:
                key = keys[position]
                return shards[key % SHARDS].get(key, 0)
        else:

            def at(position: int) -> int:
                key = keys[position]
                holders = 0
                for shards in layers:
                    holders |= shards[key % SHARDS].get(key, 0)
                return holders

        self._dice += 1
        runs, broken = audited(at, start, len(keys), mask, dice=self._dice * 0x9E3779B1)
        if broken:
            self.holes += broken.bit_count()
        return runs


def _each(slots: Mapping[int, Slot], mask: int, depth: int) -> list[tuple[Slot, dict[str, int]]]:
    tiers = {GPU: depth}
    held: list[tuple[Slot, dict[str, int]]] = []
    while mask:
        bit = mask & -mask
        mask ^= bit
        held.append((slots[bit], tiers))
    return held
