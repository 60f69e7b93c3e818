"""The feed against an engine in the test's hand: what it publishes, how it answers, when it dies."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.core import (
    Cleared,
    EngineFacts,
    EventBatch,
    EventSource,
    Instance,
    KVEvent,
    Load,
    Lost,
    Removed,
    Stored,
    Upstream,
)
from router.errors import EngineProtocolError, EngineTimeout, EngineUnreachable
from router.routing import persist, reader
from router.routing.blocks import chain, root_key
from router.routing.bookings import Bookings
from router.routing.feed import Feed
from router.routing.fleet import Fleet, Health, Rank
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches
from router.routing.sent import SentIndex

BLOCK = 4
SECRET = b"deployment secret"
Item = Any


class FakeEngine:
    """An adapter and the engine behind it. `publish` sends an item to whoever reads; an exception breaks the stream."""

    name = "fake"

    def __init__(self, **facts: Any) -> None:
        sources = facts.pop("sources", (EventSource(0, "tcp://a:5557"),))
        self.facts: Any = EngineFacts(
            **({"served": ("m",), "block_size": BLOCK, "boot_id": "one", "sources": sources} | facts)
        )
        self.loads: Any = None
        self.error: Exception | None = None
        self.streams: dict[int, asyncio.Queue[Item]] = {}
        self.asked: list[tuple[int, int | None]] = []
        self.inspected = 0

    def publish(self, item: Item, rank: int = 0) -> None:
        self.streams.setdefault(rank, asyncio.Queue()).put_nowait(item)

    async def inspect(self, instance: Instance) -> EngineFacts:
        self.inspected += 1
        if self.error is not None:
            raise self.error
        return self.facts  # type: ignore[no-any-return]

    async def load(self, instance: Instance) -> Mapping[int, Load]:
        if self.error is not None:
            raise self.error
        if self.loads is not None:
            return self.loads  # type: ignore[no-any-return]
        return {rank: Load(at=0.0, boot_id=self.facts.boot_id) for rank in range(self.facts.ranks)}

    async def events(
        self, instance: Instance, source: EventSource, after: int | None
    ) -> AsyncIterator[EventBatch | Lost]:
        self.asked.append((source.rank, after))
        queue = self.streams.setdefault(source.rank, asyncio.Queue())
        while True:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item == "end":
                return
            yield item

    async def tokenize(self, instance: Instance, path: str, body: Mapping[str, Any]) -> list[int]:
        raise NotImplementedError

    def upstream(self, instance: Instance, rank: int | None) -> Upstream:
        return Upstream()

    async def aclose(self) -> None: ...


class World:
    def __init__(self, engine: FakeEngine, *, saved: Sequence[persist.SavedSlot] = (), inspect_s: float = 60.0) -> None:
        clock = asyncio.get_running_loop().time
        self.engine = engine
        self.fleet = Fleet()
        self.index = BlockIndex(SECRET, clock=clock)
        self.sent = SentIndex(self.index, clock=clock)
        self.recent = RecentDispatches(clock=clock)
        self.bookings = Bookings[str]()
        self.clock = clock
        self.feed = Feed(
            fleet=self.fleet,
            index=self.index,
            sent=self.sent,
            recent=self.recent,
            bookings=self.bookings,
            adapters={"fake": engine},
            clock=clock,
            dice=random.Random(1),
            saved=saved,
            poll_s=0.005,
            inspect_s=inspect_s,
        )
        self.fleet.add(instance(), now=clock())

    async def __aenter__(self) -> World:
        await self.feed.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.feed.stop()
        assert not self.feed._tasks

    def rank(self, number: int = 0) -> Rank:
        found = self.fleet.rank("a", number)
        assert found is not None
        return found

    @property
    def health(self) -> Health:
        return self.rank().health

    def held(self, tokens: Sequence[int], rank: int = 0) -> int:
        """Tokens of this prompt that the index says the rank holds."""
        keys = chain(root_key(SECRET, "m", None, None), array("I", tokens), BLOCK)
        found = {(slot.instance, slot.rank): tiers for slot, tiers in self.index.match(keys, BLOCK)}
        return max(found.get(("a", rank), {}).values(), default=0) * BLOCK

    def confidence(self, rank: int = 0) -> float:
        confidence = self.rank(rank).confidence
        return -1.0 if confidence is None else confidence.value


def instance(id: str = "a", **rest: Any) -> Instance:
    return Instance(id, f"http://{id}:8000", "fake", "m", **rest)


def stored(tokens: Sequence[int], parent: int | None = None, first: int = 1) -> Stored:
    blocks = len(tokens) // BLOCK
    return Stored(list(range(first, first + blocks)), parent, list(tokens), BLOCK)


def batch(seq: int, *events: KVEvent, rank: int | None = None) -> EventBatch:
    return EventBatch(seq, list(events), rank)


async def until(condition: Callable[[], object]) -> None:
    """Fails by the test's own timeout if it never comes true."""
    while not condition():  # noqa: ASYNC110 - what is awaited is the state of the code under test
        await asyncio.sleep(0.001)


async def never(condition: Callable[[], object], seconds: float = 0.05) -> None:
    ends = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < ends:
        assert not condition()
        await asyncio.sleep(0.001)


PROMPT = list(range(8))


async def test_events_fill_the_index_and_empty_it() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        engine.publish(batch(1, Removed([2])))
        await until(lambda: world.held(PROMPT) == 4)
        engine.publish(batch(2, Cleared()))
        await until(lambda: world.held(PROMPT) == 0)
        assert world.rank().last_seq == 2
        assert (world.feed.counts.batches, world.feed.counts.stored) == (3, 2)


async def test_batches_that_repeat_are_dropped() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        engine.publish(batch(0, stored(PROMPT)))  # a second copy, had it been applied
        engine.publish(batch(1, Removed([1, 2])))
        await until(lambda: world.rank().last_seq == 1)
        assert world.held(PROMPT) == 0
        assert world.feed.counts.repeated == 1


async def test_a_restart_forgets_the_rank_at_once() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(7, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        engine.publish(Lost("restart", "sequence fell"))
        await until(lambda: world.held(PROMPT) == 0)
        assert world.confidence() == 1.0
        engine.publish(batch(0, stored(PROMPT)))  # it counts from 0 again
        await until(lambda: world.held(PROMPT) == 8)


async def test_a_gap_takes_all_confidence_but_leaves_what_chains_build_on() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        engine.publish(Lost("gap", "no longer in the replay buffer", 1, 4))
        engine.publish(batch(5, stored([8, 9, 10, 11], parent=2, first=3)))
        await until(lambda: world.rank().last_seq == 5)
        assert world.confidence() == 0.0
        assert world.held([*PROMPT, 8, 9, 10, 11]) == 12
        assert world.feed.counts.lost == {"restart": 0, "gap": 1, "silent": 0}


async def test_a_hole_the_adapter_does_not_mention_is_a_gap_all_the_same() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        engine.publish(batch(3))
        await until(lambda: world.rank().last_seq == 3)
        assert world.confidence() == 0.0


async def test_a_history_that_begins_late_is_no_reason_for_doubt() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(Lost("gap", "no longer in the replay buffer", 0, 499))
        engine.publish(batch(500, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        assert world.confidence() == 1.0


@pytest.mark.parametrize("end", [EngineUnreachable("x"), RuntimeError("a bug of the adapter"), "end"])
async def test_a_broken_stream_is_opened_again_where_it_stood(end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "RETRY_S", (0.001, 0.01))
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        engine.publish(batch(1))
        engine.publish(end)
        await until(lambda: len(engine.asked) == 2)
        assert engine.asked == [(0, None), (0, 1)]
        assert world.feed.counts.lost["silent"] == 1
        engine.publish(batch(1))  # the adapter's word that nothing was missed
        engine.publish(batch(2, Removed([2])))
        await until(lambda: world.held(PROMPT) == 4)
        assert world.confidence() == 1.0


async def test_silence_lowers_confidence_until_something_is_heard() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        engine.publish(Lost("silent", "disconnected"))
        await until(lambda: world.feed.counts.lost["silent"] == 1)
        await until(lambda: world.confidence() < 1.0)
        assert world.held(PROMPT) == 8
        engine.publish(batch(0))
        await until(lambda: world.confidence() == 1.0)


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        "a string",
        batch(1, "not an event"),  # type: ignore[arg-type]
        batch(1, Stored([1, 2], None, [1, 2, 3], BLOCK)),
        batch(1, Stored([5], 99, [1, 2, 3, 4], BLOCK)),  # nobody knows its parent
        batch(1, Removed([77])),
        batch(1, stored(PROMPT), rank=9),
    ],
)
async def test_nonsense_neither_stops_the_feed_nor_earns_credit(nonsense: Any) -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0))
        engine.publish(nonsense)
        await until(lambda: engine.streams[0].empty())
        await never(lambda: world.held(PROMPT), 0.01)
        engine.publish(batch(2, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        assert len(engine.asked) == 1


async def test_an_event_for_a_prompts_last_block_ends_its_prefill() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        await until(lambda: world.rank().slot)
        keys = chain(root_key(SECRET, "m", None, None), array("I", PROMPT), BLOCK)
        booked = world.rank().booked
        world.bookings.book(
            booked, "", now=world.clock(), prefill_ms=5000, prefill_tokens=8, kv_tokens=8, last_key=keys[-1]
        )
        engine.publish(batch(0, stored(PROMPT[:4])))
        await until(lambda: world.held(PROMPT) == 4)
        assert len(booked.prefills) == 1
        engine.publish(batch(1, stored(PROMPT[4:], parent=1, first=2)))
        await until(lambda: not booked.prefills)
        assert booked.requests == 1


async def test_of_an_engine_that_tells_late_is_kept_which_blocks_were_continued() -> None:
    engine = FakeEngine(tells_answers_late=True)
    async with World(engine) as world:
        await until(lambda: world.rank().slot)
        keys = chain(root_key(SECRET, "m", None, None), array("I", PROMPT), BLOCK)
        engine.publish(batch(0, stored(PROMPT[:4])))
        engine.publish(batch(1, stored(PROMPT[4:], parent=1, first=2)))
        await until(lambda: world.held(PROMPT) == 8)
        assert 0 < world.rank().told_after(keys[0]) <= world.clock()
        assert world.rank().told_after(keys[1]) == -math.inf
        world.rank().take(instance(), EngineFacts(served=("m",)))
        assert world.rank().told_after(keys[0]) == -math.inf


# --- ranks


FOUR = tuple(EventSource(rank, f"tcp://a:{5557 + rank}") for rank in range(4))


async def test_each_rank_fills_a_slot_of_its_own() -> None:
    engine = FakeEngine(ranks=4, rank_targeting=True, sources=FOUR)
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT), rank=2), rank=2)
        await until(lambda: world.held(PROMPT, rank=2) == 8)
        assert [world.held(PROMPT, rank=rank) for rank in range(4)] == [0, 0, 8, 0]


async def test_a_batch_without_a_rank_belongs_to_the_source_it_came_from() -> None:
    engine = FakeEngine(ranks=4, rank_targeting=True, sources=FOUR)
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)), rank=3)
        await until(lambda: world.held(PROMPT, rank=3) == 8)


async def test_a_dead_rank_socket_lowers_that_rank_only() -> None:
    engine = FakeEngine(ranks=4, rank_targeting=True, sources=FOUR)
    async with World(engine) as world:
        for rank in range(4):
            engine.publish(batch(0, stored(PROMPT)), rank=rank)
        await until(lambda: all(world.held(PROMPT, rank=rank) == 8 for rank in range(4)))
        engine.publish(EngineUnreachable("refused"), rank=3)
        await until(lambda: world.confidence(3) < 1.0)
        assert [world.confidence(rank) for rank in range(3)] == [1.0, 1.0, 1.0]
        assert [world.rank(rank).health for rank in range(4)] == [Health.READY] * 4


async def test_ranks_behind_one_port_are_told_apart_by_their_batches() -> None:
    engine = FakeEngine(ranks=4, rank_targeting=True, sources=FOUR[:1])
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT), rank=2))
        engine.publish(batch(1, stored(PROMPT)))  # whose it is nobody can tell: it must not be rank 0's
        engine.publish(batch(2, stored(PROMPT), rank=1))
        await until(lambda: world.held(PROMPT, rank=1) == 8)
        assert [world.held(PROMPT, rank=rank) for rank in range(4)] == [0, 8, 8, 0]
        assert world.feed.counts.unranked == 1


# --- health


async def test_an_engine_that_is_down_at_the_start_joins_when_it_appears() -> None:
    engine = FakeEngine()
    engine.error = EngineUnreachable("refused")
    async with World(engine) as world:
        await until(lambda: world.health is Health.DOWN)
        assert world.rank().reason == "EngineUnreachable"
        engine.error = None
        await until(lambda: world.health is Health.READY)
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)


async def test_one_refused_connection_or_a_few_slow_answers_do_not_take_an_engine_down() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        await until(lambda: world.health is Health.READY)
        failures: list[Exception] = [EngineUnreachable("x"), *[EngineTimeout("x")] * 3]
        load = engine.load

        async def flaky(instance: Instance) -> Mapping[int, Load]:
            if failures:
                raise failures.pop()
            return await load(instance)

        engine.load = flaky  # type: ignore[method-assign]
        await until(lambda: not failures)
        await never(lambda: world.health is not Health.READY)


@pytest.mark.parametrize("error", [EngineUnreachable("x"), EngineTimeout("x"), EngineProtocolError("x"), KeyError("x")])
async def test_an_engine_that_goes_on_failing_is_down(error: Exception) -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        await until(lambda: world.health is Health.READY)
        engine.error = error
        await until(lambda: world.health is Health.DOWN)


async def test_an_engine_that_comes_back_as_the_same_process_keeps_its_blocks() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        engine.error = EngineUnreachable("x")
        await until(lambda: world.health is Health.DOWN)
        engine.error = None
        await until(lambda: world.health is Health.READY)
        await never(lambda: world.held(PROMPT) != 8, 0.02)


@pytest.mark.parametrize("boot_id", ["two", None])
async def test_an_engine_that_comes_back_as_another_process_starts_empty(boot_id: str | None) -> None:
    engine = FakeEngine(boot_id="one" if boot_id else None)
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        engine.error = EngineUnreachable("x")
        await until(lambda: world.health is Health.DOWN)
        engine.facts = EngineFacts(("m",), block_size=BLOCK, boot_id=boot_id, sources=engine.facts.sources)
        engine.error = None
        await until(lambda: world.health is Health.READY)
        await until(lambda: world.held(PROMPT) == 0)
        await until(lambda: engine.asked[-1] == (0, None) and len(engine.asked) == 2)
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)


async def test_a_restart_too_quick_to_be_seen_as_down_is_seen_by_the_start_time() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        engine.loads = {0: Load(at=0.0, boot_id="two")}
        await until(lambda: world.held(PROMPT) == 0)
        await until(lambda: len(engine.asked) == 2)
        await never(lambda: len(engine.asked) > 2)  # once


async def test_a_restart_told_by_the_events_is_not_made_up_for_again_by_the_start_time() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(7, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        gate = asyncio.Event()

        async def load(instance: Instance) -> Mapping[int, Load]:
            await gate.wait()
            return {0: Load(at=0.0, boot_id="two")}

        polls = engine.load
        engine.load = load  # type: ignore[method-assign]
        await asyncio.sleep(0.02)  # no poll is under way that would still tell of the old process
        engine.publish(Lost("restart", "sequence fell"))
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.rank().last_seq == 0)
        gate.set()
        await never(lambda: world.held(PROMPT) != 8)
        assert engine.asked == [(0, None)]
        engine.load = polls  # type: ignore[method-assign]


async def test_sleep_takes_an_engine_out_and_it_wakes_up_empty() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        engine.loads = {0: Load(at=0.0, sleeping=True, boot_id="one")}
        await until(lambda: world.health is Health.SLEEPING)
        assert world.held(PROMPT) == 0
        engine.loads = {0: Load(at=0.0, boot_id="one")}
        await until(lambda: world.health is Health.READY)
        assert world.held(PROMPT) == 0
        engine.publish(batch(1, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)


async def test_loads_are_taken_over_and_those_that_make_no_sense_are_not() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.loads = {0: Load(at=5.0, running=3, kv_usage=0.5)}
        await until(lambda: world.rank().load.running == 3)
        engine.loads = {0: Load(at=6.0, running=-3), 1: Load(at=6.0, running=4), "x": "y"}
        await never(lambda: world.rank().load.running != 3, 0.02)
        engine.loads = {0: Load(at=7.0, running=1, kv_usage=float("nan"))}
        await never(lambda: world.rank().load.running != 3, 0.02)
        assert world.health is Health.READY


async def test_an_engine_that_answers_nonsense_to_inspect_is_down_until_it_does_not() -> None:
    engine = FakeEngine()
    facts, engine.facts = engine.facts, None
    async with World(engine) as world:
        await until(lambda: world.health is Health.DOWN)
        engine.facts = facts
        await until(lambda: world.health is Health.READY)


async def test_facts_are_asked_for_again_from_time_to_time() -> None:
    engine = FakeEngine()
    async with World(engine, inspect_s=0.01) as world:
        await until(lambda: engine.inspected >= 3)
        engine.facts = EngineFacts(("m",), ("law",), block_size=BLOCK, boot_id="one", sources=engine.facts.sources)
        await until(lambda: world.fleet.resolve("law") == ("m", "law"))
        assert len(engine.asked) == 1  # the same source is not read twice


# --- engines without events, and instances that come and go


async def test_an_engine_without_events_gets_a_slot_of_what_is_sent() -> None:
    engine = FakeEngine(sources=(), capacity_tokens=1000)
    async with World(engine) as world:
        await until(lambda: world.rank().slot)
        rank = world.rank()
        assert rank.slot_is_assumed
        assert rank.slot is not None
        world.sent.sent(rank.slot, [1, 2, 3])
        assert world.sent.blocks(rank.slot) == 3
        engine.error = EngineUnreachable("x")
        await until(lambda: world.health is Health.DOWN)
        engine.error = None
        engine.facts = EngineFacts(("m",), boot_id="two")
        await until(lambda: world.sent.blocks(rank.slot) == 0)  # type: ignore[arg-type]


async def test_events_that_appear_later_replace_what_was_assumed() -> None:
    engine = FakeEngine(sources=())
    async with World(engine, inspect_s=0.01) as world:
        await until(lambda: world.rank().slot_is_assumed)
        engine.facts = EngineFacts(("m",), block_size=BLOCK, boot_id="one", sources=(EventSource(0, "tcp://a:5557"),))
        await until(lambda: not world.rank().slot_is_assumed)
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)


async def test_instances_join_and_leave_at_run_time() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.held(PROMPT) == 8)
        world.feed.remove("a")
        assert world.fleet.instances() == []
        assert world.held(PROMPT) == 0
        world.feed.add(instance("b"))
        await until(lambda: [rank.health for rank in world.fleet.ranks("b")] == [Health.READY])
        await until(lambda: len(world.feed._tasks) == 3)  # tidy, one watch, one reader


async def test_settings_change_without_losing_what_is_known() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.rank().last_seq == 0)
        world.feed.add(instance(labels={"zone": "x"}))
        await until(lambda: len(engine.asked) == 2)
        assert engine.asked[-1] == (0, 0)
        assert world.held(PROMPT) == 8
        assert world.rank().instance.labels == {"zone": "x"}


async def test_another_url_is_another_engine() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(0, stored(PROMPT)))
        await until(lambda: world.rank().last_seq == 0)
        world.feed.add(Instance("a", "http://elsewhere:8000", "fake", "m"))
        assert world.held(PROMPT) == 0
        await until(lambda: engine.asked[-1] == (0, None) and len(engine.asked) == 2)


# --- floods


async def test_a_flood_of_events_leaves_the_loop_to_others() -> None:
    engine = FakeEngine()
    async with World(engine) as world:
        await until(lambda: world.rank().slot)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.get_running_loop().create_task(other())
        blocks = 32_768  # what takes a quick machine several slices too
        tokens = list(range(blocks * BLOCK))
        engine.publish(batch(0, Stored(list(range(1, blocks + 1)), None, tokens, BLOCK)))
        await until(lambda: world.rank().last_seq == 0)
        task.cancel()
        assert world.held(tokens) == blocks * BLOCK
        assert turns > 5


def test_an_event_in_pieces_says_what_it_said_whole() -> None:
    tokens = list(range(600 * BLOCK))
    whole = Stored(list(range(1, 601)), 77, tokens, BLOCK, "host", "law", "salt", 1, None, True)
    pieces = list(reader._pieces(whole))
    assert [len(piece.hashes) for piece in pieces if isinstance(piece, Stored)] == [256, 256, 88]
    stores = [piece for piece in pieces if isinstance(piece, Stored)]
    assert [hash for piece in stores for hash in piece.hashes] == whole.hashes
    assert [token for piece in stores for token in piece.tokens] == tokens
    assert [piece.parent for piece in stores] == [77, 256, 512]
    assert {(p.tier, p.lora, p.salt, p.group, p.reannounced) for p in stores} == {("host", "law", "salt", 1, True)}
    removed = list(reader._pieces(Removed(list(range(600)), "host", 1)))
    assert [hash for piece in removed if isinstance(piece, Removed) for hash in piece.hashes] == list(range(600))


# --- over a restart of the gateway


async def saved_index(tmp_path: Path) -> list[persist.SavedSlot]:
    engine = FakeEngine()
    async with World(engine) as world:
        engine.publish(batch(41, stored(PROMPT)))
        await until(lambda: world.rank().last_seq == 41)
        await persist.save(tmp_path / "index", world.index, secret=SECRET, position=world.feed.position)
    return persist.load(tmp_path / "index", secret=SECRET)


async def test_a_saved_index_is_believed_once_the_engine_goes_on_from_there(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with World(engine, saved=await saved_index(tmp_path)) as world:
        await until(lambda: engine.asked)
        assert engine.asked == [(0, 41)]
        assert world.held(PROMPT) == 8
        assert world.confidence() == 0.0
        assert world.feed.position(world.rank().slot) is None  # type: ignore[arg-type]
        engine.publish(batch(41))
        await until(lambda: world.confidence() == 1.0)
        engine.publish(batch(42, Removed([2])))
        await until(lambda: world.held(PROMPT) == 4)


@pytest.mark.parametrize("lost", ["gap", "restart"])
async def test_a_saved_index_that_cannot_be_continued_is_dropped(tmp_path: Path, lost: Any) -> None:
    engine = FakeEngine()
    async with World(engine, saved=await saved_index(tmp_path)) as world:
        await until(lambda: world.held(PROMPT) == 8)
        engine.publish(Lost(lost, "too long ago", 42, 600))
        await until(lambda: world.held(PROMPT) == 0)
        assert world.confidence() == 1.0


@pytest.mark.parametrize("boot_id", ["two", None])
async def test_a_saved_index_of_another_process_is_not_taken(tmp_path: Path, boot_id: str | None) -> None:
    engine = FakeEngine(boot_id=boot_id)
    async with World(engine, saved=await saved_index(tmp_path)) as world:
        await until(lambda: engine.asked)
        assert engine.asked == [(0, None)]
        assert world.held(PROMPT) == 0
