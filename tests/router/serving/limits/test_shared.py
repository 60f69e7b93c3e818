"""Several gateways and one real Redis, whose clock the test moves."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import pytest
from redis.asyncio import Redis as Client
from redis.crc import key_slot

from router.core import Caller, Usage
from router.errors import BudgetExceeded, RateLimited
from router.serving.limits.errands import Settle, Take, Used
from router.store.windows import read_window
from tests.router.serving.limits.gateways import Gateways
from tests.router.serving.limits.stand import CALLER, MONDAY, PARTS, limit, money, outcome

PREFIX = "warmroute:{ten_a}:"


async def counted(client: Client) -> dict[str, int]:
    """All counters of the tenant."""
    names = [name async for name in client.scan_iter(PREFIX + "lim_*")]
    return {name.decode().removeprefix(PREFIX): int(await client.get(name)) for name in names}


async def test_what_one_gateway_takes_another_cannot(gateways: Gateways, client: Client) -> None:
    one, two = await gateways.start(2, limit("requests", 2), limit("parallel", 2, ""), limit("tokens", 1000))
    first = await one.begin(100, 200)
    await two.begin(100, 200)
    for stand in (one, two):
        with pytest.raises(RateLimited):
            await stand.begin(0, 0)
    one.end(first, outcome(Usage(100, 50, 0)))
    await one.told()
    minute = f":{int(MONDAY)}"
    assert await counted(client) == {
        f"lim_requests_key_a{minute}": 2, "lim_parallel_key_a:0": 1, f"lim_tokens_key_a{minute}": 450,
    }  # fmt: skip
    assert two.used("requests") == [2]


async def test_200_at_once_over_three_gateways_are_exactly_100(gateways: Gateways, client: Client) -> None:
    stands = await gateways.start(3, money("1.00"))
    asked = await asyncio.gather(*[stands[n % 3].begin(0, 1000) for n in range(200)], return_exceptions=True)
    assert sum(isinstance(each, BudgetExceeded) for each in asked) == 100
    assert sum(not isinstance(each, Exception) for each in asked) == 100
    assert list((await counted(client)).values()) == [PARTS]


async def test_a_reservation_is_all_or_nothing(gateways: Gateways, client: Client) -> None:
    (stand,) = await gateways.start(1, limit("requests", 9), limit("parallel", 0, ""), limit("tokens", 5, "1d"))
    with pytest.raises(RateLimited, match="at once"):
        await stand.begin()
    await stand.told()
    assert await counted(client) == {}


async def test_what_is_refused_at_the_second_step_gives_back_the_first(gateways: Gateways, client: Client) -> None:
    (stand,) = await gateways.start(1, limit("requests", 9), limit("parallel", 9, ""), limit("tokens", 5))
    with pytest.raises(RateLimited, match="tokens"):
        await stand.begin(10, 0)
    await stand.told()
    assert await counted(client) == {}


async def test_the_reservations_of_a_dead_gateway_come_back_with_its_leases(gateways: Gateways, client: Client) -> None:
    dead, alive = await gateways.start(
        2, limit("requests", 2, "1d"), limit("parallel", 2, ""), limit("tokens", 1000, "1d"), money("1"), lease_s=10.0
    )
    await dead.begin(100, 200)
    mine = await alive.begin(100, 200)
    for _ in range(3):
        await gateways.move(3)
        await alive.renew()
    with pytest.raises(RateLimited):
        await alive.begin()
    await gateways.move(2)
    again = await alive.begin(100, 200)  # 11 s after the last word of the dead one
    assert (await counted(client))["lim_parallel_key_a:0"] == 2
    for hold in (mine, again):
        alive.end(hold, outcome(Usage(1, 1, 0)))
    await alive.told()
    day = f":{int(MONDAY)}"
    assert await counted(client) == {
        f"lim_requests_key_a{day}": 2, f"lim_tokens_key_a{day}": 4,
        f"lim_money_key_a:{read_window('month').span(MONDAY)[0]}": 2 * (10**6 + 10**7),
    }  # fmt: skip


async def test_a_gateway_that_lives_gives_back_what_a_dead_one_held_though_nobody_asks(
    gateways: Gateways, client: Client
) -> None:
    dead, alive = await gateways.start(2, limit("parallel", 5, ""), lease_s=10.0)
    await dead.begin()
    alive.end(await alive.begin())
    await gateways.move(11)
    await alive.renew()
    assert await counted(client) == {}
    await gateways.move(121)
    for _ in range(2):  # nothing is left, and then nothing is asked any more
        await alive.renew()
    assert (await client.exists(PREFIX + "holds", PREFIX + "leases"), alive.counters._open) == (0, {})


async def test_a_request_longer_than_its_lease_keeps_it_by_renewals(gateways: Gateways, client: Client) -> None:
    (stand,) = await gateways.start(1, limit("parallel", 1, ""), lease_s=10.0)
    hold = await stand.begin()
    for _ in range(20):
        await gateways.move(9)
        await stand.renew()
        with pytest.raises(RateLimited):
            await stand.begin()
    stand.end(hold)
    await stand.begin()


# -- said twice, too late, or in the wrong order


async def test_an_end_that_is_told_twice_counts_once(gateways: Gateways, client: Client) -> None:
    (stand,) = await gateways.start(1, limit("tokens", 1000), limit("parallel", 3, ""))
    hold = await stand.begin(10, 10)
    other = await stand.begin(0, 0)
    used = [Used("lim_tokens_key_a", int(MONDAY), int(MONDAY) + 60, 7)]
    await stand.say(*[Settle("ten_a", hold.name, used) for _ in range(3)])
    assert await counted(client) == {f"lim_tokens_key_a:{int(MONDAY)}": 7, "lim_parallel_key_a:0": 1}
    stand.end(other)


async def test_an_end_that_comes_before_the_beginning_undoes_it(gateways: Gateways, client: Client) -> None:
    """A command that was given up, and is carried out when Redis goes on."""
    (stand,) = await gateways.start(1, limit("parallel", 3, ""))
    hold = stand.limiter.hold(CALLER)
    assert hold is not None
    hold.name = "late.1"
    await stand.say(Settle("ten_a", hold.name, []))
    take = Take(hold, [(hold.limits.parallel[0], 1)], MONDAY, lease_s=10, otherwise=lambda *_: None)
    await stand.say(take)
    assert (take.future.done(), hold.taken, await counted(client)) == (True, [], {})


async def test_an_end_after_the_lease_is_counted_in_the_window_of_the_beginning(
    gateways: Gateways, client: Client
) -> None:
    slow, other = await gateways.start(2, limit("tokens", 1000, "1m"), limit("parallel", 1, ""), lease_s=10.0)
    hold = await slow.begin(100, 100)
    await gateways.move(3 * 3600)
    other.end(await other.begin(5, 5), outcome(Usage(5, 5, 0)))
    slow.end(hold, outcome(Usage(100, 30, 0)))
    for stand in (slow, other):
        await stand.told()
    now = int(MONDAY)
    assert await counted(client) == {f"lim_tokens_key_a:{now}": 130, f"lim_tokens_key_a:{now + 3 * 3600}": 10}


async def test_a_client_that_leaves_before_it_is_answered_holds_nothing(gateways: Gateways, client: Client) -> None:
    (stand,) = await gateways.start(1, limit("requests", 5), limit("parallel", 5, ""))
    hold = stand.limiter.hold(CALLER)
    assert hold is not None
    decided = stand.limiter.admit(hold)
    assert decided is not None
    decided.cancel()
    stand.end(hold, outcome(status=499, finish="client_gone", instance=None))
    await stand.told()
    assert await counted(client) == {}


# -- windows


@pytest.mark.parametrize(
    ("window", "at"),
    [
        ("1m", "2026-11-30T14:19:59+00:00"), ("1h", "2026-11-30T15:00:00+00:00"), ("1d", "2026-12-31T23:59:59+00:00"),
        ("1d+05:30", "2026-11-30T18:29:59+00:00"), ("1d+05:30", "2026-11-30T18:30:00+00:00"),
        ("30d", "2026-11-30T14:19:59+00:00"), ("month", "2028-02-29T23:59:59+00:00"),
        ("month", "2027-01-01T00:00:00+00:00"), ("month-08:00", "2027-01-01T07:59:59+00:00"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ahead_s", [0, 3, -3, 3600])
async def test_redis_finds_the_window_by_its_own_clock(
    gateways: Gateways, client: Client, window: str, at: str, ahead_s: int
) -> None:
    """`ahead_s`: how far the gateway's clock is ahead."""
    now = int(datetime.fromisoformat(at).timestamp())
    (stand,) = await gateways.start(1, limit("requests", 5, window))
    await gateways.move(now - MONDAY)
    stand.now += ahead_s
    await stand.begin()
    begins, ends = read_window(window).span(now)
    assert await counted(client) == {f"lim_requests_key_a:{begins}": 1}
    (meter,) = stand.book
    assert (meter.start, meter.ends) == (begins, ends)
    assert ends - now < await client.ttl(f"{PREFIX}lim_requests_key_a:{begins}") <= ends - now + 86401


async def test_nothing_is_kept_for_ever(gateways: Gateways, client: Client) -> None:
    (stand,) = await gateways.start(1, limit("requests", 5), limit("parallel", 5, ""), money("1"))
    stand.end(await stand.begin(1, 1), outcome(Usage(1, 1, 0)))
    await stand.begin(1, 1)
    await stand.told()
    names = [name async for name in client.scan_iter("warmroute:*")]
    assert len(names) == 6
    assert all([await client.ttl(name) > 0 for name in names])


async def test_large_budgets_are_counted_to_the_last_part(gateways: Gateways, client: Client) -> None:
    (stand,) = await gateways.start(1, money("9000000"))
    for _ in range(3):
        stand.end(await stand.begin(0, 10**11 + 1), outcome(Usage(0, 10**11 + 1, 0)))
    await stand.told()
    assert list((await counted(client)).values()) == [3 * (10**11 + 1) * 10**7]


# -- what is asked of Redis


async def test_each_step_is_one_command_and_nothing_is_asked_where_nothing_limits(
    gateways: Gateways, client: Client
) -> None:
    async def commands() -> int:
        stats: dict[str, Any] = await client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))

    (stand,) = await gateways.start(1, limit("tokens", 1000), limit("requests", 99, owner="key_b"))
    before = await commands()
    assert stand.limiter.hold(Caller("ten_c", "proj_c", "key_c")) is None
    assert await commands() == before
    stand.end(await stand.begin(1, 1), outcome(Usage(1, 1, 0)))
    await stand.told()
    assert await commands() == before + 2
    stand.end(await stand.begin(caller=Caller("ten_b", "proj_b", "key_b")))
    await stand.told()
    assert await commands() == before + 4


async def test_all_that_a_tenant_needs_is_in_one_slot_of_a_cluster(gateways: Gateways, client: Client) -> None:
    (stand,) = await gateways.start(1, limit("requests", 9), limit("parallel", 9, ""), money("1", owner="ten_a"))
    stand.end(await stand.begin(1, 1), outcome(Usage(1, 1, 0)))
    await stand.begin(1, 1)
    await stand.told()
    names = [name async for name in client.scan_iter("warmroute:*")]
    slots = {key_slot(name) for name in names if name != b"warmroute:gateways"}
    assert (len(names), slots) == (6, {key_slot(b"ten_a")})
