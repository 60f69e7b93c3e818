"""From a snapshot to a decision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core import Candidate, Cost, HitRule, Snapshot
from router.routing.decide import LEAST_BOOKED, TIE_MS, decide


class Fixed:
    """A policy that answers what it was told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]


def ms(*values: float) -> list[Cost]:
    return [Cost(value, {"all": value}) for value in values]


def snapshot(*candidates: Candidate) -> Snapshot:
    return Snapshot(at=0.0, tokens=1000, candidates=candidates)


def three(**second: Any) -> Snapshot:
    return snapshot(
        Candidate("a", 0, booked_requests=3), Candidate("b", 0, **second), Candidate("c", 0, booked_requests=2)
    )


def run(shot: Snapshot, answer: Any, seed: int = 1, **rest: Any) -> Any:
    return decide(shot, Fixed(answer), name="fixed", dice=random.Random(seed), **rest)  # type: ignore[arg-type]


def test_best_first_and_the_tail_is_the_order_of_further_attempts() -> None:
    decision = run(three(), ms(30, 10, 20), filtered={"d/0": "down"}, reason="no key: x")
    assert [scored.candidate.instance for scored in decision.scored] == ["b", "c", "a"]
    assert [scored.cost.value for scored in decision.scored] == [10, 20, 30]
    assert (decision.policy, decision.filtered, decision.reason) == ("fixed", {"d/0": "down"}, "no key: x")


def test_costs_closer_than_a_step_are_a_tie_won_by_the_least_used_cache() -> None:
    shot = three(recent_tokens=5000)
    assert run(shot, ms(10 + TIE_MS / 2, 10, 99)).chosen.instance == "a"
    assert run(shot, ms(10 + TIE_MS * 1.1, 10, 99)).chosen.instance == "b"


def test_recent_work_is_measured_by_capacity_where_it_is_known() -> None:
    small = Candidate("small", 0, recent_tokens=4000, capacity_tokens=81_000)
    big = Candidate("big", 0, recent_tokens=6000, capacity_tokens=228_000)
    assert run(snapshot(small, big), ms(5, 5)).chosen.instance == "big"


def test_true_ties_are_broken_by_dice() -> None:
    chosen = [run(three(), ms(5, 5, 5), seed).chosen.instance for seed in range(300)]
    assert all(60 <= chosen.count(instance) <= 140 for instance in "abc")


def test_ranks_tie_only_when_equal() -> None:
    costs = [Cost(value, {}, "rank") for value in (0.5, 0.4, 1.0)]
    assert run(three(recent_tokens=9999), costs).chosen.instance == "b"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ms(1, 2), "2 costs for 3 candidates"),
        (ms(1, float("nan"), 2), "nan"),
        (ms(1, -1, 2), "-1"),
        (ms(1, float("inf"), 2), "inf"),
        ([1.0, 2.0, 3.0], "1.0"),
        (None, "TypeError"),
        (ZeroDivisionError("prompt text must not be told"), "ZeroDivisionError"),
    ],
)
def test_a_policy_that_breaks_its_promises_never_fails_the_request(answer: Any, said: str) -> None:
    decision = run(three(), answer, reason="no key")
    assert decision.policy == LEAST_BOOKED
    assert decision.chosen.instance == "b"  # nothing booked
    assert said in decision.reason
    assert decision.reason.startswith("policy fixed: ")
    assert decision.reason.endswith("; no key")
    assert "prompt text" not in decision.reason


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20), st.integers())
def test_every_candidate_is_scored_once_and_the_first_is_within_a_tie_of_the_best(
    values: list[float], seed: int
) -> None:
    shot = snapshot(*(Candidate(str(i), 0, recent_tokens=i * 7 % 5) for i in range(len(values))))
    decision = run(shot, ms(*values), seed)
    assert sorted(int(s.candidate.instance) for s in decision.scored) == list(range(len(values)))
    assert decision.scored[0].cost.value <= min(values) + TIE_MS
    tail = [s.cost.value for s in decision.scored if s.cost.value > min(values) + TIE_MS]
    assert tail == sorted(tail)


@pytest.mark.parametrize(
    ("rule", "held", "prompt", "confidence", "expected"),
    [
        (HitRule(alignment_tokens=16), 1600, 1600, 1.0, 1584),  # one prompt token is always computed
        (HitRule(alignment_tokens=16), 800, 1600, 1.0, 800),
        (HitRule(alignment_tokens=16), 800, 1600, 0.5, 400),
        (HitRule(alignment_tokens=16), 800, 1600, 0.33, 256),  # 264 in whole blocks
        (HitRule(alignment_tokens=16), 800, 1600, 0.0, 0),
        (HitRule(alignment_tokens=512), 800, 1600, 1.0, 512),
        (HitRule(alignment_tokens=16, drop_tokens=16), 800, 1600, 1.0, 784),  # EAGLE
        (HitRule(alignment_tokens=16, minimum_tokens=1024), 800, 1600, 1.0, 0),
        (HitRule(), 0, 1600, 1.0, 0),
    ],
)
def test_what_is_usable_of_a_prefix(rule: HitRule, held: int, prompt: int, confidence: float, expected: int) -> None:
    assert rule.usable(held, prompt, confidence) == expected
