"""Each figure of a replay, worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from router.lab.measures import FIXED, SCALED, Objective, measure, quantile, tpot_s, ttft_s
from router.lab.replay import Replayed, Served

BASIS = Served(
    "r", "acme", 1, arrived_at=10.0, input_tokens=1_000, output_tokens=11, solo_s=0.1,
    placed_at=10.5, first_token_at=11.0, finished_at=12.0, engine=0,
)  # fmt: skip
"""TTFT 1 s, TPOT 100 ms, half a second in the room."""


def served(**changed: object) -> Served:
    return msgspec.structs.replace(BASIS, **changed)


def replayed(*ones: Served, ended_at: float = 20.0, busy_s: tuple[float, ...] = (3.0, 1.0)) -> Replayed:
    return Replayed("p", list(ones), ended_at, list(busy_s), 7, 0.25, None)


# --- one request


def test_time_to_first_token_counts_from_arrival() -> None:
    assert ttft_s(BASIS) == 1.0
    assert ttft_s(served(first_token_at=None)) is None
    assert ttft_s(served(arrived_at=0.0, first_token_at=0.0)) == 0.0


def test_time_per_output_token_counts_from_the_first_one() -> None:
    assert tpot_s(BASIS) == pytest.approx(0.1)  # 1 s for 10 further ones
    assert tpot_s(served(output_tokens=1)) == 0.0
    assert tpot_s(served(finished_at=None)) == 0.0
    assert tpot_s(served(first_token_at=None)) == 0.0


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, True),
        ({"first_token_at": 12.0, "finished_at": 13.0}, True),  # 2 s
        ({"first_token_at": 12.001, "finished_at": 13.0}, False),
        ({"finished_at": 12.01}, False),  # 101 ms a token
        ({"finished_at": 99.0, "output_tokens": 1}, True),  # there is no further token
        ({"finished_at": None}, False),
        ({"first_token_at": None, "finished_at": None}, False),
    ],
)
def test_the_fixed_objective_is_2_s_and_100_ms(changed: dict[str, object], met: bool) -> None:
    assert FIXED.met(served(**changed)) is met


@pytest.mark.parametrize(("ttft", "met"), [(1.19, True), (1.21, False)])
def test_the_scaled_objective_adds_twice_the_prefill_alone(ttft: float, met: bool) -> None:
    one = served(first_token_at=10.0 + ttft, finished_at=10.0 + ttft + 0.5)
    assert SCALED.met(one) is met
    assert not SCALED.met(served(first_token_at=10.1, finished_at=10.62))  # 52 ms a token


def test_an_objective_of_ones_own() -> None:
    assert Objective(ttft_s=0.5, tpot_s=1.0, solo_factor=5.0).met(BASIS)
    assert not Objective(ttft_s=0.5, tpot_s=1.0, solo_factor=4.9).met(BASIS)


# --- quantiles


def test_quantiles_are_values_that_were_measured() -> None:
    """By nearest rank: the least value that so large a share does not exceed."""
    ten = [float(value) for value in range(1, 11)]
    assert (quantile(ten, 0.5), quantile(ten, 0.9), quantile(ten, 0.99)) == (5.0, 9.0, 10.0)
    hundred = [float(value) for value in range(1, 101)]
    assert (quantile(hundred, 0.5), quantile(hundred, 0.9), quantile(hundred, 0.99)) == (50.0, 90.0, 99.0)
    assert (quantile(ten, 0.0), quantile(ten, 1.0)) == (1.0, 10.0)
    assert (quantile([4.0], 0.5), quantile([4.0], 0.99)) == (4.0, 4.0)
    assert quantile([], 0.5) is None


# --- all of them


FIVE = (
    served(hit_tokens=400, best_hit_tokens=600),
    served(id="late", arrived_at=13.0, first_token_at=16.0, finished_at=16.5, placed_at=15.0, retries=1),
    served(
        id="long", arrived_at=10.0, input_tokens=40_000, first_token_at=15.0, finished_at=15.5, placed_at=10.0,
        output_tokens=1, hit_tokens=20_000, best_hit_tokens=20_000, solo_s=2.0,
    ),
    served(id="full", placed_at=None, first_token_at=None, finished_at=None, engine=-1, refused="overloaded"),
    served(id="broken", finished_at=None, retries=1, refused="broken_off", hit_tokens=999),
)  # fmt: skip
"""TTFT 1, 3 and 5 s of those that were answered; the last arrival is at 13."""


def test_what_five_requests_come_to() -> None:
    found = measure(replayed(*FIVE))
    assert (found.policy, found.requests, found.refused, found.retried, found.preemptions) == ("p", 5, 2, 2, 7)
    assert (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p90_s, found.ttft_p99_s) == (3.0, 3.0, 5.0, 5.0)
    assert (found.ttft_long_p90_s, found.ttft_long_max_s) == (5.0, 5.0)
    assert found.tpot_mean_ms == pytest.approx((100 + 50) / 2)  # the long one has a single token
    assert found.goodput == pytest.approx(1 / 5)  # of all, the refused ones included: the first only
    assert found.goodput_scaled == pytest.approx(1 / 5)  # the long one: 5 s are 1 + 2 × 2
    assert found.goodput_tokens == pytest.approx(1_011 / (4 * 1_011 + 40_001))
    assert found.hit_rate == pytest.approx(20_400 / 42_000)
    assert found.best_hit_rate == pytest.approx(20_600 / 42_000)
    assert found.late == pytest.approx((1_000 + 20_000) / (600 + 1_000 + 20_000))  # first tokens after 13
    assert found.drain_s == 7.0
    assert found.duplicate_share == 0.25
    assert found.imbalance == 1.5  # 3 s over the mean of 2
    assert found.longest_wait_s == 2.0


def test_nobody_answered() -> None:
    found = measure(replayed(FIVE[3], busy_s=(0.0, 0.0)))
    assert (found.requests, found.refused) == (1, 1)
    assert found.ttft_mean_s is found.ttft_p50_s is found.ttft_long_p90_s is found.ttft_long_max_s is None
    assert found.tpot_mean_ms is None
    assert (found.goodput, found.goodput_tokens, found.hit_rate, found.late) == (0.0, 0.0, 0.0, 0.0)
    assert (found.imbalance, found.longest_wait_s) == (1.0, 0.0)


def test_prompts_are_long_from_32768_tokens_on() -> None:
    just, not_yet = served(input_tokens=32_768, first_token_at=14.0), served(input_tokens=32_767, first_token_at=19.0)
    found = measure(replayed(just, not_yet))
    assert (found.ttft_long_p90_s, found.ttft_long_max_s) == (4.0, 4.0)


def test_a_replay_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no requests were replayed"):
        measure(replayed())
