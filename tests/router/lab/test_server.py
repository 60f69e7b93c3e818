from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from router.lab.chat import ChatModel
from router.lab.server import SimEngineOptions, SimEngineServer

CITY_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}


def user(text: str) -> Any:
    return [{"role": "system", "content": "You are terse."}, {"role": "user", "content": text}]


@pytest.fixture
async def engine(chat: ChatModel) -> AsyncIterator[SimEngineServer]:
    async with SimEngineServer(SimEngineOptions(speed=50, loras=("poet",)), chat=chat) as engine:
        yield engine


@pytest.fixture
async def client(engine: SimEngineServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(engine: SimEngineServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url) as http:
        yield http


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=user("Hello"), max_tokens=9)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9


async def test_answers_end_by_themselves_and_the_same_prompt_gets_the_same_answer(client: openai.AsyncOpenAI) -> None:
    answers = [await client.chat.completions.create(model="demo", messages=user("Hello")) for _ in range(2)]
    assert answers[0].choices[0].finish_reason == "stop"
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage is not None
    assert 64 < answers[0].usage.completion_tokens <= 192


async def test_a_stream_says_what_the_whole_answer_says(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="demo", messages=user("Hello"))
    stream = await client.chat.completions.create(
        model="demo", messages=user("Hello"), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) == whole.usage.completion_tokens + 2  # a chunk a token, the opening and the usage


async def test_without_asking_there_is_no_usage_in_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="demo", messages=user("Hi"), stream=True, max_tokens=3)
    assert [chunk.usage async for chunk in stream if chunk.usage] == []


async def test_several_choices_differ(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=user("Hello"), n=2, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    stream = await client.chat.completions.create(
        model="demo", messages=user("Hello"), n=2, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=user("Hello"), max_tokens=4, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 4
    completion = await client.completions.create(model="demo", prompt="Once", max_tokens=4, logprobs=1)
    listed = completion.choices[0].logprobs
    assert listed is not None
    assert listed.tokens is not None
    assert "".join(listed.tokens) == completion.choices[0].text


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "get_weather"}}, "stop")],
)
async def test_tools(client: openai.AsyncOpenAI, choice: Any, finish: str) -> None:
    ask: dict[str, Any] = {"model": "demo", "messages": user("Weather?"), "tools": [CITY_TOOL], "tool_choice": choice}
    answer = await client.chat.completions.create(**ask)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert answer.choices[0].finish_reason == finish
    assert calls[0].function.name == "get_weather"
    assert json.loads(calls[0].function.arguments) == {"city": "Oslo", "unit": "C"}
    fragments, names, finishes = [], [], []
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        finishes.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or []:
            names.append(call.function.name)
            fragments.append(call.function.arguments or "")
    assert [name for name in names if name] == ["get_weather"]
    assert "".join(fragments) == calls[0].function.arguments
    assert len([fragment for fragment in fragments if fragment]) > 3
    assert finishes[-1] == finish


async def test_tools_that_the_model_may_use_are_not_used(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=user("Weather?"), tools=[CITY_TOOL], tool_choice="auto", max_tokens=5
    )
    assert answer.choices[0].message.content


async def test_token_ids_in_and_out(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    prompt = (await http.post("/tokenize", json={"model": "demo", "prompt": "one two three"})).json()["tokens"]
    ask = {"prompt": prompt, "max_tokens": 5, "return_token_ids": True, "echo": True}
    choice = (await http.post("/v1/completions", json=ask)).json()["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 5
    assert choice["text"].startswith("one two three")
    whole = (await http.post("/detokenize", json={"tokens": prompt + choice["token_ids"]})).json()["prompt"]
    assert whole == choice["text"]


async def test_a_batch_of_prompts(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="demo", prompt=["one two", "three four five"], n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


async def cached(client: openai.AsyncOpenAI, messages: Any, **more: Any) -> tuple[int, int]:
    """Prompt tokens, and how many of them were cached."""
    answer = await client.chat.completions.create(model="demo", messages=messages, max_tokens=2, **more)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens


async def test_a_warm_prompt_reports_all_blocks_but_the_last_token(client: openai.AsyncOpenAI) -> None:
    for length in range(40, 60):
        messages = user(" ".join(["water"] * length))
        await cached(client, messages)
        prompt, hit = await cached(client, messages)
        assert hit == (prompt - 1) // 16 * 16


async def test_a_fresh_engine_and_another_salt_report_nothing(client: openai.AsyncOpenAI) -> None:
    messages = user("water " * 100)
    assert (await cached(client, messages))[1] == 0
    assert (await cached(client, messages, extra_body={"cache_salt": "tenant-b"}))[1] == 0
    async with (
        SimEngineServer(SimEngineOptions(speed=50)) as other,
        openai.AsyncOpenAI(base_url=f"{other.url}/v1", api_key="none") as fresh,
    ):
        assert (await cached(fresh, messages))[1] == 0


@pytest.mark.parametrize("with_tool", [False, True])
async def test_the_next_turn_hits_the_answer_too(client: openai.AsyncOpenAI, with_tool: bool) -> None:
    messages = user("water " * 50)
    extra: dict[str, Any] = {"tools": [CITY_TOOL], "tool_choice": "required"} if with_tool else {}
    answer = await client.chat.completions.create(model="demo", messages=messages, **extra)
    assert answer.usage is not None
    said = answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    if with_tool:
        extra["tool_choice"] = "none"
    prompt, hit = await cached(client, [*messages, said, {"role": "user", "content": "And then?"}], **extra)
    computed = answer.usage.total_tokens - 1  # the last token was never an input
    assert hit == computed // 16 * 16
    assert prompt > computed


async def test_report_cached_off() -> None:
    async with (
        SimEngineServer(SimEngineOptions(speed=50, report_cached=False)) as engine,
        httpx.AsyncClient(base_url=engine.url) as http,
    ):
        answer = (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).json()
    assert answer["usage"]["prompt_tokens_details"] is None


async def test_adapters(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["demo", "poet"]
    answer = await client.chat.completions.create(model="poet", messages=user("Hello"), max_tokens=1)
    assert answer.model == "poet"


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"model": "gpt-9", "messages": user("x")}, 404, "model", "The model `gpt-9` does not exist."),
        ({"messages": []}, 400, None, "empty conversation"),
        ({}, 400, "body.messages", "Field required"),
        ({"messages": user("x"), "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"messages": user("x"), "max_tokens": 10**7}, 400, "max_tokens", "max_model_len"),
        ({"messages": user("water " * 500), "max_tokens": 3800}, 400, "input_tokens", "maximum context length"),
        ({"messages": user("x"), "temperature": "hot"}, 400, "body.temperature", "Expected `float"),
        ({"messages": user("x"), "temperature": -1}, 400, "temperature", "non-negative"),
        ({"messages": user("x"), "top_p": 1.5}, 400, "top_p", "(0, 1]"),
        ({"messages": user("x"), "n": 0}, 400, None, "at least 1"),
        ({"messages": user("x"), "n": 10**9}, 400, None, "at most 16384"),
        ({"messages": user("x"), "logprobs": True, "top_logprobs": 99}, 400, "logprobs", "max allowed: 20"),
        ({"messages": user("x"), "stream_options": {"include_usage": True}}, 400, "stream_options", "stream=True"),
        ({"messages": user("x"), "cache_salt": ""}, 400, "cache_salt", "non-empty"),
        ({"messages": user("x"), "tool_choice": "auto"}, 400, "tool_choice", "`tools` must be set"),
        ({"messages": user("x"), "response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "demo is not a multimodal"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, None, "not iterable"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, None, "unknown role"),
    ],
)
async def test_chat_errors(body: dict[str, Any], status: int, param: str | None, words: str, chat: ChatModel) -> None:
    async with (
        SimEngineServer(SimEngineOptions(max_model_tokens=4_000), chat=chat) as engine,
        httpx.AsyncClient(base_url=engine.url) as http,
    ):
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"max_tokens": 2}, "Either prompt"),
        ("/v1/completions", {"prompt": [999_999_999]}, "out of vocabulary"),
        ("/v1/completions", {"prompt": [[1], "x", {}]}, "prompt must be"),
        ("/tokenize", {}, "Field required"),
    ],
)
async def test_other_errors(http: httpx.AsyncClient, path: str, body: dict[str, Any], words: str) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_what_is_no_json_and_no_route(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    bad = await http.post("/v1/chat/completions", content=b'{"messages": [', headers=headers)
    assert (bad.status_code, "JSON decode error" in bad.text) == (400, True)
    deep = b'{"messages": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    bad = await http.post("/v1/chat/completions", content=deep, headers=headers)
    assert (bad.status_code, "JSON decode error" in bad.text) == (400, True)
    text = await http.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert (text.status_code, "Unsupported Media Type" in text.text) == (400, True)
    assert (await http.get("/v1/nothing")).json() == {"detail": "Not Found"}
    wrong = await http.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


async def test_a_key_guards_the_api_and_nothing_else() -> None:
    async with (
        SimEngineServer(SimEngineOptions(api_key="secret", speed=50)) as engine,
        httpx.AsyncClient(base_url=engine.url) as http,
    ):
        refused = await http.get("/v1/models")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert (await http.get("/v1/models", headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await http.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
        assert (await http.get("/kv_event_sources")).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 200


async def test_tokenize_renders_a_conversation_as_chat_does(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    messages = user("What is the weather in Oslo?")
    told = (await http.post("/tokenize", json={"messages": messages, "return_token_strs": True})).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert (await cached(client, messages))[0] == told["count"]
    bare = (await http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    assert told["tokens"][: bare["count"]] == bare["tokens"]
    going_on = [*messages, {"role": "assistant", "content": "It is"}]
    body = {"messages": going_on, "add_generation_prompt": False, "continue_final_message": True}
    cut = (await http.post("/tokenize", json=body)).json()["tokens"]
    text = (await http.post("/detokenize", json={"tokens": cut})).json()["prompt"]
    assert text.endswith("It is")


async def idle(engine: SimEngineServer) -> None:
    async with asyncio.timeout(5):
        while engine.model.running:  # noqa: ASYNC110 (the engine has no reason to tell anybody)
            await asyncio.sleep(0.01)


def sample(page: str, name: str) -> float:
    (line,) = [line for line in page.splitlines() if line.startswith(name)]
    return float(line.rpartition(" ")[2])


async def test_metrics_count(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    messages = user("water " * 100)
    prompt, _ = await cached(client, messages)
    _, hit = await cached(client, messages)
    page = (await http.get("/metrics")).text
    assert sample(page, "vllm:prefix_cache_queries_total") == 2 * prompt
    assert sample(page, "vllm:prefix_cache_hits_total") == hit
    assert sample(page, "vllm:generation_tokens_total") == 4
    assert sample(page, "vllm:time_to_first_token_seconds_count") == 2
    assert sample(page, 'vllm:time_to_first_token_seconds_bucket{engine="0",model_name="demo",le="+Inf"}') == 2
    assert sample(page, "vllm:num_requests_running") == 0
    assert sample(page, "process_start_time_seconds") > 1e9
    assert 'block_size="16"' in page


async def test_a_client_that_leaves_frees_the_engine(engine: SimEngineServer, http: httpx.AsyncClient) -> None:
    ask = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=ask) as answer:
        await answer.aiter_lines().__anext__()
        assert engine.model.running == 1
    await idle(engine)
    assert 'finished_reason="abort"} 1.0' in (await http.get("/metrics")).text


async def test_a_full_queue_is_busy() -> None:
    options = SimEngineOptions(max_num_seqs=1, max_queued=1)
    ask = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
    async with SimEngineServer(options) as engine, httpx.AsyncClient(base_url=engine.url) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=ask) for _ in range(6)))
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses[0] == 200
    assert statuses[-1] == 503
    busy = next(answer for answer in answers if answer.status_code == 503)
    assert busy.json()["error"]["type"] == "ServiceUnavailable"


async def test_a_crash_shows_in_the_stream_and_in_health(engine: SimEngineServer, http: httpx.AsyncClient) -> None:
    ask = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=ask) as answer:
        lines = answer.aiter_lines()
        await lines.__anext__()
        engine.crash()
        rest = [line async for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "InternalServerError"
    assert rest[-1] == "data: [DONE]"
    assert (await http.get("/health")).status_code == 503
    assert (await http.post("/v1/completions", json=ask)).status_code == 500


async def test_sleep_forgets_and_wake_up_serves_what_came_meanwhile(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    messages = user("water " * 100)
    await cached(client, messages)
    assert (await http.post("/sleep?level=1")).json() == {"status": "sleeping", "level": 1}
    assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
    page = (await http.get("/metrics")).text
    assert sample(page, 'vllm:engine_sleep_state{engine="0",model_name="demo",sleep_state="awake"}') == 0
    waiting = asyncio.create_task(cached(client, messages))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await http.post("/wake_up")
    assert (await waiting)[1] == 0


async def test_reset_is_refused_while_busy(engine: SimEngineServer, http: httpx.AsyncClient) -> None:
    ask = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    async with http.stream("POST", "/v1/completions", json=ask) as answer:
        await answer.aiter_lines().__anext__()
        assert (await http.post("/reset_prefix_cache")).json() == {"success": False}
    await idle(engine)
    assert (await http.post("/reset_prefix_cache")).json() == {"success": True}


async def test_a_request_id_names_the_answer(http: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "mine"}
    answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
    assert answer.json()["id"] == "cmpl-mine"


def test_run_serves_until_it_is_told_to_stop() -> None:
    script = (
        "from router.lab.server import SimEngineOptions, run\n"
        "run(SimEngineOptions(), ready=lambda engine: print(engine.url, flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            assert httpx.get(f"{url}/version").json() == {"version": "0.32.0"}
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0


async def test_a_model_that_fails_is_a_crash(
    engine: SimEngineServer, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.model, "step", lambda now: 1 / 0)
    assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 500
    assert (await http.get("/health")).status_code == 503


def test_options_that_make_no_engine_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown profile"):
        SimEngineOptions(profile="abacus")
    with pytest.raises(ValueError, match="speed"):
        SimEngineOptions(speed=0)
