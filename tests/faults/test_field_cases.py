"""Faults from public reports, each with what is right. The settings are the defaults unless a test gives others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.routing import brain
from tests.faults.deployment import Deployment
from tests.faults.engine import FaultyEngine, Script, Wrong, well
from tests.flows.site import until

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."  # vLLM 0.32


async def fleet_of(deployment: Deployment, *scripts: Script, **settings: object) -> list[FaultyEngine]:
    engines = [await deployment.engine(script) for script in scripts]
    await deployment.start(*engines, **{"failover": {}, **settings})  # type: ignore[arg-type]
    return engines


def calls(engines: list[FaultyEngine]) -> int:
    return sum(len(engine.calls) for engine in engines)


# -- FC-64: retries multiply expensive generations


async def fails(call: Wrong, number: int) -> None:
    await call.refuse(500)


async def overloaded(call: Wrong, number: int) -> None:
    await call.refuse(503)


async def resets(call: Wrong, number: int) -> None:
    call.reset()


async def is_silent_and_answers(call: Wrong, number: int) -> None:
    await asyncio.sleep(0.5)
    await call.well()


async def breaks_off(call: Wrong, number: int) -> None:
    await call.begin()
    await call.tokens(0, 2)
    await asyncio.sleep(0.02)
    call.reset()


@pytest.mark.parametrize(
    ("script", "attempts", "status"),
    [
        (fails, 1, 500),
        (overloaded, 2, 503),
        (resets, 1, 502),
        (is_silent_and_answers, 1, 200),
        (breaks_off, 1, 200),
    ],
)
async def test_only_what_no_engine_ran_is_tried_again_and_once(
    deployment: Deployment, script: Script, attempts: int, status: int
) -> None:
    engines = await fleet_of(deployment, script, script, script, script)
    told = await deployment.ask()
    assert told.status == status
    assert calls(engines) == attempts
    assert max(len(engine.calls) for engine in engines) == 1, "never the same one"


async def test_a_refused_connection_is_passed_over(deployment: Deployment) -> None:
    engines = await fleet_of(deployment, well, well, policy={"name": "round_robin"})
    await engines[0].die()
    for _ in range(4):
        assert (await deployment.ask()).status == 200


# -- FC-66: client errors open the circuit breaker


async def too_long_as_a_500(call: Wrong, number: int) -> None:
    await call.refuse(500, message="This model's maximum context length is 8192 tokens.")


async def bad_request(call: Wrong, number: int) -> None:
    await call.refuse(400)


@pytest.mark.parametrize("script", [bad_request, too_long_as_a_500])
async def test_a_noisy_client_takes_no_engine_from_the_others(deployment: Deployment, script: Script) -> None:
    async def noisy(call: Wrong, number: int) -> None:
        await (script if b"noisy" in call.body else well)(call, number)

    engines = await fleet_of(deployment, noisy, noisy)
    for _ in range(25):
        told = await deployment.ask(messages=[{"role": "user", "content": "noisy"}])
        assert told.status == 400
    assert (await deployment.ask()).status == 200
    rows = await deployment.running.live.fleet()
    assert [row["suspect"] for row in rows] == [False, False]
    assert calls(engines) == 26


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_an_engine_that_refuses_us_is_passed_over(deployment: Deployment, status: int) -> None:
    """Our key is wrong there, or an adapter is missing: others of the model still serve."""

    async def refuses(call: Wrong, number: int) -> None:
        await call.refuse(status)

    engines = await fleet_of(deployment, refuses, well, policy={"name": "round_robin"})
    for _ in range(6):
        assert (await deployment.ask()).status == 200
    assert len(engines[1].calls) == 6


# -- FC-68: an instance gets traffic before it can serve, or stays green when it cannot


async def test_what_joins_gets_one_request_until_it_has_answered(deployment: Deployment) -> None:
    may_answer = asyncio.Event()

    async def warms_up(call: Wrong, number: int) -> None:
        await may_answer.wait()
        await call.well()

    old, new = await deployment.engine(), await deployment.engine(warms_up)
    await new.die()
    await deployment.start(old, new, failover={}, policy={"name": "round_robin"}, ready=1)
    assert (await deployment.ask()).status == 200
    await new.__aenter__()

    async def joined() -> bool:
        return all(row["health"] == "ready" for row in await deployment.running.live.fleet())

    await until(joined, what="the new engine has joined")
    first = [asyncio.create_task(deployment.ask()) for _ in range(2)]  # one of them is the new one's
    await until(_has(lambda: len(new.calls) == 1), what="it has a request")
    for _ in range(10):
        assert (await deployment.ask()).status == 200
    assert len(new.calls) == 1
    may_answer.set()
    assert [told.status for told in await asyncio.gather(*first)] == [200, 200]
    for _ in range(10):
        await deployment.ask()
    assert len(new.calls) > 3


async def test_a_green_engine_that_answers_nobody_is_out_after_three(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brain, "STUCK_S", 0.2)
    monkeypatch.setattr(brain, "COMPARE_S", 0.05)

    async def stuck(call: Wrong, number: int) -> None:
        await call.until_gone()

    settings = {"failover": {"retry_on": ["silent"], "move_on_s": 2.0}, "policy": {"name": "round_robin"}}
    dead, good = await fleet_of(deployment, stuck, well, **settings)
    asked = []
    for _ in range(20):
        asked.append(asyncio.create_task(deployment.ask()))
        await asyncio.sleep(0.1)
    answers = await asyncio.gather(*asked)
    assert {told.status for told in answers} == {200}, "what was stuck is answered elsewhere"
    assert 3 <= len(dead.calls) <= 6
    assert len(good.calls) == 20


# -- a prompt that ends engines


@pytest.mark.parametrize("word", [True, False], ids=["with a last word", "without"])
async def test_a_prompt_that_ended_two_engines_is_not_given_to_a_third(deployment: Deployment, word: bool) -> None:
    engines: list[FaultyEngine] = []

    async def dies(call: Wrong, number: int) -> None:
        if b"deadly" not in call.body:
            await call.well()
            return
        if word:
            await call.refuse(500, message=DEAD)
        await next(engine for engine in engines if call in engine.calls).die()
        call.reset()

    engines += await fleet_of(deployment, dies, dies, dies)
    deadly = [{"role": "user", "content": "deadly"}]
    told = await deployment.ask(messages=deadly)
    assert told.status == 502
    assert told.error is not None
    assert told.error["code"] == "quarantined"
    assert calls(engines) == 2
    again = await deployment.ask(messages=deadly)
    assert (again.status, calls(engines)) == (502, 2), "nor when the client tries again"
    assert (await deployment.ask()).status == 200, "others are served by who is left"
    assert await deployment.is_well()


async def test_an_engine_that_dies_of_something_else_costs_no_request(deployment: Deployment) -> None:
    engines: list[FaultyEngine] = []

    async def dies_once(call: Wrong, number: int) -> None:
        if calls(engines) == 1:
            await next(engine for engine in engines if call in engine.calls).die()
            call.reset()
        else:
            await call.well()

    engines += await fleet_of(deployment, dies_once, dies_once)
    assert (await deployment.ask()).status == 200
    assert calls(engines) == 2


# -- FC-67: a client may lower the limits, and never raise them


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x-warmroute-first-token-timeout": "0.2"}, "ttft_timeout"),
        ({"x-warmroute-timeout": "0.2"}, "total_timeout"),
        ({"x-litellm-timeout": "0.2"}, "total_timeout"),
        ({"x-warmroute-timeout": "50"}, "ttft_timeout"),
    ],
)
async def test_a_client_lowers_its_limits(deployment: Deployment, headers: dict[str, str], code: str) -> None:
    gone = asyncio.Event()

    async def silent(call: Wrong, number: int) -> None:
        await call.until_gone()
        gone.set()

    await fleet_of(deployment, silent, timeouts={"first_byte_s": 0.6})
    told = await deployment.ask(headers=headers)
    assert told.status == 504
    assert told.error is not None
    assert told.error["code"] == code
    await asyncio.wait_for(gone.wait(), 5)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
async def test_a_limit_that_is_no_time_is_refused(deployment: Deployment, value: str) -> None:
    (engine,) = await fleet_of(deployment, well)
    told = await deployment.ask(headers={"x-warmroute-timeout": value})
    assert told.status == 400
    assert told.error is not None
    assert told.error["code"] == "invalid_timeout"
    assert not engine.calls


async def test_the_time_in_line_counts(deployment: Deployment) -> None:
    async def silent(call: Wrong, number: int) -> None:
        await call.until_gone()

    (engine,) = await fleet_of(deployment, silent, waiting_room={"free_tokens": 1})
    long = [{"role": "user", "content": "so many words that nothing else has room beside it " * 400}]
    first = asyncio.create_task(deployment.ask(messages=long, headers={"x-warmroute-timeout": "1.0"}))
    await until(_has(lambda: len(engine.calls) == 1), what="the engine is busy")
    told = await deployment.ask(headers={"x-warmroute-timeout": "0.2"})
    assert told.status == 504
    assert told.error is not None
    assert told.error["message"] == "No engine was free in the time the request may take."
    assert (await first).status == 504
    assert await deployment.is_well()


def _has(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def met() -> bool:
        return condition()

    return met
