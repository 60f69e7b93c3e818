from __future__ import annotations

from array import array
from collections.abc import Callable

from router.serving.isolation.shadow import BURST_S, PACE_S, WAITING_MAX, IsolationShadow


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[Callable[[], None]] = []

    def __call__(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.due.append(call)

    def run(self) -> None:
        self.now += 1.0
        while self.due:
            self.due.pop(0)()


def shadow(clock: Clock, **options: int) -> IsolationShadow:
    return IsolationShadow(call_at=clock.call_at, clock=clock, **options)


def test_what_others_asked_before_would_have_been_a_hit() -> None:
    clock = Clock()
    seen = shadow(clock)
    system = "s" * 400
    seen.note("tenant:a", "m", [system, "a" * 40], 4.0)
    seen.note("tenant:b", "m", [system, "b" * 40], 4.0)
    seen.note("tenant:b", "m", [system, "c" * 40], 4.0)
    clock.run()
    first, other = seen.counts["tenant:a"], seen.counts["tenant:b"]
    assert (first.own_tokens, first.shared_tokens, first.lost_tokens) == (0, 0, 0)
    assert (other.requests, other.prompt_tokens) == (2, 220)
    assert (other.own_tokens, other.shared_tokens, other.lost_tokens) == (100, 200, 100)


def test_models_are_told_apart_and_ids_are_counted_as_they_are() -> None:
    clock = Clock()
    seen = shadow(clock)
    ids = array("I", range(64))
    for domain, model in (("tenant:a", "m"), ("tenant:b", "n"), ("tenant:c", "m")):
        seen.note(domain, model, [ids], 4.0)
    clock.run()
    assert {domain: counts.lost_tokens for domain, counts in seen.counts.items()} == {
        "tenant:a": 0,
        "tenant:b": 0,
        "tenant:c": 64,
    }


def test_it_looks_at_so_many_and_remembers_so_many() -> None:
    clock = Clock()
    seen = shadow(clock, texts=8)
    for number in range(100):
        seen.note("tenant:a", "m", [f"{number}"], 4.0)
    clock.run()
    assert seen.counts["tenant:a"].requests == WAITING_MAX
    assert len(seen._asked) == 8
    for _ in range(int(10 * BURST_S / PACE_S)):
        seen.note("tenant:a", "m", ["x"], 4.0)
        clock.due and clock.due.pop()()
    assert seen.counts["tenant:a"].requests <= WAITING_MAX + BURST_S / PACE_S + 1


def test_half_a_character_is_left_out() -> None:
    clock = Clock()
    seen = shadow(clock)
    seen.note("tenant:a", "m", ["\ud800"], 4.0)
    clock.run()
    assert seen.counts["tenant:a"].requests == 0
