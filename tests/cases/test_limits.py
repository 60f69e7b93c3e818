"""Budgets under a crowd, windows that roll over, and a shared store that stops: several gateways on one Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from redis.asyncio import Redis as Client

from router.core import Prompt, Usage
from router.errors import RateLimited
from router.serving.limits import line
from router.serving.limits.opening import open_limits
from router.serving.pricing import Price, Tokens
from router.store.database import Database
from router.store.limits import Limit, used_in
from router.store.windows import read_window
from router.telemetry import Telemetry
from tests.cases.stand import case_input
from tests.flows.site import until
from tests.router.serving.limits.frozen import frozen
from tests.router.serving.limits.gateways import Gateways, SharedStand
from tests.router.serving.limits.stand import (
    CALLER,
    MONDAY,
    PARTS,
    SharedClock,
    Stand,
    limit,
    money,
    outcome,
    price,
    with_clock_of_a_test,
)
from tests.router.serving.stand import EngineSide, FakePrompts
from tests.router.serving.stand import Stand as Gateway
from tests.servers import Redis

RECOVERED_WITHIN_S = 2.0
TIMEOUT_S = 0.05


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    async with Client.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def gateways(redis_url: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateways]:
    with_clock_of_a_test(monkeypatch)
    async with Gateways(redis_url, SharedClock(client)) as gateways:
        yield gateways


async def counted(client: Client) -> dict[str, Decimal]:
    """What was spent, by the first second of the window."""
    names = [name.decode() async for name in client.scan_iter("warmroute:{ten_a}:lim_*")]
    return {name.rpartition(":")[2]: Decimal(int(await client.get(name))) / PARTS for name in names}


# --- FC-85: https://github.com/BerriAI/litellm/issues/34732


class TenTokens(FakePrompts):
    async def prepare(self, *_: object, **__: object) -> Prompt:
        return Prompt(tokens=10, known_tokens=0, keys={})


@pytest.mark.parametrize(("spent", "fit"), [(None, 0), ("0.55", 4)])
async def test_a_crowd_cannot_spend_more_than_there_is(
    gateways: Gateways, client: Client, spent: str | None, fit: int
) -> None:
    """The case's own figures leave room for none; with less spent before, as many pass as fit in together."""
    case = case_input("85")
    setup, (call,), (upstream,) = case["setup"], case["client"], case["upstream"]
    dear = price(uncached_input="3750", output="625")
    assert dear.cost(Tokens(uncached_input=10, output=100)) == Decimal(setup["estimated_cost_each"])
    assert dear.cost(Tokens(uncached_input=10, output=4)) == Decimal(setup["actual_cost_each"])
    before = Decimal(spent or setup["spent"])
    decided = asyncio.Event()
    answer = json.dumps({"choices": [], "usage": upstream["usage"]}).encode()

    async def engine(side: EngineSide) -> None:
        await decided.wait()
        await side.whole(answer)

    limiters = await gateways.start(call["replicas"], money(setup["budget"], owner="ten_a"))
    limiters[0].end(await spend(limiters[0], before), costing(before))
    await limiters[0].told()
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(replica(limiter, engine, dear)) for limiter in limiters]
        asked = [asyncio.ensure_future(replicas[n % 3].ask(call["json"])) for n in range(call["concurrent"])]
        while sum(each.done() for each in asked) < call["concurrent"] - fit:
            await asyncio.wait([each for each in asked if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        refused = [each.result() for each in asked if each.done()]
        assert sum(len(each.engine.seen) for each in replicas) <= fit
        decided.set()
        answers = await asyncio.gather(*asked)
    assert {(each.status, each.json["error"]["code"]) for each in refused} == {(429, "budget_exceeded")}
    assert [each.status for each in answers].count(200) == fit
    for limiter in limiters:
        await limiter.told()
    assert list((await counted(client)).values()) == [before + Decimal(setup["actual_cost_each"]) * fit]


@asynccontextmanager
async def replica(limited: SharedStand, engine: Any, dear: Price) -> AsyncIterator[Gateway]:
    gateway = Gateway()
    gateway.prompts = TenTokens()
    limited.limiter._price_of = lambda model, tenant: dear
    try:
        await gateway.start(engine, limiter=limited.limiter, identify=lambda headers: CALLER)
        yield gateway
    finally:
        await gateway.stop()


async def spend(stand: Stand, dollars: Decimal) -> Any:
    return await stand.begin(0, int(dollars * 10**5))


def costing(dollars: str | Decimal) -> Any:
    return outcome(Usage(0, int(Decimal(dollars) * 10**5), 0))  # an answer's token costs 0.00001


# --- FC-87: https://github.com/BerriAI/litellm/issues/34733

ROLLS: Mapping[str, tuple[str, str, float, tuple[float, float]]] = {
    # window, when the two requests begin, how long they take, how far their gateways' clocks are ahead
    "midnight": ("1d", "2026-11-30T23:59:59+00:00", 2, (0, 0)),
    "tenant timezone +05:30": ("1d+05:30", "2026-11-30T18:29:59+00:00", 2, (0, 0)),
    "replica clocks 3 s apart": ("1d", "2026-11-30T23:59:59+00:00", 2, (0, 3)),
    "window = 1 h, request runs 3 h": ("1h", "2026-11-30T12:30:00+00:00", 3 * 3600, (0, 0)),
}


def test_all_variants_of_the_case_are_here() -> None:
    steps = case_input("87")["steps"]
    assert {step["variant"] for step in steps[1:]} == set(ROLLS) - {"midnight"}


@pytest.mark.parametrize("roll", list(ROLLS))
async def test_two_ends_after_the_window_are_both_counted_and_once(
    gateways: Gateways, client: Client, roll: str
) -> None:
    window, begins, takes_s, ahead = ROLLS[roll]
    first = case_input("87")["steps"][0]
    at = datetime.fromisoformat(begins).timestamp()
    stands = await gateways.start(2, money("100", window, owner="ten_a"), lease_s=10.0)
    await gateways.move(at - MONDAY)
    for stand, ahead_s in zip(stands, ahead, strict=True):
        stand.now += ahead_s
    stands[0].end(await spend(stands[0], Decimal(first["spent"])), costing(first["spent"]))
    holds = [await spend(stand, Decimal(1)) for stand in stands]
    await gateways.move(takes_s)
    stands[0].end(await spend(stands[0], Decimal(1)), costing("0.01"))  # somebody has begun the next window
    for stand, hold, cost in zip(stands, holds, first["finish"], strict=True):
        stand.end(hold, costing(cost))
    for stand in stands:
        await stand.told()
    then, now = (read_window(window).span(moment)[0] for moment in (at, at + takes_s))
    assert then < now
    assert await counted(client) == {str(then): Decimal("9.80"), str(now): Decimal("0.01")}


@pytest.mark.parametrize("roll", list(ROLLS))
async def test_one_gateway_counts_the_same_in_its_tables(database: Database, roll: str) -> None:
    window, begins, takes_s, _ = ROLLS[roll]
    first = case_input("87")["steps"][0]
    at = datetime.fromisoformat(begins).timestamp()
    async with open_limits(database, refresh_s=3600) as limiter:
        stand = Stand(money("100", window, owner="ten_a"), counters=limiter._counters)
        stand.now = at
        stand.end(await spend(stand, Decimal(first["spent"])), costing(first["spent"]))
        holds = [await spend(stand, Decimal(1)) for _ in range(2)]
        stand.now += takes_s
        stand.end(await spend(stand, Decimal(1)), costing("0.01"))
        for hold, cost in zip(holds, first["finish"], strict=True):
            stand.end(hold, costing(cost))
    counts = [("lim_money_ten_a", read_window(window).span(moment)[0]) for moment in (at, at + takes_s)]
    used = await used_in(database, counts)
    assert [Decimal(used[each]) / PARTS for each in counts] == [Decimal("9.80"), Decimal("0.01")]


# --- FC-89: https://github.com/BerriAI/litellm/pull/35273


@asynccontextmanager
async def far_away(port: int, delay_s: float) -> AsyncIterator[tuple[str, Callable[[float], None]]]:
    """Redis behind a wire on which every answer takes so much longer; and how to change that."""
    tasks: set[asyncio.Task[None]] = set()
    delays = [delay_s]

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slowly: bool) -> None:
        try:
            while data := await reader.read(65536):
                if slowly:
                    await asyncio.sleep(delays[0])
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        for work in (carry(reader, back, slowly=False), carry(there, writer, slowly=True)):
            tasks.add(asyncio.ensure_future(work))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", lambda delay: delays.__setitem__(0, delay)
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Traffic:
    """The case's requests, by turns over all gateways. `waited`: how many had to wait for Redis at all."""

    def __init__(self, stands: list[SharedStand]) -> None:
        self.stands = stands
        self.sent = self.let_in = self.waited = 0

    async def send(self, count: int) -> None:
        for _ in range(count):
            stand = self.stands[self.sent % len(self.stands)]
            self.sent += 1
            hold = stand.limiter.hold(CALLER)
            assert hold is not None
            try:
                decided = stand.limiter.admit(hold)
                self.waited += decided is not None
                if decided is not None:
                    await decided
            except RateLimited:
                stand.end(hold, outcome(instance=None))
            else:
                self.let_in += 1
                stand.end(hold, outcome(Usage(1, 1, 0)))


def per_minute() -> tuple[Limit, int]:
    (call,) = case_input("89")["client"]
    return limit("requests", call["limit_rpm"], owner="ten_a"), call["limit_rpm"]


async def settled(stands: list[SharedStand], mode: str, within_s: float) -> None:
    async def reached() -> bool:
        return {stand.limiter.state()["mode"] for stand in stands} == {mode}

    await until(reached, what=f"all go by {mode}", seconds=within_s)
    for stand in stands:
        await stand.told()


async def began(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Three gateways, a tenth of the minute's requests sent."""
    found, amount = per_minute()
    stands = await gateways.start(3, found)
    monkeypatch.setattr(line, "BEAT_S", 0.5)
    for stand in stands:
        stand.counters._line._fell.set()  # beats come as often as they do from now on
    traffic = Traffic(stands)
    await traffic.send(amount // 10)
    for stand in stands:
        await stand.told()
        stand.counters._line._timeout_s = TIMEOUT_S
    assert traffic.let_in == amount // 10
    traffic.waited = 0
    return traffic


async def test_a_store_that_freezes_stops_nobody(
    gateways: Gateways, client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, amount = per_minute()
    traffic = await began(gateways, monkeypatch)
    with frozen(redis_url):
        await traffic.send(2 * amount)
        assert traffic.waited <= len(traffic.stands)  # of 1,200: the 99th percentile did not wait
        assert 0.9 * amount <= traffic.let_in <= 1.3 * amount
        page = await Telemetry(limits=traffic.stands[0].limiter.figures).page()
        assert b'warmroute_limiter_mode{mode="local"} 1.0' in page
    await settled(traffic.stands, "redis", RECOVERED_WITHIN_S)
    name = f"warmroute:{{ten_a}}:lim_requests_ten_a:{int(MONDAY)}"
    assert int(await client.get(name)) == traffic.let_in


async def test_a_store_that_refuses_connections_stops_nobody(
    gateways: Gateways, client: Client, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, amount = per_minute()
    traffic = await began(gateways, monkeypatch)
    redis.stop()
    try:
        await settled(traffic.stands, "local", 10)
        await traffic.send(2 * amount)
        assert traffic.waited == 0
        assert 0.9 * amount <= traffic.let_in <= 1.3 * amount
    finally:
        redis.start()
        await client.connection_pool.disconnect()
        await gateways.move(0)  # its clock was kept in it
    await settled(traffic.stands, "redis", RECOVERED_WITHIN_S)


async def test_a_store_that_is_far_too_slow_is_a_store_that_is_away(
    gateways: Gateways, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, amount = per_minute()
    async with far_away(redis.port, 0.0) as (url, slow_down):
        gateways._url = url
        traffic = await began(gateways, monkeypatch)
        slow_down(0.1)
        await settled(traffic.stands, "local", 10)
        await traffic.send(2 * amount)
        assert traffic.waited <= len(traffic.stands)
        assert 0.9 * amount <= traffic.let_in <= 1.3 * amount
        slow_down(0.0)
        await settled(traffic.stands, "redis", RECOVERED_WITHIN_S)
        for stand in traffic.stands:
            await stand.counters.aclose()


async def test_a_store_without_the_command_script_is_used_without_it(
    gateways: Gateways, client: Client, redis_url: str
) -> None:
    await client.acl_setuser("narrow", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-script"])
    gateways._url = redis_url.replace("redis://", "redis://narrow:any@")
    found, amount = per_minute()
    traffic = Traffic(await gateways.start(3, found))
    await traffic.send(amount + 30)
    assert (traffic.let_in, {stand.limiter.state()["mode"] for stand in traffic.stands}) == (amount, {"redis"})
    await client.acl_deluser("narrow")
