"""Engines watched from beside the path: their KV events into an index of our own, their counters once a second.

Nothing is sent to them but questions about their state, and nobody's requests come by here.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.cli.engines import known_engines
from router.cli.live_table import cache_filled
from router.config import Config
from router.core import Instance, Load
from router.errors import ConfigError, EngineError
from router.roster import close_adapters, load_adapters
from router.routing.bookings import Bookings
from router.routing.copies import Copies, count_copies
from router.routing.feed import Feed
from router.routing.fleet import Fleet, Health, Rank
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches
from router.routing.sent import SentIndex

SAMPLE_S = 0.5


class Seen(msgspec.Struct):
    """One rank by its own word. None: it does not tell.

    blocks, filled: KV blocks known from its events, and the share of its cache they fill.
    pinned: the share of its cache that running requests need. running, waiting: requests, mean.
    stored_per_s, removed_per_s: blocks its events told of, in the second half of the time: the first may still be what
        the engine replayed.
    hit_rate: cached of prompt tokens while it was watched; hit_rate_ever: since it started.
    elsewhere: share of its known blocks that another rank holds too.
    """

    instance: str
    rank: int
    model: str
    health: str
    reason: str
    capacity_tokens: int | None
    block_size: int
    blocks: int | None
    filled: float | None
    pinned: float
    running: float
    waiting: float
    stored_per_s: float | None
    removed_per_s: float | None
    prompt_tokens_per_s: float | None
    hit_rate: float | None
    hit_rate_ever: float | None
    elsewhere: float | None


class Observed(msgspec.Struct):
    """`blocks` over all ranks, `distinct_blocks` each once; `duplicate_share`, `shared_share` as in `Copies`."""

    seconds: float
    ranks: list[Seen]
    blocks: int
    distinct_blocks: int
    duplicate_share: float
    shared_share: float
    left_out: dict[str, str]  # engines that could not be watched, and why


class Tally:
    """What the counters of one rank come to. A counter that falls has begun anew with its engine."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = 0.0
        self.first_at = self.last_at = 0.0
        self._last: Load | None = None
        self._looks = self._running = self._waiting = 0

    def add(self, load: Load) -> None:
        """The rank's last word; the same one twice counts for the mean only."""
        self._looks += 1
        self._running += load.running
        self._waiting += load.waiting
        last, self._last = self._last, load
        if last is None:
            self.first_at = load.at
        else:
            self.prompt_tokens += _grown(last.prompt_tokens_total, load.prompt_tokens_total)
            self.cached_tokens += _grown(last.cached_tokens_total, load.cached_tokens_total)
        self.last_at = load.at

    @property
    def running(self) -> float:
        return self._running / self._looks if self._looks else 0.0

    @property
    def waiting(self) -> float:
        return self._waiting / self._looks if self._looks else 0.0

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """None where the engine has no such counter, or has not counted anything yet."""
        told, seconds = self._last is not None and self._last.prompt_tokens_total > 0, self.last_at - self.first_at
        return self.prompt_tokens / seconds if told and seconds > 0 else None

    @property
    def hit_rate(self) -> float | None:
        return _share(self.cached_tokens, self.prompt_tokens)

    @property
    def hit_rate_ever(self) -> float | None:
        last = self._last
        return None if last is None else _share(last.cached_tokens_total, last.prompt_tokens_total)


class Observer:
    """Follows engines on the running loop, from `start` to `stop`. `instances`: each with its public model."""

    def __init__(self, instances: Sequence[Instance], adapters: Mapping[str, Any], *, index_bytes: int) -> None:
        clock, dice = time.monotonic, random.Random()
        bookings, recent = Bookings[Any](), RecentDispatches(clock=clock)
        self._instances = instances
        self._clock = clock
        self._fleet = Fleet()
        self._index = BlockIndex(secrets.token_bytes(32), clock=clock, max_bytes=index_bytes)
        self._feed = Feed(
            fleet=self._fleet,
            index=self._index,
            sent=SentIndex(self._index, clock=clock),
            recent=recent,
            bookings=bookings,
            adapters=adapters,
            clock=clock,
            dice=dice,
        )
        self._tallies: dict[str, Tally] = {}
        self._half: dict[str, tuple[float, int, int]] = {}  # when, and blocks stored and removed until then
        self._began = 0.0

    async def start(self) -> None:
        self._began = self._clock()
        await self._feed.start()
        for instance in self._instances:
            self._feed.add(instance)

    async def stop(self) -> None:
        await self._feed.stop()

    async def watch(self, seconds: float, stop: asyncio.Event) -> None:
        """For so long, or until told to stop."""
        half, ends = self._began + seconds / 2, self._began + seconds
        while (now := self._clock()) < ends and not stop.is_set():
            for rank in self._fleet:
                if rank.health is Health.READY:
                    self._tallies.setdefault(rank.id, Tally()).add(rank.load)
                if now >= half and rank.id not in self._half and rank.slot is not None:
                    counts = rank.slot.counts
                    self._half[rank.id] = now, counts.stored, counts.removed
            try:
                await asyncio.wait_for(stop.wait(), min(SAMPLE_S, ends - now))
            except TimeoutError:
                pass

    def observed(self, left_out: Mapping[str, str]) -> Observed:
        """What has been seen up to now."""
        now = self._clock()
        fed = [rank.slot for rank in self._fleet if rank.slot is not None and not rank.slot_is_assumed]
        copies = count_copies(fed)
        rows = {(row["instance"], row["rank"]): row for row in self._fleet.rows(now)}
        return Observed(
            round(now - self._began, 1),
            [self._seen(rank, rows[rank.target], copies, now) for rank in self._fleet],
            copies.held,
            copies.distinct,
            copies.duplicate_share,
            copies.shared_share,
            dict(left_out),
        )

    def _seen(self, rank: Rank, row: Mapping[str, Any], copies: Copies, now: float) -> Seen:
        slot = None if rank.slot_is_assumed else rank.slot
        tally = self._tallies.get(rank.id) or Tally()
        stored_per_s = removed_per_s = None
        if slot is not None and rank.id in self._half:
            at, stored, removed = self._half[rank.id]
            seconds = max(now - at, 1e-9)
            stored_per_s = (slot.counts.stored - stored) / seconds
            removed_per_s = (slot.counts.removed - removed) / seconds
        return Seen(
            instance=rank.instance.id,
            rank=rank.rank,
            model=rank.instance.model,
            health=rank.health.value,
            reason=rank.reason,
            capacity_tokens=rank.capacity_tokens or None,
            block_size=rank.block_size,
            blocks=None if slot is None else slot.blocks,
            filled=None if slot is None else cache_filled(row),
            pinned=rank.load.kv_usage,
            running=tally.running,
            waiting=tally.waiting,
            stored_per_s=stored_per_s,
            removed_per_s=removed_per_s,
            prompt_tokens_per_s=tally.prompt_tokens_per_s,
            hit_rate=tally.hit_rate,
            hit_rate_ever=tally.hit_rate_ever,
            elsewhere=None if slot is None else _share(copies.shared_of.get(slot, 0), slot.blocks),
        )


async def observe(
    config: Config, seconds: float, stop: asyncio.Event, *, model: str | None, one_model: bool = False
) -> Observed:
    """All configured engines, or those of one public model; `one_model`: they must not be of several.

    Raises EngineError when there is nothing to watch, ConfigError for several models.
    """
    adapters = load_adapters()
    try:
        instances, left_out = await _instances(config, adapters)
        chosen = [instance for instance in instances if model in (None, instance.model)]
        served = sorted({instance.model for instance in instances})
        if not chosen:
            why = "; ".join(f"{url}: {reason}" for url, reason in left_out.items())
            raise EngineError("there is no engine to watch", detail=why or f"they serve {', '.join(served)}")
        if one_model and model is None and len(served) > 1:
            raise ConfigError([f"the engines serve {', '.join(served)}: name one with --model, a load is of one"])
        observer = Observer(chosen, adapters, index_bytes=int(config.index.max_bytes))
        await observer.start()
        try:
            await observer.watch(seconds, stop)
            return observer.observed(left_out)
        finally:
            await observer.stop()
    finally:
        await close_adapters(adapters)


async def _instances(config: Config, adapters: dict[str, Any]) -> tuple[list[Instance], dict[str, str]]:
    """Those that answer, each under its public model, and why the others were left out, by URL."""
    found: list[Instance] = []
    left_out: dict[str, str] = {}
    for instance, adapter, why_not in await known_engines(config, adapters):
        if adapter is None:
            left_out[instance.url] = why_not
        elif instance.model:
            found.append(instance)
        else:
            try:
                facts = await adapter.inspect(instance)
            except EngineError as error:
                left_out[instance.url] = error.message
                continue
            name = instance.served or next(iter(facts.served), "")
            found.append(msgspec.structs.replace(instance, model=config.aliases.get(name, name)))
    return found, left_out


def _grown(before: float, now: float) -> float:
    return now - before if now >= before else now


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole else None
