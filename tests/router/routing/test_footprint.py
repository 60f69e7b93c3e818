from __future__ import annotations

from math import exp

import pytest

from router.core import Candidate, EngineFacts, Instance
from router.routing.fleet import Fleet, Rank
from router.routing.footprint import Footprints


def ranks(count: int, capacity: int = 1_000) -> list[Rank]:
    fleet = Fleet()
    for number in range(count):
        name = f"e{number}"
        fleet.add(Instance(name, f"http://{name}", "vllm", "m"), now=0.0)
        fleet.learn(name, EngineFacts(served=("m",), capacity_tokens=capacity), now=0.0)
    return list(fleet)


def candidates(of: list[Rank], hit_tokens: int = 0) -> list[Candidate]:
    return [Candidate(rank.instance.id, rank.rank, hit_tokens) for rank in of]


def test_a_domain_holds_its_share_of_what_was_computed_last() -> None:
    (rank,) = ranks(1)
    footprints = Footprints()
    footprints.note("a", rank, 500)
    assert footprints.tokens([rank]) == {"a": 500}
    footprints.note("b", rank, 1_000)
    assert footprints.tokens([rank]) == {"a": round(500 * exp(-1)), "b": 1_000}
    assert footprints.share("a", [rank]) == pytest.approx(0.5 * exp(-1))
    footprints.forget(rank.id)
    assert footprints.tokens([rank]) == {}


def test_nobody_holds_more_than_there_is() -> None:
    (rank,) = ranks(1)
    footprints = Footprints()
    for _ in range(50):
        footprints.note("a", rank, 400)
    assert footprints.share("a", [rank]) == 1.0


def test_it_goes_on_for_ever() -> None:
    """However much has been computed: 1,000 times the cache in small pieces, then as much again in one."""
    (rank,) = ranks(1)
    footprints = Footprints()
    for _ in range(2_000):
        footprints.note("a", rank, 250)
        footprints.note("b", rank, 250)
    held = footprints.tokens([rank])
    assert (held["a"], held["b"]) == (round(250 * exp(-0.25) / (1 - exp(-0.5))), round(250 / (1 - exp(-0.5))))
    footprints.note("c", rank, 1_000_000)
    assert footprints.tokens([rank]) == {"c": 1_000}


def test_domains_are_bounded() -> None:
    (rank,) = ranks(1, capacity=10**9)
    footprints = Footprints()
    footprints.note("big", rank, 1_000_000)
    for number in range(1_500):
        footprints.note(f"d{number}", rank, 10)
    held = footprints.tokens([rank])
    assert len(held) == 1_024
    assert held["big"] > 900_000


class TestTheBound:
    def test_leaves_cold_prompts_of_who_fills_too_much_a_few_ranks_always_the_same(self) -> None:
        fleet = ranks(8)
        footprints = Footprints(most=0.25)
        for rank in fleet:
            footprints.note("flood", rank, 900)
        allowed = footprints.allowed("flood", 1_000, fleet, candidates(fleet))
        assert allowed is not None
        assert len(allowed) == 2
        assert footprints.allowed("flood", 1_000, fleet, candidates(fleet)) == allowed

    @pytest.mark.parametrize(
        ("domain", "hit_tokens", "most"), [("flood", 500, 0.25), ("calm", 0, 0.25), ("", 0, 0.25), ("flood", 0, None)]
    )
    def test_is_none_for_what_is_cached_for_others_and_without_the_setting(
        self, domain: str, hit_tokens: int, most: float | None
    ) -> None:
        fleet = ranks(8)
        footprints = Footprints(most=most)
        for rank in fleet:
            footprints.note("flood", rank, 900)
        assert footprints.allowed(domain, 1_000, fleet, candidates(fleet, hit_tokens)) is None
