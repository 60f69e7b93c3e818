"""The life of a request over real sockets: what the engine gets, what the client gets, and the one Outcome."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest
import zstandard

from router.core import Ask, Outcome, Prompt, Usage
from router.serving.deadlines import TimeLimits
from router.serving.models import ServedModel
from tests.router.serving.stand import STREAM_HEAD, EngineSide, Stand

RECORDINGS = Path(__file__).parent / "recordings"
CHAT = {"model": "m-chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
STREAM = {**CHAT, "stream": True}
DONE = b"data: [DONE]\n\n"
USAGE = {
    "prompt_tokens": 120,
    "completion_tokens": 1,
    "total_tokens": 121,
    "prompt_tokens_details": {"cached_tokens": 112},
}
NESTED = "[" * 1000 + "]" * 1000
ANSWER = json.dumps({"id": "x", "choices": [{"index": 0, "message": {"content": "z"}}], "usage": USAGE}).encode()


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(content: str, finish: str | None = None, *, index: int = 0) -> bytes:
    return event(choices=[{"index": index, "delta": {"content": content}, "finish_reason": finish}])


USAGE_CHUNK = event(choices=[], usage=USAGE)


async def echo(engine: EngineSide) -> None:
    await engine.whole(ANSWER)


async def hang(engine: EngineSide) -> None:
    await engine.until_gone()


# -- streams


@pytest.mark.parametrize("options", [{"include_usage": False}, None, {"include_usage": True}])
async def test_usage_is_always_asked_for_and_shown_only_to_who_asked(stand: Stand, options: dict[str, Any]) -> None:
    """https://github.com/headroomlabs-ai/headroom/pull/2026"""

    async def engine(side: EngineSide) -> None:
        asked = side.json["stream_options"]["include_usage"]
        await side.stream(chunk("a"), chunk("", "stop"), *([USAGE_CHUNK] if asked else []), DONE)

    await stand.start(engine)
    answer = await stand.ask({**STREAM, **({"stream_options": options} if options is not None else {})})
    shown = [USAGE_CHUNK] if options == {"include_usage": True} else []
    assert answer.body == b"".join([chunk("a"), chunk("", "stop"), *shown, DONE])
    assert not answer.broken
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert stand.outcome.usage == Usage(input_tokens=120, output_tokens=1, cached_tokens=112)
    assert stand.outcome.finish == "complete"
    assert stand.outcome.delivered_source == "usage"
    assert stand.outcome.ttft_s is not None
    assert stand.placement.progressed == [1]


async def test_the_clients_other_stream_options_survive(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.stream(chunk("a", "stop"), DONE)

    await stand.start(engine)
    await stand.ask({**STREAM, "stream_options": {"include_usage": False, "x": {"y": [1]}}})
    assert stand.engine.seen[0].json["stream_options"] == {"x": {"y": [1]}, "include_usage": True}


@pytest.mark.parametrize("name", ["vllm-0.32.0/34-stream-usage", "sglang-0.5.23/25-stream-usage"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_recorded_stream_arrives_byte_for_byte(stand: Stand, name: str, size: int) -> None:
    data = (RECORDINGS / f"{name}.sse").read_bytes()

    async def engine(side: EngineSide) -> None:
        await side.stream(*[data[at : at + size] for at in range(0, len(data), size)])

    await stand.start(engine)
    answer = await stand.ask({**STREAM, "stream_options": {"include_usage": True}})
    assert answer.body == data
    assert stand.outcome.usage == Usage(input_tokens=300, output_tokens=6, cached_tokens=288)


async def test_characters_split_between_writes_arrive_whole(stand: Stand) -> None:
    """https://github.com/api7/aisix/issues/111"""
    text = 'data: {"choices":[{"index":0,"delta":{"content":"你好🌍界"},"finish_reason":null}]}\n\n'.encode()

    async def engine(side: EngineSide) -> None:
        await side.stream(*[bytes([byte]) for byte in text + USAGE_CHUNK + DONE])

    await stand.start(engine)
    answer = await stand.ask(STREAM)
    assert answer.body == text + DONE
    assert b"\xef\xbf\xbd" not in answer.body
    assert stand.outcome.usage is not None


async def test_an_event_leaves_in_the_moment_it_comes(stand: Stand) -> None:
    go_on = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        await side.chunk(chunk("first"))
        await go_on.wait()
        await side.chunk(chunk("", "stop") + DONE)
        await side.raw(b"0\r\n\r\n")

    await stand.start(engine)
    reader, _ = await stand.send(STREAM)
    await reader.readuntil(b"first")
    go_on.set()
    assert (await reader.read()).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")


async def test_tool_call_deltas_and_finish_reason_are_the_engines(stand: Stand) -> None:
    """https://github.com/BerriAI/litellm/pull/37792"""

    def delta(finish: str | None = None, **fields: object) -> bytes:
        return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])

    calls = [
        delta(
            content=None,
            role="assistant",
            tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {"name": "a", "arguments": ""}}],
        ),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"x":'}}]),
        delta(tool_calls=[{"index": 1, "id": "call_2", "function": {"name": "b", "arguments": '{"y":2'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}, {"index": 1, "function": {"arguments": "}"}}]),
        delta("tool_calls"),
    ]

    async def engine(side: EngineSide) -> None:
        await side.stream(*calls, USAGE_CHUNK, DONE)

    await stand.start(engine)
    assert (await stand.ask(STREAM)).body == b"".join(calls) + DONE


async def test_a_stream_of_several_choices_is_whole_only_when_all_have_finished(stand: Stand) -> None:
    """https://github.com/BerriAI/litellm/issues/3276"""
    parts = [chunk("A"), chunk("B", index=1), chunk("", "stop", index=1)]

    async def engine(side: EngineSide) -> None:
        last = [chunk("", "length")] if len(stand.engine.seen) == 1 else []
        await side.stream(*parts, *last)

    await stand.start(engine)
    whole = await stand.ask({**STREAM, "n": 2})
    assert whole.body == b"".join([*parts, chunk("", "length")])
    assert not whole.broken
    cut = await stand.ask({**STREAM, "n": 2})
    assert cut.broken
    assert [outcome.finish for outcome in stand.outcomes] == ["complete", "upstream_failed"]


async def test_a_stream_that_is_cut_ends_with_an_error_and_never_as_if_whole(stand: Stand) -> None:
    """https://github.com/open-webui/open-webui/issues/29628"""

    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        await side.chunk(chunk("a") + chunk("b") + chunk("half")[:20])
        await asyncio.sleep(0.05)
        side.reset()

    await stand.start(engine, engine)
    answer = await stand.ask(STREAM)
    assert answer.broken
    events = answer.body.split(b"\n\n")
    assert b"\n\n".join(events[:2]) + b"\n\n" == chunk("a") + chunk("b")
    assert json.loads(events[2].removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert events[3:] == [b""]
    assert b"stop" not in answer.body
    assert b"[DONE]" not in answer.body
    assert stand.outcome.finish == "upstream_failed"
    assert stand.outcome.status == 200
    assert stand.outcome.events == 2
    assert len(stand.placement.asks) == 1  # never a second try once something has been sent


@pytest.mark.parametrize("name", ["stream-engine-killed", "stream-sigterm-server"])
async def test_an_engine_that_dies_in_mid_stream(stand: Stand, name: str) -> None:
    data = (RECORDINGS / f"vllm-0.32.0/{name}.sse").read_bytes()

    async def engine(side: EngineSide) -> None:
        await side.stream(data)

    await stand.start(engine)
    answer = await stand.ask(STREAM)
    assert answer.broken
    assert b"[DONE]" not in answer.body
    assert b"EngineCore" not in answer.body
    last = answer.body.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_error"
    assert stand.outcome.finish == "upstream_failed"


@pytest.mark.parametrize(("code", "status"), [(400, 400), (500, 500), ("x", 500)])
async def test_an_error_as_first_event_becomes_a_status(stand: Stand, code: object, status: int) -> None:
    """https://github.com/sgl-project/sglang/issues/12081"""

    async def engine(side: EngineSide) -> None:
        await side.stream(event(error={"message": "context length exceeded", "type": "BadRequestError", "code": code}))

    await stand.start(engine)
    answer = await stand.ask(STREAM)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert ("context length exceeded" in answer.json["error"]["message"]) == (status == 400)
    assert stand.outcome.finish == ("complete" if status == 400 else "upstream_failed")


async def test_keep_alives_pass_and_are_no_first_token(stand: Stand) -> None:
    go_on = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        await side.chunk(b": keep-alive\n\n")
        await go_on.wait()
        await side.chunk(chunk("x") + DONE)
        await side.raw(b"0\r\n\r\n")

    await stand.start(engine)
    reader, _ = await stand.send(STREAM)
    await reader.readuntil(b": keep-alive\n\n")
    assert stand.placement.progressed == []
    go_on.set()
    await reader.read()
    assert stand.placement.progressed == [1]


async def test_a_stream_without_a_word_is_no_answer(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.stream()

    await stand.start(engine)
    answer = await stand.ask(STREAM)
    assert answer.status == 502
    assert stand.outcome.finish == "upstream_failed"


async def test_the_end_is_told_at_done_and_the_connection_is_used_again(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        await side.chunk(chunk("x", "stop") + DONE)
        await asyncio.sleep(0.05)
        await side.raw(b"0\r\n\r\n")

    await stand.start(engine)
    first = await stand.ask(STREAM)
    await asyncio.sleep(0.1)
    second = await stand.ask(STREAM)
    assert first.body == second.body == chunk("x", "stop") + DONE
    assert stand.engine.seen[0].writer is stand.engine.seen[1].writer


async def test_a_slow_client_makes_the_engine_wait(stand: Stand) -> None:
    written = 0

    async def engine(side: EngineSide) -> None:
        nonlocal written
        await side.raw(STREAM_HEAD)
        for _ in range(2000):
            await side.chunk(chunk("x" * 16_000))
            written += 1

    await stand.start(engine)
    _, writer = await stand.send(STREAM)
    await stand.until(lambda: written > 0)
    before = -1
    while before != written:  # until nothing more is taken
        before = written
        await asyncio.sleep(0.2)
    assert written < 2000
    writer.transport.abort()
    await stand.until(lambda: bool(stand.outcomes))
    assert stand.outcome.finish == "client_gone"


# -- whole answers


async def test_a_whole_answer_is_the_engines_bytes_with_a_receipt(stand: Stand) -> None:
    await stand.start(echo)
    answer = await stand.ask(CHAT)
    assert answer.status == 200
    assert answer.body == ANSWER
    assert answer.headers["content-length"] == str(len(ANSWER))
    assert answer.headers["x-warmroute-predicted-tokens"] == "48"
    assert answer.headers["x-warmroute-cached-tokens"] == "112"
    assert answer.headers["cache-control"] == "no-store"
    assert "x-warmroute-instance" not in answer.headers
    outcome = stand.outcome
    assert (outcome.input_tokens, outcome.best_hit_tokens, outcome.predicted_hit_tokens) == (120, 64, 48)
    assert (outcome.delivered_hit_tokens, outcome.delivered_source) == (112, "usage")
    assert (outcome.instance, outcome.rank, outcome.status, outcome.finish) == ("engine-0", 3, 200, "complete")
    assert stand.placement.released == [(1, outcome)]


async def test_every_field_of_ask_and_outcome_is_in_its_place(stand: Stand) -> None:
    await stand.start(echo)
    await stand.ask(
        {**CHAT, "n": 2, "model": "tuned"}, headers={"x-request-id": "asked-by-client", "x-session-id": "one"}
    )
    assert stand.placement.asks == [
        Ask(
            request_id="asked-by-client",
            model="m-chat",
            prompt=Prompt(tokens=100, known_tokens=96, keys={16: array("Q", range(6))}),
            lora="tuned",
            session="one",
            stream=False,
            choices=2,
            max_output_tokens=16,
            body_bytes=96,  # as sent
        )
    ]
    outcome = stand.outcome
    assert outcome == Outcome(
        request_id="asked-by-client",
        model="m-chat",
        tenant="",
        instance="engine-0",
        rank=3,
        status=200,
        finish="complete",
        usage=Usage(input_tokens=120, output_tokens=1, cached_tokens=112),
        input_tokens=120,
        best_hit_tokens=64,
        predicted_hit_tokens=48,
        delivered_hit_tokens=112,
        delivered_source="usage",
        started_at=outcome.started_at,
        queue_s=outcome.queue_s,
        ttft_s=None,
        took_s=outcome.took_s,
        stream=False,
        prompt_source="exact",
        policy="kv_aware",
        alone=True,
        attempts=1,
        serial=outcome.serial,
        route="/v1/chat/completions",
    )
    assert len(outcome.serial) == 20
    assert outcome.started_at > 1e9 > outcome.took_s > outcome.queue_s > 0


async def test_one_connection_serves_requests_of_all_sizes_one_after_the_other(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        if side.json.get("stream"):
            await side.stream(chunk("a"), chunk("", "stop"), DONE)
        else:
            await side.whole(json.dumps({"pad": side.json["pad"], "usage": USAGE}).encode())

    stand.placement.served = "m-chat"
    await stand.start(engine)
    reader, writer = await stand.connect()
    for size in (1, 30, 30, 2000, 70_000, 1):
        for stream in (False, True):
            body = json.dumps({**CHAT, "pad": "x" * size, "stream": stream}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if stream:
                assert b"a" in await reader.readuntil(b"0\r\n\r\n")
            else:
                length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))["pad"] == "x" * size
            sent = {**stand.engine.seen[-1].json}
            assert (sent["pad"], sent["stream"]) == ("x" * size, stream)
    assert {outcome.finish for outcome in stand.outcomes} == {"complete"}
    assert len(stand.outcomes) == 12


async def test_pipelined_requests_are_answered_in_order(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(b'{"n":%d}' % side.json["n"])

    await stand.start(engine)
    reader, writer = await stand.connect()
    for number in range(10):
        body = json.dumps({**CHAT, "n": number}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
    for number in range(10):
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(7) == b'{"n":%d}' % number
    assert stand.edge.running == 0


async def test_what_need_not_wait_takes_no_task(stand: Stand) -> None:
    prompt = Prompt(tokens=7, known_tokens=0, keys={})

    def prepare_now(*_: object, **__: object) -> Prompt:
        return prompt

    stand.prompts.prepare_now = prepare_now  # type: ignore[attr-defined]
    stand.placement.place_now = stand.placement.place_here  # type: ignore[attr-defined]
    await stand.start(echo)
    before = set(asyncio.all_tasks())
    answer = await stand.ask(CHAT)
    assert answer.status == 200
    assert stand.placement.asks[0].prompt is prompt
    stand.placement.instances.clear()
    assert (await stand.ask(CHAT)).status == 503
    assert stand.prompts.seen == []
    assert len(asyncio.all_tasks() - before) <= 2  # the engine's side of its connections


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "text/plain"])
async def test_the_content_type_is_the_engines(stand: Stand, kind: str) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(ANSWER, headers={"content-type": kind})

    await stand.start(engine)
    assert (await stand.ask(CHAT)).headers["content-type"] == kind


async def test_the_instance_is_named_only_on_demand(stand: Stand) -> None:
    await stand.start(echo, receipts=True)
    assert (await stand.ask(CHAT)).headers["x-warmroute-instance"] == "engine-0"


@pytest.mark.parametrize("cached", [None, 0, "absent"])
async def test_an_unknown_cached_count_is_not_zero(stand: Stand, cached: object) -> None:
    """https://github.com/vllm-project/vllm/issues/44377"""
    details = {} if cached == "absent" else {"prompt_tokens_details": {"cached_tokens": cached}}
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1, **details}}).encode()

    async def engine(side: EngineSide) -> None:
        await side.whole(body)

    await stand.start(engine)
    await stand.ask(CHAT)
    assert stand.outcome.delivered_hit_tokens == (0 if cached == 0 else None)
    assert stand.outcome.delivered_source == ("usage" if cached == 0 else "none")


async def test_a_large_answer_passes_without_being_gathered(stand: Stand) -> None:
    body = b'{"choices":[{"message":{"content":"%b"}}], "usage": %b, "ids":[1]}' % (
        b"x" * (9 << 20),
        json.dumps(USAGE).encode(),
    )

    async def engine(side: EngineSide) -> None:
        await side.whole(body)

    await stand.start(engine)
    answer = await stand.ask(CHAT)
    assert answer.body == body
    assert not answer.broken
    assert stand.outcome.usage == Usage(input_tokens=120, output_tokens=1, cached_tokens=112)


async def test_a_cut_whole_answer_is_an_error(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        side.reset()

    await stand.start(engine)
    answer = await stand.ask(CHAT)
    assert answer.status == 502
    assert stand.outcome.finish == "upstream_failed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("coding", ["gzip", "zstd", "deflate"])
async def test_an_answer_compressed_unasked_is_readable(stand: Stand, stream: bool, coding: str) -> None:
    """https://github.com/vllm-project/production-stack/issues/827"""
    compress = {"gzip": gzip.compress, "zstd": zstandard.compress, "deflate": zlib.compress}[coding]
    kind = "text/event-stream" if stream else "application/json"
    body = chunk("a", "stop") + USAGE_CHUNK + DONE if stream else ANSWER

    async def engine(side: EngineSide) -> None:
        assert "accept-encoding" not in side.headers
        await side.whole(compress(body), headers={"content-encoding": coding, "content-type": kind})

    await stand.start(engine)
    answer = await stand.ask(STREAM if stream else CHAT)
    assert answer.body == (chunk("a", "stop") + DONE if stream else ANSWER)
    assert "content-encoding" not in answer.headers
    assert stand.outcome.usage is not None
    assert stand.outcome.usage.input_tokens == 120


# -- what the engine gets


FIDELITY = [
    {
        **CHAT,
        "top_k": 20,
        "chat_template_kwargs": {"enable_thinking": False},
        "guided_json": {"type": "object"},
        "vllm_xargs": {"a": 1},
        "field_from_2027": {"deep": [1, {"k": None}]},
        "big": 123456789012345678901234567890,
        "null": None,
    },
    {**CHAT, "tools": [{"type": "function", "function": {"name": "ping"}}]},
    {
        **CHAT,
        "messages": [
            {"role": "latest_reminder", "content": "r"},
            {"role": "user", "content": [{"type": "part_from_2027", "x": 1}]},
        ],
    },
    {
        **CHAT,
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "chain",
                "tool_calls": [{"function": {"name": "f", "arguments": '{ "z":1,  "a":2 }'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
    },
]


@pytest.mark.parametrize("body", FIDELITY)
async def test_the_engine_gets_the_clients_bytes(stand: Stand, body: dict[str, Any]) -> None:
    """https://github.com/vllm-project/router/issues/161, 275, 298; https://github.com/sgl-project/sglang/pull/38983"""
    stand.placement.served = "m-chat"
    await stand.start(echo)
    sent = json.dumps(body, indent=1).encode()
    for _ in range(3):
        assert (await stand.ask(sent)).status == 200
    assert {side.body for side in stand.engine.seen} == {sent}


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2], [3, 4]], ["a", "b"], "", []])
async def test_prompts_of_any_shape_pass(stand: Stand, prompt: object) -> None:
    """https://github.com/vllm-project/production-stack/pull/1037"""
    stand.placement.served = "m-chat"
    await stand.start(echo)
    sent = json.dumps({"model": "m-chat", "prompt": prompt, "max_tokens": 2, "logprobs": True}).encode()
    assert (await stand.ask(sent, path="/v1/completions")).status == 200
    assert stand.engine.seen[0].body == sent
    assert stand.engine.seen[0].head.startswith(b"POST /v1/completions HTTP/1.1\r\n")


@pytest.mark.parametrize("name", ["alias", "tuned", None, "m-chat"])
async def test_the_engine_is_told_its_own_name_of_the_model(stand: Stand, name: str | None) -> None:
    await stand.start(echo)
    body = {**CHAT, "model": name} if name is not None else {"messages": []}
    assert (await stand.ask(body)).status == 200
    got = stand.engine.seen[0]
    assert got.json == {**body, "model": "served-name"}
    assert got.body.endswith(b',"model":"served-name"}')
    assert json.dumps(body["messages"]).encode() in got.body
    assert stand.placement.asks[0].model == "m-chat"
    assert stand.placement.asks[0].lora == ("tuned" if name == "tuned" else None)


async def test_half_a_surrogate_pair_is_relayed_as_it_came(stand: Stand) -> None:
    """https://github.com/BerriAI/litellm/pull/24196"""
    stand.placement.served = "m-chat"
    await stand.start(echo)
    sent = b'{"model":"m-chat","messages":[{"role":"user","content":"cut \\ud83d here \\u4f60 \\ud83c\\udf0d"}]}'
    assert (await stand.ask(sent)).status == 200
    assert stand.engine.seen[0].body == sent


async def test_headers_to_the_engine_are_ours(stand: Stand) -> None:
    """https://github.com/sgl-project/sglang/pull/27048; https://github.com/vllm-project/router/pull/114"""
    await stand.start(echo)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await stand.ask(
        CHAT,
        headers={
            "authorization": "Bearer gw-tenant-key",
            "x-api-key": "gw-tenant-key",
            "cookie": "a=gw-tenant-key",
            "x-hop": "1",
            "proxy-authorization": "Basic eA==",
            "x-data-parallel-rank": "7",
            "traceparent": trace,
            "tracestate": "a=b",
            "accept-encoding": "gzip",
            "x-forwarded-for": "1.2.3.4",
            "x-request-id": "client-id",
        },
        path="/v1/chat/completions?key=gw-tenant-key",
    )
    headers = stand.engine.seen[0].headers
    request_id = headers.pop("x-request-id")
    assert request_id.endswith("-client-id")
    assert not request_id.startswith("client-id")
    assert headers.pop("host").startswith("127.0.0.1:")
    assert headers.pop("content-length") == str(len(stand.engine.seen[0].body))
    assert headers == {
        "content-type": "application/json",
        "accept": "*/*",
        "authorization": "Bearer engine-key",
        "x-data-parallel-rank": "3",
        "traceparent": trace,
        "tracestate": "a=b",
    }
    assert b"gw-tenant-key" not in stand.engine.seen[0].head


@pytest.mark.parametrize(
    ("coding", "compress"),
    [
        ("gzip", gzip.compress),
        ("GZIP ", gzip.compress),
        ("x-gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data)[2:-4]),
        ("zstd", zstandard.compress),
        ("identity", bytes),
    ],
)
@pytest.mark.parametrize("size", [10, 600_000])
async def test_compressed_bodies_reach_the_engine_plain(stand: Stand, coding: str, compress: Any, size: int) -> None:
    """https://github.com/agentgateway/agentgateway/issues/2402"""
    stand.placement.served = "m-chat"
    await stand.start(echo)
    sent = json.dumps({**CHAT, "pad": "ab" * size}).encode()[: 1 << 20]
    sent = sent if size == 10 else json.dumps({**CHAT, "pad": "a" * size}).encode()
    assert (await stand.ask(compress(sent), headers={"content-encoding": coding})).status == 200
    assert stand.engine.seen[0].body == sent
    assert "content-encoding" not in stand.engine.seen[0].headers


@pytest.mark.parametrize(
    ("coding", "body", "status", "code"),
    [
        ("gzip", bytes.fromhex("1f8b0800"), 400, "invalid_body"),
        ("gzip", gzip.compress(b"{}" * 100, mtime=0)[:-9], 400, "invalid_body"),
        ("zstd", zstandard.compress(b"{}" * 1000)[:-3], 400, "invalid_body"),
        ("zstd", b"no zstd", 400, "invalid_body"),
        ("br", b"{}", 415, "unsupported_content_encoding"),
        ("gzip, gzip", b"{}", 415, "unsupported_content_encoding"),
        ("gzip", gzip.compress(bytes(64 << 20), 1, mtime=0), 413, "request_too_large"),
        ("zstd", zstandard.compress(bytes(64 << 20)), 413, "request_too_large"),
        ("deflate", zlib.compress(bytes(64 << 20)), 413, "request_too_large"),
    ],
)
async def test_bodies_that_do_not_unfold(stand: Stand, coding: str, body: bytes, status: int, code: str) -> None:
    await stand.start(echo)
    answer = await stand.ask(body, headers={"content-encoding": coding})
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert stand.engine.seen == []


# -- refusals


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "invalid_json", None),
        (b"{", 400, "invalid_json", None),
        (b"[]", 400, "invalid_json", None),
        (b'"x"', 400, "invalid_json", None),
        (b"[" * 100_000, 400, "invalid_json", None),
        (b'{"model":"m-chat","messages":[{"role":"user","content":"\xff\xfe"}]}', 400, "invalid_unicode", None),
        (b'{"model":7}', 400, "invalid_type", "model"),
        (b'{"model":"gpt-9"}', 404, "model_not_found", "model"),
    ],
)
async def test_what_cannot_be_served_is_said_in_the_openai_shape(
    stand: Stand, body: bytes, status: int, code: str, param: str | None
) -> None:
    await stand.start(echo)
    answer = await stand.ask(body)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"], error["type"]) == (
        status,
        code,
        param,
        "invalid_request_error",
    )
    assert set(error) == {"message", "type", "param", "code"}
    assert stand.outcome.status == status
    assert stand.outcome.model == "unknown"
    assert stand.outcome.finish == "complete"
    assert stand.placement.asks == []


async def test_no_model_is_an_error_only_where_there_is_a_choice(stand: Stand) -> None:
    await stand.start(echo)
    assert (await stand.ask({"messages": []})).status == 200
    stand.models.replace([ServedModel("a", stand.prompts), ServedModel("b", stand.prompts)])
    answer = await stand.ask({"messages": []})
    assert (answer.status, answer.json["error"]["param"]) == (400, "model")


async def test_nobody_can_serve_the_model(stand: Stand) -> None:
    await stand.start()
    answer = await stand.ask(CHAT)
    assert answer.status == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json["error"]["code"] == "no_engine_available"
    assert stand.outcome.finish == "upstream_failed"
    assert stand.placement.released == []


MISSING = "1 validation error:\n  {'type': 'missing'}"
TRACE = '\n\n  File "/models/v/http_server.py", line 1870, in openai_v1_chat_completions'
NOT_THERE = "The engine does not serve this model or route."
FAILED = "The engine failed to answer the request."
BUSY = "The engine is too busy to take the request; try again later."


def openai_error(message: str, **fields: object) -> dict[str, object]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400, **fields}}


@pytest.mark.parametrize(
    ("status", "body", "shown", "message"),
    [
        (400, openai_error("max_tokens=100000", param="max_tokens"), 400, "max_tokens=100000"),
        (
            400,
            {"object": "error", "message": "Messages cannot be empty.", "code": 400},
            400,
            "Messages cannot be empty.",
        ),
        (400, {"object": "error", "message": MISSING + TRACE, "code": 400}, 400, MISSING),
        (422, {"detail": [{"loc": ["body", 10], "msg": "JSON decode error"}]}, 400, "body.10: JSON decode error"),
        (404, openai_error("The model `x` does not exist. Valid aliases: tiny.", code=404), 404, NOT_THERE),
        (422, {"detail": [{"loc": None, "msg": "m"}, {"loc": ["a", {}], "msg": {}}]}, 400, "m; a: "),
        (400, {"detail": {"message": "no such tool"}}, 400, "no such tool"),
        (400, {"detail": [[[]]]}, 400, "The engine refused the request."),
        (400, openai_error("cut \ud83d here"), 400, "cut \ud83d here"),
        (400, openai_error("odd", code=10**30, type=[1]), 400, "odd"),
        (401, {"error": "Unauthorized"}, 502, "The engine refused the gateway."),
        (500, openai_error("EngineCore at /srv/x.py", code=500), 500, FAILED),
        (503, openai_error("busy on node-7", code=503), 503, BUSY),
        (502, "not json", 502, FAILED),
        (302, {}, 502, "The engine answered with a status that is not understood."),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_error_in_the_clients_dialect(
    stand: Stand, status: int, body: object, shown: int, message: str, stream: bool
) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(json.dumps(body).encode(), status=status, headers={"retry-after": "7"})

    await stand.start(engine)
    answer = await stand.ask(STREAM if stream else CHAT)
    assert answer.status == shown
    assert answer.json["error"]["message"] == message
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert ("retry-after" in answer.headers) == (status >= 500 or status == 401)
    assert stand.outcome.status == shown
    assert stand.outcome.finish == ("complete" if shown in (400, 404) else "upstream_failed")
    assert len(stand.engine.seen) == 1


@pytest.mark.parametrize("detail", [NESTED, '{"a":' + NESTED + "}", '[{"loc":' + NESTED + ',"msg":' + NESTED + "}]"])
async def test_an_engines_error_may_be_nested_as_deep_as_it_likes(stand: Stand, detail: str) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(b'{"detail":%b,"type":%b}' % (detail.encode(), NESTED.encode()), status=400)

    await stand.start(engine)
    answer = await stand.ask(CHAT)
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


async def test_so_may_an_answer_and_an_in_band_error(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        if b'"stream"' in side.body:
            await side.stream(chunk("a"), b'data: {"error":%b}\n\n' % NESTED.encode())
        else:
            await side.whole(b'{"a":%b,"usage":{"prompt_tokens":3}}' % NESTED.encode())

    await stand.start(engine)
    assert (await stand.ask(CHAT)).status == 200
    assert stand.outcome.usage == Usage(3, 0, None)
    answer = await stand.ask(STREAM)
    assert answer.broken
    assert json.loads(answer.body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "engine_error"


async def test_a_body_nested_as_deep_as_parsers_go_is_relayed(stand: Stand) -> None:
    """orjson reads 1,024 levels; what else looks at the body must not stop earlier."""
    await stand.start(echo)
    rest = b'"messages":[],"x":%b,"extra_key":%b' % (NESTED.encode(), NESTED.encode())
    assert (await stand.ask(b'{"model":"alias",%b,"model":"m-chat"}' % rest)).status == 200
    assert stand.engine.seen[0].body == b'{%b,"model":"served-name"}' % rest


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mistake_of_ours_in_reading_an_answer_is_an_error_and_no_hang(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def mistaken(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr("router.serving.attempt.usage_of_answer", mistaken)
    monkeypatch.setattr("router.serving.sse.SseRelay.feed", mistaken)

    async def engine(side: EngineSide) -> None:
        await (side.stream(chunk("a")) if stream else side.whole(ANSWER))

    await stand.start(engine)
    assert (await stand.ask(STREAM if stream else CHAT)).status == 500
    assert stand.outcome.finish == "upstream_failed"
    assert not stand.placement.open


# -- engines that are not there, and clients that leave


async def test_an_engine_that_cannot_be_reached_is_passed_over_once(stand: Stand) -> None:
    await stand.start()
    stand.add("dead", "http://127.0.0.1:9")
    await stand.start(echo)
    answer = await stand.ask(CHAT)
    assert answer.status == 200
    assert stand.placement.asks[1].exclude == ("dead",)
    assert [outcome.finish for _, outcome in stand.placement.released] == ["upstream_failed", "complete"]
    assert stand.outcome.attempts == 2
    assert stand.outcome.instance == "engine-0"


async def test_two_dead_engines_are_an_error_without_their_names(stand: Stand) -> None:
    await stand.start()
    for name in ("dead-1", "dead-2", "dead-3"):
        stand.add(name, "http://127.0.0.1:9")
    answer = await stand.ask(CHAT)
    assert answer.status == 502
    assert b"127.0.0.1" not in answer.body
    assert b"dead" not in answer.body
    assert len(stand.placement.asks) == 2


async def test_an_engine_that_may_have_begun_is_not_passed_over(stand: Stand) -> None:
    """It took the request and closed the connection: sent again elsewhere, the request might be served twice."""

    async def engine(side: EngineSide) -> None:
        side.reset()

    await stand.start(engine, echo)
    answer = await stand.ask(CHAT)
    assert (answer.status, answer.json["error"]["code"]) == (502, "engine_no_answer")
    assert len(stand.placement.asks) == 1
    assert stand.outcome.error == "engine_no_answer"


async def test_the_only_engine_is_dead(stand: Stand) -> None:
    await stand.start()
    stand.add("dead", "http://127.0.0.1:9")
    answer = await stand.ask(CHAT)
    assert (answer.status, answer.json["error"]["code"]) == (502, "engine_unreachable")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_answer_frees_the_engine(stand: Stand, stream: bool) -> None:
    """https://github.com/BerriAI/litellm/pull/31499"""
    left = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        await side.until_gone()
        left.set()

    await stand.start(engine)
    _, writer = await stand.send(STREAM if stream else CHAT)
    await stand.until(lambda: bool(stand.engine.seen))
    writer.transport.abort()
    await asyncio.wait_for(left.wait(), 1)
    assert stand.outcome.finish == "client_gone"
    assert stand.outcome.status == 499


async def test_a_client_that_leaves_in_mid_stream_frees_the_engine(stand: Stand) -> None:
    """https://github.com/BerriAI/litellm/issues/30244"""
    left = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        try:
            while True:
                await side.chunk(chunk("tok"))
                await asyncio.sleep(0.01)
        finally:
            left.set()

    await stand.start(engine)
    reader, writer = await stand.send(STREAM)
    await reader.readuntil(b"tok")
    writer.transport.abort()
    await asyncio.wait_for(left.wait(), 1)
    assert stand.outcome.finish == "client_gone"
    assert stand.outcome.status == 499
    assert stand.outcome.events >= 1


async def test_a_client_that_leaves_while_its_prompt_is_read(stand: Stand) -> None:
    reading = asyncio.Event()

    async def prepare(*_: object, **__: object) -> Prompt:
        reading.set()
        return await asyncio.get_running_loop().create_future()

    stand.prompts.prepare = prepare  # type: ignore[method-assign]
    await stand.start(echo)
    _, writer = await stand.send(CHAT)
    await asyncio.wait_for(reading.wait(), 5)
    writer.transport.abort()
    await stand.until(lambda: bool(stand.outcomes))
    assert stand.outcome.finish == "client_gone"
    assert stand.placement.asks == []
    assert stand.edge.running == 0


async def test_a_client_that_leaves_while_waiting_is_never_dispatched(stand: Stand) -> None:
    await stand.start(echo)
    stand.placement.gate = asyncio.Event()
    _, writer = await stand.send(CHAT)
    await stand.until(lambda: bool(stand.placement.asks))
    writer.transport.abort()
    await stand.until(lambda: bool(stand.outcomes))
    stand.placement.gate.set()
    assert stand.outcome.finish == "client_gone"
    assert stand.engine.seen == []
    assert stand.edge.running == 0


async def test_nothing_leaks_in_a_storm_of_leavers_and_failures(stand: Stand) -> None:
    """https://github.com/vllm-project/router/pull/215"""
    turn = 0

    async def engine(side: EngineSide) -> None:
        nonlocal turn
        turn += 1
        match turn % 5:
            case 0:
                await asyncio.sleep(0.05)
                await side.stream(chunk("a", "stop"), DONE)
            case 1:
                await side.raw(STREAM_HEAD)
                await side.chunk(chunk("a"))
                side.reset()
            case 2:
                side.reset()
            case 3:
                await side.whole(b"{}", status=500)
            case 4:
                await side.stream(chunk("a"), chunk("", "stop"), DONE)

    await stand.start(engine, engine)

    async def leave_after(seconds: float) -> None:
        _, writer = await stand.send(STREAM)
        await asyncio.sleep(seconds)
        writer.transport.abort()

    await asyncio.gather(*[leave_after(0.001 * (number % 40)) for number in range(120)])
    await asyncio.gather(*[stand.ask(STREAM) for _ in range(20)])
    await stand.until(lambda: stand.edge.running == 0)
    assert stand.placement.open == set()
    assert len(stand.outcomes) == len({outcome.request_id for outcome in stand.outcomes})
    assert len(stand.outcomes) >= 20


async def test_an_engine_that_does_not_begin_in_time(stand: Stand) -> None:
    await stand.start(hang, model={"limits": TimeLimits(first_byte_s=0.05)})
    answer = await stand.ask(CHAT)
    assert (answer.status, answer.json["error"]["code"]) == (504, "ttft_timeout")
    assert stand.outcome.finish == "upstream_failed"


async def test_keep_alives_do_not_put_off_the_deadline(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        while True:
            await side.chunk(b": keep-alive\n\n")
            await asyncio.sleep(0.01)

    await stand.start(engine, model={"limits": TimeLimits(first_byte_s=0.1)})
    answer = await stand.ask(STREAM)
    assert answer.broken
    assert b"ttft_timeout" in answer.body


async def test_reading_a_prompt_that_fails_costs_the_key_not_the_request(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("secret prompt text")

    stand.prompts.prepare = fail  # type: ignore[method-assign, assignment]
    await stand.start(echo)
    assert (await stand.ask(CHAT)).status == 200
    assert stand.placement.asks[0].prompt.source == "none"
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


async def test_a_listener_that_fails_breaks_nothing(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    await stand.start(echo)

    def fail(_: object) -> None:
        raise RuntimeError("secret")

    stand.gateway._listeners = (fail, stand.outcomes.append)
    assert (await stand.ask(CHAT)).status == 200
    assert len(stand.outcomes) == 1
    assert "secret" not in caplog.text


async def test_a_fallback_that_may_not_be_billed_is_none(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `ledger.on_missing_price` is `refuse`."""
    await stand.start(echo)
    stand.placement.instances.clear()
    stand.models.replace([ServedModel(CHAT["model"], stand.prompts, fallbacks=("b",)), ServedModel("b", stand.prompts)])
    assert (await stand.ask(CHAT)).status == 503
    assert [ask.model for ask in stand.placement.asks] == [CHAT["model"], "b"]
    monkeypatch.setattr(stand.gateway, "may_bill", lambda caller, model: model != "b")
    assert (await stand.ask(CHAT)).status == 503
    assert [ask.model for ask in stand.placement.asks[2:]] == [CHAT["model"]]


async def test_a_placement_that_fails_at_the_end_loses_no_outcome(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one may that wakes other requests then, and asks a policy of somebody else's where they go."""
    await stand.start(echo)

    release = stand.placement.release

    def fail(booking_id: int, outcome: Outcome) -> None:
        release(booking_id, outcome)
        raise RuntimeError("secret")

    monkeypatch.setattr(stand.gateway, "_release", fail)
    assert (await stand.ask(CHAT)).status == 200
    assert len(stand.outcomes) == 1


async def test_the_outcome_is_announced_before_the_client_sees_the_end(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.stream(chunk("a"), chunk("", "stop"), DONE)

    await stand.start(engine)
    reader, _ = await stand.send(STREAM)
    await reader.readuntil(b"[DONE]")
    assert len(stand.outcomes) == 1
