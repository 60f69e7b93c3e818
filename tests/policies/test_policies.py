"""One table a policy: which candidate it likes best, and why."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies.kv_aware import WEIGHTS, KvAware
from policies.least_work import LeastWork
from policies.lmetric import LMetric
from policies.round_robin import RoundRobin
from policies.session import Session
from router.core import Candidate, Policy, Rates, Snapshot
from router.routing.decide import decide


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
        assert set(cost.parts) == {
            "queue",
            "prefill",
            "neighbours",
            "duplication",
            "crowding",
            "memory",
            "decode",
            "price",
        }
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


def together(chooser: Policy, requests: int, *, own_tokens: int, prefix_tokens: int = 8192) -> list[int]:
    """How many of so many requests at once, alike but for their ends, each of four engines gets. The first holds it."""
    tokens, rates = prefix_tokens + own_tokens, Rates()
    queued_ms, held, served = [0.0] * 4, [prefix_tokens, 0, 0, 0], [0] * 4
    for _ in range(requests):
        states = [
            {
                "booked_prefill_ms": queued_ms[i],
                "booked_requests": served[i],
                "booked_prefills": served[i],
                "booked_kv_tokens": served[i] * tokens,
                "hit_tokens": held[i],
            }
            for i in range(4)
        ]
        chosen = "abcd".index(best(chooser, shot(*states, tokens=tokens)))
        queued_ms[chosen] += rates.prefill_ms(tokens - held[chosen], tokens)
        held[chosen] = prefix_tokens
        served[chosen] += 1
    return served


@pytest.mark.parametrize(
    ("requests", "own_tokens", "engines"),
    [
        (1, 2000, 1),
        (5, 500, 1),
        (20, 500, 1),  # 53 ms of work at 100 tokens, 267 here: a copy takes 189, and displaces as much
        (20, 1000, 2),
        (20, 1500, 3),
        (20, 2000, 4),
    ],
)
def test_kv_aware_copies_a_hot_prefix_to_as_many_engines_as_its_load_needs(
    requests: int, own_tokens: int, engines: int
) -> None:
    """Of its prefill alone: what its answers cost each other is looked at apart."""
    served = together(policy(KvAware, crowding=0.0), requests, own_tokens=own_tokens)
    assert sum(count > 0 for count in served) == engines
    assert served[0] == max(served)


@pytest.mark.parametrize(("requests", "engines"), [(1, 1), (8, 1), (12, 2), (20, 3), (60, 4)])
def test_kv_aware_copies_a_hot_prefix_where_its_answers_would_hold_each_other_up(requests: int, engines: int) -> None:
    """An answer of 256 tokens on 8,292 of context makes each other one 90 ms longer; a copy costs 378."""
    served = together(policy(KvAware), requests, own_tokens=100)
    assert sum(count > 0 for count in served) == engines


def siblings(requests: int, *, busy: int, tokens: int = 6_000) -> list[int]:
    """How many of so many equal requests at once each of eight engines gets, `busy` of which compute another prompt.

    Of their prefill alone, as above.
    """
    rates, chooser = Rates(), policy(KvAware, crowding=0.0)
    queued_ms, served, tail = [5_000.0] * busy + [0.0] * (8 - busy), [0] * 8, 112
    for _ in range(requests):
        states = [
            {
                "booked_prefill_ms": queued_ms[i],
                "booked_requests": served[i] + (i < busy),
                "booked_prefills": served[i] + (i < busy),
                "hit_tokens": tokens - tail if served[i] else 0,
                "expected_tokens": tokens - tail if served[i] else 0,
            }
            for i in range(8)
        ]
        chosen = "abcdefgh".index(best(chooser, shot(*states, tokens=tokens)))
        queued_ms[chosen] += rates.prefill_ms(tail if served[chosen] else tokens, tokens)
        served[chosen] += 1
    return served


def test_kv_aware_lets_siblings_compute_their_prompt_beside_each_other_while_half_of_the_engines_are_idle() -> None:
    assert sorted(siblings(8, busy=0), reverse=True) == [2, 2, 2, 1, 1, 0, 0, 0]
    assert sorted(siblings(8, busy=3)[3:], reverse=True) == [4, 4, 0, 0, 0]
    assert sorted(siblings(8, busy=5)[5:], reverse=True) == [8, 0, 0]  # they follow the first
    assert sorted(siblings(8, busy=0, tokens=17_000), reverse=True)[:2] == [8, 0]  # too long for it


def test_kv_aware_copies_sooner_the_less_a_copy_weighs() -> None:
    spread = [
        sum(count > 0 for count in together(policy(KvAware, duplication=weight, crowding=0.0), 20, own_tokens=1_000))
        for weight in (0.5, 1.0, 2.0)
    ]
    assert spread == [4, 2, 1]


FAST = {"rates": Rates(c0_ms=5, c1_ms=0.02, c2_ms=0, c3_ms=0, c4_ms=0)}
SLOW = {"rates": Rates(c0_ms=10, c1_ms=0.04, c2_ms=0, c3_ms=0, c4_ms=0)}


@pytest.mark.parametrize(
    ("states", "weight", "expected"),
    [
        (
            [{"price_per_hour": 4.0, "booked_prefill_ms": 0.0}, {"price_per_hour": 2.0, "booked_prefill_ms": 50.0}],
            0,
            "a",
        ),
        # 86 ms of prefill and 1,749 of decode, at 2 an hour less: 0.00102; at 100,000 ms for one that is 102 ms
        ([{"price_per_hour": 4.0}, {"price_per_hour": 2.0, "booked_prefill_ms": 95.0}], 1e5, "b"),
        ([{"price_per_hour": 4.0}, {"price_per_hour": 2.0, "booked_prefill_ms": 110.0}], 1e5, "a"),
        # half as fast: at 0.6 of the price a request costs more there, at 0.4 less
        ([FAST | {"price_per_hour": 2.0}, SLOW | {"price_per_hour": 1.2}], 1e9, "a"),
        ([FAST | {"price_per_hour": 2.0}, SLOW | {"price_per_hour": 0.8}], 1e9, "b"),
    ],
)
def test_kv_aware_waits_for_the_cheaper_engine_as_long_as_money_is_worth(
    states: list[dict[str, Any]], weight: float, expected: str
) -> None:
    assert best(policy(KvAware, price=weight), shot(*states)) == expected


BUSY = {"running": 30}  # each prefill costs thirty others


@pytest.mark.parametrize(
    ("states", "objective_ms", "expected"),
    [
        ([BUSY, HELD | {"booked_prefill_ms": 150.0}], None, "b"),
        ([BUSY, HELD | {"booked_prefill_ms": 150.0}], 120.0, "a"),  # 86 ms against 171: whatever else it costs
        ([BUSY, HELD | {"booked_prefill_ms": 150.0}], 200.0, "b"),  # both in time: no matter
        # nobody in time: least late, 321 ms against 386, although it costs more
        ([{"booked_prefill_ms": 300.0}, BUSY | HELD | {"booked_prefill_ms": 300.0}], None, "a"),
        ([{"booked_prefill_ms": 300.0}, BUSY | HELD | {"booked_prefill_ms": 300.0}], 100.0, "b"),
        # of two in time the cheaper, not the faster
        ([BUSY, {"booked_prefill_ms": 20.0}, HELD | {"booked_prefill_ms": 150.0}], 120.0, "b"),
    ],
)
def test_kv_aware_and_the_objective(states: list[dict[str, Any]], objective_ms: float | None, expected: str) -> None:
    assert best(policy(KvAware, neighbours=0.5), shot(*states, ttft_slo_ms=objective_ms)) == expected


def test_kv_aware_tells_what_the_objective_did() -> None:
    states = (BUSY, HELD | {"booked_prefill_ms": 150.0}, HELD | {"booked_prefill_ms": 180.0})
    plain, costs = (policy(KvAware).costs(shot(*states, ttft_slo_ms=slo)) for slo in (None, 120.0))
    assert [cost.parts["slo"] > 0 for cost in costs] == [False, True, True]
    for before, after in zip(plain, costs, strict=True):
        assert "slo" not in before.parts
        assert after.value == pytest.approx(before.value + after.parts["slo"])
    assert costs[2].value - costs[1].value == pytest.approx(30.0)  # how much later


def test_kv_aware_late_is_no_tie_with_in_time() -> None:
    """Were nothing else of any weight, costs would tie, and dice or the fresher cache might choose who is late."""
    nothing = dict.fromkeys(WEIGHTS, 0.0)
    asked = shot({"recent_tokens": 9_000}, {"booked_prefill_ms": 35.0}, ttft_slo_ms=120.0)  # 86 and 121 ms
    for seed in range(20):
        decision = decide(asked, policy(KvAware, **nothing), name="kv_aware", dice=random.Random(seed))
        assert decision.chosen.instance == "a"


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
