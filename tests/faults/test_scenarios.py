"""Sixteen ways of an engine to go wrong, by the catalogue of failoverbench 0.1 (S01-S16), and what is right for each.

A gateway that has begun to pass an answer on cannot take it back: where an engine breaks off in mid-stream, right is an
error that nobody can take for an end.
"""

from __future__ import annotations

import asyncio

import pytest

from router.core import Outcome, Usage
from tests.faults.deployment import RESCUE, Deployment, Told, gaps
from tests.faults.engine import PROMPT_TOKENS, WHOLE, WORDS, FaultyEngine, Script, Wrong, well

SPARE = {"fallbacks": ["spare"], "context_window_fallbacks": ["spare"]}


def once(fault: Script) -> Script:
    async def script(call: Wrong, number: int) -> None:
        await (fault if number == 1 else well)(call, number)

    return script


async def with_spare(deployment: Deployment, script: Script, **settings: object) -> tuple[FaultyEngine, FaultyEngine]:
    """An engine that goes wrong, and another model's to fall back to."""
    main, spare = await deployment.engine(script), await deployment.engine(model="spare")
    await deployment.start(main, spare, main=SPARE, **settings)  # type: ignore[arg-type]
    return main, spare


def is_whole(told: Told) -> bool:
    return told.status == 200 and told.text == WHOLE and told.done and not told.broken and told.error is None


async def one_outcome(deployment: Deployment, finish: str) -> Outcome:
    assert await deployment.is_well()
    (outcome,) = deployment.outcomes
    assert outcome.finish == finish
    return outcome


async def test_s01_a_429_with_retry_after_is_asked_again_when_it_said_so(deployment: Deployment) -> None:
    async def busy(call: Wrong, number: int) -> None:
        await call.refuse(429, retry_after="2")

    engine = await deployment.engine(once(busy))
    await deployment.start(engine)
    assert is_whole(await deployment.ask())
    (gap,) = gaps(engine.times)
    assert gap >= 1.8
    assert (await one_outcome(deployment, "complete")).attempts == 2


async def test_s01_or_it_is_served_elsewhere_at_once(deployment: Deployment) -> None:
    async def busy(call: Wrong, number: int) -> None:
        await call.refuse(429, retry_after="2")

    engines = await deployment.engine(busy), await deployment.engine(busy)
    await deployment.start(*engines)
    engines[1].script = well
    for _ in range(4):
        assert is_whole(await deployment.ask())
    assert len(engines[0].times) <= 1, "who said it is busy is left alone as long as it asked for"


async def test_s02_a_429_for_ever_is_not_hammered(deployment: Deployment) -> None:
    async def busy(call: Wrong, number: int) -> None:
        await call.refuse(429)

    main, spare = await with_spare(deployment, busy, failover={**RESCUE, "attempts": 6, "within_s": 4})
    assert is_whole(await deployment.ask())
    assert sum(at - main.times[0] < 3.0 for at in main.times) <= 4
    assert 2 <= len(main.times) <= 6
    assert len(spare.times) == 1


async def test_s03_a_500_is_tried_once_more(deployment: Deployment) -> None:
    async def fail(call: Wrong, number: int) -> None:
        await call.refuse(500)

    engine = await deployment.engine(once(fail))
    await deployment.start(engine)
    assert is_whole(await deployment.ask())
    assert len(engine.times) == 2


async def test_s04_a_503_for_ever_is_served_by_the_fallback(deployment: Deployment) -> None:
    async def overloaded(call: Wrong, number: int) -> None:
        await call.refuse(503)

    main, spare = await with_spare(deployment, overloaded)
    assert is_whole(await deployment.ask())
    assert len(main.times) == RESCUE["attempts"]
    assert len(spare.times) == 1


async def test_s04_or_the_client_is_told(deployment: Deployment) -> None:
    async def overloaded(call: Wrong, number: int) -> None:
        await call.refuse(503, retry_after="3")

    engine = await deployment.engine(overloaded)
    await deployment.start(engine, failover={})
    told = await deployment.ask()
    assert (told.status, len(engine.times)) == (503, 1)
    assert (await one_outcome(deployment, "upstream_failed")).error == "engine_503"


async def test_s05_a_reset_before_the_answer_is_tried_once_more(deployment: Deployment) -> None:
    async def reset(call: Wrong, number: int) -> None:
        call.reset()

    engine = await deployment.engine(once(reset))
    await deployment.start(engine)
    assert is_whole(await deployment.ask())
    assert len(engine.times) == 2


async def test_s06_silence_is_not_asked_again_on_the_same_route(deployment: Deployment) -> None:
    main, spare = await with_spare(deployment, silent, timeouts={"first_byte_s": 0.5})
    assert is_whole(await deployment.ask())
    assert (len(main.times), len(spare.times)) == (1, 1)


async def test_s06_or_ends_in_time(deployment: Deployment) -> None:
    engine = await deployment.engine(silent)
    await deployment.start(engine, timeouts={"first_byte_s": 0.5})
    told = await deployment.ask()
    assert told.status == 504
    assert told.error is not None
    assert told.error["code"] == "ttft_timeout"
    assert len(engine.times) == 1
    await one_outcome(deployment, "upstream_failed")


async def silent(call: Wrong, number: int) -> None:
    await call.until_gone()


async def late(call: Wrong, number: int) -> None:
    await call.begin()
    await asyncio.sleep(1.0)
    await call.tokens(0, len(WORDS))
    await call.end()


async def test_s07_a_late_first_token_is_not_waited_for_where_there_is_another(deployment: Deployment) -> None:
    main, spare = await with_spare(deployment, late, failover={**RESCUE, "move_on_s": 0.2})
    began = asyncio.get_running_loop().time()
    assert is_whole(await deployment.ask())
    assert spare.times[0] - began < 0.75, "a second of the scenario is a twentieth here: within 15"
    assert len(main.times) == 1


async def test_s07_and_is_where_there_is_none(deployment: Deployment) -> None:
    engine = await deployment.engine(late)
    await deployment.start(engine, failover={**RESCUE, "move_on_s": 0.2})
    assert is_whole(await deployment.ask())
    assert len(engine.times) == 1


async def cut(call: Wrong, number: int) -> None:
    await call.begin()
    await call.tokens(0, 40)
    await asyncio.sleep(0.05)
    call.reset()


async def test_s08_a_cut_stream_ends_with_an_error(deployment: Deployment) -> None:
    main, spare = await with_spare(deployment, cut)
    told = await deployment.ask()
    assert told.text == " ".join(WORDS[:40])
    assert told.error is not None
    assert told.broken
    assert not told.done
    assert (len(main.times), len(spare.times)) == (1, 0), "a second answer cannot follow what was sent of the first"
    outcome = await one_outcome(deployment, "upstream_failed")
    assert outcome.events == 40


async def test_s09_a_stream_that_stalls_ends_with_an_error_in_time(deployment: Deployment) -> None:
    async def stall(call: Wrong, number: int) -> None:
        await call.begin()
        await call.tokens(0, 20)
        await call.until_gone()

    engine = await deployment.engine(once(stall))
    await deployment.start(engine, timeouts={"between_s": 0.3})
    told = await deployment.ask()
    assert told.text == " ".join(WORDS[:20])
    assert told.error is not None
    assert told.error["code"] == "stall_timeout"
    assert told.broken
    assert (await one_outcome(deployment, "upstream_failed")).error == "stall_timeout"
    assert is_whole(await deployment.ask()), "and all is well afterwards"


async def test_s10_an_event_that_is_cut_short_reaches_nobody(deployment: Deployment) -> None:
    """What it should have said is lost, so that the answer cannot be whole any more."""
    torn = b'data: {"id":"x","choices":[{"index":0,"del\n\n'

    async def garble(call: Wrong, number: int) -> None:
        await call.begin()
        await call.tokens(0, 9)
        await call.chunk(torn)
        await call.tokens(9, len(WORDS))
        await call.end()

    engine = await deployment.engine(once(garble))
    await deployment.start(engine)
    told = await deployment.ask()
    assert torn not in told.body + b"\n\n"
    assert told.text == " ".join(WORDS[:9])
    assert told.error is not None
    assert not told.done
    await one_outcome(deployment, "upstream_failed")
    assert is_whole(await deployment.ask())


async def test_s11_a_stream_without_done_is_whole_when_every_choice_has_finished(deployment: Deployment) -> None:
    async def no_done(call: Wrong, number: int) -> None:
        await call.begin()
        await call.tokens(0, len(WORDS))
        await call.end(b"")

    engine = await deployment.engine(no_done)
    await deployment.start(engine)
    told = await deployment.ask(stream_options={"include_usage": True})
    assert told.text == WHOLE
    assert not told.broken
    assert told.chunks[-1]["usage"]["completion_tokens"] == len(WORDS)
    assert (await one_outcome(deployment, "complete")).usage == Usage(PROMPT_TOKENS, len(WORDS))


TOO_LONG = "This model's maximum context length is 8192 tokens. However, you requested 40011 tokens."


@pytest.mark.parametrize(
    ("status", "code"), [(400, "context_length_exceeded"), (400, ""), (500, "")], ids=["code", "words", "as a 500"]
)
async def test_s12_a_prompt_too_long_goes_to_the_larger_model(deployment: Deployment, status: int, code: str) -> None:
    async def too_long(call: Wrong, number: int) -> None:
        await call.refuse(status, code, TOO_LONG)

    main, spare = await with_spare(deployment, too_long)
    assert is_whole(await deployment.ask())
    assert (len(main.times), len(spare.times)) == (1, 1)


async def test_s12_a_prompt_known_to_be_too_long_goes_there_at_once(deployment: Deployment) -> None:
    main, spare = await deployment.engine(), await deployment.engine(model="spare")
    main.max_model_tokens = 2
    await deployment.start(main, spare, main=SPARE | {"tokenize": "always"})
    assert is_whole(await deployment.ask())
    assert (len(main.times), len(spare.times)) == (0, 1)
    (outcome,) = deployment.outcomes
    assert outcome.model == "spare"


async def test_s12_or_the_client_is_told(deployment: Deployment) -> None:
    async def too_long(call: Wrong, number: int) -> None:
        await call.refuse(400, "context_length_exceeded", TOO_LONG)

    engines = await deployment.engine(too_long), await deployment.engine(too_long)
    await deployment.start(*engines)
    told = await deployment.ask()
    assert told.status == 400
    assert told.error is not None
    assert (told.error["code"], told.error["message"]) == ("context_length_exceeded", TOO_LONG)
    assert len(engines[0].times) + len(engines[1].times) == 1


async def test_s13_a_content_filter_has_the_last_word(deployment: Deployment) -> None:
    async def filtered(call: Wrong, number: int) -> None:
        await call.refuse(400, "content_policy_violation", "The prompt was flagged.")

    main, spare = await with_spare(deployment, filtered)
    told = await deployment.ask()
    assert told.status == 400
    assert told.error is not None
    assert (told.error["code"], told.error["message"]) == ("content_policy_violation", "The prompt was flagged.")
    assert (len(main.times), len(spare.times)) == (1, 0)


async def test_s14_a_cut_stream_is_never_hidden_behind_what_a_fallback_refuses(deployment: Deployment) -> None:
    async def no_prefill(call: Wrong, number: int) -> None:
        await call.refuse(400, "", "The last message must be the user's.")

    _, spare = await with_spare(deployment, cut)
    spare.script = no_prefill
    told = await deployment.ask()
    assert told.error is not None
    assert told.error["type"] == "server_error"
    assert "last message" not in told.error["message"]
    assert len(spare.times) == 0


async def test_s15_an_engine_that_flaps_is_passed_over_and_comes_back(deployment: Deployment) -> None:
    """Down for 60 s, here 3: everything is served meanwhile, it is asked now and then, and is back within 30 s.

    Those 1.5 s are counted in requests 0.05 s apart: on a busy machine fewer come in that time, never more.
    """
    clock = asyncio.get_running_loop().time
    healthy_at = clock() + 3.0

    async def flap(call: Wrong, number: int) -> None:
        await (call.well() if clock() >= healthy_at else call.refuse(500))

    main, spare = await deployment.engine(flap), await deployment.engine()
    await deployment.start(main, spare, policy={"name": "round_robin"}, failover={**RESCUE, "attempts": 2})
    since_healthy = 0
    while not any(at >= healthy_at for at in main.times):
        since_healthy += clock() >= healthy_at
        assert is_whole(await deployment.ask())
        await asyncio.sleep(0.05)
    while_down = [at for at in main.times if at < healthy_at]
    assert len(while_down) <= 3 + 6, "three failures open the circuit; then one request at a time, ever more seldom"
    assert since_healthy <= 1.5 / 0.05


async def test_s16_who_answered_is_named_and_billed(deployment: Deployment) -> None:
    async def overloaded(call: Wrong, number: int) -> None:
        await call.refuse(503)

    await with_spare(deployment, overloaded, failover={**RESCUE, "wait_s": 0})
    told = await deployment.ask(stream_options={"include_usage": True})
    assert {chunk["model"] for chunk in told.chunks} == {"spare"}
    assert told.chunks[-1]["usage"]["prompt_tokens"] == PROMPT_TOKENS
    outcome = await one_outcome(deployment, "complete")
    assert (outcome.model, outcome.usage, outcome.attempts) == ("spare", Usage(PROMPT_TOKENS, len(WORDS)), 2)
    assert told.headers["x-warmroute-attempts"] == "2"
    page = (await deployment.running.live.metrics()).decode()
    assert 'warmroute_engine_faults_total{fault="busy",model="main"} 1.0' in page
