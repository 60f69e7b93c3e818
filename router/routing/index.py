"""Who holds which blocks: the engines' KV events on one side, the keys of a prompt on the other.

    engine hash ──(slot, tier, group)──▶ our key ──(tier)──▶ mask of slots

The left map is needed only to resolve parents and removals: engine hashes are opaque names, valid inside one
(instance, rank). The right one answers "who holds this prefix", over all ranks at once. A slot is a bit in its masks,
and one generation of a rank: to forget the rank, it gets another bit, and `sweep` clears the old one out in slices.

Rules that follow from how engines publish (vLLM 0.9 to 0.33, SGLang 0.4.6 to 0.5.23):

* Copies are counted per (slot, tier, group, hash): vLLM announces the same block once a physical copy and removes each.
* A removal of an unknown block is normal. Each hash is handled alone.
* Tiers are apart: what happens on the GPU says nothing of the copy in host memory, except that a clear empties all.
* A block whose parent is unknown waits (`orphans.py`). It is never a root.
* Where ids and hashes do not match in number, no keys can be derived: such an event can only bring known blocks into
  another tier (vLLM's offload placeholders).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import msgspec
from xxhash import xxh3_64_intdigest

from router.core import Cleared, KVEvent, Removed, Stored
from router.routing.blocks import chain_list, root_key
from router.routing.lookup import Lookup
from router.routing.orphans import Orphans
from router.routing.slots import GPU, PARTS, SHARDS, TIERS, Handles, Holding, Shards, Slot
from router.routing.stats import HANDLE_BYTES, KEY_BYTES, IndexStats, slot_stats
from router.routing.sweep import Sweeper

EVICT_BLOCKS = 1024  # at once, when memory runs out: about 0.5 ms


class Applied(msgspec.Struct, frozen=True, gc=False):
    """What one event did, in blocks."""

    stored: int = 0
    removed: int = 0
    unknown: int = 0  # removes of blocks we do not have
    parked: int = 0  # orphans
    ignored: int = 0  # no keys could be derived, or another block size


_STORED_ONE, _REMOVED_ONE = Applied(1), Applied(0, 1)


class BlockIndex:
    """Not thread-safe: lives on one event loop.

    secret: the deployment's, folded into every root. clock: monotonic seconds. max_bytes: a bound on the estimated size
    of all entries; when it is reached, first the oldest orphans go, then the oldest blocks of the largest slot.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        clock: Callable[[], float],
        max_bytes: int = 1 << 30,
        orphan_bytes: int = 16 << 20,
        orphan_ttl_s: float = 120.0,
    ) -> None:
        self._secret = secret
        self._clock = clock
        self._max_bytes = max_bytes
        self._tiers: dict[str, Shards] = {GPU: _empty_shards()}
        self._opened: dict[Slot, None] = {}  # in order
        self._lookup = Lookup(self._tiers)
        self._orphans = Orphans(max_bytes=orphan_bytes, ttl_s=orphan_ttl_s)
        self._sweeper = Sweeper(self._tiers)
        self._handles = 0
        self._keys = 0
        self._evicted = 0

    # -- slots ---------------------------------------------------------------------------------------------------------

    def open(
        self,
        instance: str,
        rank: int,
        *,
        model: str,
        block_size: int | None = None,
        capacity_blocks: int | None = None,
    ) -> Slot:
        """A new, empty slot. `block_size` None: the events will tell.

        `capacity_blocks`, where known, bounds what is believed of the GPU tier (with a quarter more): an engine cannot
        hold more, so the oldest beyond that are removals we never heard of.
        """
        slot = Slot(instance, rank, model=model, bit=self._sweeper.new_bit(), block_size=block_size)
        if capacity_blocks:
            slot.gpu_blocks_limit = capacity_blocks + capacity_blocks // 4
        self._opened[slot] = None
        self._lookup.enlist(slot)
        return slot

    def forget(self, slot: Slot) -> Slot:
        """The engine is a new one: it holds nothing, and may have another block size. O(1). The slot stays valid."""
        self._renew(slot)
        slot.begin_vote()
        return slot

    def set_block_size(self, slot: Slot, block_size: int) -> None:
        """Empties the slot: blocks of another size say nothing of these."""
        if slot.gpu_blocks_limit is not None and slot.block_size is not None:
            slot.gpu_blocks_limit = max(1, slot.gpu_blocks_limit * slot.block_size // block_size)
        self._renew(slot, block_size=block_size)
        slot.begin_vote()

    def close(self, slot: Slot) -> None:
        """The rank is gone. The slot must not be used again."""
        self._retire(slot)
        del self._opened[slot]

    def slots(self) -> Sequence[Slot]:
        """In the order in which they were opened."""
        return tuple(self._opened)

    def _renew(self, slot: Slot, *, block_size: int | None = None) -> None:
        """The same rank, empty: another bit, while the old one waits to be swept out."""
        self._retire(slot)
        slot.bit = self._sweeper.new_bit()
        slot.block_size = block_size or slot.block_size
        self._lookup.enlist(slot)

    def _retire(self, slot: Slot) -> None:
        self._lookup.delist(slot)
        self._orphans.forget(slot)
        self._sweeper.retire(slot.bit, slot.tiers, used=slot.blocks > 0)
        slot.bit = 0
        slot.tiers = {}
        slot.blocks = 0
        slot.generation += 1
        slot.version += 1

    # -- events --------------------------------------------------------------------------------------------------------

    def apply(self, slot: Slot, event: KVEvent) -> Applied:
        """One event of the rank, in order. Events that were already applied must not come again (the feed's job)."""
        assert slot.bit, "this slot is closed"
        slot.version += 1
        if type(event) is Stored:
            if len(event.hashes) == 1 and self._store_one(slot, event):
                return _STORED_ONE
            return self._store(slot, event)
        if type(event) is Removed:
            if len(event.hashes) == 1 and self._remove_one(slot, event):
                return _REMOVED_ONE
            return self._remove(slot, event)
        assert type(event) is Cleared
        removed = slot.blocks
        self._renew(slot)
        slot.counts.removed += removed
        return Applied(removed=removed)

    def _store_one(self, slot: Slot, event: Stored) -> bool:
        """`_store` of one new block whose parent is known: what engines at work publish thousands of times a second.

        False: it is not so plain, and nothing has been done.
        """
        tokens, size, parent = event.tokens, event.block_size, event.parent
        holding = slot.tiers.get(event.tier)
        handles = holding.groups.get(event.group) if holding is not None else None
        if handles is None or size != slot.block_size or len(tokens) != size or event.media:
            return False
        parts = handles.parts
        before = self._root(slot, event) if parent is None else parts[parent % PARTS].get(parent)
        name = event.hashes[0]
        part = parts[name % PARTS]
        if before is None or name in part or (self._orphans.bytes and self._orphans.waiting(slot)):
            return False
        try:
            key = xxh3_64_intdigest(array("I", tokens), before)
        except (OverflowError, TypeError):
            return False
        part[name] = key
        self._handles += 1
        handles.size += 1
        slot.blocks += 1
        slot.counts.stored += 1
        self._hold_once_more(slot.bit, handles.holding, key)
        self._keep_in_bounds(slot, handles)
        return True

    def _hold_once_more(self, bit: int, holding: Holding, key: int) -> None:
        """One handle more names `key`; the opposite of `_unhold`."""
        shard = holding.shards[key % SHARDS]
        mask = shard.get(key)
        if mask is None:
            shard[key] = bit
            self._keys += 1
        elif mask & bit:
            holding.shared[key] = holding.shared.get(key, 1) + 1
        else:
            shard[key] = mask | bit

    def _store(self, slot: Slot, event: Stored) -> Applied:
        hashes, size = event.hashes, event.block_size
        if event.tier not in TIERS:
            return _ignored(slot, len(hashes))
        if not event.tokens:
            return self._bring_into_tier(slot, event)
        if len(event.tokens) != size * len(hashes) or (size != slot.block_size and not self._adopt_size(slot, event)):
            return _ignored(slot, len(hashes))
        try:
            tokens = array("I", event.tokens)
        except (OverflowError, TypeError):  # ids that are no u32: from no tokenizer we could match
            return _ignored(slot, len(hashes))
        parent = self._parent_key(slot, event)
        if parent is None:
            self._orphans.park(slot, event, tokens, now=self._clock())
            slot.counts.orphaned += len(hashes)
            if self._used_bytes() > self._max_bytes:
                self._make_room()
            return Applied(parked=len(hashes))
        keys = chain_list(parent, tokens, size, event.media)
        self._name(slot, event, hashes, keys)
        stored = len(hashes)
        if self._orphans.bytes and self._orphans.waiting(slot):
            stored += self._link(slot, hashes, keys)
        slot.counts.stored += stored
        return Applied(stored)

    def _parent_key(self, slot: Slot, event: Stored) -> int | None:
        if event.parent is None:
            return self._root(slot, event)
        holding = slot.tiers.get(event.tier)
        handles = holding.groups.get(event.group) if holding else None
        key = handles.key(event.parent) if handles is not None else None
        return slot.key_of(event.parent) if key is None else key

    def _root(self, slot: Slot, event: Stored) -> int:
        name = (event.lora, event.salt)
        root = slot.roots.get(name)
        if root is None:
            if len(slot.roots) >= 1024:  # salts are as many as tenants; deriving one again takes a microsecond
                slot.roots.clear()
            root = slot.roots[name] = root_key(self._secret, slot.model, event.lora, event.salt)
        return root

    def _adopt_size(self, slot: Slot, event: Stored) -> bool:
        """A rank has one block size, that of most of its blocks; the first is believed until then. False: not this one.

        Sizes differ within a rank where a hybrid model has several groups, or the engine announces partial blocks.
        """
        size, votes = event.block_size, slot.size_votes
        if len(votes) < 64 or size in votes:
            votes[size] = votes.get(size, 0) + len(event.hashes)
        if slot.block_size is not None and votes.get(size, 0) <= slot.counts.stored - slot.stored_at_adoption:
            return False
        self.set_block_size(slot, size)
        return True

    def _bring_into_tier(self, slot: Slot, event: Stored) -> Applied:
        """No token ids: all it can say is that known blocks now lie in this tier as well."""
        known = [(engine_hash, key) for engine_hash in event.hashes if (key := slot.key_of(engine_hash)) is not None]
        if known:
            self._name(slot, event, [engine_hash for engine_hash, _ in known], [key for _, key in known])
        ignored = len(event.hashes) - len(known)
        slot.counts.stored += len(known)
        slot.counts.ignored += ignored
        return Applied(len(known), ignored=ignored)

    def _name(self, slot: Slot, event: Stored, hashes: Sequence[int], keys: Sequence[int]) -> None:
        handles = self._handles_of(slot, event.tier, event.group)
        self._insert(slot, handles, hashes, keys, new_copy=not event.reannounced)
        self._keep_in_bounds(slot, handles)

    def _keep_in_bounds(self, slot: Slot, handles: Handles) -> None:
        if handles.holding.tier == GPU and slot.gpu_blocks_limit is not None:
            self._keep_to_capacity(slot, handles)
        if self._used_bytes() > self._max_bytes:
            self._make_room()

    def _handles_of(self, slot: Slot, tier: str, group: int) -> Handles:
        holding = slot.tiers.get(tier)
        if holding is None:
            shards = self._tiers.get(tier)
            if shards is None:
                shards = self._tiers[tier] = _empty_shards()
            holding = slot.tiers[tier] = Holding(tier, shards)
            if tier != GPU:
                self._lookup.uses(slot, tier)
        return holding.handles(group)

    def _insert(
        self, slot: Slot, handles: Handles, hashes: Iterable[int], keys: Iterable[int], *, new_copy: bool = True
    ) -> None:
        parts, copies, shards, shared = handles.parts, handles.copies, handles.holding.shards, handles.holding.shared
        bit = slot.bit
        new_handles = new_keys = 0
        for engine_hash, key in zip(hashes, keys, strict=True):
            part = parts[engine_hash % PARTS]
            if engine_hash in part:
                if new_copy:
                    copies[engine_hash] = copies.get(engine_hash, 1) + 1
                continue
            part[engine_hash] = key
            new_handles += 1
            shard = shards[key % SHARDS]
            mask = shard.get(key)
            if mask is None:
                shard[key] = bit  # the slot's own int: most blocks have one holder, and an int takes 32 bytes
                new_keys += 1
            elif mask & bit:
                shared[key] = shared.get(key, 1) + 1
            else:
                shard[key] = mask | bit
        handles.size += new_handles
        slot.blocks += new_handles
        self._handles += new_handles
        self._keys += new_keys

    def _link(self, slot: Slot, hashes: Sequence[int], keys: Sequence[int]) -> int:
        """Stores the orphans that waited for these blocks, theirs, and so on. Returns the number of blocks."""
        linked = 0
        parents = list(zip(hashes, keys, strict=True))
        while parents:
            engine_hash, key = parents.pop()
            for orphan in self._orphans.take_children(slot, engine_hash):
                event = orphan.event
                if event.block_size != slot.block_size:
                    continue
                children = chain_list(key, orphan.tokens, event.block_size, event.media)
                present = [pair for pair in zip(event.hashes, children, strict=True) if pair[0] not in orphan.absent]
                self._name(slot, event, [child for child, _ in present], [child_key for _, child_key in present])
                parents.extend(zip(event.hashes, children, strict=True))
                linked += len(present)
        return linked

    def _remove_one(self, slot: Slot, event: Removed) -> bool:
        """`_remove` of one block that we have. False: we don't, and nothing has been done."""
        holding = slot.tiers.get(event.tier)
        handles = holding.groups.get(event.group) if holding is not None else None
        if handles is None or not self._drop_copy(slot, handles, event.hashes[0]):
            return False
        slot.counts.removed += 1
        return True

    def _remove(self, slot: Slot, event: Removed) -> Applied:
        holding = slot.tiers.get(event.tier)
        handles = holding.groups.get(event.group) if holding else None
        removed = 0
        for engine_hash in event.hashes:
            if (handles is not None and self._drop_copy(slot, handles, engine_hash)) or self._orphans.remove(
                slot, engine_hash, tier=event.tier, group=event.group
            ):
                removed += 1
        unknown = len(event.hashes) - removed
        slot.counts.removed += removed
        slot.counts.unknown += unknown
        return Applied(0, removed, unknown)

    def _drop_copy(self, slot: Slot, handles: Handles, engine_hash: int) -> bool:
        part = handles.parts[engine_hash % PARTS]
        key = part.get(engine_hash)
        if key is None:
            return False
        copies = handles.copies
        if copies and engine_hash in copies:
            if copies[engine_hash] > 2:
                copies[engine_hash] -= 1
            else:
                del copies[engine_hash]
            return True
        del part[engine_hash]
        handles.size -= 1
        slot.blocks -= 1
        self._handles -= 1
        self._unhold(slot.bit, handles.holding, key)
        return True

    def _unhold(self, bit: int, holding: Holding, key: int) -> None:
        """One handle less names `key`; the slot holds it as long as any does."""
        shared = holding.shared
        if shared and key in shared:
            if shared[key] > 2:
                shared[key] -= 1
            else:
                del shared[key]
            return
        self._clear_bit(bit, holding.shards[key % SHARDS], key)

    def _clear_bit(self, bit: int, shard: dict[int, int], key: int) -> None:
        mask = shard[key]
        if mask == bit:
            del shard[key]
            self._keys -= 1
        else:
            shard[key] = mask & ~bit

    # -- entries the router makes itself -------------------------------------------------------------------------------

    def hold(self, slot: Slot, keys: Iterable[int]) -> None:
        """Believe that the rank holds these blocks on its GPU. For slots without events; twice is once."""
        assert not slot.tiers, "this slot is fed by events"
        shards, bit = self._tiers[GPU], slot.bit
        new_bits = new_keys = 0
        for key in keys:
            shard = shards[key % SHARDS]
            mask = shard.get(key)
            if mask is None:
                shard[key] = bit
                new_keys += 1
                new_bits += 1
            elif not mask & bit:
                shard[key] = mask | bit
                new_bits += 1
        slot.blocks += new_bits
        self._keys += new_keys
        if self._used_bytes() > self._max_bytes:
            self._make_room()

    def drop(self, slot: Slot, keys: Iterable[int]) -> None:
        """Believe it no more. Keys that are not held are passed over."""
        assert not slot.tiers, "this slot is fed by events"
        shards, bit = self._tiers[GPU], slot.bit
        for key in keys:
            shard = shards[key % SHARDS]
            if shard.get(key, 0) & bit:
                self._clear_bit(bit, shard, key)
                slot.blocks -= 1

    def restore(self, slot: Slot, tier: str, group: int, *, hashes: Sequence[int], keys: Sequence[int]) -> None:
        """Blocks from a saved index, one copy each (`persist.py`)."""
        slot.version += 1
        self._insert(slot, self._handles_of(slot, tier, group), hashes, keys)
        if self._used_bytes() > self._max_bytes:
            self._make_room()

    def restore_copies(self, slot: Slot, tier: str, group: int, *, copies: Mapping[int, int]) -> None:
        """How many copies there are of restored blocks that have more than one."""
        handles = self._handles_of(slot, tier, group)
        handles.copies.update({name: n for name, n in copies.items() if n > 1 and handles.key(name) is not None})

    # -- look-up -------------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[int], block_size: int) -> list[tuple[Slot, dict[str, int]]]:
        """Who holds how many leading blocks of a prompt, among slots of that block size; those with none are left out.

        Depths are cumulative, in blocks: {"gpu": 3, "host": 7} = 3 from the GPU, 4 more that lie on the GPU or in host
        memory. A slower tier is named only where it adds something.
        """
        return self._lookup.match(keys, block_size)

    # -- memory --------------------------------------------------------------------------------------------------------

    def sweep(self, budget_s: float) -> bool:
        """Clears retired generations and old orphans for about `budget_s`. True when nothing is left to do."""
        deadline = self._clock() + budget_s
        while not self._sweep_step():
            if self._clock() >= deadline:
                return False
        return True

    def _sweep_step(self) -> bool:
        swept = self._sweeper.step()
        self._handles -= swept.handles
        self._keys -= swept.keys
        return self._orphans.expire(self._clock()) and swept.done

    def _used_bytes(self) -> int:
        return self._handles * HANDLE_BYTES + self._keys * KEY_BYTES + self._orphans.bytes

    def _make_room(self) -> None:
        for _ in range(4):  # what is forgotten already costs nobody anything; but not all of it at once
            if self._sweeper.pending:
                self._sweep_step()
        while self._used_bytes() > self._max_bytes:
            if self._orphans.drop_oldest():
                continue
            largest = max(self._opened, key=lambda slot: slot.blocks if slot.tiers else 0)
            if not self._evict(largest, EVICT_BLOCKS):
                return

    def _keep_to_capacity(self, slot: Slot, handles: Handles) -> None:
        limit = slot.gpu_blocks_limit
        assert limit is not None
        if handles.size > limit:
            self._evict_from(slot, handles, min(EVICT_BLOCKS, handles.size - limit + limit // 16))

    def _evict(self, slot: Slot, blocks: int) -> int:
        handles = max(slot.all_handles(), key=lambda handles: handles.size, default=None)
        return self._evict_from(slot, handles, blocks) if handles is not None else 0

    def _evict_from(self, slot: Slot, handles: Handles, blocks: int) -> int:
        """Drops the oldest handles: of all there are, they are the likeliest to be removals we never heard of.

        What other ranks hold as well is spared while there is anything else: a prefix in wide use is old, and alive.
        """
        oldest = [name for part in handles.parts for name in islice(part, -(-blocks // PARTS))]
        doomed = [name for name in oldest if not self._is_shared(slot, handles, name)]
        for name in doomed or oldest:
            handles.copies.pop(name, None)
            self._drop_copy(slot, handles, name)
        evicted = len(doomed or oldest)
        slot.counts.evicted += evicted
        self._evicted += evicted
        return evicted

    def _is_shared(self, slot: Slot, handles: Handles, engine_hash: int) -> bool:
        """Whether other slots hold the block too. If so, it goes to the end of the queue."""
        part = handles.parts[engine_hash % PARTS]
        key = part[engine_hash]
        shared = handles.holding.shards[key % SHARDS][key] != slot.bit
        if shared:
            part[engine_hash] = part.pop(engine_hash)
        return shared

    def stats(self) -> IndexStats:
        return IndexStats(
            blocks=sum(slot.blocks for slot in self._opened),
            bytes=self._used_bytes(),
            max_bytes=self._max_bytes,
            orphan_blocks=self._orphans.blocks,
            orphans_expired=self._orphans.expired_blocks,
            evicted=self._evicted,
            holes=self._lookup.holes,
            retired_generations=self._sweeper.retired.bit_count(),
            slots=[slot_stats(slot) for slot in self._opened],
        )


def _empty_shards() -> Shards:
    return [{} for _ in range(SHARDS)]


def _ignored(slot: Slot, blocks: int) -> Applied:
    slot.counts.ignored += blocks
    return Applied(ignored=blocks)
