"""One lane of the waiting room: order, hold and the way back, against a plain list."""

from __future__ import annotations

import random
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from router.core import Ask, Prompt
from router.routing.room_lanes import Lane, LaneName, Target, Waiting

A: Target = ("a", 0)
B: Target = ("b", 0)
NAME = LaneName("m", None, 0, "acme")

MOST_STALE = 64
"""Entries of moved requests that a heap may hold beside two for each that is in it."""


def waiting(id: str, place: float = 0.0, ms: float = 0.0) -> Waiting:
    one = Waiting(Ask(id, "m", Prompt(100, 0, {})), 0.0)
    one.place, one.prefill_ms = place, ms
    return one


def entered(lane: Lane, *places: float) -> list[Waiting]:
    ones = [waiting(f"r{number}", place) for number, place in enumerate(places)]
    for one in ones:
        lane.enter(one)
    return ones


def drained(lane: Lane, *free: Target) -> list[str]:
    """Everybody who can be, first to last."""
    order = []
    while (one := lane.first(free)) is not None:
        order.append(one.ask.request_id)
        lane.leave(one)
    return order


def test_the_line_goes_by_place_and_equal_places_by_who_came_first() -> None:
    lane = Lane(NAME)
    entered(lane, 3.0, 1.0, 2.0, 1.0, -inf)
    assert drained(lane) == ["r4", "r1", "r3", "r2", "r0"]
    assert lane.first([]) is None


def test_size_and_work_count_everybody_wherever_they_are() -> None:
    lane = Lane(NAME)
    ones = [waiting(f"r{number}", ms=ms) for number, ms in enumerate([10.0, 20.0, 40.0])]
    for one in ones:
        lane.enter(one)
    lane.hold(ones[0], A, 5.0)
    lane.take_out(ones[1])
    assert (lane.size, lane.waiting_ms, lane.held) == (3, 70.0, 1)
    lane.revalue(ones[2], 15.0)
    assert (lane.waiting_ms, ones[2].prefill_ms) == (45.0, 15.0)
    for one in ones:
        lane.leave(one)
        assert one.lane is None
    assert (lane.size, lane.waiting_ms, lane.held) == (0, 0.0, 0)


def test_who_is_held_stands_back_until_that_engine_is_free() -> None:
    lane = Lane(NAME)
    first, second, third = entered(lane, 1.0, 2.0, 3.0)
    lane.hold(first, A, 10.0)
    lane.hold(second, B, 10.0)
    assert first.held_for == A
    assert lane.first([]) is third
    assert lane.first([B]) is second
    assert lane.first([A]) is first
    assert lane.first([B, A]) is first
    assert sorted(lane.targets()) == [A, B]


def test_who_is_held_takes_the_same_place_among_those_in_line() -> None:
    lane = Lane(NAME)
    ones = entered(lane, 1.0, 2.0, 3.0)
    lane.hold(ones[1], A, 10.0)
    assert lane.first([A]) is ones[0]
    assert drained(lane, A) == ["r0", "r1", "r2"]


def test_those_who_gain_no_more_than_so_much_are_let_go() -> None:
    lane = Lane(NAME)
    ones = entered(lane, 1.0, 2.0, 3.0, 4.0)
    for one, gain in zip(ones, [300.0, 100.0, 200.0, 50.0], strict=True):
        lane.hold(one, B if one is ones[3] else A, gain)
    lane.let_go(A, 199.9)
    assert [one.held_for for one in ones] == [A, None, A, B]
    lane.let_go(A, 200.0)
    assert [one.held_for for one in ones] == [A, None, None, B]
    assert drained(lane) == ["r1", "r2"]
    lane.let_go(A, inf)
    assert lane.targets() == [B]
    assert drained(lane) == ["r0"]
    assert drained(lane, B) == ["r3"]


def test_to_let_go_of_nobody_is_nothing() -> None:
    lane = Lane(NAME)
    lane.let_go(A, inf)
    assert lane.first([A]) is None


def test_who_leaves_from_line_or_hold_is_not_met_again() -> None:
    lane = Lane(NAME)
    ones = entered(lane, 1.0, 2.0, 3.0)
    lane.hold(ones[0], A, 10.0)
    lane.leave(ones[0])
    lane.leave(ones[1])
    assert lane.targets() == []
    assert (lane.first([A]), lane.size) == (ones[2], 1)
    lane.let_go(A, inf)
    assert drained(lane, A) == ["r2"]


def test_who_is_taken_out_counts_and_can_line_up_again() -> None:
    lane = Lane(NAME)
    ones = entered(lane, 1.0, 2.0)
    lane.take_out(ones[0])
    lane.take_out(ones[0])
    assert lane.first([]) is ones[1]
    assert lane.size == 2
    lane.line_up(ones[0])
    assert lane.first([]) is ones[0]


def test_a_new_place_counts_from_when_it_is_taken() -> None:
    lane = Lane(NAME)
    ones = entered(lane, 1.0, 2.0)
    ones[0].place = 5.0
    assert lane.first([]) is ones[0]
    lane.line_up(ones[0])
    assert lane.first([]) is ones[1]


def test_who_is_held_for_another_engine_waits_for_that_one_only() -> None:
    lane = Lane(NAME)
    (one,) = entered(lane, 1.0)
    lane.hold(one, A, 10.0)
    lane.hold(one, B, 20.0)
    assert (lane.first([A]), lane.first([B]), lane.held) == (None, one, 1)
    lane.let_go(A, inf)
    assert one.held_for == B


@pytest.mark.parametrize("seed", range(3))
def test_heaps_stay_small_however_often_few_requests_move(seed: int) -> None:
    lane, dice = Lane(NAME), random.Random(seed)
    ones = entered(lane, *range(10))
    for _ in range(10_000):
        one = dice.choice(ones)
        one.place = dice.random()
        move = dice.randrange(4)
        if move == 0:
            lane.line_up(one)
        elif move == 1:
            lane.hold(one, dice.choice([A, B]), dice.random())
        elif move == 2:
            lane.let_go(dice.choice([A, B]), dice.random() / 4)
        else:
            lane.take_out(one)
        heaps = [lane._line, *(heap for held in lane._held.values() for heap in (held.by_place, held.by_gain))]
        assert all(len(heap._entries) <= MOST_STALE + 2 * 10 + 1 for heap in heaps)


def test_one_that_moves_up_and_down_behind_a_first_that_never_does() -> None:
    """Nothing that is met is out of date, so only the heap's own count can tell."""
    lane = Lane(NAME)
    first, other = entered(lane, 0.0, 1.0)
    for _ in range(10_000):
        lane.line_up(other)
    assert lane.first([]) is first
    assert len(lane._line._entries) <= MOST_STALE + 2 * 2 + 1


def test_one_that_is_held_again_and_again_beside_one_that_stays() -> None:
    lane = Lane(NAME)
    stays, moves = entered(lane, 0.0, 1.0)
    lane.hold(stays, A, 1.0)
    for _ in range(10_000):
        lane.hold(moves, A, 2.0)
    held = lane._held[A]
    assert len(held.by_place._entries) <= MOST_STALE + 2 * 2 + 1
    assert len(held.by_gain._entries) <= MOST_STALE + 2 * 2 + 1


class Stood(NamedTuple):
    """Where the list has somebody. `order`: place or gain, and how many had moved before."""

    place: tuple[float, int]
    gain: tuple[float, int]
    target: Target | None


class Lanes(RuleBasedStateMachine):
    """Everything that can be done to a lane, in any order; the list is searched through, the lane is not."""

    inside = Bundle("inside")
    engines = st.sampled_from([A, B, ("a", 1)])
    places = st.sampled_from([-inf, 0.0, 1.0, 1.5, 2.0, 7.0])
    gains = st.sampled_from([1.0, 2.0, 2.5, 100.0])

    @initialize()
    def begin(self) -> None:
        self.lane = Lane(NAME)
        self.all: dict[Waiting, Stood | None] = {}  # None: taken out
        self.moves = 0

    def _stand(self, one: Waiting, target: Target | None = None, gain: float = 0.0) -> None:
        self.moves += 1
        self.all[one] = Stood((one.place, self.moves), (gain, self.moves), target)

    @rule(target=inside, place=places, ms=st.integers(0, 1000))
    def enter(self, place: float, ms: int) -> Waiting:
        one = waiting("r", place, float(ms))
        self.lane.enter(one)
        self._stand(one)
        return one

    @rule(one=consumes(inside))
    def leave(self, one: Waiting) -> None:
        self.lane.leave(one)
        del self.all[one]

    @rule(one=inside, place=places)
    def line_up(self, one: Waiting, place: float) -> None:
        one.place = place
        self.lane.line_up(one)
        self._stand(one)

    @rule(one=inside, engine=engines, gain=gains)
    def hold(self, one: Waiting, engine: Target, gain: float) -> None:
        self.lane.hold(one, engine, gain)
        self._stand(one, engine, gain)

    @rule(one=inside)
    def take_out(self, one: Waiting) -> None:
        self.lane.take_out(one)
        self.all[one] = None

    @rule(one=inside, ms=st.integers(0, 1000))
    def revalue(self, one: Waiting, ms: int) -> None:
        self.lane.revalue(one, float(ms))

    @rule(engine=engines, gain=gains | st.just(inf))
    def let_go(self, engine: Target, gain: float) -> None:
        self.lane.let_go(engine, gain)
        held = [(stood.gain, one) for one, stood in self.all.items() if stood is not None and stood.target == engine]
        for (its_gain, _), one in sorted(held, key=lambda row: row[0]):
            if its_gain <= gain:
                self._stand(one)

    @rule(free=st.sets(engines))
    def first(self, free: set[Target]) -> None:
        standing = [
            (stood.place, one)
            for one, stood in self.all.items()
            if stood is not None and (stood.target is None or stood.target in free)
        ]
        expected = min(standing, key=lambda row: row[0])[1] if standing else None
        assert self.lane.first(free) is expected

    @invariant()
    def the_counts_are_a_recount(self) -> None:
        held = [(one, stood.target) for one, stood in self.all.items() if stood is not None and stood.target]
        assert self.lane.size == len(self.all)
        assert self.lane.waiting_ms == sum(one.prefill_ms for one in self.all)
        assert self.lane.held == len(held)
        assert set(self.lane.targets()) == {target for _, target in held}
        assert all(one.held_for == target for one, target in held)
        assert all(one.lane is self.lane for one in self.all)


TestLanes = Lanes.TestCase
TestLanes.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
