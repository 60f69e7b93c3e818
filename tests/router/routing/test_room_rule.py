"""The rule of the waiting room, worked out by hand: nothing here knows of queues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core import Rates
from router.routing.room_rule import GAP_STEP_S, RoomRule

RULE = RoomRule()
RATES = Rates(c1_ms=0.1, c2_ms=0.0)


# --- the place in line


@pytest.mark.parametrize(
    ("prefill_ms", "place"),
    [
        (0.0, 100.0),  # all of it is cached
        (10.0, 100.4),  # 40 × 0.01 s
        (999.0, 139.96),
        (1_000.0, 140.0),  # 40 × 1 s is just the most
        (1_001.0, 140.0),
        (60_000.0, 140.0),
    ],
)
def test_a_request_stands_behind_what_is_sooner_computed_by_40_times_its_own_prefill(
    prefill_ms: float, place: float
) -> None:
    assert RULE.place_in_line(100.0, prefill_ms, 40.0) == pytest.approx(place, abs=1e-9)


def test_without_a_head_start_the_line_is_in_the_order_of_arrival() -> None:
    rule = RoomRule(head_start_max_s=0.0, head_start_backlog=0.0)
    assert rule.longest_head_start_s(60.0, 600.0) == 0.0
    assert rule.place_in_line(7.0, 1e6, 0.0) == 7.0


@pytest.mark.parametrize(
    ("longest_s", "prefill_ms", "start_s"),
    [
        (80.0, 100.0, 4.0),
        (80.0, 2_500.0, 80.0),
        (100.0, 100.0, 4.0),  # 40 × 2.5 s is the most there is
        (200.0, 100.0, 8.0),
        (420.0, 100.0, 16.8),
        (420.0, 2_499.0, 419.832),
        (420.0, 9_000.0, 420.0),
    ],
)
def test_where_the_head_start_is_long_short_prompts_stand_as_far_apart_as_all_up_to_two_and_a_half_seconds(
    longest_s: float, prefill_ms: float, start_s: float
) -> None:
    assert RULE.place_in_line(0.0, prefill_ms, longest_s) == pytest.approx(start_s, abs=1e-9)


@given(
    st.floats(0, 1e5),
    st.floats(0, 1e5),
    st.floats(0, 1e7),
    st.floats(0, 1e7),
)
def test_nothing_that_arrives_later_by_more_than_the_head_start_stands_before_it(
    first: float, later: float, first_ms: float, later_ms: float
) -> None:
    """By exactly that much it may stand level, and the line then goes by who came first."""
    arrived_later = first + RULE.head_start_max_s + later
    longer = RULE.longest_head_start_s(1e9, 600.0)  # more waits by now
    place = RULE.place_in_line(first, first_ms, RULE.head_start_max_s)
    assert place <= RULE.place_in_line(arrived_later, later_ms, longer)


@pytest.mark.parametrize(
    ("backlog_s", "wait_s", "longest_s"),
    [
        (0.0, 600.0, 50.0),
        (6.25, 600.0, 50.0),
        (10.0, 600.0, 80.0),
        (15.0, 600.0, 120.0),
        (1_000.0, 600.0, 420.0),
        (1_000.0, 100.0, 70.0),  # else it would be refused for having waited too long
        (0.0, 20.0, 14.0),
    ],
)
def test_the_head_start_grows_where_everybody_would_wait_long(
    backlog_s: float, wait_s: float, longest_s: float
) -> None:
    assert RULE.longest_head_start_s(backlog_s, wait_s) == longest_s


# --- pressure, and eagerness λ


@pytest.mark.parametrize(
    ("waiting_ms", "engines", "pressure"),
    [
        (0.0, 1, 0.0),
        (250.0, 1, 0.5),  # of 0.5 s
        (500.0, 1, 1.0),
        (501.0, 1, 1.0),
        (1e9, 1, 1.0),
        (250.0, 8, 0.0625),  # of 4 s
        (4_000.0, 8, 1.0),
        (0.0, 0, 1.0),  # nobody is there
    ],
)
def test_pressure_grows_with_the_work_that_waits_for_each_engine(
    waiting_ms: float, engines: int, pressure: float
) -> None:
    assert RULE.pressure(waiting_ms, engines) == pytest.approx(pressure)


def test_eagerness_grows_with_the_pressure_from_4_to_10() -> None:
    assert [RULE.eagerness(pressure) for pressure in (0.0, 0.5, 1.0)] == [4.0, 7.0, 10.0]
    assert RoomRule(eagerness_min=1.0, eagerness_max=1.0).eagerness(1.0) == 1.0


# --- what an engine takes


def test_an_engine_takes_as_much_as_it_computes_before_we_hear_of_it_and_2048_tokens_at_least() -> None:
    assert RULE.takes_tokens(RATES, 0.0) == 2_048  # 15 ms at 0.1 ms a token are 150
    assert RoomRule(signal_delay_s=0.5).takes_tokens(RATES, 0.0) == 5_000
    assert RoomRule(signal_delay_s=0.2047).takes_tokens(RATES, 0.0) == 2_048  # 2,047 by the delay
    assert RoomRule(free_tokens=0).takes_tokens(RATES, 0.0) == 150
    assert RULE.takes_tokens(Rates(c1_ms=0.0), 0.0) == 2_048


def test_an_h100_with_an_8b_model_takes_2048_tokens() -> None:
    assert RULE.takes_tokens(Rates(), 0.0) == 2_048  # 15 ms at 0.01983 ms a token are 756


@pytest.mark.parametrize(("step_ms", "tokens"), [(44.9, 2_048), (45.0, 3_025), (80.0, 4_790)])
def test_where_decoding_is_too_slow_it_takes_what_one_step_computes_on_top(step_ms: float, tokens: int) -> None:
    assert RULE.takes_tokens(Rates(), step_ms) == tokens  # (15 ms + a step) at 0.01983 ms a token


# --- what it has still to do


@pytest.mark.parametrize(
    ("prefill_ms", "busy_ms"),
    [
        (0.0, 50.0),
        (204.8, 50.0),  # 2,048 tokens
        (205.8, 51.3),
        (604.8, 570.0),  # 1.3 × 400 + 50
    ],
)
def test_what_is_waited_for_is_the_work_beyond_what_an_engine_takes(prefill_ms: float, busy_ms: float) -> None:
    assert RULE.busy_ms(RATES, prefill_ms, 0.0) == pytest.approx(busy_ms)


# --- the gap


@pytest.mark.parametrize(
    ("step_ms", "share"),
    [(0.0, 1.0), (9.0, 0.8), (22.5, 0.5), (45.0, 0.0), (90.0, -1.0)],  # of 45 ms a token
)
def test_prefills_may_take_the_time_that_the_pace_of_those_who_decode_leaves(step_ms: float, share: float) -> None:
    assert RULE.prefill_share(step_ms) == pytest.approx(share)


@pytest.mark.parametrize(
    ("owed_s", "elapsed_s", "prefill_s", "share", "after_s"),
    [
        (0.0, 10.0, 0.3, 0.5, 0.3),  # what has not been used is not saved up
        (0.5, 0.0, 0.3, 0.5, 0.8),
        (0.5, 0.4, 0.3, 0.5, 0.6),  # 0.4 s pay for 0.2
        (0.5, 1.0, 0.3, 0.5, 0.3),
        (0.5, 1.0, 0.3, -1.0, 0.8),  # nothing is paid where decoding alone is too slow
        (1.0, 0.0, 5.0, 0.5, 1.2),  # two rests of 100 ms at most beyond the second that is free
    ],
)
def test_those_who_decode_are_owed_what_prefills_take_beyond_their_share(
    owed_s: float, elapsed_s: float, prefill_s: float, share: float, after_s: float
) -> None:
    assert RULE.owed_s(owed_s, elapsed_s, prefill_s, share) == pytest.approx(after_s)


@pytest.mark.parametrize(
    ("owed_s", "share", "rest_s"),
    [
        (0.0, 0.5, 0.0),
        (1.0, 0.5, 0.0),  # the second that is free
        (1.0075, 0.5, 0.0),  # 15 ms: over when we hear of it
        (1.03, 0.5, 0.045),  # 60 ms, less the signal's 15
        (1.05, 0.5, 0.085),
        (1.2, 0.5, 0.085),  # 100 ms at most
        (1.03, 1.0, 0.015),
        (1.2, 0.0, 0.0),  # no rest would bring them to their pace
        (1.2, -1.0, 0.0),
    ],
)
def test_an_engine_rests_until_what_is_owed_is_paid_if_that_can_be(owed_s: float, share: float, rest_s: float) -> None:
    assert RULE.rest_s(owed_s, share, 0.1, 1.0) == pytest.approx(rest_s)


@pytest.mark.parametrize(
    ("pressure", "rest_s"), [(0.0, 0.0), (0.125, 0.0425), (0.25, 0.085), (0.26, 0.085), (1.0, 0.085)]
)
def test_with_little_waiting_an_engine_rests_less(pressure: float, rest_s: float) -> None:
    assert RULE.rest_s(1.2, 0.5, 0.1, pressure) == pytest.approx(rest_s)


def test_where_engines_rest_as_owed_decoding_keeps_its_pace() -> None:
    """Prefills of 60 ms, one after the other; who decodes gets a token by each of them and one each 20 ms of rest."""
    rule, step_s, prefill_s = RoomRule(signal_delay_s=0.0), 0.02, 0.06
    share, owed_s, elapsed_s, tokens, took_s = rule.prefill_share(20.0), 0.0, 0.0, 0.0, 0.0
    for number in range(400):
        owed_s = rule.owed_s(owed_s, elapsed_s, prefill_s, share)
        rest_s = rule.rest_s(owed_s, share, rule.gap_s, 1.0)
        elapsed_s = prefill_s + step_s + rest_s
        if number >= 100:  # the free second is over
            tokens, took_s = tokens + 1 + rest_s / step_s, took_s + elapsed_s
    assert took_s / tokens == pytest.approx(0.045, rel=0.01)


def test_a_signal_that_takes_longer_than_the_gap_leaves_no_rest() -> None:
    assert RoomRule(signal_delay_s=0.1).rest_s(1.2, 0.5, 0.1, 1.0) == 0.0
    assert RoomRule(signal_delay_s=0.25).rest_s(1.2, 0.5, 0.1, 1.0) == 0.0
    assert RULE.rest_s(1.2, 0.5, 0.015, 1.0) == RULE.rest_s(1.2, 0.5, 0.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("slow", "late", "step"),
    [
        (True, False, 0.8),
        (False, True, -1.2),
        (True, True, -0.2),  # to rest more would make first tokens later still
        (False, False, -0.2),
    ],
)
def test_the_gap_grows_with_slow_tokens_and_shrinks_with_late_first_ones(slow: bool, late: bool, step: float) -> None:
    assert RULE.next_gap_s(0.05, slow=slow, late=late) == pytest.approx(0.05 + step * GAP_STEP_S)


def test_the_gap_stays_between_nothing_and_the_most() -> None:
    assert RULE.next_gap_s(0.1, slow=True, late=False) == 0.1
    assert RULE.next_gap_s(0.0, slow=False, late=True) == 0.0
    assert RoomRule(gap_s=0.0).next_gap_s(0.0, slow=True, late=False) == 0.0


def test_one_slow_answer_in_five_keeps_the_gap_as_it_is() -> None:
    gap_s = 0.05
    for number in range(200):
        gap_s = RULE.next_gap_s(gap_s, slow=number % 5 == 0, late=False)
    assert gap_s == pytest.approx(0.05)
