"""The KV blocks of one engine: reference counts, a prefix cache, and the order in which blocks are given up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice


class BlockPool:
    """Physical blocks 0 .. total-1, as vLLM v1 keeps them.

    A block with references cannot be evicted. Without references it waits in the free list and can still be hit until
    it is taken for something else. Two blocks may carry one hash (nothing is deduplicated); the older one is hit.
    """

    __slots__ = ("_cached", "_copies", "_free", "_hashes", "_references", "changes", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.changes = 0  # moves when a lookup or a take that failed before might now succeed
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))  # the head is taken first
        self._references = [0] * total
        self._hashes: list[int | None] = [None] * total
        self._cached: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}  # further blocks of a hash, oldest first

    @property
    def used(self) -> int:
        """Blocks that requests hold. Cached blocks nobody holds count as free."""
        return self.total - len(self._free)

    @property
    def cached_hashes(self) -> dict[int, int]:
        """How many physical copies of each hash can be hit."""
        return {known: 1 + len(self._copies.get(known, ())) for known in self._cached}

    def lookup(self, hashes: Sequence[int], limit: int) -> list[int]:
        """The cached blocks of the longest known prefix, at most `limit`."""
        cached = self._cached
        hits: list[int] = []
        for wanted in islice(hashes, limit):
            block = cached.get(wanted)
            if block is None:
                break
            hits.append(block)
        return hits

    def can_take(self, hits: Sequence[int], fresh: int) -> bool:
        """Whether `take` would succeed: hits that nobody holds leave the free list too."""
        if len(hits) + fresh <= len(self._free):
            return True
        references = self._references
        return fresh + sum(references[block] == 0 for block in hits) <= len(self._free)

    def take(self, hits: list[int], fresh: int, evicted: list[int]) -> list[int]:
        """References `hits` and `fresh` blocks from the head of the free list. Appends the hashes this evicts."""
        references, free = self._references, self._free
        for block in hits:
            if references[block] == 0:
                del free[block]
            references[block] += 1
        blocks = list(hits)
        for _ in range(fresh):
            block, _none = free.popitem(last=False)
            if self._hashes[block] is not None:
                evicted.append(self._forget(block))
            references[block] = 1
            blocks.append(block)
        return blocks

    def register(self, block: int, block_hash: int) -> None:
        """The block is full (or will be when the step in hand ends), and can be hit from now on."""
        self._hashes[block] = block_hash
        if self._cached.setdefault(block_hash, block) != block:
            self._copies.setdefault(block_hash, []).append(block)
        self.changes += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each block of a sequence, its tail first, so that prefixes live longest."""
        references, free, hashes = self._references, self._free, self._hashes
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                free[block] = None
                if hashes[block] is None:  # worth nothing to anybody: taken before what can be hit
                    free.move_to_end(block, last=False)
        self.changes += 1

    def clear(self) -> bool:
        """Forgets every hash. Refused while any block is in use."""
        if self.used:
            return False
        self._hashes = [None] * self.total
        self._cached.clear()
        self._copies.clear()
        self.changes += 1
        return True

    def free_hashes(self) -> list[int | None]:
        """What the free blocks hold, the one that is taken next first."""
        return [self._hashes[block] for block in self._free]

    def _forget(self, block: int) -> int:
        block_hash = self._hashes[block]
        assert block_hash is not None
        self._hashes[block] = None
        copies = self._copies.get(block_hash)
        if copies is None:
            del self._cached[block_hash]
            return block_hash
        if self._cached[block_hash] == block:
            self._cached[block_hash] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[block_hash]
        return block_hash
