"""Answers off the wire: the receiver is told once, the same however they are cut, and what h11 reads."""

from __future__ import annotations

import re
from typing import Any

import h11

from router.errors import EngineError
from router.http.known_head import KnownHead
from router.http.messages import Header
from router.http.upstream import ClientProtocol, Exchange, Head
from tests.fuzz.source import Source, split
from tests.fuzz.transport import Transport

WORDS = (
    b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b"\t", b" ", b":", b"0\r\n\r\n", b"5\r\nabcde\r\n",
    b"ffffffffffffffff\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 204 N\r\n", b"HTTP/1.1 304 N\r\n",
    b"HTTP/1.1 500\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 103 H\r\nX: y\r\n\r\n", b"HTTP/1.1 101 S\r\nUpgrade: x\r\n", b"HTTP/2.0", b"Content-Length: 5\r\n",
    b"Content-Length: 5, 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"Connection: close\r\n",
    b"Connection: keep-alive\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Keep-Alive: timeout=5, max=9\r\n",
    b"X: \xff\r\n", b" folded\r\n", b";ext=1", b"abcde", b"T: u\r\n",
)  # fmt: skip


_ODD_PHRASE = re.compile(rb"HTTP/1\.[01] \d{3} [^\r\n]*[\0-\x08\x0b-\x1f\x7f]").search
"""Control characters in a reason phrase, which goes no further: llhttp takes them, h11 does not."""


class _Pool:
    def __init__(self) -> None:
        self.free = self.losses = self.retries = 0

    def released(self, connection: ClientProtocol) -> None:
        assert connection.alive
        self.free += 1

    def lost(self, connection: ClientProtocol) -> None:
        self.losses += 1

    def retry(self, exchange: Exchange) -> None:
        self.retries += 1

    def withdrawn(self, exchange: Exchange) -> None:
        raise AssertionError("it had a connection")


class _Receiver:
    """Checks the order of the calls."""

    def __init__(self) -> None:
        self.head: tuple[int, list[Header]] | None = None
        self.body = b""
        self.end = ""

    def on_head(self, status: int, headers: list[Header]) -> None:
        assert self.head is None
        assert not self.end
        assert 200 <= status <= 999
        for name, value in headers:
            assert name == name.lower()
            assert not set(name + value) & set(b"\r\n\0")
        self.head = status, headers

    def on_data(self, data: bytes) -> None:
        assert data
        assert self.head is not None
        assert not self.end
        self.body += data

    def on_end(self) -> None:
        assert self.head is not None
        assert not self.end
        self.end = "end"

    def on_error(self, error: EngineError) -> None:
        assert not self.end
        self.end = error.code or error.type


def target(data: bytes) -> None:
    source = Source(data)
    head_only, reused = source.flag(), source.flag()
    cuts = source.cuts()
    text = source.rest()
    whole = _exchange(split(text, []), head_only=head_only, reused=reused)
    cut = _exchange(split(text, cuts), head_only=head_only, reused=reused)
    assert whole[0] == cut[0]
    if head_only or reused or not text:
        return
    known: KnownHead[Head] = KnownHead(4096)
    first = _exchange([text], head_only=False, reused=False, known=known)
    assert _exchange([text], head_only=False, reused=False, known=known) == first == whole
    _compare_with_h11(text, *whole)


def _exchange(
    pieces: list[bytes], *, head_only: bool, reused: bool, known: KnownHead[Head] | None = None
) -> tuple[tuple[Any, ...], int]:
    """What the receiver was told, and whether the connection may carry another exchange."""
    pool, receiver, transport = _Pool(), _Receiver(), Transport()
    connection = ClientProtocol(pool, 4096, known=known)
    connection.connection_made(transport)
    connection.begin(Exchange(pool, receiver, (b"x",), head_only=head_only), reused=reused)
    for piece in pieces:
        if not transport.closed:
            connection.data_received(piece)
    if not transport.closed:
        connection.eof_received()
    connection.connection_lost(None)
    assert bool(receiver.end) + pool.retries == 1
    assert pool.losses == 1
    assert pool.free <= (receiver.end == "end")
    assert len(receiver.body) <= sum(map(len, pieces))
    return (receiver.head, receiver.body, receiver.end, pool.retries), pool.free


def _compare_with_h11(text: bytes, told: tuple[Any, ...], free: int) -> None:
    """What we call a whole answer is one to h11 as well, the same one; and a kept connection has nothing left over."""
    head, body, end, _ = told
    theirs = _read_with_h11(text)
    if end != "end" or _ODD_PHRASE(text):
        return
    assert theirs is not None, "what we accept, h11 refuses"
    status, headers, their_body, rest = theirs
    assert (head[0], head[1], body) == (status, headers, their_body)
    assert not (free and rest.strip(b"\r\n"))


def _read_with_h11(text: bytes) -> tuple[int, list[Header], bytes, bytes] | None:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "a"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    body = b""
    try:
        connection.receive_data(text.lstrip(b"\r\n"))  # empty lines before an answer are let pass
        connection.receive_data(b"")
        while isinstance(head := connection.next_event(), h11.InformationalResponse):
            pass
        if not isinstance(head, h11.Response):
            return None
        while isinstance(event := connection.next_event(), h11.Data):
            body += bytes(event.data)
    except h11.RemoteProtocolError:
        return None
    if not isinstance(event, h11.EndOfMessage):
        return None
    return head.status_code, list(head.headers), body, connection.trailing_data[0]
