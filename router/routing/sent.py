"""What engines without events probably hold: what we sent them, as far as it fits, corrected by what they report.

An engine keeps what was used last and drops the tail of a prompt before its head; so does this. Its capacity is taken
at 80 %, since other things (running requests, other routers) need room as well; where it is unknown, what was not used
for two minutes is no longer believed (the default of Dynamo's approximate mode).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from router.routing.index import BlockIndex
from router.routing.slots import Slot

EXPIRE_BLOCKS = 1024  # at once, about 0.5 ms


class _Used:
    """The blocks of one rank, least recently used first; of those used at the same time, the tail first."""

    __slots__ = ("at", "limit", "ttl_s")

    def __init__(self, limit: int, *, ttl_s: float | None) -> None:
        self.at: OrderedDict[int, float] = OrderedDict()  # key → when it was last used
        self.limit = limit
        self.ttl_s = ttl_s


class SentIndex:
    """Opens its own slots in `index`, so that a look-up finds them beside those fed by events.

    clock: monotonic seconds. max_blocks: bound for a rank, whatever its capacity.
    """

    def __init__(
        self,
        index: BlockIndex,
        *,
        clock: Callable[[], float],
        share: float = 0.8,
        ttl_s: float = 120.0,
        max_blocks: int = 1 << 18,
    ) -> None:
        self._index = index
        self._clock = clock
        self._share = share
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._used: dict[Slot, _Used] = {}

    def open(
        self, instance: str, rank: int, *, model: str, block_size: int, capacity_tokens: int | None = None
    ) -> Slot:
        """`block_size`: of the keys that will be given here, 16 to 64 tokens, whatever the engine's own pages are.

        With 64, a prompt of 100,000 tokens is written down in a third of a millisecond.
        """
        slot = self._index.open(instance, rank, model=model, block_size=block_size)
        if capacity_tokens:
            fits = int(capacity_tokens * self._share) // block_size
            self._used[slot] = _Used(min(max(fits, 1), self._max_blocks), ttl_s=None)
        else:
            self._used[slot] = _Used(self._max_blocks, ttl_s=self._ttl_s)
        return slot

    def close(self, slot: Slot) -> None:
        del self._used[slot]
        self._index.close(slot)

    def sent(self, slot: Slot, keys: Sequence[int]) -> None:
        """The rank was given this prompt, or has answered with what now follows it: it will hold these blocks."""
        used = self._used[slot]
        at, now = used.at, self._clock()
        touch = at.move_to_end
        new = []
        for key in reversed(keys[: used.limit]):
            if key in at:
                touch(key)
            else:
                new.append(key)
            at[key] = now
        self._index.hold(slot, new)
        excess = len(at) - used.limit
        if excess > 0:
            self._index.drop(slot, [at.popitem(last=False)[0] for _ in range(excess)])

    def correct(self, slot: Slot, keys: Sequence[int], *, predicted_tokens: int, reported_tokens: int) -> None:
        """What the engine says it reused of a prompt, against what we had said.

        Less: it has dropped things we did not hear of, and what follows the reported part is believed no more. More: it
        holds at least that. Give `sent` again afterwards if the engine is known to keep what it has just computed.
        """
        assert slot.block_size is not None
        reported = reported_tokens // slot.block_size
        if reported < predicted_tokens // slot.block_size:
            at = self._used[slot].at
            for key in keys[reported:]:
                at.pop(key, None)
            self._index.drop(slot, keys[reported:])
        elif reported_tokens > predicted_tokens:
            self.sent(slot, keys[:reported])

    def clear(self, slot: Slot) -> None:
        """Its health flapped, it restarted, slept or loaded other weights: nothing is believed any more."""
        self._used[slot].at = OrderedDict()
        self._index.forget(slot)

    def expire(self) -> bool:
        """Drops what is too old, a slice a rank. True when nothing of that is left. Call it every second or so."""
        now = self._clock()
        return all([self._expire(slot, used, now) for slot, used in self._used.items()])

    def _expire(self, slot: Slot, used: _Used, now: float) -> bool:
        if used.ttl_s is None:
            return True
        gone: list[int] = []
        while used.at and len(gone) < EXPIRE_BLOCKS:
            key = next(iter(used.at))
            if used.at[key] > now - used.ttl_s:
                break
            del used.at[key]
            gone.append(key)
        self._index.drop(slot, gone)
        return len(gone) < EXPIRE_BLOCKS

    def blocks(self, slot: Slot) -> int:
        return len(self._used[slot].at)
