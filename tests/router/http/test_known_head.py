"""A head that is known is read as a parser would have read it: the same messages, from any bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.known_head import KnownHead
from router.http.messages import Limits, Refusal, Request
from router.http.reader import Incoming, RequestReader
from router.http.upstream import ClientProtocol, Exchange

_SETTINGS = settings(max_examples=400, deadline=None, database=None)

_HEADS = (
    b"POST /v1/x HTTP/1.1\r\nHost: a\r\nX-A: b\r\nContent-Length: %b\r\n\r\n",
    b"POST /v1/x?q=1 HTTP/1.1\r\ncontent-length:%b\r\nhost: a\r\nX-A:  b \r\nx-a: c\r\n\r\n",
    b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: \t%b \r\nX-Request-Id: r\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nX-Length: content-length: 5\r\nContent-Length: %b\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nExpect: 100-continue\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nConnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"POST / HTTP/1.0\r\nContent-Length: %b\r\nConnection: keep-alive\r\n\r\n",
    b"\r\nPOST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n%.0b",
)
_LENGTHS = st.sampled_from([b"%d"] * 12 + [b"0%d", b"%d0", b"+%d", b"%d ", b" %d", b"%d\r\nContent-Length: 1", b"%dx"])


_BODIES = st.sampled_from([b"", b"{}", b"abc" * 5, b"\r\n\r\n", b"x" * 120, b"GET / HTTP/1.1\r\n\r\n"])
_CUTS = st.sampled_from([0] * 6 + [1, 5, -1, -7])


@st.composite
def _messages(draw: st.DrawFn, heads: tuple[bytes, ...]) -> list[bytes]:
    """Some messages with one or two heads, most with the right length."""
    used = st.sampled_from(draw(st.lists(st.sampled_from(heads), min_size=1, max_size=2)))
    bodies = draw(st.lists(_BODIES, min_size=2, max_size=8))
    return [draw(used) % (draw(_LENGTHS) % len(body)) + body for body in bodies]


@st.composite
def _reads(draw: st.DrawFn) -> list[bytes]:
    """Each message a read of its own; some are torn, and what is torn off comes with the next."""
    reads, rest = [], b""
    for message in draw(_messages(_HEADS)):
        cut = draw(_CUTS)
        data = rest + message
        rest = data[cut:] if cut else b""
        reads.append(data[:cut] if cut else data)
    return [*reads, rest] if rest else reads


def _meaning(request: Request) -> tuple[object, ...]:
    return request.method, request.path, request.query, request.headers, dict(request.named), request.body


def _read(reads: list[bytes], *, by_memory: bool) -> tuple[list[Any], int]:
    """What a reader makes of each read, and how often it needed no parser."""
    reader = RequestReader(Limits(body_bytes=100), "")
    seen: list[Any] = []
    hits = 0
    for data in reads:
        known = reader.again(data) if by_memory else None
        try:
            if known is None:
                reader.feed(data)
        except Refusal as refusal:
            return [*seen, (refusal.status, refusal.message)], hits
        hits += known is not None
        whole = [Incoming(known, False, True)] if known is not None else list(reader.requests)
        reader.requests.clear()
        requests = [(_meaning(request), http10, keep_alive) for request, http10, keep_alive in whole]
        seen.append((requests, reader.stage, reader.owes_continue, reader.last))
        if reader.last:  # what follows is ignored
            break
    return seen, hits


@_SETTINGS
@given(_reads())
def test_requests_are_the_same_with_and_without_a_memory(reads: list[bytes]) -> None:
    assert _read(reads, by_memory=True)[0] == _read(reads, by_memory=False)[0]


def test_the_second_request_with_a_head_needs_no_parser() -> None:
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nX-A: b\r\n\r\n%b"
    seen, hits = _read([head % (len(body), body) for body in (b"{}", b"", b"abc" * 20)], by_memory=True)
    assert hits == 2
    meanings = [requests[0][0] for requests, *_ in seen]
    assert [meaning[-1] for meaning in meanings] == [b"{}", b"", b"abc" * 20]
    assert meanings[2][3] == [(b"host", b"a"), (b"content-length", b"60"), (b"x-a", b"b")]


def test_a_larger_body_than_allowed_is_refused_with_a_known_head_too() -> None:
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
    seen, hits = _read([head % (2, b"{}"), head % (101, b"x" * 101)], by_memory=True)
    assert hits == 0
    assert seen[-1][0] == 413


def test_no_body_is_remembered() -> None:
    reader = RequestReader(Limits(), "")
    reader.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\nsecret")
    reader.requests.clear()
    assert reader._known.meaning is not None
    assert reader._known.meaning.body == b""


def test_a_sender_whose_heads_are_all_new_is_remembered_seldom() -> None:
    known: KnownHead[int] = KnownHead(4096)
    remembered = []
    for number in range(200):
        known.learn(b"x%d\r\nContent-Length: 1\r\n\r\n." % number, number)
        remembered.append(known.meaning)
    assert remembered[15] == 15
    assert set(remembered[16:]) == {15, 63, 127, 191}
    assert known.body_of(b"x191\r\nContent-Length: 2\r\n\r\n..") == b".."


def test_a_head_beyond_the_bound_is_not_remembered() -> None:
    known: KnownHead[int] = KnownHead(64)
    known.learn(b"x: %b\r\nContent-Length: 1\r\n\r\n." % (b"y" * 64), 1)
    assert known.meaning is None


# -- answers

_ANSWER_HEADS = (
    b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-length: %b\r\ncontent-type: application/json\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\nKeep-Alive: timeout=7\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nContent-Length: %b\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: %b\r\n\r\n",
    b"HTTP/1.1 500 Oh\r\nContent-Length: %b\r\n\r\n",
    b"HTTP/1.1 103 Hints\r\nContent-Length: %b\r\n\r\nHTTP/1.1 200 OK\r\nx-a: b\r\n\r\n",
    b"HTTP/1.1 103 Hints\r\nx: y\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nContent-Length: %b\r\n\r\n",
)


class _Transport:
    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0


class _Pool:
    def __init__(self) -> None:
        self.free: list[tuple[bool, float | None]] = []

    def released(self, connection: ClientProtocol) -> None:
        self.free.append((connection.alive, connection.keep_alive_s))

    def lost(self, connection: ClientProtocol) -> None: ...
    def retry(self, exchange: Exchange) -> None: ...
    def withdrawn(self, exchange: Exchange) -> None: ...


class _Receiver:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def on_head(self, status: int, headers: object) -> None:
        self.calls.append((status, headers))

    def on_data(self, data: bytes) -> None:
        self.calls.append(data)

    def on_end(self) -> None:
        self.calls.append("end")

    def on_error(self, error: Exception) -> None:
        self.calls.append(type(error))


def _answers(answers: list[bytes], *, by_memory: bool = True, head_only: Sequence[bool] = ()) -> tuple[list[Any], int]:
    """What the receiver of each answer is told on one connection, and how many of them needed no parser."""
    pool, transport = _Pool(), _Transport()
    connection = ClientProtocol(pool, 4096)
    connection.connection_made(transport)  # type: ignore[arg-type]
    told: list[Any] = []
    known = 0
    for raw, only_head in zip_longest(answers, head_only, fillvalue=False):
        if not by_memory:
            connection._known = KnownHead(4096)
        receiver = _Receiver()
        connection.begin(Exchange(pool, receiver, (b"x",), head_only=only_head), reused=True)
        before = connection._known.meaning
        connection.data_received(raw)
        known += before is not None and connection._known.meaning is before
        told.append((receiver.calls, list(pool.free), transport.closed))
        if transport.closed or connection._exchange is not None:
            break
    return told, known


@_SETTINGS
@given(_messages(_ANSWER_HEADS))
def test_answers_are_the_same_with_and_without_a_memory(answers: list[bytes]) -> None:
    assert _answers(answers)[0] == _answers(answers, by_memory=False)[0]


def test_the_second_answer_with_a_head_needs_no_parser() -> None:
    head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n%b"
    told, known = _answers([head % (len(body), body) for body in (b"{}", b"", b"abc" * 9)])
    assert known == 2
    assert [calls[1:] for calls, _, _ in told] == [[b"{}", "end"], ["end"], [b"abc" * 9, "end"]]
    headers = [(b"server", b"uvicorn"), (b"content-length", b"27"), (b"content-type", b"application/json")]
    assert told[2][0][0] == (200, headers)


@pytest.mark.parametrize("body", [b"", b"1234"])
def test_an_answer_to_head_is_never_taken_for_one_with_a_body(body: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
    assert _answers([head + b"1234", head + body], head_only=[False, True])[0][1] == (
        [(200, [(b"content-length", b"4")]), "end"],
        [(True, None)],
        True,
    )
