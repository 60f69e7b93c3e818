"""The official `openai` client, unchanged but for its base_url: what works against an engine works through us."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletionChunk

from router.lab.server import SimEngineServer
from tests.flows.recording_engine import TOKEN, RecordingEngine
from tests.flows.site import CHAT, Client, Site, essay, said, until

MESSAGES: Any = [said("How does a cache stay warm?")]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
EIGHT: Any = {"max_tokens": 8, "extra_body": {"ignore_eos": True}}


async def _one_engine(site: Site, **options: Any) -> tuple[SimEngineServer, Client, AsyncOpenAI]:
    engine = await site.engine(**options)
    client = await site.gateway(engine)
    return engine, client, await site.sdk(client)


async def _idle(engine: SimEngineServer) -> bool:
    return engine.model.running == engine.model.waiting == 0


# --- answers


async def test_a_chat_whole_and_streamed_says_the_same(site: Site) -> None:
    _, _, sdk = await _one_engine(site)
    whole = await sdk.chat.completions.create(model="demo", messages=MESSAGES, **EIGHT)
    stream = await sdk.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **EIGHT)
    chunks = [chunk async for chunk in stream]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert whole.choices[0].finish_reason == "length"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content != ""
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_client_that_blocks_works_too(site: Site) -> None:
    _, client, _ = await _one_engine(site)

    def talk() -> tuple[str | None, str]:
        with (
            DefaultHttpxClient(trust_env=False, verify=False) as http,
            OpenAI(base_url=f"{client.running.url}/v1", api_key="none", http_client=http) as sdk,
        ):
            whole = sdk.chat.completions.create(model="demo", messages=MESSAGES, **EIGHT)
            stream = sdk.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **EIGHT)
            return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)

    whole, streamed = await asyncio.to_thread(talk)
    assert whole == streamed != ""


async def test_usage_in_a_stream_is_for_who_asked(site: Site) -> None:
    _, client, sdk = await _one_engine(site)
    asked = await sdk.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **EIGHT
    )
    *tokens, last = [chunk async for chunk in asked]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.completion_tokens, last.usage.total_tokens - last.usage.prompt_tokens) == (8, 8)
    assert all(chunk.choices for chunk in tokens)

    unasked = await sdk.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **EIGHT)
    assert [chunk.usage for chunk in [c async for c in unasked] if chunk.usage or not chunk.choices] == []
    raw = await client.ask({"model": "demo", "messages": MESSAGES, "stream": True, "max_tokens": 8})
    assert "usage" not in raw.text
    assert raw.text.endswith("data: [DONE]\n\n")
    receipt = await client.receipt(raw.id)  # known to us all the same
    assert receipt["usage"]["input_tokens"] == last.usage.prompt_tokens


async def test_several_choices(site: Site) -> None:
    _, _, sdk = await _one_engine(site)
    whole = await sdk.chat.completions.create(model="demo", messages=MESSAGES, n=2, **EIGHT)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert texts[0] != texts[1]
    stream = await sdk.chat.completions.create(model="demo", messages=MESSAGES, n=2, stream=True, **EIGHT)
    chunks = [chunk.choices[0] async for chunk in stream]
    for index, text in enumerate(texts):
        own = [choice for choice in chunks if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == text
        assert own[-1].finish_reason == "length"


async def test_log_probabilities(site: Site) -> None:
    _, _, sdk = await _one_engine(site)
    answer = await sdk.chat.completions.create(model="demo", messages=MESSAGES, logprobs=True, top_logprobs=2, **EIGHT)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert "".join(token.token for token in told.content) == answer.choices[0].message.content
    assert [len(token.top_logprobs) for token in told.content] == [2] * 8


async def test_tools(site: Site) -> None:
    _, _, sdk = await _one_engine(site)
    required: Any = "required"
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice, finish in ((required, "tool_calls"), (named, "stop")):
        answer = await sdk.chat.completions.create(model="demo", messages=MESSAGES, tools=[TOOL], tool_choice=choice)
        assert answer.choices[0].finish_reason == finish
        assert answer.choices[0].message.tool_calls is not None
        (call,) = answer.choices[0].message.tool_calls
        assert call.type == "function"
        assert call.function.name == "weather"
        assert isinstance(json.loads(call.function.arguments), dict)
        stream = await sdk.chat.completions.create(
            model="demo", messages=MESSAGES, tools=[TOOL], tool_choice=choice, stream=True
        )
        assert _called([chunk async for chunk in stream]) == ("weather", call.function.arguments, finish)


def _called(chunks: list[ChatCompletionChunk]) -> tuple[str, str, str | None]:
    """The name, the arguments and the finish reason of the one call in a stream."""
    parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or () if call.function]
    names = [part.function.name for part in parts if part.function and part.function.name]
    arguments = "".join(part.function.arguments or "" for part in parts if part.function)
    return "".join(names), arguments, chunks[-1].choices[0].finish_reason


async def test_prompts_of_every_form(site: Site) -> None:
    engine, client, sdk = await _one_engine(site)
    ids = [5 + n % 300 for n in range(64)]
    prompt: Any
    for prompt, choices, tokens in ((ids, 1, 64), ([ids, ids[:32]], 2, 96), (["one two", "three"], 2, None)):
        answer = await sdk.completions.create(model="demo", prompt=prompt, max_tokens=4)
        assert [choice.index for choice in answer.choices] == list(range(choices))
        assert answer.usage is not None
        assert tokens in (None, answer.usage.prompt_tokens)
    await client.caught_up(engine)
    again = await sdk.completions.with_raw_response.create(model="demo", prompt=ids, max_tokens=4)
    assert again.headers["x-warmroute-predicted-tokens"] == again.headers["x-warmroute-cached-tokens"] == "48"
    text = await sdk.completions.create(model="demo", prompt=essay("lakes"), max_tokens=4, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in text])


async def test_models(site: Site) -> None:
    engine = await site.engine(loras=("tuned",))
    client = await site.gateway(engine, models={"demo": {"tokenizer": "demo", "aliases": ["gpt-4o"]}})
    sdk = await site.sdk(client)
    listed = [model.id async for model in sdk.models.list()]
    assert sorted(listed) == ["demo", "gpt-4o", "tuned"]
    for name in listed:
        assert (await sdk.models.retrieve(name)).id == name
        answer = await sdk.chat.completions.create(model=name, messages=MESSAGES, **EIGHT)
        assert answer.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("nobody")


async def test_headers_tell_what_was_done(site: Site) -> None:
    engine, client, sdk = await _one_engine(site)
    asked: Any = {"model": "demo", "messages": [said(essay("headers"))], **EIGHT}
    first = await sdk.chat.completions.with_raw_response.create(**asked)
    await client.caught_up(engine)
    again = await sdk.chat.completions.with_raw_response.create(**asked, extra_headers={"x-request-id": "mine-1"})
    usage = again.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert again.headers["x-request-id"] == "mine-1" != first.headers["x-request-id"]
    assert int(again.headers["x-warmroute-predicted-tokens"]) == usage.prompt_tokens_details.cached_tokens
    assert int(again.headers["x-warmroute-cached-tokens"]) == usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens
    assert again.headers["x-warmroute-instance"] == engine.url.removeprefix("http://")
    async with sdk.chat.completions.with_streaming_response.create(**asked, stream=True) as streamed:
        assert int(streamed.headers["x-warmroute-predicted-tokens"]) == usage.prompt_tokens_details.cached_tokens
        await streamed.read()


# --- what reaches the engine


async def _recorded(site: Site) -> tuple[RecordingEngine, AsyncOpenAI, list[bytes]]:
    """The engine's side and the client's own bytes."""
    engine: RecordingEngine = await site.enter(RecordingEngine())
    client = await site.gateway(
        {"url": engine.url, "model": "public"}, models={"*": {"tokenizer": "demo", "parity": "off"}}
    )
    sent: list[bytes] = []

    async def keep(request: Any) -> None:
        sent.append(request.content)

    http = DefaultAsyncHttpxClient(trust_env=False, verify=False, event_hooks={"request": [keep]})
    return engine, await site.sdk(client, http_client=http), sent


EXTRA: dict[str, Any] = {
    "top_k": 5,
    "chat_template_kwargs": {"enable_thinking": False},
    "cache_salt": "mine",
    "nobody_knows_this": {"big": 12345678901234567890123456789, "text": "😀\u2028\x7f", "nested": [{}, None]},
}


async def test_unknown_fields_arrive_as_they_were_sent(site: Site) -> None:
    engine, sdk, sent = await _recorded(site)
    answer = await sdk.chat.completions.create(model="public", messages=MESSAGES, extra_body=EXTRA)
    assert answer.choices[0].message.content == "well"
    (body,), (got,) = sent, engine.bodies
    assert json.loads(body).keys() >= EXTRA.keys()
    _equal_but_for_the_model(body, got)


def _equal_but_for_the_model(body: bytes, got: bytes) -> None:
    """The public name is cut out, the engine's own spliced in at the end; every other byte is the client's."""
    kept = body.replace(b'"model":"public",', b"").replace(b',"model":"public"', b"")
    assert got == kept[:-1] + b',"model":"own"}'


async def test_a_stream_asks_for_usage_and_changes_nothing_else(site: Site) -> None:
    engine, sdk, sent = await _recorded(site)
    stream = await sdk.chat.completions.create(model="public", messages=MESSAGES, stream=True, extra_body=EXTRA)
    chunks = [chunk async for chunk in stream]
    assert [chunk.usage for chunk in chunks] == [None, None]  # the engine's usage chunk is not for this client
    (body,), (got,) = sent, engine.bodies
    asked, told = json.loads(body), json.loads(got)
    assert told.pop("stream_options") == {"include_usage": True}
    assert told.pop("model") == "own"
    del asked["model"]
    assert list(told.items()) == list(asked.items())


async def test_the_engine_knows_the_request_by_our_id_and_no_client_header(site: Site) -> None:
    engine, sdk, _ = await _recorded(site)
    await sdk.chat.completions.create(
        model="public", messages=MESSAGES, extra_headers={"x-request-id": "theirs", "x-data-parallel-rank": "7"}
    )
    headers = {name: value for name, value in engine.seen[0].headers}
    assert headers[b"x-request-id"].endswith(b"-theirs")
    assert not headers[b"x-request-id"].startswith(b"theirs")
    assert b"authorization" not in headers  # the client's key is for us
    assert b"x-data-parallel-rank" not in headers


# --- errors


async def test_the_client_is_at_fault(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine, listen={"max_body_bytes": 20_000})
    sdk = await site.sdk(client)
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.chat.completions.create(model="nobody", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.chat.completions.create(model="demo", messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        await sdk.chat.completions.create(model="demo", messages=7)  # type: ignore[call-overload]
    huge: Any = [said("x" * 30_000)]
    with pytest.raises(openai.APIStatusError) as large:
        await sdk.chat.completions.create(model="demo", messages=huge)
    assert large.value.status_code == 413
    assert "larger than 20000 bytes" in large.value.message
    assert unknown.value.request_id != refused.value.request_id
    broken = await client.http.post(client.running.url + CHAT, content=b'{"model": "demo", ')
    assert broken.status_code == 400
    assert broken.json()["error"]["type"] == "invalid_request_error"
    assert await client.nothing_booked()


async def test_a_body_that_is_too_large_is_refused_as_everything_else_is(site: Site) -> None:
    client = await site.gateway(await site.engine(), listen={"max_body_bytes": 20_000})
    response = await client.http.post(client.running.url + CHAT, content=b"x" * 30_000)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    receipt = await client.receipt(response.headers["x-request-id"])
    assert receipt["status"] == 413


async def test_nobody_is_ready(site: Site) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        client = await site.gateway({"url": url, "model": "demo"}, ready=0)
        sdk = await site.sdk(client)
        with pytest.raises(openai.InternalServerError) as error:
            await sdk.chat.completions.create(model="demo", messages=MESSAGES)
    assert error.value.status_code == 503
    assert error.value.code == "no_engine_available"
    assert int(error.value.response.headers["retry-after"]) >= 1


async def test_a_client_that_waits_no_longer_frees_the_engine(site: Site) -> None:
    engine, client, sdk = await _one_engine(site, speed=0.05)  # a step takes 130 ms
    with pytest.raises(openai.APITimeoutError):
        await sdk.with_options(timeout=0.3).chat.completions.create(model="demo", messages=MESSAGES, max_tokens=200)
    await until(lambda: _idle(engine), what="the engine is idle")
    await until(client.nothing_booked, what="nothing is booked")


async def test_a_client_that_leaves_a_stream_frees_the_engine(site: Site) -> None:
    engine, client, sdk = await _one_engine(site, speed=1)
    stream = await sdk.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, max_tokens=4_000, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert engine.model.running == 1
    await stream.close()
    await until(lambda: _idle(engine), what="the engine is idle")
    await until(client.nothing_booked, what="nothing is booked")
    (receipt,) = await client.running.live.requests(None)
    assert receipt["finish"] == "client_gone"


async def test_an_engine_that_dies_breaks_the_stream_with_an_error(site: Site) -> None:
    engine, client, sdk = await _one_engine(site, speed=1)
    stream = await sdk.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, max_tokens=4_000, extra_body={"ignore_eos": True}
    )
    seen = []
    with pytest.raises(openai.APIError):  # noqa: PT012 (it is raised by the iteration)
        async for chunk in stream:
            seen.append(chunk.choices[0].finish_reason)
            if len(seen) == 3:
                engine.crash()
    assert len(seen) >= 3
    assert set(seen) == {None}  # nothing that could be taken for an end
    await until(client.nothing_booked, what="nothing is booked")


async def test_a_connection_that_is_cut_breaks_the_stream_with_an_error(site: Site) -> None:
    engine, sdk, _ = await _recorded(site)
    engine.stream = [TOKEN]
    stream = await sdk.chat.completions.create(model="public", messages=MESSAGES, stream=True)
    seen = []
    with pytest.raises(openai.APIError) as error:  # noqa: PT012 (it is raised by the iteration)
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content)
    assert seen == ["well"]
    assert "127.0.0.1" not in str(error.value)
