"""Reuse, retries, and every way an engine can end an answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import pytest

from router.errors import EngineProtocolError, EngineUnreachable
from router.http.client import Pool, PoolLimits

_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Taken:
    """A receiver that remembers the calls it got."""

    def __init__(self) -> None:
        self.status = 0
        self.headers = []
        self.pieces = []
        self.calls = []
        self.error = None
        self.over = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def on_head(self, status, headers) -> None:
        self.calls.append("head")
        self.status = status
        self.headers = headers

    def on_data(self, data) -> None:
        self.calls.append("data")
        self.pieces.append(data)

    def on_end(self) -> None:
        self.calls.append("end")
        self.over.set()

    def on_error(self, error) -> None:
        self.calls.append("error")
        self.error = error
        self.over.set()

    async def done(self) -> Taken:
        await asyncio.wait_for(self.over.wait(), 10)
        return self


class Engine:
    """An engine told what to write. `script(peer, number)` runs for each connection, the number-th of its kind."""

    def __init__(self, script) -> None:
        self._script = script
        self._tasks = set()
        self.opened = 0
        self.heads = []

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**26)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader, writer) -> None:
        self._tasks.add(asyncio.current_task())
        self.opened += 1
        with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            await self._script(Peer(self, reader, writer), self.opened)
        writer.close()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Peer:
    def __init__(self, engine, reader, writer) -> None:
        self._engine = engine
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """Reads one request; returns its body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        self._engine.heads.append(head)
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return await self.reader.readexactly(int(length or 0))

    async def write(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await asyncio.sleep(0.005)

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def left(self) -> None:
        """Until the other side has closed."""
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(self.reader.read(), 10)


@pytest.fixture
async def engine():
    engines = []

    async def start(script) -> Engine:
        engines.append(Engine(script))
        await engines[-1].listen()
        return engines[-1]

    yield start
    for one in engines:
        await one.close()


@pytest.fixture
async def pool():
    pools = []

    def make(url: str, **limits: float) -> Pool:
        pools.append(Pool(url, limits=PoolLimits(**limits)))
        return pools[-1]

    yield make
    for one in pools:
        await one.aclose()


def ask(pool: Pool, taken: Taken | None = None, *, method: bytes = b"POST", body=b"{}", headers=()):
    taken = taken or Taken()
    return pool.send(method, b"/v1/x", headers, body, taken), taken


async def answers_ok(peer: Peer, number: int) -> None:
    while True:
        await peer.request()
        await peer.write(_OK)


def writes(*pieces: bytes):
    """A script: read one request, write the pieces one by one, close."""

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.write(*pieces)

    return script


def then_stays(*pieces: bytes):
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.write(*pieces)
        await peer.left()

    return script


async def eventually(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.002)


# -- requests


async def test_the_head_is_ours_and_the_headers_are_the_callers(engine, pool):
    one = await engine(answers_ok)
    headers = [
        (b"x-a", b"b"), (b"host", b"evil"), (b"content-length", b"99"), (b"transfer-encoding", b"chunked"),
        (b"accept-encoding", b"gzip"), (b"connection", b"close"), (b"expect", b"100-continue"), (b"te", b"trailers"),
    ]  # fmt: skip
    _, taken = ask(pool(one.url + "/base/"), headers=headers)
    await taken.done()
    host = one.url.removeprefix("http://").encode()
    assert one.heads == [
        b"POST /base/v1/x HTTP/1.1\r\nhost: " + host + b"\r\nx-a: b\r\ncontent-length: 2\r\n\r\n",
    ]


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 16_384, b"x" * 16_385])
async def test_a_head_written_beforehand_is_the_same_request(engine, pool, body):
    one = await engine(answers_ok)
    mine = pool(one.url + "/base/")
    headers = [(b"x-a", b"b%d"), (b"host", b"evil"), (b"content-length", b"99")]
    await ask(mine, headers=headers, body=body)[1].done()
    lines = mine.post_lines(b"/v1/x", headers)
    for more in (b"", b"\r\nx-c: d"):
        taken = Taken()
        mine.post(lines + more, body, taken)
        await taken.done()
        assert taken.calls == ["head", "data", "end"]
    plain, same, longer = one.heads
    assert plain == same
    assert longer == plain.replace(b"x-a: b%d\r\n", b"x-a: b%d\r\nx-c: d\r\n")
    assert mine.stats.exchanges == 3


async def test_a_line_break_in_a_head_written_beforehand_raises(pool):
    mine = pool("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="line break"):
        mine.post_lines(b"/v1/x", [(b"x-a\n", b"b")])
    with pytest.raises(ValueError, match="line break"):
        mine.post_lines(b"/v1/x HTTP/1.1\r\nx-a: b", [])


async def test_a_closing_pool_does_not_say_that_the_engine_was_not_reached(engine, pool):
    one = await engine(answers_ok)
    mine = pool(one.url)
    await ask(mine)[1].done()
    taken = ask(mine)[1]
    await mine.aclose()
    assert (await taken.done()).error.code == "engine_no_answer"
    assert mine.stats.retried == 0


async def test_a_retired_pool_ends_what_runs_and_keeps_nothing(engine, pool):
    go = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        if await peer.request() == b"slow":
            await peer.write(_STREAM_HEAD)
            await go.wait()
            await peer.write(b"2\r\nok\r\n0\r\n\r\n")
        else:
            await peer.write(_OK)
        await peer.left()

    one = await engine(script)
    mine = pool(one.url)
    quick, slow = ask(mine)[1], ask(mine, body=b"slow")[1]
    await quick.done()
    await eventually(lambda: mine.idle == 1 and slow.calls == ["head"])
    mine.retire()
    assert mine.idle == 0
    go.set()
    assert (await slow.done()).body == b"ok"
    await eventually(lambda: mine.open == 0)


async def test_get_has_no_length_and_an_empty_post_has(engine, pool):
    one = await engine(answers_ok)
    mine = pool(one.url)
    for method in (b"GET", b"POST"):
        await ask(mine, method=method, body=b"")[1].done()
    assert [b"content-length" in head for head in one.heads] == [False, True]


@pytest.mark.parametrize("body", [b"x" * 100, b"x" * 5_000_000, [b"a", b"b" * 300_000, b"", b"c"], [b"a", b"b"], []])
async def test_the_body_arrives_whole(engine, pool, body):
    bodies = []

    async def script(peer: Peer, number: int) -> None:
        bodies.append(await peer.request())
        await peer.write(_OK)

    await ask(pool((await engine(script)).url), body=body)[1].done()
    assert bodies == [body if isinstance(body, bytes) else b"".join(body)]


async def test_a_line_break_in_a_header_raises(pool):
    with pytest.raises(ValueError, match="line break"):
        ask(pool("http://127.0.0.1:1"), headers=[(b"x-a", b"b\r\nx-c: d")])


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a", "http://", "unix:/x"])
async def test_other_urls_are_refused(url):
    with pytest.raises(ValueError, match="not an http"):
        Pool(url)


# -- answers


async def test_the_receiver_is_not_called_from_within_send(engine, pool):
    mine = pool((await engine(answers_ok)).url)
    await ask(mine)[1].done()
    _, taken = ask(mine)
    assert taken.calls == []
    assert (await taken.done()).calls == ["head", "data", "end"]


async def test_one_read_is_one_piece(engine, pool):
    chunks = b"".join(b"5\r\n" + b"%05d" % number + b"\r\n" for number in range(50))
    one = await engine(then_stays(_STREAM_HEAD + chunks, b"1\r\nx\r\n0\r\nx-trailer: y\r\n\r\n"))
    taken = await ask(pool(one.url))[1].done()
    assert taken.calls == ["head", "data", "data", "end"]
    assert taken.body == b"".join(b"%05d" % number for number in range(50)) + b"x"
    assert taken.headers == [(b"transfer-encoding", b"chunked")]


WHOLE = {
    "interim answers": (
        b"ok",
        [b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\ncontent-length: 9\r\n\r\n", _OK],
    ),
    "until close": (b"abcdef", [b"HTTP/1.1 200 OK\r\n\r\nabc", b"def"]),
    "until close, empty": (b"", [b"HTTP/1.1 200 OK\r\n\r\n"]),
    "HTTP/1.0 until close": (b"abc", [b"HTTP/1.0 200 OK\r\n\r\nabc"]),
    "HTTP/1.0 with a length": (b"ok", [b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"]),
    "connection: close": (b"ok", [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"]),
    "one byte at a time": (b"ok", [bytes([byte]) for byte in _OK]),
    "no reason phrase": (b"ok", [b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok"]),
    "no content": (b"", [b"HTTP/1.1 204 No Content\r\n\r\n"]),
}


@pytest.mark.parametrize("case", WHOLE)
async def test_whole_answers(engine, pool, case):
    body, pieces = WHOLE[case]
    taken = await ask(pool((await engine(writes(*pieces))).url))[1].done()
    assert taken.error is None
    assert taken.body == body
    assert taken.calls[0] == "head"
    assert taken.calls[-1] == "end"
    assert taken.status in (200, 204)


BROKEN = {
    "length cut short": [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc"],
    "chunks cut between": [_STREAM_HEAD + b"3\r\nabc\r\n"],
    "chunks cut within": [_STREAM_HEAD + b"5\r\nabc"],
    "cut before the last line": [_STREAM_HEAD + b"3\r\nabc\r\n0\r\n"],
    "head cut short": [b"HTTP/1.1 200 OK\r\nContent-Le"],
    "only an interim answer": [b"HTTP/1.1 100 Continue\r\n\r\n"],
    "two lengths": [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok"],
    "length and coding": [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
    "gzip, chunked": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"],
    "chunked, gzip": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, gzip\r\n\r\nabc"],
    "bare LF": [b"HTTP/1.1 200 OK\nContent-Length: 0\n\n"],
    "folded line": [b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n"],
    "bad chunk": [_STREAM_HEAD + b"zz\r\n"],
    "bad status": [b"HTTP/1.1 20 OK\r\n\r\n"],
    "status below 100": [b"HTTP/1.1 050 Continue\r\n\r\nP"],
    "switching protocols": [b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nab"],
    "switching protocols to nothing": [b"HTTP/1.1 101 S\r\n\r\nab"],
    "HTTP/2.0": [b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n"],
    "not HTTP": [b"SSH-2.0-OpenSSH\r\n"],
    "endless head": [b"HTTP/1.1 200 OK\r\nX: " + b"a" * 300_000, b"a" * 300_000],
}


@pytest.mark.parametrize("case", BROKEN)
async def test_broken_answers_never_end_well(engine, pool, case):
    one = await engine(writes(*BROKEN[case]))
    taken = await ask(pool(one.url))[1].done()
    assert isinstance(taken.error, EngineProtocolError)
    assert "end" not in taken.calls
    assert taken.calls.count("error") == 1
    assert one.opened == 1
    assert "127.0.0.1" not in taken.error.message


async def test_what_came_before_the_break_is_handed_on(engine, pool):
    one = await engine(writes(_STREAM_HEAD + b"3\r\nabc\r\nzz\r\n"))
    taken = await ask(pool(one.url))[1].done()
    assert taken.calls == ["head", "data", "error"]
    assert taken.body == b"abc"


async def test_a_reset_is_not_the_end_of_a_body_that_ends_by_closing(engine, pool):
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.write(b"HTTP/1.1 200 OK\r\n\r\nabc")
        peer.reset()

    taken = await ask(pool((await engine(script)).url))[1].done()
    assert isinstance(taken.error, EngineProtocolError)
    assert taken.calls == ["head", "data", "error"]


async def test_head_ends_with_its_head(engine, pool):
    one = await engine(then_stays(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"))
    taken = await ask(pool(one.url), method=b"HEAD", body=b"")[1].done()
    assert taken.calls == ["head", "end"]


# -- reuse


async def test_a_connection_is_reused(engine, pool):
    one = await engine(answers_ok)
    mine = pool(one.url)
    for _ in range(5):
        assert (await ask(mine)[1].done()).body == b"ok"
    assert one.opened == mine.stats.opened == 1
    assert mine.stats.reused == 4


async def test_the_newest_idle_connection_is_taken(engine, pool):
    used = []

    async def script(peer: Peer, number: int) -> None:
        while True:
            await peer.request()
            used.append(number)
            await asyncio.sleep(0.01 * number)  # the second one answers last
            await peer.write(_OK)

    mine = pool((await engine(script)).url)
    first, second = ask(mine)[1], ask(mine)[1]
    await first.done()
    await second.done()
    for _ in range(3):
        await ask(mine)[1].done()
    assert used[2:] == [2, 2, 2]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        _OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        _OK + b"garbage",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\nevil",
    ],
    ids=["close", "HTTP/1.0", "second answer", "garbage after", "body of 204"],
)
async def test_a_doubtful_connection_is_not_reused(engine, pool, answer):
    one = await engine(then_stays(answer))
    mine = pool(one.url)
    for count in (1, 2):
        taken = await ask(mine)[1].done()
        assert taken.calls[-1] == "end"
        assert taken.body in (b"ok", b"")
        assert one.opened == count
    await eventually(lambda: mine.open == 0)


async def test_data_on_an_idle_connection_closes_it(engine, pool):
    one = await engine(then_stays(_OK, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"))
    mine = pool(one.url)
    await ask(mine)[1].done()
    await eventually(lambda: mine.open == 0)
    assert (await ask(mine)[1].done()).body == b"ok"
    assert one.opened == 2


async def test_an_early_answer_ends_the_connection(engine, pool):
    async def script(peer: Peer, number: int) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.writer.transport.pause_reading()
        await peer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await asyncio.sleep(30)

    mine = pool((await engine(script)).url)
    taken = await ask(mine, body=b"x" * 30_000_000)[1].done()
    assert (taken.status, taken.body, taken.error) == (413, b"big", None)
    assert mine.idle == 0


# -- idle connections that die


async def test_an_idle_connection_that_dies_costs_nothing(engine, pool):
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.write(_OK)

    one = await engine(script)
    mine = pool(one.url)
    await ask(mine)[1].done()
    await eventually(lambda: mine.open == 0)
    assert (await ask(mine)[1].done()).body == b"ok"
    assert mine.stats.retried == 0


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_kept_connection_that_dies_under_a_request_is_replaced_unseen(engine, pool, reset):
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.write(_OK)
        if number == 1:
            await peer.request()
            if reset:
                peer.reset()
        else:
            await peer.left()

    one = await engine(script)
    mine = pool(one.url)
    await ask(mine)[1].done()
    taken = await ask(mine, body=b"y" * 100_000)[1].done()
    assert taken.calls == ["head", "data", "end"]
    assert one.opened == 2
    assert mine.stats.retried == 1


async def test_many_stale_connections_need_one_retry_each(engine, pool):
    """Every kept connection is dead, and the engine's closing has not been seen when the requests go out."""
    gate = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        if number <= 20:
            await gate.wait()
            await peer.write(_OK)
            await peer.reader.read(1)
            peer.reset()
        else:
            await peer.write(_OK)
            await peer.left()

    one = await engine(script)
    mine = pool(one.url)
    first = [ask(mine)[1] for _ in range(20)]
    await eventually(lambda: one.opened == 20)
    gate.set()
    for taken in first:
        await taken.done()
    second = [ask(mine)[1] for _ in range(20)]
    for taken in second:
        assert (await taken.done()).calls == ["head", "data", "end"]
    assert mine.stats.retried == 20


async def test_the_race_of_closing_and_sending_is_never_an_error(engine, pool):
    """The engine closes at about the time of the next request, again and again."""

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        peer.writer.write(_OK)
        await asyncio.sleep(0.0005 * (number % 5))

    mine = pool((await engine(script)).url)
    for number in range(200):
        taken = await ask(mine)[1].done()
        assert taken.error is None
        await asyncio.sleep(0.0005 * (number % 4))


async def test_a_retry_that_fails_is_an_error(engine, pool):
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        if number == 1:
            await peer.write(_OK)
            await peer.request()

    one = await engine(script)
    mine = pool(one.url)
    await ask(mine)[1].done()
    taken = await ask(mine)[1].done()
    assert isinstance(taken.error, EngineUnreachable)
    assert one.opened == 2


async def test_a_kept_connection_that_dies_within_the_answer_is_not_retried(engine, pool):
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.write(_OK)
        await peer.request()
        await peer.write(b"H")

    one = await engine(script)
    mine = pool(one.url)
    await ask(mine)[1].done()
    taken = await ask(mine)[1].done()
    assert isinstance(taken.error, EngineProtocolError)
    assert one.opened == 1


async def test_idle_connections_are_closed_after_their_time(engine, pool):
    mine = pool((await engine(answers_ok)).url, idle_s=0.05)
    await ask(mine)[1].done()
    assert mine.idle == 1
    await eventually(lambda: mine.open == 0)


async def test_an_old_idle_connection_is_not_taken(engine, pool):
    one = await engine(answers_ok)
    mine = pool(one.url, idle_s=0.0)
    for _ in range(2):
        await ask(mine)[1].done()
    assert one.opened == 2


async def test_the_engines_own_idle_time_is_learned(engine, pool):
    answer = b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=0, max=5\r\ncontent-length: 2\r\n\r\nok"

    async def script(peer: Peer, number: int) -> None:
        while True:
            await peer.request()
            await peer.write(answer)

    one = await engine(script)
    mine = pool(one.url, idle_s=60)
    for _ in range(2):
        await ask(mine)[1].done()
    assert one.opened == 2


# -- failures to connect, cancelling, limits


async def test_a_refused_connection_is_unreachable(pool):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    mine = pool(f"http://127.0.0.1:{port}")
    taken = await ask(mine)[1].done()
    assert isinstance(taken.error, EngineUnreachable)
    assert taken.error.code == "engine_unreachable"
    assert "127.0.0.1" not in taken.error.message
    assert mine.open == 0
    assert mine.stats.unreachable == 1


async def test_connecting_has_a_time_limit(pool):
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        with contextlib.ExitStack() as fillers:
            for _ in range(4):  # the backlog is full: further connections hang
                filler = fillers.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            taken = await ask(pool(f"http://127.0.0.1:{port}", connect_s=0.1))[1].done()
    assert isinstance(taken.error, EngineUnreachable)


async def test_a_fresh_connection_that_dies_is_unreachable_and_not_retried(engine, pool):
    one = await engine(writes())
    taken = await ask(pool(one.url))[1].done()
    assert isinstance(taken.error, EngineUnreachable)
    assert taken.error.code == "engine_no_answer"
    assert one.opened == 1


async def test_cancel_closes_the_connection_and_silences_the_receiver(engine, pool):
    left = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.write(_STREAM_HEAD + b"1\r\na\r\n")
        await peer.left()
        left.set()

    mine = pool((await engine(script)).url)
    exchange, taken = ask(mine)
    await eventually(lambda: taken.pieces)
    exchange.cancel()
    exchange.cancel()
    await asyncio.wait_for(left.wait(), 10)
    assert taken.calls == ["head", "data"]
    assert mine.open == 0


@pytest.mark.parametrize("at", ["head", "data"])
async def test_cancel_from_within_a_call(engine, pool, at):
    mine = pool((await engine(then_stays(_OK))).url)
    taken = Taken()

    def cancel(*_args: object) -> None:
        taken.calls.append(at)
        exchange.cancel()

    setattr(taken, f"on_{at}", cancel)
    exchange, _ = ask(mine, taken)
    await eventually(lambda: taken.calls)
    await eventually(lambda: mine.open == 0)
    assert taken.calls[-1] == at


async def test_cancel_while_connecting_keeps_the_connection_for_others(engine, pool):
    one = await engine(answers_ok)
    mine = pool(one.url)
    exchange, taken = ask(mine)
    exchange.cancel()
    await eventually(lambda: mine.idle == 1)
    assert (await ask(mine)[1].done()).body == b"ok"
    assert one.opened == 1
    assert len(one.heads) == 1
    assert taken.calls == []


async def test_connections_are_bounded_and_the_rest_wait_in_order(engine, pool):
    running, most = 0, 0

    async def script(peer: Peer, number: int) -> None:
        nonlocal running, most
        while True:
            await peer.request()
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.005)
            running -= 1
            await peer.write(_OK)

    one = await engine(script)
    mine = pool(one.url, connections=2)
    order = []
    exchanges = []
    for number in range(12):
        exchange, taken = ask(mine)
        taken.over = _Noting(order, number)
        exchanges.append(exchange)
    exchanges[5].cancel()
    await eventually(lambda: len(order) == 11)
    assert sorted(order) == [number for number in range(12) if number != 5]
    assert [abs(number - place) <= 2 for place, number in enumerate(order)].count(False) == 0
    assert one.opened == most == 2


class _Noting(asyncio.Event):
    def __init__(self, order, number) -> None:
        super().__init__()
        self._note = lambda: order.append(number)

    def set(self) -> None:
        self._note()


async def test_waiting_exchanges_go_on_when_connections_die_or_fail(engine, pool):
    one = await engine(writes(b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 2\r\n\r\nok"))
    mine = pool(one.url, connections=1)
    takens = [ask(mine)[1] for _ in range(4)]
    for taken in takens:
        assert (await taken.done()).body == b"ok"
    await one.close()
    failing = [ask(mine)[1] for _ in range(3)]
    for taken in failing:
        assert isinstance((await taken.done()).error, EngineUnreachable)


async def test_pause_stops_the_engine_and_resume_goes_on(engine, pool):
    total = 64 * 1024 * 400
    written = 0

    async def script(peer: Peer, number: int) -> None:
        nonlocal written
        await peer.request()
        peer.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while written < total:
            peer.writer.write(b"x" * 65536)
            written += 65536
            await peer.writer.drain()
        await peer.left()

    mine = pool((await engine(script)).url)
    exchange, taken = ask(mine)
    await eventually(lambda: taken.pieces)
    exchange.pause()
    before = -1
    while written != before:  # until the buffers in between are full
        before = written
        await asyncio.sleep(0.05)
    received = len(taken.body)
    assert received <= written < total
    await asyncio.sleep(0.02)
    assert len(taken.body) == received
    exchange.resume()
    assert len((await taken.done()).body) == total


async def test_a_pause_before_the_connection_holds(engine, pool):
    mine = pool((await engine(answers_ok)).url)
    exchange, taken = ask(mine)
    exchange.pause()
    await asyncio.sleep(0.1)
    assert taken.calls == []
    exchange.resume()
    assert (await taken.done()).body == b"ok"


async def test_a_pause_at_the_end_does_not_follow_the_connection(engine, pool):
    mine = pool((await engine(answers_ok)).url)
    taken = Taken()
    exchange, _ = ask(mine, taken)
    taken.on_head = lambda status, headers: exchange.pause()
    await taken.done()
    assert (await ask(mine)[1].done()).body == b"ok"
    assert mine.stats.reused == 1


async def test_closing_ends_everything_with_an_error(engine, pool):
    one = await engine(then_stays(_STREAM_HEAD))
    mine = pool(one.url, connections=2)
    running = ask(mine)[1]
    await eventually(lambda: running.status)
    connecting, waiting = ask(mine)[1], ask(mine)[1]
    await mine.aclose()
    after = ask(mine)[1]
    for taken in (running, connecting, waiting, after):
        assert (await taken.done()).error is not None
        assert taken.calls[-1] == "error"
    assert mine.open == 0
