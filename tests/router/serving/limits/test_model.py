"""Any order of requests, ends, deaths and time: memory, Redis and a plain reckoning say the same of each."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis as Client

from router.core import Caller, Usage
from router.errors import WarmrouteError
from router.serving.limits.holds import Hold
from router.store.windows import read_window
from tests.router.serving.limits.gateways import Gateways, SharedStand
from tests.router.serving.limits.stand import MONDAY, SharedClock, Stand, limit, money, outcome, with_clock_of_a_test

LIMITS = (
    limit("requests", 4, "1m"), limit("requests", 7, "1h", owner="ten_a"), limit("parallel", 3, ""),
    limit("tokens", 60, "1m", owner="ten_a", weights={"cache_read": 0.5}),
    limit("tokens", 50, "1h", owner="key_b"), money("0.0004", "1d", owner="proj_a"),
)  # fmt: skip
CALLERS = (Caller("ten_a", "proj_a", "key_a"), Caller("ten_a", "proj_a", "key_b"), Caller("ten_a", "proj_b", "key_c"))
LEASE_S = 10
PRICE = {"uncached_input": 10**6, "cache_read": 10**5, "output": 10**7}


class Entry:
    """One request in the reckoning: when it began, what it reserved, and what it was once that is known."""

    def __init__(self, caller: Caller, at: float, tokens: int, most: int, holds: tuple[Hold, Hold]) -> None:
        self.caller = caller
        self.at = at
        self.counts = {"uncached_input": tokens, "output": most}
        self.holds = holds
        self.is_open = True
        self.is_void = False
        self.dies_at: float | None = None

    def amount(self, rule: Any) -> int:
        if self.is_void or rule.owner not in (self.caller.tenant, self.caller.project, self.caller.key):
            return 0
        if rule.measure == "requests":
            return 1
        if rule.measure == "parallel":
            return int(self.is_open)
        if rule.measure == "tokens":
            halves = {name: 2 * rule.weights.get(name, 1) for name in self.counts}
            return int(-(-sum(halves[name] * count for name, count in self.counts.items()) // 2))
        return sum(PRICE[name] * count for name, count in self.counts.items())


class Machine(RuleBasedStateMachine):
    url: str
    run: Any  # a coroutine, on the loop of the test

    @initialize()
    def begin_with_nothing(self) -> None:
        async def start() -> None:
            self.client = Client.from_url(self.url)
            await self.client.flushall()
            self.gateways = await Gateways(self.url, SharedClock(self.client)).__aenter__()
            (self.over_redis,) = await self.gateways.start(1, *LIMITS, lease_s=LEASE_S)

        self.in_memory = Stand(*LIMITS)
        self.entries: list[Entry] = []
        self.run(start())

    def teardown(self) -> None:
        async def end() -> None:
            await self.gateways.__aexit__()
            await self.client.aclose()

        self.run(end())

    @property
    def now(self) -> float:
        return self.gateways.now

    def used(self, rule: Any) -> int:
        """In the window that is now."""
        since = read_window(rule.window).span(self.now)[0] if rule.window else 0
        return sum(entry.amount(rule) for entry in self.entries if entry.at >= since)

    @rule(caller=st.sampled_from(CALLERS), tokens=st.integers(0, 12), most=st.integers(0, 12))
    def request(self, caller: Caller, tokens: int, most: int) -> None:
        found = [self.run(tried(stand, caller, tokens, most)) for stand in (self.in_memory, self.over_redis)]
        wanted = Entry(caller, self.now, tokens, most, tuple(found))  # type: ignore[arg-type]
        fits = all(not wanted.amount(rule) or self.used(rule) + wanted.amount(rule) <= rule.amount for rule in LIMITS)
        assert [isinstance(each, Hold) for each in found] == [fits, fits], found
        if fits:
            self.entries.append(wanted)

    @precondition(lambda self: any(entry.is_open and entry.dies_at is None for entry in self.entries))
    @rule(
        data=st.data(), tokens=st.integers(0, 15), cached=st.integers(0, 15), output=st.integers(0, 15),
        fate=st.sampled_from(["complete", "complete", "client_gone", "upstream_failed"]),
    )  # fmt: skip
    def end(self, data: st.DataObject, tokens: int, cached: int, output: int, fate: Any) -> None:
        """It may have become more than was reserved."""
        entry = data.draw(st.sampled_from([e for e in self.entries if e.is_open and e.dies_at is None]))
        cached = min(cached, tokens)
        ended = outcome(Usage(tokens, output, cached), finish=fate)
        for stand, hold in zip((self.in_memory, self.over_redis), entry.holds, strict=True):
            self.run(ends(stand, hold, ended))
        failed = fate == "upstream_failed"
        counts = {"uncached_input": tokens - cached, "cache_read": cached, "output": output}
        entry.is_open, entry.counts = False, {} if failed else counts

    @precondition(lambda self: any(entry.is_open and entry.dies_at is None for entry in self.entries))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Its gateway is gone: nobody tells of its end, nobody renews it."""
        entry = data.draw(st.sampled_from([e for e in self.entries if e.is_open and e.dies_at is None]))
        self.run(self.over_redis.renew())
        entry.dies_at = self.now + LEASE_S
        self.over_redis.counters._open["ten_a"].pop(entry.holds[1].name)

    @rule(seconds=st.sampled_from([1, 7, 11, 60, 1800, 86400]))
    def wait(self, seconds: int) -> None:
        self.run(self.gateways.move(seconds))
        self.in_memory.now = self.now
        self.run(self.over_redis.renew())
        for entry in self.entries:
            if entry.dies_at is not None and entry.dies_at <= self.now and entry.is_open:
                entry.is_open, entry.is_void = False, True
                entry.holds[0].refused = True  # memory dies with its gateway; here it is told
                self.in_memory.end(entry.holds[0])


async def tried(stand: Stand, caller: Caller, tokens: int, most: int) -> Hold | WarmrouteError:
    try:
        return await stand.begin(tokens, most, caller=caller)
    except WarmrouteError as error:
        return error


async def ends(stand: Stand, hold: Hold, ended: Any) -> None:
    stand.end(hold, ended)
    if isinstance(stand, SharedStand):
        await stand.told()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_memory_redis_and_a_plain_reckoning_agree(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, runner: asyncio.Runner
) -> None:
    with_clock_of_a_test(monkeypatch)

    class Here(Machine):
        url = redis_url

        @staticmethod
        def run(work: Coroutine[Any, Any, Any]) -> Any:
            return runner.run(work)

    run_state_machine_as_test(Here, settings=settings(max_examples=25, stateful_step_count=30))


def test_the_reckoning_knows_the_price() -> None:
    entry = Entry(CALLERS[0], MONDAY, 3, 2, ())  # type: ignore[arg-type]
    assert entry.amount(LIMITS[-1]) == 3 * 10**6 + 2 * 10**7
