"""Sound in a form, and sound out."""

from __future__ import annotations

import asyncio
import gzip
import json

import openai
import pytest

from router.core import Usage
from tests.router.serving.stand import EngineSide, Stand

BOUNDARY = b"multipart/form-data; boundary=xyz"
SOUND = bytes.fromhex("0d0a2d2d") * 20_000


def form(*, model: bytes | None = b"m-chat", **fields: bytes) -> bytes:
    """The file first, the model last."""
    head = b'--xyz\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    parts = [head % (b"file", b'; filename="a.wav"', SOUND)]
    if model is not None:
        fields["model"] = model
    parts += [head % (name.encode(), b"", value) for name, value in fields.items()]
    return b"".join((*parts, b"--xyz--\r\n"))


async def say(side: EngineSide) -> None:
    await side.whole(b'{"text":"hi","usage":{"type":"tokens","input_tokens":14,"output_tokens":5}}')


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations", "/audio/transcriptions"])
async def test_a_form_reaches_the_engine_as_it_came(stand: Stand, path: str) -> None:
    """https://github.com/ggml-org/llama.cpp/issues/22044"""
    stand.placement.served = "m-chat"
    await stand.start(say)
    sent = form(response_format=b"json")
    answer = await stand.ask(sent, path=path, headers={"content-type": BOUNDARY.decode(), "traceparent": "00-1"})
    assert (answer.status, answer.json["text"]) == (200, "hi")
    (side,) = stand.engine.seen
    assert side.body == sent
    assert side.head.lower().count(b"content-type:") == 1
    assert side.headers["content-type"] == BOUNDARY.decode()
    assert (side.headers["traceparent"], side.headers["authorization"]) == ("00-1", "Bearer engine-key")
    assert side.head.split()[1].decode() == "/v1" + path.removeprefix("/v1")
    assert stand.outcome.usage == Usage(14, 5, None)
    assert stand.placement.asks[0].prompt.tokens == len(sent) // 512
    assert stand.prompts.seen == []


async def test_an_alias_is_replaced_by_the_name_the_engine_knows(stand: Stand) -> None:
    await stand.start(say)
    sent = form(model=b"alias")
    answer = await stand.ask(sent, path="/v1/audio/transcriptions", headers={"content-type": BOUNDARY.decode()})
    assert answer.status == 200
    assert stand.engine.seen[0].body == sent.replace(b"\r\n\r\nalias\r\n", b"\r\n\r\nserved-name\r\n")


async def test_a_compressed_form(stand: Stand) -> None:
    stand.placement.served = "m-chat"
    await stand.start(say)
    headers = {"content-type": BOUNDARY.decode(), "content-encoding": "gzip"}
    await stand.ask(gzip.compress(form()), path="/v1/audio/transcriptions", headers=headers)
    assert stand.engine.seen[0].body == form()


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (b"garbage", "multipart/form-data; boundary=nope", 400, "invalid_form"),
        (form()[:-9], BOUNDARY.decode(), 400, "invalid_form"),
        (b'{"model":"m-chat"}', "application/json", 400, "invalid_content_type"),
        (form(model=b"nobody"), BOUNDARY.decode(), 404, "model_not_found"),
        (form() + b"x" * (1 << 20), BOUNDARY.decode(), 413, "request_too_large"),
    ],
)
async def test_what_is_no_form_is_refused(stand: Stand, body: bytes, content_type: str, status: int, code: str) -> None:
    await stand.start(say)
    answer = await stand.ask(body, path="/v1/audio/transcriptions", headers={"content-type": content_type})
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert stand.engine.seen == []


@pytest.mark.parametrize(
    "events",
    [
        [
            b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n',
            b'data: {"choices":[{"delta":{"content":""},"finish_reason":"stop"}]}\n\n',
            b"data: [DONE]\n\n",
        ],
        [
            b'data: {"type":"transcript.text.delta","delta":"hi"}\n\n',
            b'data: {"type":"transcript.text.delta","delta":" you"}\n\n',
            b'data: {"type":"transcript.text.done","text":"hi you"}\n\n',
        ],
    ],
)
async def test_a_streamed_transcription(stand: Stand, events: list[bytes]) -> None:
    async def engine(side: EngineSide) -> None:
        await side.stream(*(events if len(stand.engine.seen) == 1 else events[:1]))

    await stand.start(engine)
    how = {"path": "/v1/audio/transcriptions", "headers": {"content-type": BOUNDARY.decode()}}
    answer = await stand.ask(form(stream=b"true"), **how)
    assert (answer.body, answer.broken) == (b"".join(events), False)
    assert (stand.outcome.finish, stand.outcome.stream, stand.placement.progressed) == ("complete", True, [1])
    cut = await stand.ask(form(stream=b"true"), **how)
    assert cut.broken


async def test_openais_sdk_sends_a_file(stand: Stand) -> None:
    await stand.start(say)
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{stand.port}/v1", api_key="x", max_retries=0) as client:
        heard = await client.audio.transcriptions.create(model="m-chat", file=("a.wav", SOUND))
    assert heard.text == "hi"
    assert SOUND in stand.engine.seen[0].body


async def test_speech_leaves_as_it_comes(stand: Stand) -> None:
    go_on = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n"
        await side.raw(head.encode())
        await side.chunk(b"\xff\xfbfirst")
        await go_on.wait()
        await side.chunk(b"\xff\xfbsecond")
        await side.raw(b"0\r\n\r\n")

    await stand.start(engine)
    sent = {"model": "m-chat", "input": "x" * 400, "voice": "a"}
    reader, _ = await stand.send(sent, path="/v1/audio/speech")
    head = await reader.readuntil(b"\xff\xfbfirst")
    assert b"content-type: audio/mpeg" in head
    go_on.set()
    assert (await reader.read()).endswith(b"\xff\xfbsecond\r\n0\r\n\r\n")
    assert stand.outcome.finish == "complete"
    assert stand.engine.seen[0].json == {**sent, "model": "served-name"}


async def test_speech_that_breaks_off_does_not_look_whole(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n"
        await side.raw(head.encode())
        await side.chunk(b"\xff\xfbfirst")
        await asyncio.sleep(0.02)
        side.reset()

    await stand.start(engine)
    answer = await stand.ask({"model": "m-chat", "input": "x"}, path="/v1/audio/speech")
    assert (answer.broken, answer.body) == (True, b"\xff\xfbfirst")
    assert stand.outcome.finish == "upstream_failed"


async def test_speech_that_is_refused_is_an_error(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(json.dumps({"error": {"message": "no such voice"}}).encode(), status=400)

    await stand.start(engine)
    answer = await stand.ask({"model": "m-chat", "input": "x"}, path="/v1/audio/speech")
    assert (answer.status, answer.json["error"]["message"]) == (400, "no such voice")
