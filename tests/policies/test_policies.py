"""One table a policy: which candidate it likes best, and why."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies.kv_aware import KvAware
from policies.least_work import LeastWork
from policies.lmetric import LMetric
from policies.round_robin import RoundRobin
from policies.session import Session
from router.core import Candidate, Policy, Rates, Snapshot


def policy(kind: Any, **weights: float) -> Policy:
    made: Policy = kind(weights, random.Random(3))
    return made


def shot(*states: dict[str, Any], tokens: int = 4000, **rest: Any) -> Snapshot:
    names = "abcdefgh"
    candidates = tuple(Candidate(names[i], 0, **state) for i, state in enumerate(states))
    return Snapshot(at=0.0, tokens=tokens, candidates=candidates, **rest)


def best(chooser: Policy, snapshot: Snapshot) -> str:
    costs = [cost.value for cost in chooser.costs(snapshot)]
    return snapshot.candidates[costs.index(min(costs))].instance


HELD = {"hit_tokens": 3200, "held_tokens": {"gpu": 3200}}  # saves about 65 ms of 86


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([{}, HELD], "b"),
        ([{}, HELD | {"booked_prefill_ms": 40.0}], "b"),  # worth a wait of 40 ms
        ([{}, HELD | {"booked_prefill_ms": 400.0}], "a"),  # but not of 400: a hot prefix gets a second copy
        ([{"booked_prefill_ms": 1.0}, HELD, HELD | {"booked_prefill_ms": 30.0}], "b"),
        ([{"booked_prefill_ms": 500.0}, {"booked_prefill_ms": 20.0}], "b"),  # nothing cached: least work
        ([{"running": 30}, {"running": 2}], "b"),  # an equal prefill hurts fewer neighbours
        ([{"running": 30, "load_age_s": 99.0}, {"booked_requests": 1}], "a"),  # an old word counts for nothing
        ([{"capacity_tokens": 81_000, "booked_kv_tokens": 80_000}, {"capacity_tokens": 228_000}], "b"),  # would thrash
        ([{"rates": Rates(c1_ms=0.06)}, {}], "b"),  # slower GPU
        # when shedding, whoever holds the longer part
        ([{}, HELD | {"booked_prefill_ms": 900.0}, {"hit_tokens": 1600, "held_tokens": {"gpu": 1600}}], "c"),
    ],
)
def test_kv_aware(states: list[dict[str, Any]], expected: str) -> None:
    assert best(policy(KvAware), shot(*states)) == expected


def test_kv_aware_parts_are_its_terms_and_sum_to_the_cost() -> None:
    state = HELD | {"booked_prefill_ms": 40.0, "running": 3, "capacity_tokens": 5_000, "booked_kv_tokens": 4_000}
    for cost in policy(KvAware).costs(shot({}, state)):
        assert set(cost.parts) == {"queue", "prefill", "neighbours", "duplication", "decode", "memory"}
        assert sum(cost.parts.values()) == pytest.approx(cost.value)
        assert cost.unit == "ms"


def test_kv_aware_a_block_that_everybody_holds_counts_for_nothing() -> None:
    chooser = policy(KvAware)
    loads: list[dict[str, Any]] = [{"booked_prefill_ms": 30.0}, {"booked_prefill_ms": 20.0}]
    everywhere = [state | {"hit_tokens": 3200, "held_tokens": {"gpu": 3200}} for state in loads]
    (a, b), (c, d) = chooser.costs(shot(*loads)), chooser.costs(shot(*everywhere))
    assert a.value - b.value == pytest.approx(c.value - d.value)


def test_kv_aware_siblings_of_a_burst_stay_together_before_any_event() -> None:
    """Sixteen copies of one 30k prompt at once: the prefix is computed on at most two of eight engines."""
    chooser = policy(KvAware)
    tokens, whole = 30_000, Rates().prefill_ms(30_000, 30_000)
    booked_ms, expected = [0.0] * 8, [0] * 8
    for _ in range(16):
        states = [{"booked_prefill_ms": booked_ms[i], "hit_tokens": expected[i]} for i in range(8)]
        chosen = "abcdefgh".index(best(chooser, shot(*states, tokens=tokens)))
        booked_ms[chosen] += Rates().prefill_ms(tokens - expected[chosen], tokens)
        expected[chosen] = 29_984
    assert sum(1 for hit in expected if hit) <= 2
    assert sum(booked_ms) < 2.1 * whole


def test_kv_aware_weights_are_the_operators() -> None:
    states: list[dict[str, Any]] = [{}, HELD | {"booked_prefill_ms": 400.0}]
    assert best(policy(KvAware, queue=0.01), shot(*states)) == "b"
    with pytest.raises(ValueError, match="unknown weight"):
        policy(KvAware, affinity=1.0)


@pytest.mark.parametrize(
    ("states", "values", "expected"),
    [
        ([{}, {}], [4000, 4000], "a"),
        ([{}, HELD], [4000, 800], "b"),
        ([{"booked_prefill_tokens": 1000}, HELD | {"booked_requests": 9}], [5000, 8000], "a"),
        ([{"running": 2, "waiting": 3}, {"running": 1, "booked_requests": 4}], [24_000, 20_000], "b"),
        ([{"hit_tokens": 4000}, {}], [1, 4000], "a"),  # at least one token
    ],
)
def test_lmetric(states: list[dict[str, Any]], values: list[float], expected: str) -> None:
    snapshot = shot(*states)
    chooser = policy(LMetric)
    assert [cost.value for cost in chooser.costs(snapshot)] == values
    assert best(chooser, snapshot) == expected


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([{"booked_prefill_ms": 20.0}, {}], "b"),
        ([{"booked_prefill_ms": 20.0} | HELD, {}], "b"),  # blind to what is held
        ([{"booked_kv_tokens": 90_000}, {"booked_kv_tokens": 10_000}], "b"),
        ([{"rates": Rates(c1_ms=0.06)}, {"booked_prefill_ms": 20.0}], "b"),
    ],
)
def test_least_work(states: list[dict[str, Any]], expected: str) -> None:
    assert best(policy(LeastWork), shot(*states)) == expected


def test_kv_aware_without_reuse_agrees_with_least_work() -> None:
    """On a miss the least outstanding work wins, however small that engine's index is."""
    dice = random.Random(5)
    for _ in range(200):
        states = [{"booked_prefill_ms": dice.uniform(0, 5000)} for _ in range(4)]
        snapshot = shot(*states, tokens=dice.randint(1, 50_000))
        assert best(policy(KvAware), snapshot) == best(policy(LeastWork), snapshot)


def test_round_robin_takes_turns_for_every_model_by_itself() -> None:
    chooser = policy(RoundRobin)
    asked = [best(chooser, shot({}, {}, model=model)) for model in "xyxyxyxy"]
    assert asked[::2] == ["a", "b", "a", "b"]
    assert asked[1::2] == ["a", "b", "a", "b"]


def test_session_stays_and_moves_only_when_its_engine_goes() -> None:
    chooser = policy(Session)
    four, three = shot({}, {}, {}, {}), shot({}, {}, {})
    before = {f"s{i}": best(chooser, Snapshot(0.0, 1, four.candidates, session=f"s{i}")) for i in range(200)}
    after = {f"s{i}": best(chooser, Snapshot(0.0, 1, three.candidates, session=f"s{i}")) for i in range(200)}
    assert all(30 <= list(before.values()).count(instance) <= 70 for instance in "abcd")
    assert all(after[session] == instance for session, instance in before.items() if instance != "d")
    assert {after[session] for session, instance in before.items() if instance == "d"} == {"a", "b", "c"}


def test_session_falls_back_to_the_tenant_and_then_to_dice() -> None:
    chooser = policy(Session)
    four = shot({}, {}, {}, {}).candidates
    assert len({best(chooser, Snapshot(0.0, 1, four, tenant="acme")) for _ in range(20)}) == 1
    assert len({best(chooser, Snapshot(0.0, 1, four)) for _ in range(50)}) == 4
