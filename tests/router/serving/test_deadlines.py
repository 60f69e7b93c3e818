"""Time limits, by a clock in the test's hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from router.errors import EngineError
from router.serving.deadlines import Deadlines, TimeLimits
from tests.timers import Timers


class Loop(Timers):
    """As much of a loop as timers need."""

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, call: Callable[[], None]) -> Any:
        self.call_at(self.now + delay, call)
        return _Handle()


class _Handle:
    def cancel(self) -> None:
        pass


class Attempt:
    def __init__(self) -> None:
        self.received = 0
        self.held_back = False
        self.ended: list[str | None] = []

    def cancel(self, error: EngineError | None = None) -> None:
        self.ended.append(None if error is None else error.code)


@pytest.fixture
def loop() -> Loop:
    return Loop(1000.0)


def begun(loop: Loop, limits: TimeLimits, *, age_s: float = 0.0) -> tuple[Attempt, Any]:
    deadlines, attempt = Deadlines(loop=loop), Attempt()  # type: ignore[arg-type]
    return attempt, deadlines.begin(attempt, limits, first_byte_s=limits.first_byte_s, age_s=age_s)


def test_a_long_prefill_and_slow_tokens_are_within_their_own_limits(loop: Loop) -> None:
    """FC-67: 600 s to the headers, then a token every 200 s. No limit in all by default."""
    attempt, watch = begun(loop, TimeLimits(first_byte_s=1200.0, between_s=300.0))
    loop.run_for(600.0)
    watch.begun()
    for _ in range(5):
        attempt.received += 100
        loop.run_for(200.0)
    watch.end()
    loop.run_for(2000.0)
    assert attempt.ended == []
    assert loop.timers == 0, "nobody is watched, so nothing ticks"


def test_the_first_token_has_a_limit(loop: Loop) -> None:
    """FC-67: with 300 s the same engine is given up."""
    attempt, _ = begun(loop, TimeLimits(first_byte_s=300.0))
    attempt.received += 20  # a keep-alive is no token
    loop.run_for(299.9)
    assert attempt.ended == []
    loop.run_for(1.2)
    assert attempt.ended == ["ttft_timeout"]


def test_a_stream_that_stalls_is_noticed(loop: Loop) -> None:
    attempt, watch = begun(loop, TimeLimits(between_s=30.0))
    watch.begun()
    loop.run_for(20.0)
    attempt.received += 5
    loop.run_for(29.0)
    assert attempt.ended == []
    loop.run_for(4.0)
    assert attempt.ended == ["stall_timeout"]


def test_a_client_that_reads_slowly_is_not_the_engines_stall(loop: Loop) -> None:
    attempt, watch = begun(loop, TimeLimits(between_s=30.0))
    watch.begun()
    attempt.held_back = True
    loop.run_for(500.0)
    assert attempt.ended == []
    attempt.held_back = False
    loop.run_for(33.0)
    assert attempt.ended == ["stall_timeout"]


def test_the_whole_has_a_limit_that_begins_with_the_request(loop: Loop) -> None:
    attempt, watch = begun(loop, TimeLimits(total_s=10.0), age_s=4.0)
    loop.run_for(2.0)
    watch.begun()
    for _ in range(39):
        attempt.received += 1
        loop.run_for(0.1)
    assert attempt.ended == []
    loop.run_for(1.2)
    assert attempt.ended == ["total_timeout"]


def test_a_short_limit_is_looked_at_more_often(loop: Loop) -> None:
    attempt, _ = begun(loop, TimeLimits(first_byte_s=0.2))
    loop.run_for(0.41)
    assert attempt.ended == ["ttft_timeout"]


def test_the_rest_after_the_end_of_a_stream_is_waited_for_a_little(loop: Loop) -> None:
    attempt, watch = begun(loop, TimeLimits(total_s=100.0))
    watch.begun()
    watch.drain()
    loop.run_for(4.9)
    assert attempt.ended == []
    loop.run_for(1.3)
    assert attempt.ended == [None], "it was whole: no error"


def test_many_attempts_are_each_looked_at(loop: Loop) -> None:
    deadlines = Deadlines(loop=loop)  # type: ignore[arg-type]
    limits = TimeLimits(first_byte_s=5.0)
    attempts = [Attempt() for _ in range(100)]
    watches = [deadlines.begin(attempt, limits, first_byte_s=5.0) for attempt in attempts]
    for watch in watches[::2]:
        watch.end()
    loop.run_for(6.2)
    assert [attempt.ended for attempt in attempts] == [[], ["ttft_timeout"]] * 50
    assert loop.timers == 0
