"""Streams that break off where `failover.resume` is on: another engine goes on, or they end with an error as ever."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from adapters.openai import OpenAIAdapter
from router.core import Usage
from tests.faults.deployment import Deployment, Told
from tests.faults.engine import PROMPT_TOKENS, STREAM_HEAD, WHOLE, WORDS, FaultyEngine, Script, Wrong
from tests.flows.site import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = " ".join(WORDS[:40])
ON = {"resume": True}


class ContinuingAdapter(OpenAIAdapter):
    """Of engines that know `continue_final_message`."""

    continues_messages = True


CONTINUING = f"{__name__}:{ContinuingAdapter.__name__}"


def said_before(call: Wrong) -> str:
    """What the engine is to go on after."""
    if "prompt" in call.json:
        return str(call.json["prompt"]).removeprefix("sixty words")
    last = call.json["messages"][-1]
    return str(last["content"]) if last["role"] == "assistant" else ""


def part(call: Wrong, number: int) -> bytes:
    text = WORDS[number] if number == 0 else f" {WORDS[number]}"
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    return call.event(choices=[choice | ({"text": text} if "prompt" in call.json else {"delta": {"content": text}})])


async def begin(call: Wrong, number: int) -> int:
    """An engine's head and, of a chat, the chunk with the role; its chunks differ from another engine's."""
    await call.raw(STREAM_HEAD)
    if "messages" in call.json:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        await call.chunk(call.event(choices=[role], created=1000 + number))
    return len(said_before(call).split())


async def goes_on(call: Wrong, number: int) -> None:
    start = await begin(call, number)
    for at in range(start, len(WORDS)):
        await call.chunk(part(call, at))
    last: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    last |= {"text": ""} if "prompt" in call.json else {"delta": {}}
    usage = {"prompt_tokens": PROMPT_TOKENS + 2 * start, "completion_tokens": len(WORDS) - start, "total_tokens": 0}
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    await call.chunk(call.event(choices=[last]) + call.event(choices=[], usage=usage) + b"data: [DONE]\n\n")
    await call.raw(b"0\r\n\r\n")


async def cuts(call: Wrong, number: int, *, upto: int = 40) -> None:
    start = await begin(call, number)
    for at in range(start, upto):
        await call.chunk(part(call, at))
    await asyncio.sleep(0.02)
    call.reset()


async def stalls(call: Wrong, number: int) -> None:
    await begin(call, number)
    for at in range(40):
        await call.chunk(part(call, at))
    await call.until_gone()


class Fleet:
    """Whichever engine is asked first breaks off; the others do what `then` says."""

    def __init__(self, *faults: Script, then: Script = goes_on) -> None:
        self.faults = list(faults)
        self.then = then
        self.calls: list[Wrong] = []

    async def __call__(self, call: Wrong, number: int) -> None:
        self.calls.append(call)
        script = self.faults.pop(0) if self.faults else self.then
        await script(call, len(self.calls))

    async def start(
        self, deployment: Deployment, *, engines: int = 2, kind: str = CONTINUING, **settings: Any
    ) -> list[FaultyEngine]:
        started = [await deployment.engine(self) for _ in range(engines)]
        failover = ON | settings.pop("failover", {})
        main = {"tokenize": "always", **settings.pop("main", {})}
        await deployment.start(*started, kind=kind, failover=failover, main=main, **settings)
        return started


def is_error(told: Told) -> bool:
    return told.error is not None and told.broken and not told.done and told.status == 200


async def test_s08_with_resume_the_stream_is_whole_and_one(deployment: Deployment) -> None:
    fleet = Fleet(cuts)
    await fleet.start(deployment)
    told = await deployment.ask(stream_options={"include_usage": True}, max_tokens=200)
    assert (told.text, told.error, told.done, told.broken) == (WHOLE, None, True, False)
    first, second = fleet.calls
    assert said_before(second) == SAID
    assert second.json["messages"][:-1] == first.json["messages"]
    assert (second.json["continue_final_message"], second.json["add_generation_prompt"]) == (True, False)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in told.chunks[:1]}) == 1
    assert {chunk.get("created", 1001) for chunk in told.chunks} == {1001}, "as the first engine said"
    roles = [choice["delta"] for chunk in told.chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert len(roles) == 1
    assert [chunk.get("warmroute") for chunk in told.chunks] == [None] * 41 + [{"resumed": 1}] * 22

    asked = (await deployment.running.live.explain(CHAT, first.body))["request"]["tokens"]
    again = PROMPT_TOKENS + 2 * 40
    usage = told.chunks[-1]["usage"]
    assert usage["prompt_tokens"] == asked, "as the client sent it"
    assert usage["completion_tokens"] == again - asked + 20
    assert usage["total_tokens"] == again + 20
    assert 200 - second.json["max_tokens"] >= 40, "no more tokens than were asked for"
    (outcome,) = deployment.outcomes
    assert (outcome.finish, outcome.resumed, outcome.attempts) == ("complete", 1, 2)
    assert outcome.usage == Usage(asked, again - asked + 20)
    assert outcome.input_tokens == asked
    assert outcome.events == 40 + 1 + 22
    assert outcome.ttft_s is not None
    assert outcome.ttft_s < outcome.took_s
    assert await deployment.is_well()
    page = (await deployment.running.live.metrics()).decode()
    assert 'warmroute_resumed_streams_total{finish="complete",model="main"} 1.0' in page


async def test_the_official_client_sees_one_answer(deployment: Deployment) -> None:
    await Fleet(cuts).start(deployment)
    async with openai.AsyncOpenAI(base_url=f"{deployment.running.url}/v1", api_key="-", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "main", "messages": [{"role": "user", "content": "sixty words"}]}
        async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            whole = await stream.get_final_completion()
    assert whole.choices[0].message.content == WHOLE
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == PROMPT_TOKENS + 2 * 40 + 20


async def test_a_completion_needs_no_engine_that_knows_how(deployment: Deployment) -> None:
    fleet = Fleet(cuts)
    await fleet.start(deployment, kind="openai")
    told = await deployment.ask(path=COMPLETIONS, messages=None, prompt="sixty words", min_tokens=50)
    assert "".join(choice["text"] for chunk in told.chunks for choice in chunk["choices"]) == WHOLE
    assert fleet.calls[1].json["prompt"] == "sixty words" + SAID
    assert fleet.calls[1].json["min_tokens"] <= 10
    assert told.done


async def test_a_chat_does(deployment: Deployment) -> None:
    fleet = Fleet(cuts)
    await fleet.start(deployment, kind="openai")
    told = await deployment.ask()
    assert told.text == SAID
    assert is_error(told)
    assert len(fleet.calls) == 1
    assert deployment.outcomes[0].resumed == 0
    assert deployment.outcomes[0].instance is not None
    assert deployment.outcomes[0].events == 41
    assert await deployment.is_well()


async def test_it_is_off_by_default(deployment: Deployment) -> None:
    fleet = Fleet(cuts)
    await fleet.start(deployment, failover={"resume": False})
    assert is_error(await deployment.ask())
    assert len(fleet.calls) == 1


async def test_a_stalled_stream_too_and_a_model_may_have_it_alone(deployment: Deployment) -> None:
    await Fleet(stalls).start(
        deployment, timeouts={"between_s": 0.2}, failover={"resume": False}, main={"failover": ON}
    )
    told = await deployment.ask()
    assert (told.text, told.done, told.error) == (WHOLE, True, None)
    assert not any("usage" in chunk for chunk in told.chunks), "nobody asked for it"
    assert deployment.outcomes[0].usage is not None


async def test_before_the_first_word_it_is_simply_asked_again(deployment: Deployment) -> None:
    async def only_a_role(call: Wrong, number: int) -> None:
        await cuts(call, number, upto=0)

    fleet = Fleet(only_a_role)
    await fleet.start(deployment)
    told = await deployment.ask()
    assert (told.text, told.done) == (WHOLE, True)
    assert fleet.calls[1].json["messages"] == fleet.calls[0].json["messages"]
    assert "continue_final_message" not in fleet.calls[1].json


async def again(call: Wrong, number: int) -> None:
    await cuts(call, number, upto=50)


async def test_the_second_to_break_off_is_the_last(deployment: Deployment) -> None:
    fleet = Fleet(cuts, again)
    await fleet.start(deployment, engines=3)
    told = await deployment.ask()
    assert told.text == " ".join(WORDS[:50])
    assert is_error(told)
    assert len(fleet.calls) == 2
    (outcome,) = deployment.outcomes
    assert (outcome.finish, outcome.resumed, outcome.attempts) == ("upstream_failed", 1, 2)
    assert await deployment.is_well()


async def test_unless_more_attempts_are_allowed(deployment: Deployment) -> None:
    async def busy(call: Wrong, number: int) -> None:
        await call.refuse(503)

    fleet = Fleet(cuts, busy, again)
    await fleet.start(deployment, engines=4, failover={"attempts": 4})
    told = await deployment.ask(stream_options={"include_usage": True})
    assert (told.text, told.done) == (WHOLE, True)
    assert said_before(fleet.calls[3]) == " ".join(WORDS[:50])
    assert told.chunks[-1]["warmroute"] == {"resumed": 2}
    assert len({call.writer.get_extra_info("sockname") for call in fleet.calls}) == 4, "never the same one"


async def refuses(call: Wrong, number: int) -> None:
    await call.refuse(400, "", "The last message must be the user's.")


async def answers_whole(call: Wrong, number: int) -> None:
    await call.whole(b'{"choices": [{"message": {"role": "assistant", "content": "secret"}}]}')


async def thinks(call: Wrong, number: int) -> None:
    await begin(call, number)
    await call.chunk(call.event(choices=[{"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None}]))
    await call.until_gone()


@pytest.mark.parametrize("other", [refuses, answers_whole, thinks])
async def test_what_another_engine_makes_of_it_is_never_told(deployment: Deployment, other: Script) -> None:
    fleet = Fleet(cuts, then=other)
    await fleet.start(deployment)
    told = await deployment.ask()
    assert told.text == SAID
    assert is_error(told)
    assert len(fleet.calls) == 2
    assert all(word not in told.body for word in (b"last message", b"secret", b'"hm"'))
    assert await deployment.is_well()


@pytest.mark.parametrize("fields", [{"seed": 1}, {"stop": ["word39 word99"]}, {"max_tokens": 40}], ids=str)
async def test_what_cannot_be_gone_on_with_is_not(deployment: Deployment, fields: dict[str, Any]) -> None:
    fleet = Fleet(cuts)
    await fleet.start(deployment)
    told = await deployment.ask(**fields)
    assert told.text == SAID
    assert is_error(told)
    assert len(fleet.calls) == 1


async def test_who_leaves_meanwhile_frees_the_second_engine(deployment: Deployment) -> None:
    gone = asyncio.Event()

    async def slow(call: Wrong, number: int) -> None:
        await begin(call, number)
        await call.until_gone()
        gone.set()

    fleet = Fleet(cuts, then=slow)
    await fleet.start(deployment)
    asking = asyncio.create_task(deployment.ask())

    async def has_moved() -> bool:
        return len(fleet.calls) == 2

    await until(has_moved, what="another engine is asked")
    asking.cancel()
    await asyncio.wait_for(gone.wait(), 5)
    await until(deployment.is_well, what="nothing is booked")
    (outcome,) = deployment.outcomes
    assert outcome.finish == "client_gone"
    assert outcome.events >= 41


async def test_a_prompt_that_ends_engines_amid_answers_gets_no_third(deployment: Deployment) -> None:
    fleet = Fleet()
    engines = await fleet.start(deployment, engines=3)

    async def dies(call: Wrong, number: int) -> None:
        start = await begin(call, number)
        await call.chunk(part(call, start))
        await asyncio.sleep(0.02)
        port = call.writer.get_extra_info("sockname")[1]
        await next(engine for engine in engines if engine.url.endswith(f":{port}")).die()
        call.reset()

    fleet.then = dies
    assert is_error(await deployment.ask())
    assert len(fleet.calls) == 2
    told = await deployment.ask()
    assert told.status == 502
    assert told.error is not None
    assert told.error["code"] == "quarantined"
    assert len(fleet.calls) == 2
