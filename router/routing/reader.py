"""One event source of one engine, read for as long as the engine is known: batches in, index and bookings told.

Nothing that comes from an adapter stops a reader, and nothing odd earns credit: what repeats is dropped, what cannot be
assigned to a rank or applied is counted, and a hole in the sequence counts as a gap even if the adapter says nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from router.core import Adapter, Cleared, EventBatch, EventSource, Instance, KVEvent, Lost, Removed, Stored
from router.errors import EngineError
from router.routing.bookings import Bookings
from router.routing.fleet import Rank
from router.routing.index import BlockIndex

log = logging.getLogger("warmroute.feed")

SLICE_S = 0.0007
"""Nothing else on the loop waits longer than 1 ms for a flood of events: this, and one piece."""
PIECE_BLOCKS = 256
"""A long prompt comes as thousands of hashes in an event; it is applied in pieces of this many blocks (some 0.2 ms)."""
RETRY_S = (0.5, 30.0)
"""First and longest pause before a broken stream is opened again."""


class FeedCounts:
    """Since start, over all sources."""

    __slots__ = ("batches", "failures", "ignored", "lost", "removed", "repeated", "skipped", "stored", "unranked")

    def __init__(self) -> None:
        self.batches = 0
        self.stored = 0  # blocks
        self.removed = 0  # blocks
        self.ignored = 0  # blocks no key could be derived for
        self.skipped = 0  # events that the adapter or the index could make nothing of
        self.repeated = 0  # batches that had been applied before
        self.unranked = 0  # batches of a rank nobody knows
        self.failures = 0  # streams that broke
        self.lost = {"restart": 0, "gap": 0, "silent": 0}


class Reader:
    """Reads `source` until cancelled. `ranks()`: those its instance has now. `shared`: the source speaks for them all.

    `after`: the sequence at which the slots stand already. `emptied(rank)` is called when all that a rank held is gone,
    so that what it was sent before is not counted on either.
    """

    def __init__(
        self,
        instance: Instance,
        source: EventSource,
        *,
        adapter: Adapter,
        ranks: Callable[[], Sequence[Rank]],
        shared: bool,
        index: BlockIndex,
        bookings: Bookings[Any],
        counts: FeedCounts,
        clock: Callable[[], float],
        dice: random.Random,
        after: int | None = None,
        emptied: Callable[[Rank], None] = lambda rank: None,
    ) -> None:
        self._instance = instance
        self._source = source
        self._adapter = adapter
        self._ranks = ranks
        self._shared = shared
        self._index = index
        self._bookings = bookings
        self._counts = counts
        self._clock = clock
        self._dice = dice
        self._last = after
        self._emptied = emptied
        self._slice_ends = 0.0

    async def run(self) -> None:
        pause, longest = RETRY_S
        while True:
            began = self._clock()
            reason = await self._read()
            self._counts.failures += 1
            self._silent(reason)
            if self._clock() - began > longest:
                pause = RETRY_S[0]
            await asyncio.sleep(pause * self._dice.uniform(0.5, 1.5))
            pause = min(longest, pause * 2)

    async def _read(self) -> str:
        """Until the stream breaks; returns why."""
        try:
            async for item in self._adapter.events(self._instance, self._source, self._last):
                await self._take(item)
        except EngineError as error:
            return type(error).__name__
        except Exception as error:  # an adapter's mistake is no reason to be blind for good
            log.warning("events of %s rank %s: %s", self._instance.id, self._source.rank, type(error).__name__)
            return type(error).__name__
        return "ended"

    # --- items

    async def _take(self, item: object) -> None:
        if isinstance(item, EventBatch):
            await self._batch(item)
        elif isinstance(item, Lost):
            self._lost(item)
        else:
            self._counts.skipped += 1

    async def _batch(self, batch: EventBatch) -> None:
        last = self._last
        if last is not None and batch.seq <= last:
            if batch.seq == last and not batch.events:  # how an adapter says that nothing was missed
                self._confirmed()
            else:
                self._counts.repeated += 1
            return
        if last is not None and batch.seq > last + 1:
            self._lost(Lost("gap", "batches are missing", last + 1, batch.seq - 1))
        self._last = batch.seq
        self._counts.batches += 1
        self._counts.skipped += batch.skipped
        self._confirmed()
        rank = self._rank_of(batch)
        if rank is None:
            self._counts.unranked += 1
            return
        rank.in_batch = True
        for event in batch.events:
            for piece in _pieces(event):
                self._apply(rank, piece)
                if self._clock() >= self._slice_ends:
                    await asyncio.sleep(0)
                    self._slice_ends = self._clock() + SLICE_S
        rank.last_seq = batch.seq
        rank.in_batch = False

    def _rank_of(self, batch: EventBatch) -> Rank | None:
        """A batch's own word comes first: several ranks may publish on one port. None: its rank cannot be told."""
        ranks = self._ranks()
        number = batch.rank
        if number is None:
            if self._shared:
                return None  # credited to rank 0, it would draw requests to a rank that does not hold them
            number = self._source.rank
        return ranks[number] if 0 <= number < len(ranks) else None

    def _apply(self, rank: Rank, event: KVEvent) -> None:
        slot = rank.slot
        if slot is None:
            self._counts.unranked += 1
            return
        try:
            applied = self._index.apply(slot, event)
        except Exception as error:  # whatever is in it: the next event is served, this rank is trusted less
            self._counts.skipped += 1
            log.warning("an event of %s could not be applied: %s", rank.id, type(error).__name__)
            self._doubt(rank, Lost("gap", "an event could not be applied"))
            return
        counts = self._counts
        counts.stored += applied.stored
        counts.removed += applied.removed
        counts.ignored += applied.ignored
        if isinstance(event, Cleared):
            self._emptied(rank)
        if applied.stored and not rank.dispatches:
            rank.inherited_at = self._clock()
        if rank.continued is not None and applied.stored and isinstance(event, Stored) and event.parent is not None:
            key = slot.key_of(event.parent)
            if key is not None:
                rank.tell_after(key, self._clock())
        if rank.booked.awaited and applied.stored and isinstance(event, Stored):
            key = slot.key_of(event.hashes[-1])
            if key is not None:
                self._bookings.computed(rank.booked, key, self._clock())

    # --- what cannot be continued as if whole

    def _affected(self) -> Sequence[Rank]:
        ranks = self._ranks()
        return ranks if self._shared else ranks[self._source.rank : self._source.rank + 1]

    def _lost(self, lost: Lost) -> None:
        self._counts.lost[lost.kind] += 1
        log.info("events of %s rank %s: %s: %s", self._instance.id, self._source.rank, lost.kind, lost.reason)
        if lost.kind == "restart":
            self._last = None
        elif lost.last_seq is not None:
            self._last = max(lost.last_seq, -1 if self._last is None else self._last)
        for rank in self._affected():
            self._doubt(rank, lost)

    def _silent(self, reason: str) -> None:
        self._lost(Lost("silent", reason))

    def _confirmed(self) -> None:
        """The stream goes on from where it stood."""
        for rank in self._affected():
            if rank.confidence is not None:
                rank.confidence.heard()
                if rank.unconfirmed:
                    rank.unconfirmed = False
                    rank.confidence.rebuilt()

    def _doubt(self, rank: Rank, lost: Lost) -> None:
        slot, confidence = rank.slot, rank.confidence
        if slot is None or confidence is None:
            return
        if lost.kind == "restart":
            rank.last_seq = None
            rank.restarted_at = self._clock()
            self._emptied(rank)
        if lost.kind == "restart" or (lost.kind == "gap" and rank.unconfirmed):
            self._index.forget(slot)
            rank.unconfirmed = False
            confidence.rebuilt()
        if lost.kind != "gap" or slot.blocks:  # a history that begins late says nothing against what follows
            confidence.lost(lost)


def _pieces(event: KVEvent) -> Iterator[KVEvent]:
    """An event as a chain of shorter ones: what it says stays the same."""
    if not isinstance(event, Stored | Removed) or len(event.hashes) <= PIECE_BLOCKS:
        yield event
        return
    hashes, starts = event.hashes, range(0, len(event.hashes), PIECE_BLOCKS)
    if isinstance(event, Removed):
        for start in starts:
            yield Removed(hashes[start : start + PIECE_BLOCKS], event.tier, event.group)
        return
    size = event.block_size
    dense = len(event.tokens) == size * len(hashes)
    if not dense or event.media:
        yield event  # its parts would not mean what the whole does
        return
    for start in starts:
        end = start + PIECE_BLOCKS
        yield Stored(
            hashes[start:end],
            hashes[start - 1] if start else event.parent,
            event.tokens[start * size : end * size],
            size,
            event.tier,
            event.lora,
            event.salt,
            event.group,
            None,
            event.reannounced,
        )
