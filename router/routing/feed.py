"""From the engines to what we believe of them: a watch for every engine, a reader for every event source.

An engine that is down at the start is shown as down and joins when it appears. All tasks belong to the feed: `stop`
ends and awaits every one of them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from router.core import Adapter, EngineFacts, EventSource, Instance, Lost, Rates
from router.routing.bookings import Bookings
from router.routing.confidence import Confidence
from router.routing.fleet import Fleet, Rank
from router.routing.index import BlockIndex
from router.routing.persist import Position, SavedSlot, adopt
from router.routing.reader import FeedCounts, Reader
from router.routing.recent import RecentDispatches
from router.routing.sent import SentIndex
from router.routing.slots import Slot
from router.routing.watch import Watch

log = logging.getLogger("warmroute.feed")

POLLED_AT_FULL_PACE = 50
"""So many engines are polled every second. More of them are polled less often: a poll costs some 0.6 ms of the loop,
and between two polls our own bookings say what matters."""
SLOWEST_PACE = 3.0
"""An engine's word older than 5 s is not counted on by policies, so it must come more often than that."""
TIDY_S = 1.0
TIDY_SLICE_S = 0.0005


class _Followed:
    """What runs for one instance."""

    __slots__ = ("adapter", "instance", "readers", "watch")

    def __init__(self, instance: Instance, adapter: Adapter) -> None:
        self.instance = instance
        self.adapter = adapter
        self.watch: asyncio.Task[None] | None = None
        self.readers: dict[EventSource, asyncio.Task[None]] = {}


class Feed:
    """`adapters` by entry point name; `saved`: slots of an earlier run (`persist.load`), adopted where their engine is
    still the same process. Everything happens on the running loop; `clock` is monotonic.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: BlockIndex,
        sent: SentIndex,
        recent: RecentDispatches,
        bookings: Bookings[Any],
        adapters: Mapping[str, Adapter],
        clock: Callable[[], float],
        dice: random.Random,
        saved: Iterable[SavedSlot] = (),
        poll_s: float = 1.0,
        inspect_s: float = 60.0,
    ) -> None:
        self.counts = FeedCounts()
        self._fleet = fleet
        self._index = index
        self._sent = sent
        self._recent = recent
        self._bookings = bookings
        self._adapters = adapters
        self._clock = clock
        self._dice = dice
        self._saved = {(slot.instance, slot.rank): slot for slot in saved}
        self._poll_s = poll_s
        self._inspect_s = inspect_s
        self._followed: dict[str, _Followed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = False

    async def start(self) -> None:
        """Follows every instance the fleet knows."""
        self._running = True
        self._spawn(self._tidy(), "tidy")
        for instance in self._fleet.instances():
            self._follow(instance)

    async def stop(self) -> None:
        """Ends every task. What is known stays known."""
        self._running = False
        self._followed.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, instance: Instance, *, rates: Rates | None = None) -> None:
        """A new instance, or a known one with other settings; what it holds stays known if it is the same engine."""
        before = self._fleet.ranks(instance.id)
        self._unfollow(instance.id)
        self._fleet.add(instance, now=self._clock(), rates=rates)
        after = self._fleet.ranks(instance.id)
        self._close(rank for rank in before if rank not in after)
        if self._running:
            self._follow(instance)

    def remove(self, instance_id: str) -> None:
        """Bookings on it end by themselves."""
        self._unfollow(instance_id)
        self._close(self._fleet.remove(instance_id))

    def position(self, slot: Slot) -> Position | None:
        """Where a slot stands in its stream, for `persist.save`. None: it cannot be continued from a file."""
        rank = self._fleet.rank(slot.instance, slot.rank)
        if rank is None or rank.slot is not slot or rank.last_seq is None or rank.in_batch or rank.unconfirmed:
            return None
        return None if rank.shares_source else Position(rank.facts.boot_id, rank.last_seq)

    # --- one instance

    def _follow(self, instance: Instance) -> None:
        followed = self._followed[instance.id] = _Followed(instance, self._adapters[instance.engine])
        watch = Watch(
            instance,
            fleet=self._fleet,
            adapter=followed.adapter,
            learned=lambda facts: self._learned(followed, facts),
            forget=self._forget,
            restarted=lambda: self._restarted(followed),
            clock=self._clock,
            dice=self._dice,
            poll_s=self._poll_s,
            pace=lambda: min(SLOWEST_PACE, max(1.0, len(self._followed) / POLLED_AT_FULL_PACE)),
            inspect_s=self._inspect_s,
        )
        followed.watch = self._spawn(watch.run(), f"watch {instance.id}")

    def _unfollow(self, instance_id: str) -> None:
        followed = self._followed.pop(instance_id, None)
        if followed is not None:
            if followed.watch is not None:
                followed.watch.cancel()
            self._end_readers(followed)

    def _end_readers(self, followed: _Followed) -> None:
        for task in followed.readers.values():
            task.cancel()
        followed.readers.clear()

    def _learned(self, followed: _Followed, facts: EngineFacts) -> None:
        """The engine has said what it is: slots for its ranks, readers for its sources."""
        instance = followed.instance
        self._close(self._fleet.learn(instance.id, facts, now=self._clock()))
        ranks = self._fleet.ranks(instance.id)
        for rank in ranks:
            self._open(rank)
        sources = ranks[0].sources
        for source in [source for source in followed.readers if source not in sources]:
            followed.readers.pop(source).cancel()
        for source in sources:
            if source not in followed.readers:
                followed.readers[source] = self._spawn(self._read(followed, source), f"events {instance.id}")

    def _restarted(self, followed: _Followed) -> None:
        """A new process: nothing is held, and its events are read from the beginning."""
        self._end_readers(followed)
        for rank in self._fleet.ranks(followed.instance.id):
            self._begin_anew(rank)
        log.info("%s is a new process", followed.instance.id)
        for source in self._fleet.ranks(followed.instance.id)[0].sources:
            followed.readers[source] = self._spawn(self._read(followed, source), f"events {followed.instance.id}")

    async def _read(self, followed: _Followed, source: EventSource) -> None:
        instance_id = followed.instance.id
        rank = self._fleet.rank(instance_id, source.rank)
        shared = rank is None or rank.shares_source
        for each in self._fleet.ranks(instance_id) if shared else (rank,):
            if each is not None and (each.in_batch or (shared and each.last_seq is not None)):
                self._begin_anew(each)  # where it stands cannot be told
        if rank is not None and not shared:
            await self._adopt(rank)
        reader = Reader(
            followed.instance,
            source,
            adapter=followed.adapter,
            ranks=lambda: self._fleet.ranks(instance_id),
            shared=shared,
            index=self._index,
            bookings=self._bookings,
            counts=self.counts,
            clock=self._clock,
            dice=self._dice,
            after=None if rank is None or shared else rank.last_seq,
            emptied=lambda rank: self._recent.forget(rank.target),
        )
        await reader.run()

    # --- one rank

    def _open(self, rank: Rank) -> None:
        """A slot of the right kind: fed by its events, or by what we send."""
        if rank.slot is not None:
            if rank.slot_is_assumed is not rank.has_events:
                return
            self._close((rank,))
        instance, capacity = rank.instance, rank.capacity_tokens
        rank.slot_is_assumed = not rank.has_events
        if rank.has_events:
            size = rank.facts.block_size or instance.block_size
            rank.slot = self._index.open(
                instance.id,
                rank.rank,
                model=instance.model,
                block_size=size,
                capacity_blocks=capacity // size if size and capacity else None,
            )
        else:
            rank.slot = self._sent.open(
                instance.id,
                rank.rank,
                model=instance.model,
                block_size=rank.block_size,
                capacity_tokens=capacity or None,
            )
        rank.confidence = Confidence(clock=self._clock)

    async def _adopt(self, rank: Rank) -> None:
        """Takes over what an earlier run knew, believed as soon as the stream has gone on from there."""
        saved = self._saved.pop(rank.target, None)
        slot, confidence = rank.slot, rank.confidence
        if saved is None or slot is None or confidence is None or slot.blocks or rank.last_seq is not None:
            return
        boot_id = rank.facts.boot_id
        if saved.model != rank.instance.model or boot_id is None or saved.position.boot_id != boot_id:
            return
        rank.unconfirmed = rank.in_batch = True
        confidence.lost(Lost("gap", "a saved index that its engine has not yet confirmed"))
        await adopt(self._index, slot, saved)
        rank.inherited_at = self._clock()
        rank.in_batch = False
        rank.last_seq = saved.position.last_seq

    def _forget(self, rank: Rank) -> None:
        """Its cache is gone."""
        self._recent.forget(rank.target)
        slot, confidence = rank.slot, rank.confidence
        if slot is None or confidence is None:
            return
        rank.unconfirmed = False
        if rank.slot_is_assumed:
            self._sent.clear(slot)
        else:
            self._index.forget(slot)
        confidence.rebuilt()

    def _begin_anew(self, rank: Rank) -> None:
        self._forget(rank)
        rank.last_seq = None
        rank.in_batch = False

    def _close(self, ranks: Iterable[Rank]) -> None:
        for rank in ranks:
            self._recent.forget(rank.target)
            slot, rank.slot, rank.last_seq = rank.slot, None, None
            if slot is not None:
                (self._sent if rank.slot_is_assumed else self._index).close(slot)

    # --- tasks

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"feed: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s ended: %s", task.get_name(), type(task.exception()).__name__)

    async def _tidy(self) -> None:
        """Clears out, in slices, what was forgotten or has grown too old."""
        while True:
            swept, expired = self._index.sweep(TIDY_SLICE_S), self._sent.expire()
            await asyncio.sleep(TIDY_S if swept and expired else 0.02)
