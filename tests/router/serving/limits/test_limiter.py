"""A request and its limits, counted in one process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.core import OPEN, Caller, Usage
from router.errors import BudgetExceeded, RateLimited, StoreUnavailable, WarmrouteError
from router.serving.limits.book import LimitBook
from router.serving.limits.counters import InThisProcess
from router.serving.limits.limiter import Limiter
from tests.router.serving.limits.stand import CALLER, MONDAY, PARTS, Stand, limit, money, outcome


async def test_requests_in_a_window() -> None:
    stand = Stand(limit("requests", 2))
    stand.now = MONDAY + 45.5
    for _ in range(2):
        stand.end(await stand.begin())
    with pytest.raises(RateLimited) as refused:
        await stand.begin()
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (429, "rate_limit_exceeded", 14.5)
    assert str(refused.value) == "You have reached the limit of 2 requests per minute of this API key."
    stand.now = MONDAY + 60
    await stand.begin()
    assert stand.used() == [1]


async def test_requests_at_once() -> None:
    stand = Stand(limit("parallel", 2, ""))
    first, _ = [await stand.begin() for _ in range(2)]
    with pytest.raises(RateLimited, match="2 requests at once") as refused:
        await stand.begin()
    assert refused.value.retry_after_s == 1.0
    stand.end(first)
    await stand.begin()
    assert stand.used() == [2]


async def test_tokens_are_reserved_and_then_counted_as_they_were() -> None:
    stand = Stand(limit("tokens", 1000, weights={"cache_read": 0.1}))
    hold = await stand.begin(100, 200)
    assert stand.used() == [300]
    stand.end(hold, outcome(Usage(100, 50, 60)))
    assert stand.used() == [40 + 6 + 50]


async def test_two_reservations_cannot_pass_where_one_fits() -> None:
    stand = Stand(limit("tokens", 1000))
    hold = await stand.begin(100, 500)
    with pytest.raises(RateLimited, match="tokens per minute"):
        await stand.begin(100, 500)
    stand.end(hold, outcome(Usage(100, 10, 0)))
    await stand.begin(100, 500)


async def test_what_can_never_fit_is_not_to_be_tried_again() -> None:
    stand = Stand(limit("tokens", 1000))
    with pytest.raises(RateLimited, match="This request alone is more than the limit of 1000 tokens") as refused:
        await stand.begin(900, 200)
    assert (refused.value.final, refused.value.retry_after_s) == (True, None)


async def test_a_budget() -> None:
    stand = Stand(money("0.01"))
    hold = await stand.begin(1000, 900)  # 0.001 + 0.009
    with pytest.raises(BudgetExceeded) as refused:
        await stand.begin(0, 1)
    assert (refused.value.final, refused.value.retry_after_s) == (True, None)
    assert str(refused.value) == "This request does not fit into the budget of this API key per month any more."
    stand.end(hold, outcome(Usage(1000, 100, 500)))
    assert stand.used() == [int(0.00155 * PARTS)]


async def test_a_budget_that_is_there_again_soon_may_be_waited_for() -> None:
    stand = Stand(money("0.01", "1d"))
    await stand.begin(0, 1000)
    stand.now = MONDAY + 86400 - 20
    with pytest.raises(BudgetExceeded) as refused:
        await stand.begin(0, 1000)
    assert (refused.value.final, refused.value.retry_after_s) == (False, 20.0)


async def test_money_of_another_currency_is_not_counted() -> None:
    stand = Stand(limit("money", 1, "1d", currency="EUR"))
    stand.end(await stand.begin(1000, 1000), outcome(Usage(1000, 1000, 0)))
    assert stand.used() == [0]


@pytest.mark.parametrize("full", range(4))
async def test_all_limits_must_pass_or_nothing_is_taken(full: int) -> None:
    amounts = [10**6] * 4
    amounts[full] = 0
    requests, parallel, tokens, spend = amounts
    stand = Stand(
        limit("requests", requests), limit("requests", 9, "1h", owner="proj_a"), limit("parallel", parallel, ""),
        limit("tokens", tokens, owner="ten_a"), money(str(spend), owner="proj_a"),
    )  # fmt: skip
    with pytest.raises(WarmrouteError):
        await stand.begin(10, 10)
    assert stand.used() == [0] * 5
    assert sum(stand.limiter.refused.values()) == 1


async def test_the_wait_is_until_the_last_of_the_full_windows_ends() -> None:
    stand = Stand(limit("requests", 1), limit("requests", 1, "1h", owner="ten_a"))
    await stand.begin()
    with pytest.raises(RateLimited, match="1 requests per hour of your organization") as refused:
        await stand.begin()
    assert refused.value.retry_after_s == 3600.0


async def test_other_keys_of_a_tenant_share_its_limits_and_not_each_others() -> None:
    stand = Stand(limit("requests", 1), limit("requests", 3, owner="ten_a"))
    other = Caller(tenant="ten_a", project="proj_b", key="key_b")
    await stand.begin()
    await stand.begin(caller=other)
    await stand.begin(caller=other)
    with pytest.raises(RateLimited, match="your organization"):
        await stand.begin(caller=other)
    with pytest.raises(RateLimited):
        await stand.begin()


@pytest.mark.parametrize(
    ("ended", "used"),
    [
        ({"finish": "upstream_failed", "status": 502, "input_tokens": 100}, [1, 0, 0]),
        ({"finish": "client_gone", "status": 499, "input_tokens": 100, "instance": None}, [1, 0, 0]),
        ({"finish": "client_gone", "status": 499, "input_tokens": 100, "events": 3}, [1, 0, 103]),
        ({"usage": Usage(120, 30, 0)}, [1, 0, 150]),
    ],
)
async def test_however_a_request_ends_it_is_settled(ended: dict[str, Any], used: list[int]) -> None:
    stand = Stand(limit("requests", 9), limit("parallel", 9, ""), limit("tokens", 1000))
    stand.end(await stand.begin(100, 50), outcome(**ended))
    assert stand.used() == used


async def test_without_a_limit_of_its_own_an_answer_is_as_long_as_those_before() -> None:
    stand = Stand(limit("tokens", 10**6))
    hold = await stand.begin(100, None)
    assert stand.used() == [100 + 1024]
    stand.end(hold, outcome(Usage(100, 16, 0)))
    for _ in range(10):
        stand.end(await stand.begin(100, None, choices=2), outcome(Usage(100, 32, 0)))
    before = stand.used()[0]
    await stand.begin(100, None, choices=3)
    assert stand.used() == [before + 100 + 3 * 16]


async def test_answers_that_their_client_limited_or_left_teach_nothing() -> None:
    stand = Stand(limit("tokens", 10**6))
    for _ in range(20):
        stand.end(await stand.begin(0, 5), outcome(Usage(0, 5, 0)))
        stand.end(await stand.begin(0, None), outcome(Usage(0, 1, 0), finish="client_gone"))
    before = stand.used()[0]
    await stand.begin(0, None)
    assert stand.used() == [before + 1024]


async def test_no_answer_is_longer_than_the_model_can_hold() -> None:
    stand = Stand(limit("tokens", 10**6))
    await stand.begin(100, 10**9, model_tokens=4096)
    assert stand.used() == [4096]
    await stand.begin(5000, None, model_tokens=4096)
    assert stand.used() == [4096 + 5000]


async def test_a_request_belongs_to_the_window_it_began_in() -> None:
    stand = Stand(limit("tokens", 1000, "1h"), limit("parallel", 5, ""))
    hold = await stand.begin(100, 100)
    stand.now += 3 * 3600
    other = await stand.begin(10, 10)
    stand.end(hold, outcome(Usage(100, 700, 0)))
    assert stand.used() == [20, 1]
    stand.end(other, outcome(Usage(10, 1, 0)))
    assert stand.used() == [11, 0]
    assert stand.counters.unwritten == {  # type: ignore[attr-defined]
        ("lim_tokens_key_a", int(MONDAY)): 800,
        ("lim_tokens_key_a", int(MONDAY) + 3 * 3600): 11,
    }


async def test_a_clock_that_is_set_back_gives_nobody_a_second_window() -> None:
    stand = Stand(limit("requests", 1))
    await stand.begin()
    stand.now -= 30
    with pytest.raises(RateLimited):
        await stand.begin()


async def test_200_at_once_of_a_hundredth_each_are_exactly_100() -> None:
    stand = Stand(money("1.00"))
    asked = await asyncio.gather(*[stand.begin(0, 1000) for _ in range(200)], return_exceptions=True)
    refused = [each for each in asked if isinstance(each, BudgetExceeded)]
    assert len(refused) == 100
    assert stand.used() == [PARTS]


async def test_who_has_no_limits_has_no_hold() -> None:
    stand = Stand(limit("requests", 1))
    assert stand.limiter.hold(Caller()) is None
    assert stand.limiter.hold(Caller(tenant="ten_b", key="key_b")) is None
    assert stand.limiter.hold(CALLER) is not None


async def test_money_is_charged_as_the_ledger_bills_it() -> None:
    """Where an engine does not say what it had cached, and `ledger.unknown_cached` is `predicted`."""
    stand = Stand(money("10"))
    stand.limiter._unknown_cached = "predicted"
    (meter,) = stand.book
    hold = await stand.begin(1_000_000)
    stand.limiter.settle(hold, outcome(Usage(1_000_000, 0, None), predicted_hit_tokens=900_000))
    assert meter.used == PARTS * 19 // 100  # 0.1 at 1, 0.9 at 0.1
    hold = await stand.begin(1_000_000)
    stand.limiter.settle(hold, outcome(Usage(1_000_000, 0, 0), predicted_hit_tokens=900_000))
    assert meter.used == PARTS * 119 // 100


async def test_nobody_is_let_in_before_the_limits_are_known() -> None:
    limiter = Limiter(LimitBook(), InThisProcess())
    with pytest.raises(StoreUnavailable):
        limiter.hold(CALLER)
    assert limiter.hold(OPEN) is None
