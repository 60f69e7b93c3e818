"""Anthropic's Messages through the gateway: the engine's bytes, errors in Anthropic's shape, usage in both parts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.core import Usage
from tests.router.serving.stand import STREAM_HEAD, EngineSide, Stand

RECORDED = Path(__file__).parent / "recordings" / "vllm-0.32.0" / "named" / "messages-stream.sse"
BODY = {"model": "m-chat", "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**BODY, "stream": True}
PATH = "/v1/messages"
WHOLE = {
    "type": "message",
    "content": [{"type": "text", "text": "x"}],
    "usage": {"input_tokens": 40, "output_tokens": 7, "cache_read_input_tokens": 32},
}


def named(name: str, **fields: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


START = named("message_start", message={"usage": {"input_tokens": 40, "cache_read_input_tokens": 32}})
DELTA = named("content_block_delta", delta={"type": "text_delta", "text": "a"})


def events_of(body: bytes) -> list[tuple[str, Any]]:
    found = []
    for event in body.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        found.append((name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))))
    return found


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_recorded_stream_arrives_byte_for_byte(stand: Stand, size: int) -> None:
    data = RECORDED.read_bytes().rstrip(b"\n") + b"\n\n"

    async def engine(side: EngineSide) -> None:
        await side.stream(*[data[at : at + size] for at in range(0, len(data), size)])

    stand.placement.served = "m-chat"
    await stand.start(engine)
    sent = json.dumps(STREAM).encode()
    answer = await stand.ask(sent, path=PATH)
    assert (answer.body, answer.broken) == (data, False)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert stand.engine.seen[0].body == sent  # nothing is asked for that Anthropic's API does not know
    assert stand.outcome.usage == Usage(input_tokens=51, output_tokens=3, cached_tokens=32)
    assert stand.outcome.ttft_s is not None
    assert stand.placement.progressed == [1]
    assert stand.placement.asks[0].max_output_tokens == 16
    assert stand.prompts.seen[0][0] == PATH


async def test_the_first_token_is_no_message_start(stand: Stand) -> None:
    go_on = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        await side.chunk(START + named("ping"))
        await go_on.wait()
        await side.chunk(DELTA + named("message_stop"))
        await side.raw(b"0\r\n\r\n")

    await stand.start(engine)
    reader, _ = await stand.send(STREAM, path=PATH)
    await reader.readuntil(b'{"type": "ping"}\n\n')
    assert stand.placement.progressed == []
    go_on.set()
    assert (await reader.read()).endswith(b'{"type": "message_stop"}\n\n\r\n0\r\n\r\n')
    assert stand.placement.progressed == [1]


async def test_a_stream_that_is_cut_ends_with_an_error_event(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        await side.chunk(START + DELTA + DELTA[:10])
        await asyncio.sleep(0.02)
        side.reset()

    await stand.start(engine)
    answer = await stand.ask(STREAM, path=PATH)
    assert answer.broken
    assert answer.body.startswith(START + DELTA)
    name, said = events_of(answer.body)[-1]
    assert name == "error"
    assert said == {
        "type": "error",
        "error": {"type": "api_error", "message": said["error"]["message"]},
        "request_id": answer.headers["x-request-id"],
    }
    assert b"message_stop" not in answer.body
    assert (stand.outcome.finish, stand.outcome.events) == ("upstream_failed", 2)
    assert stand.outcome.usage == Usage(input_tokens=72, output_tokens=0, cached_tokens=32)


async def test_an_engines_own_error_is_told_without_its_words(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.stream(
            START, DELTA, named("error", error={"type": "internal_error", "message": "EngineCore at 10.0.0.1"})
        )

    await stand.start(engine)
    answer = await stand.ask(STREAM, path=PATH)
    assert answer.broken
    assert events_of(answer.body)[-1][1]["error"]["type"] == "api_error"
    assert b"EngineCore" not in answer.body
    assert stand.outcome.finish == "upstream_failed"


async def test_a_whole_answer_counts_what_was_cached_as_input(stand: Stand) -> None:
    """https://github.com/BerriAI/litellm/pull/38657"""
    told = json.dumps(WHOLE).encode()

    async def engine(side: EngineSide) -> None:
        await side.whole(told)

    await stand.start(engine)
    answer = await stand.ask(BODY, path=PATH)
    assert (answer.status, answer.body) == (200, told)
    assert answer.headers["x-warmroute-cached-tokens"] == "32"
    assert stand.outcome.usage == Usage(input_tokens=72, output_tokens=7, cached_tokens=32)


async def test_tokens_are_counted_by_the_engine_and_weigh_nothing(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(b'{"input_tokens":11}')

    await stand.start(engine)
    answer = await stand.ask({"model": "m-chat", "messages": BODY["messages"]}, path="/v1/messages/count_tokens")
    assert answer.json == {"input_tokens": 11}
    assert stand.engine.seen[0].head.split()[1] == b"/v1/messages/count_tokens"
    assert stand.placement.asks[0].prompt.tokens == 1
    assert stand.prompts.seen == []


@pytest.mark.parametrize(
    ("status", "told", "shown", "kind", "message"),
    [
        (400, {"error": {"type": "BadRequestError", "message": "too long"}}, 400, "invalid_request_error", "too long"),
        (422, {"detail": [{"loc": ["body", "x"], "msg": "missing"}]}, 400, "invalid_request_error", "body.x: missing"),
        (404, {"detail": "Not Found"}, 404, "not_found_error", "The engine of this model does not serve this route."),
        (401, {"error": "Unauthorized"}, 502, "api_error", "The engine refused the gateway."),
        (429, {"error": {"message": "m"}}, 429, "rate_limit_error", "The engine is at its limit; try again later."),
        (503, {"error": {}}, 529, "overloaded_error", "The engine is too busy to take the request; try again later."),
        (500, {"error": {"message": "at 10.0.0.1"}}, 500, "api_error", "The engine failed to answer the request."),
    ],
)
async def test_an_engines_refusal_in_anthropics_shape(
    stand: Stand, status: int, told: object, shown: int, kind: str, message: str
) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(json.dumps(told).encode(), status=status)

    await stand.start(engine)
    answer = await stand.ask(BODY, path=PATH)
    assert answer.status == shown
    assert answer.json == {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": answer.headers["x-request-id"],
    }
    assert stand.outcome.status == shown


@pytest.mark.parametrize(
    ("body", "method", "status", "kind"),
    [
        (b"{", "POST", 400, "invalid_request_error"),
        ({**BODY, "model": "nobody"}, "POST", 404, "not_found_error"),
        (b'{"x":"' + b"x" * (1 << 20) + b'"}', "POST", 413, "request_too_large"),
        (None, "GET", 405, "invalid_request_error"),
        (BODY, "POST", 529, "overloaded_error"),  # nobody is there
    ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/messages/count_tokens"])
async def test_the_gateways_own_errors_in_anthropics_shape(
    stand: Stand, path: str, body: Any, method: str, status: int, kind: str
) -> None:
    await stand.start()
    answer = await stand.ask(body, path=path, method=method)
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (status, "error", kind)
    assert answer.json["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("metadata", "session"), [({"user_id": "u_session_1"}, "u_session_1"), ({"session_id": "s", "user_id": "u"}, "s")]
)
async def test_the_session_is_named_in_metadata(stand: Stand, metadata: dict[str, str], session: str) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(json.dumps(WHOLE).encode())

    await stand.start(engine)
    await stand.ask({**BODY, "metadata": metadata, "cache_salt": "tenant"}, path=PATH)
    assert stand.placement.asks[0].session == session


async def test_a_client_that_leaves_frees_the_engine(stand: Stand) -> None:
    gone = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        await side.chunk(START)
        try:
            while True:
                await side.chunk(DELTA)
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    await stand.start(engine)
    reader, writer = await stand.send(STREAM, path=PATH)
    await reader.readuntil(DELTA)
    writer.transport.abort()
    await asyncio.wait_for(gone.wait(), 5)
    await stand.until(lambda: bool(stand.outcomes))
    assert (stand.outcome.finish, stand.outcome.usage) == ("client_gone", Usage(72, 0, 32))
