"""Comments that keep a waiting stream's connection alive."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.serving.keep_alive import COMMENT, KeepAlive
from tests.router.serving.stand import STREAM_HEAD, EngineSide, Stand

CHAT = {"model": "m-chat", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**CHAT, "stream": True}
DONE = b"data: [DONE]\n\n"
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
OFTEN = {"keep_alive_comments_s": 0.01}


class FakeReply:
    def __init__(self) -> None:
        self.started = False
        self.comments: list[bytes] = []

    def comment(self, comments: bytes) -> None:
        self.comments.append(comments)


class FakeLoop:
    """`fire` lets the next timer go off."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, call: Any) -> FakeTimer:
        self.timers.append((seconds, call))
        return FakeTimer(self)

    def fire(self) -> None:
        ((seconds, call),) = self.timers
        assert seconds == 15
        self.timers.clear()
        call()


class FakeTimer:
    def __init__(self, loop: FakeLoop) -> None:
        self._loop = loop

    def cancel(self) -> None:
        self._loop.timers.clear()


class TestBeats:
    def start(self) -> tuple[FakeReply, FakeLoop, KeepAlive]:
        self.amid = False
        reply, loop = FakeReply(), FakeLoop()
        return reply, loop, KeepAlive(reply, 15, is_amid=lambda: self.amid, loop=loop)  # type: ignore[arg-type]

    def test_they_come_until_the_answer_has_begun(self) -> None:
        reply, loop, _ = self.start()
        for _ in range(3):
            loop.fire()
        assert reply.comments == [COMMENT] * 3
        reply.started = True
        loop.fire()
        assert reply.comments == [COMMENT] * 3
        assert loop.timers == []

    def test_none_comes_while_part_of_an_event_is_here(self) -> None:
        reply, loop, _ = self.start()
        loop.fire()
        self.amid = True
        for _ in range(3):
            loop.fire()
        assert len(reply.comments) == 1
        self.amid = False
        loop.fire()
        assert len(reply.comments) == 2

    def test_none_comes_after_the_end(self) -> None:
        _, loop, keep_alive = self.start()
        keep_alive.stop()
        assert loop.timers == []


async def opened(stand: Stand, body: Any = STREAM) -> asyncio.StreamReader:
    """A request that has been told twice that it waits."""
    reader, _ = await stand.send(body)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"\r\ncontent-type: text/event-stream" in head
    for _ in range(2):
        await reader.readuntil(COMMENT)
    return reader


def body_of(raw: bytes) -> tuple[bytes, bool]:
    """Without comments and chunk framing, and whether it ended."""
    parts = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size or b"0", 16) if size else None
        if length is None:
            continue
        if length == 0:
            return b"".join(parts).replace(COMMENT, b""), True
        parts.append(raw[:length])
        raw = raw[length + 2 :]
    return b"".join(parts).replace(COMMENT, b""), False


async def test_a_stream_that_waits_in_line_is_opened_and_goes_on_as_ever(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.stream(CHUNK, DONE)

    await stand.start(engine, model=OFTEN)
    stand.placement.gate = asyncio.Event()
    reader = await opened(stand)
    stand.placement.gate.set()
    assert body_of(await reader.read()) == (CHUNK + DONE, True)
    assert (stand.outcome.status, stand.outcome.finish, stand.outcome.events) == (200, "complete", 1)
    assert stand.placement.progressed == [1]


async def test_nothing_is_opened_for_who_asked_for_no_stream_or_where_it_is_off(stand: Stand) -> None:
    go_on = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        await go_on.wait()
        await side.whole(b'{"choices":[]}', status=400)

    await stand.start(engine, model=OFTEN)
    asked = asyncio.ensure_future(stand.ask(CHAT))
    await opened(stand)  # another one, so that this one would have been
    stand.models.replace([stand._model()])
    off = asyncio.ensure_future(stand.ask(STREAM))
    await stand.until(lambda: len(stand.engine.seen) == 3)
    go_on.set()
    assert (await asked).status == 400
    assert (await off).status == 400


@pytest.mark.parametrize("failure", ["status", "reset", "event", "whole", "large"])
async def test_what_fails_then_is_said_in_the_stream(stand: Stand, failure: str) -> None:
    go_on = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        await go_on.wait()
        match failure:
            case "status":
                await side.whole(b'{"error":{"message":"secret"}}', status=500)
            case "reset":
                side.reset()
            case "event":
                await side.stream(b'data: {"error":{"message":"secret","code":500}}\n\n', DONE)
            case "whole":
                await side.whole(b'{"choices":[]}')
            case "large":
                await side.whole(b'{"choices":[], "x": "%b"}' % (b"x" * (9 << 20)))

    await stand.start(engine, model=OFTEN)
    reader = await opened(stand)
    go_on.set()
    body, ended = body_of(await reader.read())
    assert not ended
    assert json.loads(body.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert b"secret" not in body
    assert (stand.outcome.status, stand.outcome.finish) == (200, "upstream_failed")
    await stand.until(lambda: stand.edge.running == 0)
    assert stand.placement.open == set()


async def test_another_engine_may_still_answer(stand: Stand) -> None:
    go_on = asyncio.Event()

    async def busy(side: EngineSide) -> None:
        await go_on.wait()
        await side.raw(STREAM_HEAD)
        await side.chunk(b": of the engine\n\n")  # whatever it says, it says nothing
        await side.chunk(b'data: {"error":{"message":"busy","code":503}}\n\n')
        await side.raw(b"0\r\n\r\n")

    async def engine(side: EngineSide) -> None:
        await side.stream(CHUNK, DONE)

    await stand.start(busy, engine, model=OFTEN)
    reader = await opened(stand)
    go_on.set()
    body, ended = body_of(await reader.read())
    assert body == b": of the engine\n\n" + CHUNK + DONE
    assert ended
    assert (stand.outcome.finish, stand.outcome.attempts) == ("complete", 2)


async def test_a_client_that_leaves_then_is_noticed_and_costs_no_timer(stand: Stand) -> None:
    left = asyncio.Event()

    async def engine(side: EngineSide) -> None:
        await side.until_gone()
        left.set()

    await stand.start(engine, model=OFTEN)
    reader, writer = await stand.send(STREAM)
    await reader.readuntil(COMMENT)
    writer.close()
    await asyncio.wait_for(left.wait(), 1)
    await stand.until(lambda: bool(stand.outcomes))
    assert stand.outcome.finish == "client_gone"
