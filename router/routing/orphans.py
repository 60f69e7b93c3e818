"""Stored blocks whose parent nobody knows: kept aside until it comes, never taken for the start of a prompt.

That happens when the gateway joins late or loses a batch. An orphan that became a root would be a false prefix from the
first token on; one that is thrown away costs every later turn of its conversation.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from router.core import Stored
from router.routing.slots import Slot

# tests/bench/index.py measures both.
BYTES_PER_BLOCK = 250  # its hash, and the hash's place in `by_hash`; token ids come on top
BYTES_PER_EVENT = 900


class Orphan:
    """One event's blocks, waiting for the parent of the first."""

    __slots__ = ("absent", "at", "bytes", "event", "tokens", "ward")

    def __init__(self, ward: _Ward, event: Stored, tokens: array[int], *, at: float) -> None:
        self.ward = ward
        self.event = event
        self.tokens = tokens
        self.at = at
        self.absent: set[int] = set()  # hashes the engine removed while they waited
        self.bytes = BYTES_PER_EVENT + BYTES_PER_BLOCK * len(event.hashes) + 4 * len(tokens)


class _Ward:
    """The orphans of one slot, by the two names they can be asked for."""

    __slots__ = ("by_hash", "by_parent", "closed", "slot")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.by_parent: dict[int, dict[Orphan, None]] = {}
        self.by_hash: dict[int, list[Orphan]] = {}
        self.closed = False


class Orphans:
    """All orphans of all slots, oldest first. Bounded in bytes and in age."""

    def __init__(self, *, max_bytes: int, ttl_s: float) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._wards: dict[Slot, _Ward] = {}
        self._queue: OrderedDict[Orphan, None] = OrderedDict()
        self.bytes = 0
        self.blocks = 0
        self.expired_blocks = 0  # whose parent never came, or for which there was no room

    def waiting(self, slot: Slot) -> bool:
        return slot in self._wards

    def park(self, slot: Slot, event: Stored, tokens: array[int], *, now: float) -> None:
        """Keeps the blocks of `event`, whose parent is unknown. `tokens` are its ids, packed; its own list is let go.

        The oldest go when there is no room.
        """
        assert event.parent is not None
        ward = self._wards.get(slot)
        if ward is None:
            ward = self._wards[slot] = _Ward(slot)
        orphan = Orphan(ward, _without_tokens(event), tokens, at=now)
        ward.by_parent.setdefault(event.parent, {})[orphan] = None
        for engine_hash in event.hashes:
            ward.by_hash.setdefault(engine_hash, []).append(orphan)
        self._queue[orphan] = None
        self.bytes += orphan.bytes
        self.blocks += len(event.hashes)
        while self.bytes > self._max_bytes:
            self.drop_oldest()

    def take_children(self, slot: Slot, parent: int) -> list[Orphan]:
        """The orphans that waited for `parent`, in the order in which they came. They wait no longer."""
        ward = self._wards.get(slot)
        children = list(ward.by_parent.get(parent, ())) if ward else []
        for orphan in children:
            self._leave(orphan)
        return children

    def remove(self, slot: Slot, engine_hash: int, *, tier: str, group: int) -> bool:
        """The engine dropped one copy of a block. False: no such block waits here."""
        ward = self._wards.get(slot)
        for orphan in ward.by_hash.get(engine_hash, ()) if ward else ():
            event = orphan.event
            if event.tier == tier and event.group == group and engine_hash not in orphan.absent:
                orphan.absent.add(engine_hash)
                return True
        return False

    def forget(self, slot: Slot) -> None:
        """The rank's cache is gone. O(1): what is queued stays counted until `expire` or the bound comes by."""
        ward = self._wards.pop(slot, None)
        if ward:
            ward.closed = True

    def expire(self, now: float, *, limit: int = 64) -> bool:
        """Drops what has waited too long, at most `limit` events. True when nothing of that kind is left."""
        for _ in range(limit):
            oldest = next(iter(self._queue), None)
            if oldest is None or (oldest.at > now - self._ttl_s and not oldest.ward.closed):
                return True
            self.drop_oldest()
        return False

    def drop_oldest(self) -> bool:
        """False: there is none."""
        oldest = next(iter(self._queue), None)
        if oldest is None:
            return False
        self.expired_blocks += len(oldest.event.hashes)
        self._leave(oldest)
        return True

    def _leave(self, orphan: Orphan) -> None:
        del self._queue[orphan]
        self.bytes -= orphan.bytes
        self.blocks -= len(orphan.event.hashes)
        ward, parent = orphan.ward, orphan.event.parent
        assert parent is not None
        siblings = ward.by_parent[parent]
        del siblings[orphan]
        if not siblings:
            del ward.by_parent[parent]
        for engine_hash in orphan.event.hashes:
            namesakes = ward.by_hash[engine_hash]
            namesakes.remove(orphan)
            if not namesakes:
                del ward.by_hash[engine_hash]
        if not ward.by_parent and not ward.closed:
            self.forget(ward.slot)


def _without_tokens(event: Stored) -> Stored:
    return Stored(
        event.hashes,
        event.parent,
        [],
        event.block_size,
        tier=event.tier,
        group=event.group,
        media=event.media,
        reannounced=event.reannounced,
    )
