"""What each engine is credited with for one prompt, and what that makes it cost."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from policies.kv_aware import KvAware
from router.core import Ask, Candidate, EngineFacts, EventSource, Instance, Prompt, Rates, Snapshot, Stored
from router.routing.blocks import chain, root_key
from router.routing.confidence import Confidence
from router.routing.fleet import Fleet, Health
from router.routing.holdings import Holdings
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches

BLOCK = 16
SECRET = b"deployment secret"
PROMPT = list(range(4000))
RATES = Rates(c1_ms=0.02, c2_ms=0.0, host_ms=0.002, disk_ms=0.01, remote_ms=0.005)


class Engines:
    """A fleet and what it announced."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.index = BlockIndex(SECRET, clock=lambda: 100.0)
        self.recent = RecentDispatches(clock=lambda: 100.0)

    def add(self, name: str, *, ranks: int = 1, price_per_hour: float | None = None) -> None:
        instance = Instance(name, f"http://{name}:8000", "vllm", "m", price_per_hour=price_per_hour)
        sources = tuple(EventSource(rank, f"tcp://{name}:{5557 + rank}") for rank in range(ranks))
        self.fleet.add(instance, now=100.0, rates=RATES)
        self.fleet.learn(name, EngineFacts(served=("m",), block_size=BLOCK, sources=sources, ranks=ranks), now=100.0)
        self.fleet.set_health(name, Health.READY, "", now=100.0)
        for rank in self.fleet.ranks(name):
            rank.slot = self.index.open(name, rank.rank, model="m", block_size=BLOCK)
            rank.confidence = Confidence(clock=lambda: 100.0)

    def store(self, name: str, tokens: int, *, rank: int = 0, tier: str = "gpu") -> None:
        """The first so many tokens of the prompt."""
        slot = self.fleet.ranks(name)[rank].slot
        assert slot is not None
        blocks = tokens // BLOCK
        names = [number + 1 for number in range(blocks)]
        self.index.apply(slot, Stored(names, None, PROMPT[: blocks * BLOCK], BLOCK, tier))

    def candidates(self) -> tuple[Candidate, ...]:
        keys = chain(root_key(SECRET, "m", None, None), array("I", PROMPT), BLOCK)
        ask = Ask("r", "m", Prompt(len(PROMPT), len(PROMPT), {BLOCK: keys}))
        ranks, _ = self.fleet.candidates(ask, now=100.0)
        return Holdings(ask, self.index, self.recent).candidates(ranks, 100.0)

    def doubt(self, name: str, times: int) -> None:
        """So many answers in a row without any of the hit that was predicted: each takes a fifth of the belief."""
        confidence = self.fleet.ranks(name)[0].confidence
        assert confidence is not None
        for _ in range(times):
            confidence.answered(predicted_tokens=1600, delivered_tokens=0, slack_tokens=BLOCK)


def prefill_parts(candidates: Sequence[Candidate]) -> list[float]:
    snapshot = Snapshot(100.0, len(PROMPT), tuple(candidates))
    return [cost.parts["prefill"] for cost in KvAware({}, random.Random(1)).costs(snapshot)]


def test_what_is_believed_less_costs_more_to_compute() -> None:
    engines = Engines()
    for name in ("sure", "doubted", "empty"):
        engines.add(name)
    engines.store("sure", 3200)
    engines.store("doubted", 3200)
    engines.doubt("doubted", 1)
    candidates = engines.candidates()
    assert [candidate.confidence for candidate in candidates] == [1.0, pytest.approx(0.8), 1.0]
    assert [candidate.hit_tokens for candidate in candidates] == [3200, 2560, 0]
    assert prefill_parts(candidates) == pytest.approx([0.02 * 800, 0.02 * 1440, 0.02 * 4000])


def test_a_little_that_is_sure_beats_much_that_is_doubted() -> None:
    engines = Engines()
    engines.add("doubted")
    engines.add("sure")
    engines.store("doubted", 3200)
    engines.store("sure", 1600)
    engines.doubt("doubted", 3)  # 0.51 of 3,200
    assert [candidate.hit_tokens for candidate in engines.candidates()] == [1632, 1600]
    engines.doubt("doubted", 1)
    assert [candidate.hit_tokens for candidate in engines.candidates()] == [1296, 1600]


def test_doubt_takes_from_the_end_which_lies_in_the_slowest_tier() -> None:
    engines = Engines()
    engines.add("a")
    engines.store("a", 1600)
    engines.store("a", 3200, tier="host")
    (sure,) = engines.candidates()
    engines.doubt("a", 2)  # 0.64 of 3,200 are 2,048
    (doubted,) = engines.candidates()
    assert (sure.held_tokens, sure.hit_tokens) == ({"gpu": 1600, "host": 3200}, 3200)
    assert (doubted.held_tokens, doubted.hit_tokens) == ({"gpu": 1600, "host": 3200}, 2048)
    assert prefill_parts([sure, doubted]) == pytest.approx([0.02 * 800 + 0.002 * 1600, 0.02 * 1952 + 0.002 * 448])


def test_ranks_that_cannot_be_told_apart_are_credited_with_their_average_tier_by_tier() -> None:
    """One holds 1,600 tokens on its GPU; the other 800 there, 1,600 with its disk, 3,200 with a remote store."""
    engines = Engines()
    engines.add("a", ranks=2)
    engines.store("a", 1600, rank=0)
    engines.store("a", 800, rank=1)
    engines.store("a", 1600, rank=1, tier="disk")
    engines.store("a", 3200, rank=1, tier="remote")
    (both,) = engines.candidates()
    assert both.held_tokens == {"gpu": 1200, "disk": 1600, "remote": 2400}
    assert both.hit_tokens == 2400
    assert prefill_parts([both]) == pytest.approx([0.02 * 1600 + 0.01 * 400 + 0.005 * 800])


def test_tiers_of_ranks_that_cannot_be_told_apart_are_named_fastest_first() -> None:
    engines = Engines()
    engines.add("a", ranks=2)
    engines.store("a", 1600, rank=0, tier="disk")
    engines.store("a", 3200, rank=1, tier="host")
    (both,) = engines.candidates()
    assert list(both.held_tokens.items()) == [("gpu", 0), ("host", 1600), ("disk", 2400)]


def test_where_no_rank_of_an_engine_holds_anything_it_is_credited_with_nothing() -> None:
    engines = Engines()
    engines.add("a", ranks=2)
    engines.add("b")
    engines.store("b", 1600)
    assert [(dict(c.held_tokens), c.hit_tokens) for c in engines.candidates()] == [({}, 0), ({"gpu": 1600}, 1600)]


def test_a_candidate_has_the_price_of_its_rank() -> None:
    engines = Engines()
    engines.add("a", price_per_hour=12.0)
    engines.add("b", ranks=4, price_per_hour=12.0)
    engines.add("c")
    assert [candidate.price_per_hour for candidate in engines.candidates()] == [12.0, 3.0, 0.0]
