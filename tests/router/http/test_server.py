"""Order, keep-alive, ends and slow clients of the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import pytest

from router.http import connection
from router.http.messages import Limits
from router.http.server import serve

_GET = b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n"
_POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabcde"


async def eventually(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.002)


class Held:
    """A handler that keeps what it is given."""

    def __init__(self) -> None:
        self.requests = []
        self.responders = []
        self.gone = 0

    def __call__(self, request, responder) -> None:
        self.requests.append(request)
        self.responders.append(responder)
        responder.on_gone = self.left

    def left(self) -> None:
        self.gone += 1

    async def responder(self, count: int = 1):
        await eventually(lambda: len(self.responders) >= count)
        return self.responders[count - 1]


# -- order and keep-alive


async def test_a_connection_serves_many_requests(start, dial):
    server = await start()
    wire = await dial(server)
    for number in range(20):
        wire.send(_GET % b"/%d" % number)
        head, body = await wire.answer()
        assert body == b"GET /%d \n" % number
        assert b"connection:" not in head
    assert len(server.connections) == 1


async def test_pipelined_requests_are_answered_one_at_a_time_in_order(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(_GET % b"/1" + _POST + _GET % b"/3")
    (await held.responder()).send(200, [], b"one")
    second = await held.responder(2)
    assert len(held.responders) == 2
    second.start(200, [])
    second.write(b"two")
    await asyncio.sleep(0.01)
    assert len(held.responders) == 2
    second.finish()
    (await held.responder(3)).send(200, [], b"three")
    assert (await wire.answer())[1] == b"one"
    assert (await wire.until(b"0\r\n\r\n")).endswith(b"\r\n\r\n3\r\ntwo\r\n0\r\n\r\n")
    assert (await wire.answer())[1] == b"three"
    assert [request.path for request in held.requests] == ["/1", "/", "/3"]


async def test_reading_stops_while_many_requests_wait(start, dial):
    held = Held()
    server = await start(held, pipelined=2)
    wire = await dial(server)
    wire.send(b"".join(_GET % b"/%d" % number for number in range(50_000)))  # 1.7 MB, several reads
    await held.responder()
    (connection,) = server.connections
    await eventually(lambda: not connection._transport.is_reading())
    assert len(connection._reader.requests) < 20_000
    for number in range(200):
        (await held.responder(number + 1)).send(200, [], b"%d" % number)
        assert (await wire.answer())[1] == b"%d" % number


async def test_many_pipelined_requests_all_get_their_answer(start, dial):
    wire = await dial(await start(pipelined=2))
    count = 3000
    wire.send(b"".join(_GET % b"/%d" % number for number in range(count)))
    for number in range(count):
        assert (await wire.answer())[1] == b"GET /%d \n" % number


async def test_connection_close_is_honoured_and_what_follows_is_ignored(start, dial):
    server = await start()
    wire = await dial(server)
    wire.send(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + _GET % b"/after")
    answer = await wire.to_end()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"\r\nconnection: close\r\n" in answer
    assert server.refused == {}


async def test_http10_closes_unless_asked_to_keep_alive(start, dial):
    server = await start()
    wire = await dial(server)
    wire.send(b"GET / HTTP/1.0\r\n\r\n")
    assert b"\r\nconnection: close\r\n" in await wire.to_end()
    wire = await dial(server)
    for _ in range(2):
        wire.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert b"\r\nconnection: keep-alive\r\n" in (await wire.answer())[0]


# -- shapes of answers


async def test_http10_streams_without_chunks_and_then_closes(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    responder = await held.responder()
    responder.start(200, [])
    responder.write(b"one")
    responder.write(b"two")
    responder.finish()
    head, _, body = (await wire.to_end()).partition(b"\r\n\r\n")
    assert body == b"onetwo"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


async def test_an_empty_write_does_not_end_the_stream(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(_GET % b"/")
    responder = await held.responder()
    responder.start(200, [(b"content-type", b"text/event-stream")])
    responder.write(b"")
    responder.write(b"x" * 17)
    responder.write(b"")
    responder.finish()
    answer = await wire.until(b"0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n")
    assert b"transfer-encoding: chunked\r\n" in answer


async def test_head_has_the_length_but_no_body(start, dial):
    wire = await dial(await start(lambda request, responder: responder.send(200, [], b"abc")))
    wire.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n" + _GET % b"/")
    first = await wire.until(b"\r\n\r\n")
    assert b"content-length: 3\r\n" in first
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 200")


async def test_head_of_a_stream_has_no_body(start, dial):
    def handler(request, responder):
        responder.start(200, [])
        responder.write(b"abc")
        responder.finish()

    wire = await dial(await start(handler))
    wire.send(b"HEAD / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert (await wire.to_end()).endswith(b"\r\n\r\n")


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body(start, dial, status):
    wire = await dial(await start(lambda request, responder: responder.send(status, [], b"")))
    wire.send(_GET % b"/")
    head = await wire.until(b"\r\n\r\n")
    assert (b"content-length" in head) == (status == 304)
    wire.send(_GET % b"/")
    assert (await wire.until(b"\r\n\r\n")) == head


async def test_framing_headers_of_the_handler_are_dropped_and_unknown_statuses_pass(start, dial):
    headers = [(b"content-length", b"99"), (b"transfer-encoding", b"chunked"), (b"connection", b"x"), (b"x-a", b"b")]
    wire = await dial(await start(lambda request, responder: responder.send(599, headers, b"ok")))
    wire.send(_GET % b"/")
    assert await wire.answer() == (b"HTTP/1.1 599 \r\nx-a: b\r\ncontent-length: 2\r\n\r\n", b"ok")


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
async def test_a_line_break_in_a_header_never_reaches_the_client(start, dial, value, caplog):
    wire = await dial(await start(lambda request, responder: responder.send(200, [(b"x-a", value)], b"")))
    with caplog.at_level(logging.CRITICAL, "asyncio"):
        wire.send(_GET % b"/")
        answer = await wire.to_end()
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"x-a" not in answer


async def test_a_failing_handler_is_a_500_and_is_reported(start, dial):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))

    def handler(request, responder):
        raise RuntimeError("secret")

    wire = await dial(await start(handler))
    wire.send(_GET % b"/")
    answer = await wire.to_end()
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in answer
    assert [type(error) for error in reported] == [RuntimeError]


# -- 100-continue


async def test_continue_is_sent_when_the_body_is_awaited(start, dial):
    wire = await dial(await start())
    wire.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-Continue\r\n\r\n")
    assert await wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.send(b"abcde")
    assert (await wire.answer())[1] == b"POST / \nabcde"


async def test_continue_is_not_sent_when_the_body_is_there_or_none_is_due(start, dial):
    wire = await dial(await start())
    wire.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nabcde")
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 200")
    wire.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nab")
    await asyncio.sleep(0.01)
    wire.send(b"cde")
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 200")
    wire.send(b"GET / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n\r\n")
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 200")


async def test_continue_waits_for_the_answer_before_it(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(_GET % b"/" + b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
    responder = await held.responder()
    await asyncio.sleep(0.01)
    responder.send(200, [], b"first")
    assert (await wire.answer())[1] == b"first"
    assert await wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.send(b"abcde")
    (await held.responder(2)).send(200, [], b"second")
    assert (await wire.answer())[1] == b"second"


async def test_a_large_body_is_refused_instead_of_continued(start, dial):
    wire = await dial(await start(body_bytes=4))
    wire.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n")
    assert (await wire.to_end()).startswith(b"HTTP/1.1 413 ")


async def test_a_body_of_exactly_the_limit_passes(start, dial):
    wire = await dial(await start(body_bytes=5))
    wire.send(_POST + b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n")
    for _ in range(2):
        assert (await wire.answer())[1] == b"POST / \nabcde"


# -- ends


async def test_a_half_closed_client_gets_its_answer(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(_GET % b"/1" + _GET % b"/2")
    wire.writer.write_eof()
    responder = await held.responder()
    await asyncio.sleep(0.3)  # past the second probe
    responder.send(200, [], b"one")
    (await held.responder(2)).send(200, [], b"two")
    answer = await wire.to_end()
    assert held.gone == 0
    finals = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert finals.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert finals.endswith(b"connection: close\r\n\r\ntwo")


async def test_a_client_that_closes_before_the_answer_is_gone_without_a_write_of_ours(start, dial):
    held = Held()
    server = await start(held)
    wire = await dial(server)
    wire.send(_POST)
    responder = await held.responder()
    wire.close()
    await eventually(lambda: held.gone)
    assert responder.gone
    assert not server.connections
    responder.send(200, [], b"late")
    responder.abort()
    await asyncio.sleep(0.01)
    assert held.gone == 1


async def test_an_http10_client_that_closes_is_gone(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(b"GET / HTTP/1.0\r\n\r\n")
    await held.responder()
    wire.close()
    await eventually(lambda: held.gone == 1)


async def test_a_client_that_leaves_a_stream_is_gone_once(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(_GET % b"/")
    responder = await held.responder()
    responder.start(200, [])
    responder.write(b"one")
    await wire.until(b"one\r\n")
    wire.close()
    async with asyncio.timeout(10):
        while not held.gone:
            responder.write(b"more")
            await asyncio.sleep(0.002)
    responder.write(b"more")
    responder.finish()
    await asyncio.sleep(0.01)
    assert held.gone == 1


async def test_a_reset_is_gone(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(_GET % b"/" + _GET % b"/queued")
    await held.responder()
    wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wire.reset()
    await eventually(lambda: held.gone == 1)
    assert len(held.responders) == 1


async def test_an_answered_client_is_not_gone(start, dial):
    held = Held()
    server = await start(held)
    wire = await dial(server)
    wire.send(_GET % b"/")
    (await held.responder()).send(200, [], b"")
    await wire.answer()
    wire.close()
    await eventually(lambda: not server.connections)
    assert held.gone == 0


async def test_an_aborted_stream_has_no_end(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(_GET % b"/" + _GET % b"/queued")
    responder = await held.responder()
    responder.start(200, [])
    responder.write(b"data: error\n\n")
    responder.abort()
    answer = await wire.to_end()
    assert answer.endswith(b"d\r\ndata: error\n\n\r\n")
    assert held.gone == 0
    assert len(held.responders) == 1


async def test_an_aborted_http10_stream_is_a_reset(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(b"GET / HTTP/1.0\r\n\r\n")
    responder = await held.responder()
    responder.start(200, [])
    responder.write(b"part")
    await wire.until(b"part")
    responder.abort()
    with pytest.raises(ConnectionResetError):
        await wire.to_end()


# -- slow clients


async def test_a_slow_reader_pauses_the_handler_and_memory_stays_bounded(start, dial):
    held = Held()
    wire = await dial(await start(held, write_buffer_bytes=64 * 1024))
    wire.send(_GET % b"/")
    responder = await held.responder()
    calls = []
    responder.on_pause = lambda: calls.append("pause")
    responder.on_resume = lambda: calls.append("resume")
    responder.start(200, [])
    piece = b"x" * 16_384
    written = 0
    while not calls and written < 4000:
        responder.write(piece)
        written += 1
        await asyncio.sleep(0)
    assert calls == ["pause"]
    assert responder._transport.get_write_buffer_size() < 2 * 64 * 1024
    await wire.until(b"\r\n\r\n")
    for _ in range(written):
        await wire.until(b"4000\r\n")
        await wire.reader.readexactly(16_386)
    await eventually(lambda: calls == ["pause", "resume"])
    responder.finish()
    assert await wire.until(b"0\r\n\r\n") == b"0\r\n\r\n"


async def test_the_next_request_waits_until_the_client_took_the_answer_before(start, dial):
    held = Held()
    wire = await dial(await start(held))
    wire.send(_GET % b"/1" + _GET % b"/2")
    body = b"x" * 40_000_000  # more than the kernel and the client take in between
    (await held.responder()).send(200, [], body)
    await asyncio.sleep(0.02)
    assert len(held.responders) == 1
    assert (await wire.answer())[1] == body
    (await held.responder(2)).send(200, [], b"two")
    assert (await wire.answer())[1] == b"two"


async def test_a_client_that_takes_nothing_is_dropped(start, dial):
    held = Held()
    server = await start(held, stall_s=0.05)
    wire = await dial(server)
    wire.writer.transport.pause_reading()
    wire.send(_GET % b"/")
    responder = await held.responder()
    responder.start(200, [])
    responder.write(b"x" * 16_000_000)
    await eventually(lambda: held.gone == 1)
    assert not server.connections
    assert responder.stalled


async def test_a_client_that_reads_slowly_is_not_dropped(start, dial):
    """The sweep is driven by hand: three times the limit passes, and something is taken in between each time."""
    held = Held()
    server = await start(held, stall_s=60)
    wire = await dial(server)
    wire.writer.transport.pause_reading()
    wire.send(_GET % b"/")
    (await held.responder()).send(200, [], b"x" * 64_000_000)  # more than is taken in four times some milliseconds
    await eventually(lambda: all(connection._paused for connection in server.connections))
    (connection,) = server.connections
    unsent = connection._transport.get_write_buffer_size
    for _ in range(4):
        before = unsent()
        wire.writer.transport.resume_reading()
        await eventually(lambda before=before: unsent() < before)
        wire.writer.transport.pause_reading()
        connection.sweep(50)
    assert server.connections
    connection._unsent = 0
    connection.sweep(61)
    await eventually(lambda: not server.connections)


async def test_a_refused_body_is_answered_by_who_knows_what_goes_with_every_answer(start, dial):
    """The connection ends all the same, and slowly enough to be read."""
    refused = []

    def refuse(request, responder, refusal):
        refused.append((request, refusal))
        responder.send(refusal.status, [(b"x-own", b"1")], b"{}")

    server = await start(refuser=refuse, body_bytes=10)
    wire = await dial(server)
    wire.send(_GET % b"/" + b"POST /a?b HTTP/1.1\r\nHost: a\r\nX-Id: 7\r\nContent-Length: 1000000\r\n\r\n")
    wire.send(b"x" * 500_000)
    assert (await wire.answer())[1] == b"GET / \n"
    answer = await wire.to_end()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nx-own: 1\r\n" in answer
    assert b"\r\nconnection: close\r\n" in answer
    ((request, refusal),) = refused
    assert (refusal.status, request.path, request.query, request.body) == (413, "/a", b"b", b"")
    assert request.header(b"x-id") == b"7"
    assert server.refused == {413: 1}
    wire.close()
    await eventually(lambda: not server.connections)


async def test_who_refuses_is_not_asked_about_a_head_that_cannot_be_trusted(start, dial):
    server = await start(refuser=lambda *_: pytest.fail("there is no request"))
    for head in (b"GET / HTTP/1.1\r\n\r\n", b"POST /#a HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n", b"\0"):
        wire = await dial(server)
        wire.send(head)
        assert (await wire.to_end()).startswith(b"HTTP/1.1 400 ")
    assert server.refused == {400: 3}


async def test_a_refuser_that_fails_is_a_500_and_is_reported(start, dial):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    wire = await dial(await start(refuser=lambda *_: 1 / 0, body_bytes=1))
    wire.send(_POST)
    assert (await wire.to_end()).startswith(b"HTTP/1.1 500 ")
    assert len(reported) == 1


@pytest.mark.parametrize(
    ("limits", "sent", "status"),
    [
        ({"keep_alive_s": 0.05}, b"", b""),
        ({"keep_alive_s": 0.05}, b"\r\n", b""),
        ({"head_s": 0.05}, b"GET / HTTP/1.1\r\nHost", b"HTTP/1.1 408 "),
        ({"body_idle_s": 0.05}, _POST[:-1], b"HTTP/1.1 408 "),
    ],
)
async def test_a_client_that_sends_nothing_more_is_closed(start, dial, limits, sent, status):
    server = await start(**limits)
    wire = await dial(server)
    wire.send(sent)
    assert (await wire.to_end())[: len(status)] == status
    wire.close()
    await eventually(lambda: not server.connections)


async def test_dripping_a_head_does_not_prolong_its_time(start, dial):
    wire = await dial(await start(head_s=0.1))
    wire.send(b"GET / HTTP/1.1\r\nX: ")
    async with asyncio.timeout(10):
        while not wire.reader.at_eof() and not wire.reader._buffer:
            wire.send(b"a")
            await asyncio.sleep(0.01)
    assert (await wire.to_end()).startswith(b"HTTP/1.1 408 ")


async def test_dripping_a_body_does_not_prolong_its_time(start, dial):
    """Each piece comes in time; all of them are far fewer than a body may have in that time."""
    held = Held()
    wire = await dial(await start(held, body_idle_s=0.1, body_bytes_per_s=1e5))
    wire.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n")
    async with asyncio.timeout(10):
        while not wire.reader.at_eof() and not wire.reader._buffer:
            wire.send(b"a")
            await asyncio.sleep(0.01)
    assert (await wire.to_end()).startswith(b"HTTP/1.1 408 ")


async def test_a_large_body_has_more_time(start, dial):
    held = Held()
    server = await start(held, body_idle_s=10, body_bytes_per_s=1e3)
    wire = await dial(server)
    wire.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20001\r\n\r\n" + b"a" * 20_000)
    await eventually(lambda: [c for c in server.connections if c._reader.body_size == 20_000])
    (connection,) = server.connections
    for _ in range(29):
        connection._reader.waited = 0.0  # a piece has come
        connection.sweep(1.0)
    assert not held.requests
    wire.send(b"a")
    responder = await held.responder()
    responder.send(200, [], b"")
    assert (await wire.answer())[0].startswith(b"HTTP/1.1 200 ")


async def test_a_running_request_has_no_time_limit_here(start, dial):
    held = Held()
    wire = await dial(await start(held, keep_alive_s=0.04, head_s=0.04, body_idle_s=0.04, stall_s=0.04))
    wire.send(_GET % b"/")
    responder = await held.responder()
    await asyncio.sleep(0.2)
    responder.send(200, [], b"late")
    assert (await wire.answer())[1] == b"late"


async def test_a_refused_client_that_stays_is_dropped(start, dial):
    server = await start(linger_s=0.05)
    wire = await dial(server)
    wire.send(b"garbage\r\n\r\n")
    assert (await wire.to_end()).startswith(b"HTTP/1.1 400 ")
    await eventually(lambda: not server.connections)


async def test_a_sweep_reaches_every_one_of_many_connections(start):
    server = await start(keep_alive_s=0.2)
    loop = asyncio.get_running_loop()
    for _ in range(700):
        await loop.create_connection(asyncio.Protocol, "127.0.0.1", server.port)
    await eventually(lambda: not server.connections)


# -- drain


async def test_while_winding_down_everything_is_answered_once_more(start, dial):
    held = Held()
    server = await start(held)
    idle, busy = await dial(server), await dial(server)
    busy.send(_GET % b"/busy")
    responder = await held.responder()
    await eventually(lambda: len(server.connections) == 2)
    server.wind_down()
    new = await dial(server)
    new.send(_GET % b"/new")
    (await held.responder(2)).send(200, [], b"two")
    idle.send(_GET % b"/idle")
    (await held.responder(3)).send(200, [], b"three")
    responder.send(200, [], b"one")
    for wire in (new, idle, busy):
        assert b"\r\nconnection: close\r\n" in await wire.to_end()
    await server.emptied()


async def test_a_stream_that_runs_ends_with_its_connection(start, dial):
    held = Held()
    server = await start(held)
    wire = await dial(server)
    wire.send(_GET % b"/")
    responder = await held.responder()
    responder.start(200, [])
    responder.write(b"one")
    server.wind_down()
    responder.finish()
    assert (await wire.to_end()).endswith(b"3\r\none\r\n0\r\n\r\n")


async def test_drain_answers_what_runs_and_closes_the_idle(start, dial):
    held = Held()
    server = await start(held)
    idle, busy, reading = await dial(server), await dial(server), await dial(server)
    busy.send(_GET % b"/")
    responder = await held.responder()
    reading.send(_POST[:-1])
    await eventually(lambda: len(server.connections) == 3)
    await asyncio.sleep(0.02)
    drained = asyncio.create_task(server.drain(30))
    assert await idle.to_end() == b""
    with pytest.raises(ConnectionRefusedError):
        await dial(server)
    reading.send(_POST[-1:])
    responder.send(200, [], b"one")
    (await held.responder(2)).send(200, [], b"two")
    for wire in (busy, reading):
        assert b"\r\nconnection: close\r\n" in await wire.to_end()
    assert await drained == 0


async def test_drain_cuts_what_does_not_end(start, dial):
    held = Held()
    server = await start(held)
    wire = await dial(server)
    wire.send(_GET % b"/")
    responder = await held.responder()
    responder.start(200, [])
    responder.write(b"one")
    assert await server.drain(0.05) == 1
    await eventually(lambda: held.gone == 1)


async def test_a_unix_socket_is_served(tmp_path):
    path = str(tmp_path / "socket")
    server = await serve(lambda request, responder: responder.send(200, [], request.peer.encode()), unix_path=path)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).endswith(b"content-length: 0\r\nconnection: close\r\n\r\n")
    assert server.port == 0
    writer.close()
    server.close()
    await asyncio.sleep(0.01)


async def test_the_peer_is_the_address_without_port(start, dial):
    wire = await dial(await start(lambda request, responder: responder.send(200, [], request.peer.encode())))
    wire.send(_GET % b"/")
    assert (await wire.answer())[1] == b"127.0.0.1"


def test_default_limits_suit_balancers():
    assert Limits().keep_alive_s > 60


# -- more connections than there may be


async def test_a_connection_too_many_is_told_so_and_closed(start, dial):
    server = await start(connections=2)
    kept = [await dial(server) for _ in range(2)]
    for wire in kept:
        wire.send(_GET % b"/")
        await wire.answer()
    over = await dial(server)
    over.send(_GET % b"/")
    head, body = await over.answer()
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nconnection: close\r\n" in head
    assert b'"code":"overloaded"' in body
    assert await over.to_end() == b""
    assert server.refused == {503: 1}
    for wire in kept:
        wire.send(_GET % b"/")
        assert (await wire.answer())[0].startswith(b"HTTP/1.1 200 ")
    kept[0].close()
    await eventually(lambda: len(server.connections) == 1)
    late = await dial(server)
    late.send(_GET % b"/")
    assert (await late.answer())[0].startswith(b"HTTP/1.1 200 ")


async def test_those_beside_the_ones_that_are_told_are_cut(start, dial, monkeypatch):
    monkeypatch.setattr(connection, "_TOLD_AT_ONCE", 1)
    server = await start(connections=1)
    for _ in range(2):
        await dial(server)
    await eventually(lambda: len(server.connections) == 2)
    cut = await dial(server)
    with contextlib.suppress(ConnectionError):
        assert await cut.to_end() == b""
    await eventually(lambda: len(server.connections) == 2)
    assert server.refused == {503: 1}
