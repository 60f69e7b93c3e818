"""Policies that are asked about real decisions and never act."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from policies.kv_aware import KvAware
from policies.lmetric import LMetric
from router.core import Candidate, Cost, Decision, Policy, Scored, Snapshot
from router.routing.shadow import BURST_S, PACE_S, SCORE_AFTER_S, SLICE_S, WAITING_MAX, ShadowCounts, Shadows


class Fixed:
    """Costs by engine."""

    def __init__(self, unit: Any = "ms", **values: float) -> None:
        self._values = values
        self._unit = unit
        self.asked = 0

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        self.asked += 1
        return [Cost(self._values[c.instance], {}, self._unit) for c in snapshot.candidates]


class Failing:
    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        raise RuntimeError("a shadow's own bug")


class Loop:
    """Timers and a clock that move when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.calls.append((when, call))

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for when, call in calls:
            self.now = max(self.now, when)
            call()

    def run(self) -> None:
        while self.calls:
            self.turn()


def shadows_of(loop: Loop, **policies: Any) -> Shadows:
    return Shadows(policies, call_at=loop.call_at, clock=loop.clock, dice=random.Random(1))


def chosen(engine: str, *, at: float = 100.0, engines: str = "abc") -> tuple[Snapshot, Decision]:
    snapshot = Snapshot(at, 1000, tuple([Candidate(name, 0) for name in engines]))
    best_first = sorted(snapshot.candidates, key=lambda c: c.instance != engine)
    return snapshot, Decision("acting", tuple([Scored(c, Cost(0.0, {})) for c in best_first]))


@pytest.mark.parametrize(
    ("shadow", "engine", "expected"),
    [
        (Fixed(a=10, b=90, c=50), "a", ShadowCounts(agreed=1)),
        (Fixed(a=10, b=90, c=50), "b", ShadowCounts(differed=1, regret=80)),
        (Fixed(a=10, b=12, c=50), "b", ShadowCounts(agreed=1, regret=2)),  # within what counts as a tie in ms
        (Fixed(unit="rank", a=10, b=12, c=50), "b", ShadowCounts(differed=1, regret=2)),
        (Fixed(unit="rank", a=10, b=10, c=50), "b", ShadowCounts(agreed=1)),
        (Fixed(a=10, b=float("nan"), c=50), "a", ShadowCounts(errors=1)),
        (Failing(), "a", ShadowCounts(errors=1)),
    ],
)
def test_what_a_shadow_thinks_of_a_choice(shadow: Any, engine: str, expected: ShadowCounts) -> None:
    loop = Loop()
    shadows = shadows_of(loop, one=shadow)
    shadows.note(*chosen(engine))
    loop.run()
    assert shadows.counts == {"one": expected}


def test_counts_add_up_and_are_each_shadows_own() -> None:
    loop = Loop()
    shadows = shadows_of(loop, likes_a=Fixed(a=0, b=30, c=60), likes_b=Fixed(a=50, b=0, c=0), broken=Failing())
    for engine in "aabc":
        shadows.note(*chosen(engine))
    loop.run()
    assert shadows.figures() == {
        "likes_a": {"agreed": 2, "differed": 2, "errors": 0, "regret": 90},
        "likes_b": {"agreed": 2, "differed": 2, "errors": 0, "regret": 100},
        "broken": {"agreed": 0, "differed": 0, "errors": 4, "regret": 0},
    }


def test_it_is_asked_about_those_that_could_be_chosen() -> None:
    """The waiting room had room on b and c only: that a would have been best is nothing to regret."""
    loop = Loop()
    shadows = shadows_of(loop, one=Fixed(a=0, b=40, c=90))
    shadows.note(*chosen("b"), among=[1, 2])
    shadows.note(*chosen("c"), among=[1, 2])
    loop.run()
    assert shadows.counts["one"] == ShadowCounts(agreed=1, differed=1, regret=50)


def test_where_there_was_nothing_to_choose_nobody_agrees() -> None:
    loop = Loop()
    shadows = shadows_of(loop, one=Fixed(a=0, b=40, c=90))
    shadows.note(*chosen("b"), among=[1])
    shadows.note(*chosen("a", engines="a"))
    assert loop.calls == []
    assert shadows.counts["one"] == ShadowCounts()


def test_nothing_is_asked_while_the_request_is_placed() -> None:
    loop, shadow = Loop(), Fixed(a=0, b=0, c=0)
    shadows = shadows_of(loop, one=shadow)
    for _ in range(5):
        shadows.note(*chosen("a"))
    assert shadow.asked == 0
    assert [when for when, _ in loop.calls] == [100.0 + SCORE_AFTER_S]  # one call for all of them
    loop.run()
    assert shadow.asked == 5
    shadows.note(*chosen("a", at=loop.now))
    assert len(loop.calls) == 1


def test_long_work_is_done_in_slices() -> None:
    loop = Loop()

    class Slow(Fixed):
        def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
            loop.now += SLICE_S
            return super().costs(snapshot)

    slow, quick = Slow(a=0, b=0, c=0), Fixed(a=0, b=0, c=0)
    shadows = shadows_of(loop, slow=slow, quick=quick)
    for _ in range(3):
        shadows.note(*chosen("a"))
    asked: list[tuple[int, int]] = []
    while loop.calls:
        loop.turn()
        asked.append((slow.asked, quick.asked))
    assert asked == [(1, 0), (2, 1), (3, 2), (3, 3)]


def test_all_are_scored_up_to_a_hundred_a_second_and_a_sample_beyond() -> None:
    loop, shadow = Loop(), Fixed(a=0, b=0, c=0)
    shadows = shadows_of(loop, one=shadow)
    for number in range(500):  # 50 a second
        shadows.note(*chosen("a", at=100.0 + number * 0.02))
        loop.run()
    assert shadow.asked == 500
    at, before = loop.now, shadow.asked
    for number in range(20_000):  # 2,000 a second for 10 s
        shadows.note(*chosen("a", at=at + number * 0.0005))
        loop.run()
    assert shadow.asked - before == pytest.approx((10 + BURST_S) / PACE_S, abs=2)


def test_what_waits_is_bounded_while_the_loop_has_no_time() -> None:
    loop, shadow = Loop(), Fixed(a=0, b=0, c=0)
    shadows = shadows_of(loop, one=shadow, two=shadow)
    for number in range(3 * WAITING_MAX):
        shadows.note(*chosen("a", at=100.0 + number * PACE_S))
    loop.run()
    assert shadow.asked == 2 * WAITING_MAX


@pytest.mark.parametrize("kind", [KvAware, LMetric])
def test_a_policy_agrees_with_itself(kind: Callable[..., Policy]) -> None:
    loop, dice = Loop(), random.Random(4)
    acting = kind({}, random.Random(1))
    shadows = shadows_of(loop, same=kind({}, random.Random(2)))
    for _ in range(50):
        candidates = tuple(
            [
                Candidate(name, 0, booked_prefill_ms=dice.uniform(0, 500), booked_requests=dice.randint(0, 5))
                for name in "abcd"
            ]
        )
        snapshot = Snapshot(100.0, 4000, candidates)
        costs = acting.costs(snapshot)
        order = sorted(range(4), key=lambda i: costs[i].value)
        shadows.note(snapshot, Decision("acting", tuple([Scored(candidates[i], costs[i]) for i in order])))
    loop.run()
    assert shadows.counts["same"] == ShadowCounts(agreed=50)
