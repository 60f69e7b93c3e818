"""OpenAI's Responses through the gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from router.core import Usage
from tests.router.serving.stand import EngineSide, Stand

RECORDED = Path(__file__).parent / "recordings" / "vllm-0.32.0" / "named" / "responses-stream.sse"
BODY = {"model": "m-chat", "input": "hello", "max_output_tokens": 16}
STREAM = {**BODY, "stream": True}


def named(name: str, **fields: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


CREATED = named("response.created", response={"id": "r", "status": "in_progress"}, sequence_number=0)
DELTA = named("response.output_text.delta", delta="a", sequence_number=1)


@pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
async def test_a_recorded_stream_arrives_byte_for_byte(stand: Stand, path: str) -> None:
    data = RECORDED.read_bytes().rstrip(b"\n") + b"\n\n"

    async def engine(side: EngineSide) -> None:
        await side.stream(*[data[at : at + 50] for at in range(0, len(data), 50)])

    stand.placement.served = "m-chat"
    await stand.start(engine)
    sent = json.dumps(STREAM).encode()
    answer = await stand.ask(sent, path=path)
    assert (answer.body, answer.broken) == (data, False)
    assert stand.engine.seen[0].body == sent
    assert stand.engine.seen[0].head.split()[1] == b"/v1/responses"
    assert stand.outcome.usage == Usage(input_tokens=51, output_tokens=3, cached_tokens=32)
    assert stand.outcome.finish == "complete"
    assert stand.placement.progressed == [1]
    assert stand.placement.asks[0].max_output_tokens == 16


async def test_a_whole_answer(stand: Stand) -> None:
    usage = {"input_tokens": 51, "input_tokens_details": {"cached_tokens": 32}, "output_tokens": 4}
    told = json.dumps({"object": "response", "output": [], "usage": usage}).encode()

    async def engine(side: EngineSide) -> None:
        await side.whole(told)

    await stand.start(engine)
    answer = await stand.ask(BODY, path="/v1/responses")
    assert answer.body == told
    assert stand.outcome.usage == Usage(51, 4, 32)


@pytest.mark.parametrize(
    "end",
    [b"", named("response.failed", response={"error": {"code": "server_error", "message": "EngineCore at 10.0.0.1"}})],
)
async def test_a_stream_that_breaks_ends_with_an_error_event(stand: Stand, end: bytes) -> None:
    async def engine(side: EngineSide) -> None:
        await side.stream(CREATED, DELTA, end)

    await stand.start(engine)
    answer = await stand.ask(STREAM, path="/v1/responses")
    assert answer.broken
    assert answer.body.startswith(CREATED + DELTA + b"event: error\ndata: ")
    said = json.loads(answer.body.split(b"data: ")[-1])
    assert (said["type"], said["sequence_number"], said["error"]["type"]) == ("error", 2, "server_error")
    assert said["message"] == said["error"]["message"]
    assert b"EngineCore" not in answer.body
    assert stand.outcome.finish == "upstream_failed"


async def test_openais_sdk_reads_the_stream_and_raises_when_it_breaks(stand: Stand) -> None:
    data = RECORDED.read_bytes()

    async def engine(side: EngineSide) -> None:
        await side.stream(*([data] if len(stand.engine.seen) == 1 else [CREATED, DELTA]))

    await stand.start(engine)
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{stand.port}/v1", api_key="x", max_retries=0) as client:
        stream = await client.responses.create(model="m-chat", input="hello", stream=True)
        kinds = [event.type async for event in stream]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        stream = await client.responses.create(model="m-chat", input="hello", stream=True)
        with pytest.raises(openai.APIError, match="ended early"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    "field", [{"previous_response_id": "resp_1"}, {"conversation": {"id": "c"}}, {"background": True}]
)
async def test_what_would_have_to_be_stored_is_refused(stand: Stand, field: dict[str, Any]) -> None:
    await stand.start()
    answer = await stand.ask({**BODY, **field}, path="/v1/responses")
    assert answer.status == 400
    assert answer.json["error"]["param"] in field
    assert "`input`" in answer.json["error"]["message"]


@pytest.mark.parametrize("field", [{"previous_response_id": None}, {"background": False}, {"store": True}])
async def test_what_asks_for_nothing_stored_passes(stand: Stand, field: dict[str, Any]) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(b"{}")

    await stand.start(engine)
    assert (await stand.ask({**BODY, **field}, path="/v1/responses")).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/responses/resp_1"), ("DELETE", "/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel")],
)
async def test_stored_responses_are_said_not_to_be_here(stand: Stand, method: str, path: str) -> None:
    await stand.start()
    answer = await stand.ask(method=method, path=path)
    assert answer.status == 404
    assert "not stored here" in answer.json["error"]["message"]
