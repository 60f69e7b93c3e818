"""Redis frozen, closed, slow, or forbidding things; three gateways go on, and what they did is counted afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis as Client

from router.core import Usage
from router.errors import BudgetExceeded, RateLimited, StoreUnavailable
from router.serving.limits import line
from router.serving.limits.local_share import LocalShare
from router.serving.limits.shared import OverRedis
from router.store.limits import Limit
from tests.router.serving.limits.frozen import frozen
from tests.router.serving.limits.gateways import PATIENT_S, Gateways, SharedStand
from tests.router.serving.limits.stand import MONDAY, SharedClock, limit, money, outcome
from tests.servers import Redis

PREFIX = "warmroute:{ten_a}:"
SHORT_S = 0.05


@pytest.fixture
async def gateways(redis_url: str, clock: SharedClock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateways]:
    monkeypatch.setattr(line, "BEAT_S", 0.05)
    async with Gateways(redis_url, clock) as gateways:
        yield gateways


async def mode_of(stand: SharedStand, mode: str) -> None:
    for _ in range(1_000):
        if stand.limiter.state() == {"mode": mode}:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"it is never {mode}")


async def fallen(stands: Sequence[SharedStand]) -> None:
    for stand in stands:
        await mode_of(stand, "local")


async def up_again(stands: Sequence[SharedStand]) -> None:
    for stand in stands:
        await mode_of(stand, "redis")
        await stand.told()


async def let_in(stands: Sequence[SharedStand], each: int, *how: int) -> list[Any]:
    """Everybody tries so often; holds of those that were let in."""
    found = []
    for _ in range(each):
        for stand in stands:
            try:
                found.append((stand, await stand.begin(*how)))
            except (RateLimited, BudgetExceeded):
                pass
    return found


async def started(gateways: Gateways, *limits: Limit) -> list[SharedStand]:
    """Three, each of which has heard of the limits."""
    stands = await gateways.start(3, *limits)
    for stand in stands:
        stand.counters._line._timeout_s = 5.0  # till they have heard, however slow the machine
    for _ in range(2):
        for stand in stands:
            stand.end(await stand.begin(1, 0), outcome(Usage(1, 0, 0)))
            await stand.told()
    for stand in stands:
        stand.counters._line._timeout_s = SHORT_S
    return stands


async def count(client: Client, name: str) -> int:
    return int(await client.get(PREFIX + name) or 0)


@pytest.mark.parametrize("measure", ["requests", "tokens", "money"])
async def test_what_was_left_is_shared(gateways: Gateways, client: Client, redis_url: str, measure: str) -> None:
    amounts = {"requests": 30, "tokens": 30, "money": 30 * 10**6}
    currency = {"currency": "USD"} if measure == "money" else {}
    stands = await started(gateways, limit(measure, amounts[measure], "1d", **currency))
    with frozen(redis_url):
        await fallen(stands)
        holds = await let_in(stands, 30, 1, 0)
        assert 24 - 3 <= len(holds) <= 24 + 6  # some have heard last when less was used
        for stand, hold in holds:
            stand.end(hold, outcome(Usage(1, 0, 0)))
    await up_again(stands)
    unit = 10**6 if measure == "money" else 1
    assert await count(client, f"lim_{measure}_key_a:{int(MONDAY)}") == (6 + len(holds)) * unit


async def test_a_window_that_begins_meanwhile_is_divided_exactly(
    gateways: Gateways, client: Client, redis_url: str
) -> None:
    stands = await started(gateways, limit("requests", 11))
    with frozen(redis_url):
        await fallen(stands)
        for stand in stands:
            stand.now += 60
        holds = await let_in(stands, 11)
        assert len(holds) == 11
        for stand, hold in holds:
            stand.end(hold)
    await up_again(stands)
    assert await count(client, f"lim_requests_key_a:{int(MONDAY) + 60}") == 11


async def test_places_are_shared_and_given_back(gateways: Gateways, client: Client, redis_url: str) -> None:
    stands = await started(gateways, limit("parallel", 7, ""))
    with frozen(redis_url):
        await fallen(stands)
        holds = await let_in(stands, 7)
        assert len(holds) == 7
        for stand, hold in holds[:3]:
            stand.end(hold)
        assert len(await let_in(stands, 7)) == 3
    await up_again(stands)


async def test_those_that_ran_all_the_time_are_still_counted_after_it(
    gateways: Gateways, client: Client, redis_url: str
) -> None:
    stands = await started(gateways, limit("parallel", 7, ""), limit("tokens", 10_000, "1d"))
    holds = [(stand, await stand.begin(100, 0)) for stand in stands]
    with frozen(redis_url):
        await fallen(stands)
        stands[0].end(holds[0][1], outcome(Usage(50, 1, 0)))
    await up_again(stands)
    assert await count(client, "lim_parallel_key_a:0") == 2
    assert await count(client, f"lim_tokens_key_a:{int(MONDAY)}") == 6 + 51 + 200
    for stand, hold in holds[1:]:
        stand.end(hold, outcome(Usage(50, 1, 0)))
        await stand.told()
    assert await count(client, "lim_parallel_key_a:0") == 0
    assert await count(client, f"lim_tokens_key_a:{int(MONDAY)}") == 6 + 3 * 51


async def test_refuse_and_allow(gateways: Gateways, client: Client, redis_url: str) -> None:
    stands = await started(
        gateways,
        limit("requests", 100, "1d", without_redis="allow"),
        limit("tokens", 100, "1d", owner="ten_a", without_redis="refuse"),
    )
    only_requests = limit("requests", 8, "1d", without_redis="allow")
    with frozen(redis_url):
        await fallen(stands)
        with pytest.raises(StoreUnavailable) as refused:
            await stands[0].begin(1, 0)
        assert (refused.value.status, refused.value.retry_after_s) == (503, 2.0)
        for stand in stands:
            stand.learn(limit("tokens", 0, owner="ten_a", is_archived=True), only_requests)
        holds = await let_in(stands, 10)
        assert len(holds) == 30
        for stand, hold in holds:
            stand.end(hold)
    await up_again(stands)
    assert await count(client, f"lim_requests_key_a:{int(MONDAY)}") == 6 + 30


async def test_a_budget_nobody_has_heard_of_is_closed(gateways: Gateways, redis_url: str) -> None:
    stands = await gateways.start(2, money("1"), timeout_s=SHORT_S)
    with frozen(redis_url):
        await fallen(stands)
        with pytest.raises(StoreUnavailable):
            await stands[0].begin(1, 1)


async def test_who_waits_when_redis_stops_is_decided_here(gateways: Gateways, client: Client, redis_url: str) -> None:
    """Each of them once, although Redis will find their questions when it goes on."""
    stands = await started(gateways, limit("requests", 1000, "1d"), limit("parallel", 1000, ""))
    with frozen(redis_url):
        asked = await asyncio.gather(*[stand.begin() for stand in stands for _ in range(40)])
        assert {stand.limiter.state()["mode"] for stand in stands} == {"local"}
        for number, hold in enumerate(asked):
            stands[number // 40].end(hold)
    await up_again(stands)
    assert await count(client, f"lim_requests_key_a:{int(MONDAY)}") == 6 + 120
    assert await count(client, "lim_parallel_key_a:0") == 0


async def test_a_gateway_that_starts_without_redis_works_and_joins_later(
    redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "BEAT_S", 0.05)
    redis.stop()
    try:
        stand = alone(redis_url, limit("requests", 2, "30d"))
        await stand.counters.start()
        stand.end(await stand.begin())
        assert stand.limiter.state() == {"mode": "local"}
    finally:
        redis.start()
    await up_again([stand])
    await stand.begin()
    with pytest.raises(RateLimited):
        await stand.begin()
    await stand.counters.aclose()


async def test_what_redis_has_not_heard_is_bounded(
    gateways: Gateways, client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.serving.limits.shared._UNTOLD", 5)
    stands = await started(gateways, limit("requests", 1000, "1d"))
    holds = [(stand, await stand.begin()) for stand in stands for _ in range(20)]
    with frozen(redis_url):
        await fallen(stands)
        for stand, hold in holds:
            stand.end(hold)
        assert [stand.limiter.figures()["untold"] for stand in stands] == [6, 6, 6]
    await up_again(stands)
    assert [stand.limiter.figures()["untold"] for stand in stands] == [0, 0, 0]
    await gateways.move(11)  # the leases of those that were told as a sum
    await stands[0].begin()
    assert await count(client, f"lim_requests_key_a:{int(MONDAY)}") == 6 + 60 + 1


# -- a Redis that forbids things


@pytest.mark.parametrize("blocked", ["script", "evalsha"])
async def test_scripts_need_neither_script_load_nor_evalsha(
    redis_url: str, clock: SharedClock, client: Client, blocked: str
) -> None:
    await client.acl_setuser("narrow", enabled=True, nopass=True, keys=["*"], commands=["+@all", f"-{blocked}"])
    url = redis_url.replace("redis://", "redis://narrow:any@")
    async with Gateways(url, clock) as gateways:
        (stand,) = await gateways.start(1, limit("requests", 2))
        for _ in range(2):
            await stand.begin()
        with pytest.raises(RateLimited):
            await stand.begin()
        assert stand.limiter.state() == {"mode": "redis"}
    await client.acl_deluser("narrow")


async def test_a_redis_that_forbids_scripts_is_away(redis_url: str, client: Client) -> None:
    await client.acl_setuser("narrow", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-eval", "-evalsha"])
    stand = alone(redis_url.replace("redis://", "redis://narrow:any@"), limit("requests", 1))
    await stand.counters.start()
    await stand.begin()
    assert stand.limiter.state() == {"mode": "local"}
    await stand.counters.aclose()
    await client.acl_deluser("narrow")


def alone(url: str, *limits: Limit) -> SharedStand:
    """With the time as it is."""
    stand = SharedStand(*limits)
    stand.now = time.time()
    stand.counters = stand.limiter._counters = OverRedis(url, timeout_s=PATIENT_S, clock=lambda: stand.now)
    return stand


# -- shares


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("left", [0, 1, 2, 5, 600, 10**18 + 1])
def test_shares_are_all_of_it(count: int, left: int) -> None:
    shares = []
    for number in range(count):
        local = LocalShare()
        local.begin((count, number))
        shares.append(local.share(left))
    assert sum(shares) == left
    assert max(shares) - min(shares) <= 1


def test_nothing_is_left_of_what_is_overdrawn() -> None:
    assert LocalShare().share(-5) == 0
