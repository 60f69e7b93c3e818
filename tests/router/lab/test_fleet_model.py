"""An engine on a clock in the test's hand, and which of its announcements matter."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from zlib import crc32

import pytest

from router.core import Rates
from router.lab.engine import DoesNotFit, EngineRequest, Order, StepResult
from router.lab.fleet_model import Engine, EngineSpec, KeyCopies
from router.lab.profiles import Profile

PROFILE = Profile(
    "plain",
    Rates(c0_ms=10.0, c1_ms=0.1, c2_ms=0.0, c3_ms=0.0, c4_ms=1.0, n0_tokens=0),
    capacity_tokens=100_000,
    max_batched_tokens=8_000,
    max_num_seqs=64,
)
"""A prompt of n tokens alone: 10 + n / 10 ms. A token of one sequence that decodes: 11.1 ms."""
BLOCK = 100


class Bench:
    """One engine, its clock, and everything it said."""

    def __init__(self, spec: EngineSpec | None = None) -> None:
        self.now = 0.0
        self.steps: list[tuple[float, StepResult]] = []
        self.first: dict[str, float] = {}
        self.finished: dict[str, float] = {}
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        self.engine = Engine("e0", spec or EngineSpec(PROFILE), block_size=BLOCK, at=self.at, stepped=self.stepped)

    def at(self, when: float, call: Callable[[], None]) -> None:
        assert when >= self.now
        heapq.heappush(self._calls, (when, next(self._serial), call))

    def stepped(self, engine: Engine, result: StepResult, now: float) -> None:
        assert (engine, now) == (self.engine, self.now)
        self.steps.append((now, result))
        self.first |= {request.id: now for request in result.first}
        self.finished |= {request.id: now for request in result.finished}

    def submit(self, id: str, tokens: int, output: int = 1, *, prefix: int = 0) -> EngineRequest:
        """Its first `prefix` tokens are those of any other such request."""
        number = crc32(id.encode())
        hashes = [i if (i + 1) * BLOCK <= prefix else (number << 20) + i for i in range(tokens // BLOCK)]
        request = EngineRequest.from_hashes(id, tokens, output_tokens=output, hashes=hashes, block_size=BLOCK)
        self.engine.submit(request, self.now)
        return request

    def run_until(self, end: float) -> None:
        while self._calls and self._calls[0][0] <= end:
            self.now, _, call = heapq.heappop(self._calls)
            call()
        self.now = end


# --- the specification


def test_what_is_not_given_is_as_the_profile_says() -> None:
    model = EngineSpec(PROFILE).model(BLOCK)
    assert model.capacity_tokens == 100_000
    assert (model._max_batched_tokens, model.max_num_seqs) == (8_000, 64)


def test_what_is_given_counts() -> None:
    model = EngineSpec(PROFILE, capacity_tokens=5_050, max_batched_tokens=512, max_num_seqs=8).model(BLOCK)
    assert model.capacity_tokens == 5_000  # whole blocks
    assert (model._max_batched_tokens, model.max_num_seqs) == (512, 8)


def test_a_chunk_smaller_than_the_batch_makes_that_smaller_too() -> None:
    assert EngineSpec(PROFILE, max_batched_tokens=32).model(BLOCK).max_num_seqs == 32


# --- steps


def test_a_prompt_alone_takes_one_step_and_each_further_token_another() -> None:
    bench = Bench()
    bench.submit("r", 1_000, output=5)
    bench.run_until(10.0)
    assert bench.first == {"r": pytest.approx(0.110)}
    assert bench.finished == {"r": pytest.approx(0.110 + 4 * 0.0111)}
    assert bench.engine.busy_s == pytest.approx(0.110 + 4 * 0.0111)


def test_a_prompt_longer_than_a_chunk_takes_several_steps() -> None:
    bench = Bench()
    bench.submit("r", 10_000)
    bench.run_until(10.0)
    assert [now for now, _ in bench.steps] == [pytest.approx(0.810), pytest.approx(0.810 + 0.210)]
    assert bench.finished == bench.first == {"r": pytest.approx(1.020)}


def test_a_prefix_in_the_cache_is_not_computed_again() -> None:
    bench = Bench()
    bench.submit("first", 1_050, prefix=500)
    bench.run_until(1.0)
    second = bench.submit("second", 1_050, prefix=500)
    bench.run_until(2.0)
    assert second.cached_tokens == 500
    assert bench.first["second"] == pytest.approx(1.0 + 0.010 + 0.055)


def test_who_comes_during_a_step_is_taken_with_the_next() -> None:
    bench = Bench()
    bench.submit("first", 1_000)
    bench.run_until(0.050)
    bench.submit("second", 2_000)
    bench.run_until(1.0)
    assert bench.first == {"first": pytest.approx(0.110), "second": pytest.approx(0.110 + 0.210)}


def test_who_comes_while_others_decode_waits_for_the_step_under_way_only() -> None:
    """Quiet steps are taken in advance: those that have not begun are taken back.

    Steps of 11.1 ms from 0.110 on; at 0.200 the ninth has begun, which ends at 0.2099. Then 10 + 0.1 × 1,001 + 1 ms.
    """
    bench = Bench()
    bench.submit("decodes", 1_000, output=90)
    bench.run_until(0.200)
    bench.submit("new", 1_000)
    bench.run_until(10.0)
    assert bench.first["new"] == pytest.approx(0.110 + 9 * 0.0111 + 0.1111)
    assert bench.finished["decodes"] == pytest.approx(0.110 + 88 * 0.0111 + 0.1111)
    assert sum(result.steps for _, result in bench.steps) == 90
    assert bench.engine.busy_s == pytest.approx(bench.finished["decodes"])


def test_two_who_come_in_the_same_quiet_time_are_taken_together() -> None:
    bench = Bench()
    bench.submit("decodes", 1_000, output=90)
    bench.run_until(0.200)
    bench.submit("one", 1_000)
    bench.run_until(0.205)
    bench.submit("two", 1_000)
    bench.run_until(10.0)
    assert bench.first["one"] == bench.first["two"] == pytest.approx(0.2099 + 0.010 + 0.2001 + 0.001)


@pytest.mark.parametrize(("order", "next_one"), [("first_come", "long"), ("shortest_first", "short")])
def test_the_order_inside_the_engine_is_the_specs(order: Order, next_one: str) -> None:
    bench = Bench(EngineSpec(PROFILE, order=order))
    bench.submit("busy", 8_000)
    bench.run_until(0.1)
    bench.submit("long", 8_000)
    bench.submit("short", 7_000)
    bench.run_until(10.0)
    assert min(("long", "short"), key=lambda id: bench.first[id]) == next_one


def test_what_can_never_fit_is_said_at_once_and_disturbs_nobody() -> None:
    bench = Bench(EngineSpec(PROFILE, capacity_tokens=2_000))
    bench.submit("decodes", 1_000, output=90)
    bench.run_until(0.200)
    with pytest.raises(DoesNotFit):
        bench.submit("huge", 2_001)
    with pytest.raises(DoesNotFit):
        bench.submit("wordy", 1_900, output=200)
    bench.run_until(10.0)
    assert bench.finished == {"decodes": pytest.approx(0.110 + 89 * 0.0111)}


def test_who_is_given_up_leaves_the_batch_after_the_step_under_way() -> None:
    """The prompt of the second is computed by the step after the first's: 10 + 0.1 × 1,001 + 1 ms."""
    bench = Bench()
    bench.submit("stays", 1_000, output=90)
    left = bench.submit("left", 1_000, output=90)
    bench.run_until(0.5)
    bench.engine.abort(left, bench.now)
    bench.run_until(10.0)
    assert "left" not in bench.finished
    both, alone = 0.010 + 0.0002 + 0.002, 0.0111  # both decode from 0.2211 on; the 23rd step is under way at 0.5
    assert bench.finished["stays"] == pytest.approx(0.110 + 0.1111 + 23 * both + 65 * alone)


# --- death


def test_an_engine_that_dies_says_nothing_more_and_comes_back_empty() -> None:
    bench = Bench()
    bench.submit("before", 1_050, prefix=500)
    bench.run_until(1.0)
    bench.submit("lost", 8_000)
    bench.run_until(1.3)
    bench.engine.die()
    assert not bench.engine.alive
    bench.run_until(5.0)
    assert "lost" not in bench.first
    bench.engine.restart()
    again = bench.submit("again", 1_050, prefix=500)
    bench.run_until(10.0)
    assert again.cached_tokens == 0
    assert bench.finished["again"] == pytest.approx(5.0 + 0.115)
    assert bench.engine.model.running == bench.engine.model.waiting == 0


def test_time_in_a_step_that_is_lost_was_no_use() -> None:
    bench = Bench()
    bench.submit("lost", 8_000)
    bench.run_until(0.3)
    bench.engine.die()
    bench.run_until(5.0)
    assert bench.engine.busy_s == 0.0


def test_preemptions_of_earlier_lives_are_kept() -> None:
    bench = Bench(EngineSpec(PROFILE, capacity_tokens=2_000))
    bench.submit("one", 950, output=500)
    bench.submit("two", 950, output=500)
    bench.run_until(20.0)
    before = bench.engine.model.preemptions
    assert before
    bench.engine.die()
    bench.engine.restart()
    assert (bench.engine.preemptions, bench.engine.model.preemptions) == (before, 0)


# --- copies


def test_only_the_first_copy_is_new_and_only_the_last_is_gone() -> None:
    copies = KeyCopies()
    assert copies.store([1, 2]) == [1, 2]
    assert copies.store([2, 3]) == [3]
    assert copies.store([2]) == []
    assert sorted(copies) == [1, 2, 3]
    assert copies.remove([2, 1]) == [1]
    assert copies.remove([2]) == []
    assert copies.remove([2, 3]) == [2, 3]
    assert len(copies) == 0


def test_what_was_never_stored_can_be_removed() -> None:
    """Its announcement may have been lost."""
    copies = KeyCopies()
    assert copies.remove([9]) == []
    assert copies.store([9]) == [9]
