"""HTTP/1.1 in full, from a client through the gateway to an engine and back."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.router.serving.stand import STREAM_HEAD, Answered, EngineSide, Stand

CHAT = {"model": "m-chat", "messages": [{"role": "user", "content": "hello"}]}
BODY = json.dumps(CHAT).encode()
STREAM = json.dumps({**CHAT, "stream": True}).encode()
ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}]}'
EVENTS = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
TARGET = b"/v1/chat/completions"


def post(body: bytes, *lines: bytes, target: bytes = TARGET, version: bytes = b"1.1") -> bytes:
    head = b"\r\n".join((b"POST %b HTTP/%b" % (target, version), b"Content-Length: %d" % len(body), *lines))
    return head + b"\r\n\r\n" + body


async def engine(side: EngineSide) -> None:
    if side.json.get("stream"):
        await side.stream(EVENTS, DONE)
    else:
        await side.whole(ANSWER)


async def exchanged(stand: Stand, sent: bytes, *, half_close: bool = False) -> bytes:
    """All that comes until the gateway closes."""
    reader, writer = await stand.connect()
    writer.write(sent)
    if half_close:
        writer.write_eof()
    return await asyncio.wait_for(reader.read(), 10)


# -- the client's side


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_client_that_shuts_its_side_gets_its_answer(stand: Stand, body: bytes) -> None:
    await stand.start(engine)
    raw = await exchanged(stand, post(body, b"Host: a"), half_close=True)
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"  # how the gateway finds out whether the client is still there
    while raw.startswith(interim):
        raw = raw.removeprefix(interim)
    answer = Answered(raw)
    assert (answer.status, answer.broken) == (200, False)
    assert answer.body == (ANSWER if body is BODY else EVENTS + DONE)
    assert stand.outcome.finish == "complete"


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_client_that_closes_is_gone_even_if_the_engine_is_silent(stand: Stand, tokens: int) -> None:
    """Closing looks like shutting one's side until something is written. Before an answer, and within one."""
    left = asyncio.Event()

    async def silent(side: EngineSide) -> None:
        if tokens:
            await side.raw(STREAM_HEAD)
            await side.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n')
        await side.until_gone()
        left.set()

    await stand.start(silent)
    reader, writer = await stand.connect()
    writer.write(post(STREAM, b"Host: a"))
    if tokens:
        await reader.readuntil(b"hi")
    else:
        await stand.until(lambda: bool(stand.engine.seen))
    writer.close()
    await asyncio.wait_for(left.wait(), 5)
    await stand.until(lambda: bool(stand.outcomes))
    assert stand.outcome.finish == "client_gone"


async def test_a_client_that_shuts_its_side_in_mid_stream_gets_the_rest(stand: Stand) -> None:
    go_on = asyncio.Event()
    part = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'

    async def pausing(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        await side.chunk(part)
        await go_on.wait()
        await side.chunk(EVENTS + DONE)
        await side.raw(b"0\r\n\r\n")

    await stand.start(pausing)
    reader, writer = await stand.connect()
    writer.write(post(STREAM, b"Host: a"))
    head = await reader.readuntil(b"hi")
    writer.write_eof()
    probe = await reader.readuntil(b"3\r\n:\n\n\r\n")
    go_on.set()
    answer = Answered(head + probe + await reader.read())
    assert not answer.broken
    assert answer.body.replace(b":\n\n", b"") == part + EVENTS + DONE
    assert stand.outcome.finish == "complete"


async def test_http10_is_answered_without_chunks(stand: Stand) -> None:
    await stand.start(engine)
    for body, expected in ((BODY, ANSWER), (STREAM, EVENTS + DONE)):
        answer = Answered(await exchanged(stand, post(body, version=b"1.0")))
        assert "transfer-encoding" not in answer.headers
        assert (answer.headers["connection"], answer.body) == ("close", expected)


async def test_a_target_may_be_a_whole_url(stand: Stand) -> None:
    await stand.start(engine)
    target = b"http://gateway.example" + TARGET
    assert Answered(await exchanged(stand, post(BODY, b"Host: b", b"Connection: close", target=target))).status == 200


async def test_pipelined_streams_come_one_after_the_other(stand: Stand) -> None:
    await stand.start(engine)
    sent = post(STREAM, b"Host: a") * 2 + post(BODY, b"Host: a", b"Connection: close")
    raw = await exchanged(stand, sent)
    first, second, third = raw.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert Answered(b"HTTP/1.1 200 OK\r\n" + first).body == EVENTS + DONE
    assert Answered(b"HTTP/1.1 200 OK\r\n" + second).body == EVENTS + DONE
    assert Answered(b"HTTP/1.1 200 OK\r\n" + third).body == ANSWER
    assert len(stand.outcomes) == 3


async def test_trailers_are_dropped(stand: Stand) -> None:
    await stand.start(engine)
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\nConnection: close\r\n\r\n"
    chunked = b"%x\r\n%b\r\n0\r\nX-Sum: 1\r\nAuthorization: Bearer x\r\n\r\n" % (len(BODY), BODY)
    assert Answered(await exchanged(stand, head % TARGET + chunked)).status == 200
    (seen,) = stand.engine.seen
    assert seen.json["messages"] == CHAT["messages"]
    assert b"x-sum" not in seen.head.lower()
    assert seen.headers["authorization"] == "Bearer engine-key"


# -- the engine's side


async def test_interim_answers_of_an_engine_are_dropped(stand: Stand) -> None:
    async def hinting(side: EngineSide) -> None:
        await side.raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        await asyncio.sleep(0)
        await engine(side)

    await stand.start(hinting)
    for body, expected in ((CHAT, ANSWER), ({**CHAT, "stream": True}, EVENTS + DONE)):
        answer = await stand.ask(body)
        assert (answer.status, answer.body) == (200, expected)
        assert "link" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_body_that_ends_with_the_connection(stand: Stand, stream: bool, version: bytes) -> None:
    async def closing(side: EngineSide) -> None:
        kind = b"text/event-stream" if stream else b"application/json"
        await side.raw(b"HTTP/%b 200 OK\r\nContent-Type: %b\r\nConnection: close\r\n\r\n" % (version, kind))
        await side.raw(EVENTS + DONE if stream else ANSWER)
        side.writer.close()

    await stand.start(closing)
    for _ in range(2):
        answer = await stand.ask({**CHAT, "stream": stream})
        assert (answer.status, answer.broken) == (200, False)
        assert answer.body == (EVENTS + DONE if stream else ANSWER)
    assert {outcome.finish for outcome in stand.outcomes} == {"complete"}
    assert stand.engine.seen[0].writer is not stand.engine.seen[1].writer


async def test_trailers_of_an_engine_are_dropped(stand: Stand) -> None:
    async def trailing(side: EngineSide) -> None:
        await side.raw(STREAM_HEAD)
        await side.chunk(EVENTS + DONE)
        await side.raw(b"0\r\nX-Sum: 1\r\n\r\n")

    await stand.start(trailing)
    for _ in range(2):
        assert (await stand.ask({**CHAT, "stream": True})).body == EVENTS + DONE
    assert stand.engine.seen[0].writer is stand.engine.seen[1].writer


async def test_an_answer_that_comes_before_the_request_is_read(stand: Stand) -> None:
    """The rest of the request must not be taken for the next one: that connection ends."""
    connections: list[asyncio.StreamWriter] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"error":{"message":"too long","type":"invalid_request_error","code":400}}'
        writer.write(
            b"HTTP/1.1 400 X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    await stand.start(body_limit=64 << 20)
    stand.add("early", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    large = {**CHAT, "user": "x" * (16 << 20)}
    for count in (1, 2):
        answer = await stand.ask(large)
        assert (answer.status, answer.json["error"]["message"]) == (400, "too long")
        assert len(connections) == count
    server.close()
    for writer in connections:
        writer.transport.abort()
    await asyncio.sleep(0)
