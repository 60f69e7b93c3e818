"""Any way the network cuts the bytes gives the same messages; no bytes at all make a protocol raise."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.http.connection import ServerProtocol
from router.http.messages import Limits
from router.http.reader import RequestReader
from router.http.upstream import ClientProtocol, Exchange

_MANY = settings(max_examples=2000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
_FEWER = settings(_MANY, max_examples=500)

pytestmark = pytest.mark.timeout(300)
_TOKEN = st.text("abcxyz-_09", min_size=1, max_size=8).map(lambda text: b"x-" + text.encode())
_VALUE = st.binary(max_size=12).map(lambda raw: bytes(b for b in raw if b == 9 or 32 <= b != 127).strip(b" \t"))
_PATH = st.text("abc/%?=&~", max_size=12).map(lambda text: b"/" + text.encode())
_NASTY = st.sampled_from(
    [
        b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b" ", b":", b"0\r\n\r\n", b"ffffffff\r\n", b"HTTP/1.0", b"HTTP/2.0",
        b"CONNECT ", b"101 S", b"Host: b\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n",
        b"Connection: upgrade\r\n", b"Upgrade: x\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 100 C\r\n\r\n",
    ]
)  # fmt: skip


def _chunked(body: bytes, cuts: list[int], trailer: bytes) -> bytes:
    ends = sorted({cut % (len(body) + 1) for cut in cuts} | {0, len(body)})
    pieces = [body[start:end] for start, end in pairwise(ends)]
    return b"".join(b"%x;e=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"


@st.composite
def _request(draw: st.DrawFn) -> tuple[bytes, tuple[object, ...]]:
    """The bytes of a valid request, and what they mean."""
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"]))
    target = draw(_PATH)
    headers = [(b"host", b"a"), *draw(st.lists(st.tuples(_TOKEN, _VALUE), max_size=5))]
    body = draw(st.binary(max_size=60))
    kind = draw(st.sampled_from(["length", "chunked", "none"]))
    upgrade = draw(st.booleans())
    if kind == "length":
        headers.append((b"content-length", b"%d" % len(body)))
    elif kind == "chunked":
        headers.append((b"transfer-encoding", b"chunked"))
    wish = [(b"connection", b"upgrade"), (b"upgrade", b"h2c")] if upgrade else []
    head = b"".join(name.title() + b": " + value + b"\r\n" for name, value in [*headers, *wish])
    raw = method.encode() + b" " + target + b" HTTP/1.1\r\n" + head + b"\r\n"
    if kind == "length":
        raw += body
    elif kind == "chunked":
        trailer = draw(st.sampled_from([b"", b"Host: evil\r\n", b"X: y\r\nHost: b\r\n"]))
        raw += _chunked(body, draw(st.lists(st.integers(0, 100), max_size=4)), trailer)
    path, _, query = target.partition(b"?")
    kept = [*headers, *wish[:1]]  # an upgrade is taken out
    return raw, (method, path.decode(), query, kept, b"" if kind == "none" else body)


_REQUESTS = st.lists(_request(), min_size=1, max_size=4)
_CUTS = st.lists(st.integers(0, 2000), max_size=12)


def _split(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


@_MANY
@given(requests=_REQUESTS, cuts=_CUTS)
def test_cutting_changes_nothing(requests, cuts):
    reader = RequestReader(Limits(), "")
    for piece in _split(b"".join(raw for raw, _ in requests), cuts):
        reader.feed(piece)
    read = [
        (got.method, got.path, got.query, got.headers, got.body)
        for got in (incoming.request for incoming in reader.requests)
    ]
    assert read == [meaning for _, meaning in requests]


_EDITS = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 30), _NASTY | st.binary(max_size=3)), max_size=6)


def _edit(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """Replace some bytes by others here and there."""
    for place, removed, put in edits:
        place %= len(data) + 1
        data = data[:place] + put + data[place + removed * (removed % 3 == 0) :]
    return data


class _Transport(asyncio.Transport):
    """Keeps what is written. Nothing happens by itself."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.written = b""
        self.closed = False

    def write(self, data):
        assert not self.closed
        self.written += data

    def writelines(self, pieces):
        for piece in pieces:
            self.write(piece)

    def write_eof(self):
        pass

    def close(self):
        self.closed = True

    abort = close

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        assert not self.closed

    resume_reading = pause_reading

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def get_write_buffer_size(self):
        return 0


def _within_a_loop(check) -> None:
    """Protocols ask for the running loop; nothing here ever waits for it."""

    async def run() -> None:
        check()

    asyncio.run(run())


_ANSWERS = re.compile(
    rb"(HTTP/1\.1 (100 Continue\r\n|200 OK\r\n(connection: \S+\r\n|content-length: \d+\r\n)*"
    rb"|[45]\d\d [ \w]+\r\ncontent-type: application/json\r\ncontent-length: \d+\r\nconnection: close\r\n"
    rb'(?=\r\n\{"error":\{.*\}\}\Z))\r\n(\{"error":\{.*\}\})?)*',
    re.DOTALL,
)


def test_no_bytes_make_the_server_raise_or_write_nonsense():
    @_FEWER
    @given(requests=_REQUESTS, edits=_EDITS, cuts=_CUTS, at_once=st.booleans())
    def check(requests, edits, cuts, at_once):
        transport = _Transport()
        responders = []

        def handle(request, responder):
            assert b"\n" not in request.query
            assert all(b"\n" not in name + value and b"\r" not in name + value for name, value in request.headers)
            if at_once:
                responder.send(200, [], b"")
            else:
                responders.append(responder)

        protocol = ServerProtocol(handle, Limits(body_bytes=500), set())
        protocol.connection_made(transport)
        for piece in _split(_edit(b"".join(raw for raw, _ in requests), edits), cuts):
            if not transport.closed:
                protocol.data_received(piece)
            while responders:
                responders.pop().send(200, [], b"")
        if not transport.closed:
            protocol.eof_received()
        protocol.sweep(1000.0)
        protocol.connection_lost(None)
        assert _ANSWERS.fullmatch(transport.written), transport.written

    _within_a_loop(check)


class _Pool:
    """Counts what a connection reports."""

    def __init__(self) -> None:
        self.free = self.losses = self.retries = 0

    def released(self, connection):
        self.free += 1

    def lost(self, connection):
        self.losses += 1

    def retry(self, exchange):
        self.retries += 1

    def withdrawn(self, exchange):
        raise AssertionError("it had a connection")


class _Receiver:
    def __init__(self) -> None:
        self.calls = []
        self.body = b""

    def on_head(self, status, headers):
        self.calls.append("head")

    def on_data(self, data):
        assert data
        self.calls.append("data")
        self.body += data

    def on_end(self):
        self.calls.append("end")

    def on_error(self, error):
        self.calls.append("error")


@st.composite
def _answer(draw: st.DrawFn) -> tuple[bytes, bytes]:
    body = draw(st.binary(min_size=1, max_size=60))
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nX: y\r\n\r\n"]))
    if draw(st.booleans()):
        return interim + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body, body
    cuts = draw(st.lists(st.integers(0, 100), max_size=4))
    return interim + b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + _chunked(body, cuts, b"T: u\r\n"), body


def _exchange(pieces: list[bytes], *, reused: bool = False) -> tuple[_Receiver, _Pool]:
    pool, receiver, transport = _Pool(), _Receiver(), _Transport()
    connection = ClientProtocol(pool, 4096)
    connection.connection_made(transport)
    connection.begin(Exchange(pool, receiver, (b"x",), head_only=False), reused=reused)
    for piece in pieces:
        if not transport.closed:
            connection.data_received(piece)
    if not transport.closed:
        connection.eof_received()
    connection.connection_lost(None)
    return receiver, pool


@_FEWER
@given(answer=_answer(), cuts=_CUTS)
def test_cutting_an_answer_changes_nothing(answer, cuts):
    raw, body = answer
    receiver, pool = _exchange(_split(raw, cuts))
    assert receiver.body == body
    assert receiver.calls[0] == "head"
    assert receiver.calls[-1] == "end"
    assert receiver.calls.count("data") == len(receiver.calls) - 2
    assert pool.free == 1


@_FEWER
@given(answer=_answer(), end=st.integers(0, 1000), cuts=_CUTS)
def test_an_answer_cut_short_never_ends_well(answer, end, cuts):
    raw = answer[0]
    receiver, pool = _exchange(_split(raw[: end % len(raw)], cuts))
    assert receiver.calls[-1] == "error"
    assert "end" not in receiver.calls
    assert answer[1].startswith(receiver.body)
    assert pool.free == 0


@_FEWER
@given(answer=_answer(), edits=_EDITS, cuts=_CUTS, reused=st.booleans())
def test_no_bytes_make_the_client_raise_or_end_twice(answer, edits, cuts, reused):
    receiver, pool = _exchange(_split(_edit(answer[0], edits), cuts), reused=reused)
    ends = receiver.calls.count("end") + receiver.calls.count("error")
    assert ends + pool.retries == 1
    assert receiver.calls.count("head") <= 1
    assert not ends or receiver.calls[-1] in ("end", "error")
    assert "data" not in receiver.calls[: receiver.calls.index("head")] if "head" in receiver.calls else True
    assert pool.losses == 1
