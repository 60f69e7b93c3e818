"""Clearing out what was forgotten, in slices far below a millisecond.

A retired bit may stand in any mask of any tier. It is given to another slot only after one whole pass over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from router.routing.slots import SHARDS, Holding, Shards


class Swept(NamedTuple):
    handles: int
    keys: int
    done: bool


class Sweeper:
    """Numbers the slots, and makes numbers fit to be used again."""

    def __init__(self, tiers: Mapping[str, Shards]) -> None:
        self._tiers = tiers
        self._free: list[int] = []
        self._next_bit = 1
        self._graves: list[dict[int, int]] = []  # handles of forgotten generations
        self._sweeping = 0  # bits this pass clears
        self._waiting = 0  # bits retired since it began
        self._todo: list[Shards] = []
        self._next_shard = 0

    @property
    def retired(self) -> int:
        return self._sweeping | self._waiting

    @property
    def pending(self) -> bool:
        return bool(self._graves or self._sweeping or self._waiting)

    def new_bit(self) -> int:
        if self._free:
            return self._free.pop()
        bit = self._next_bit
        self._next_bit <<= 1
        return bit

    def retire(self, bit: int, tiers: Mapping[str, Holding], *, used: bool) -> None:
        """O(1) in blocks. `used`: the bit stands in masks; else it is free at once."""
        for holding in tiers.values():
            for handles in holding.groups.values():
                self._graves.extend(part for part in handles.parts if part)
            holding.groups = {}  # breaks the cycle between the two, so that nothing is left to the garbage collector
        if used:
            self._waiting |= bit
        else:
            self._free.append(bit)

    def step(self) -> Swept:
        """Buries one part of some handles, or clears one shard: some thousand entries."""
        if self._graves:
            return Swept(len(self._graves.pop()), 0, done=False)
        if not self._todo:
            self._begin_pass()
        if not self._todo:
            return Swept(0, 0, done=True)
        keys = _clear(self._todo[-1], self._next_shard, self._sweeping)
        self._next_shard += 1
        if self._next_shard == SHARDS:
            self._end_tier()
        return Swept(0, keys, done=not self.pending)

    def _begin_pass(self) -> None:
        self._sweeping, self._waiting = self._waiting, 0
        if self._sweeping:
            self._todo = list(self._tiers.values())
            self._next_shard = 0

    def _end_tier(self) -> None:
        self._todo.pop()
        self._next_shard = 0
        while self._sweeping and not self._todo:
            bit = self._sweeping & -self._sweeping
            self._sweeping ^= bit
            self._free.append(bit)


def _clear(shards: Shards, number: int, bits: int) -> int:
    """Clears `bits` in one shard. Returns how many keys nobody holds any more."""
    shard = shards[number]
    before = len(shard)
    touched = [key for key, mask in shard.items() if mask & bits]
    if 2 * len(touched) > before:
        # A new dict is faster than so many deletions, and only a new one gives memory back.
        shards[number] = {key: rest for key, mask in shard.items() if (rest := mask & ~bits)}
        return before - len(shards[number])
    for key in touched:
        rest = shard[key] & ~bits
        if rest:
            shard[key] = rest
        else:
            del shard[key]
    return before - len(shard)
