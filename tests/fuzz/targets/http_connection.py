"""One client connection: every request answered once and in order, a refusal is the last word, answers are whole."""

from __future__ import annotations

import re
from collections.abc import Callable

from router.http.connection import ServerProtocol
from router.http.messages import Limits, Request
from router.http.responder import Responder
from tests.fuzz.source import Source, split
from tests.fuzz.targets.http_server import WORDS as WORDS
from tests.fuzz.transport import Loop, Planned, Transport

_LIMITS = Limits(body_bytes=500, head_bytes=1024, url_bytes=100, pipelined=2)
_STATUSES = frozenset((400, 405, 408, 413, 414, 417, 431, 505))
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HEAD = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [ -~]*\r\n((?:[a-z-]+: [ -~]*\r\n)*)\r\n")
_CHUNK = re.compile(rb"([0-9a-f]+)\r\n")


class _Client:
    """What is asked of the handler, and how it answers."""

    def __init__(self, ways: list[int]) -> None:
        self._ways = ways
        self.asked: list[tuple[str, bool]] = []  # method, whether HTTP/1.0
        self.later: list[Callable[[], None]] = []
        self.broken = 0  # answers that never come to their end
        self.gone = 0

    def handle(self, request: Request, responder: Responder) -> None:
        assert not self.later, "handed over before the one before it was answered"
        self.asked.append((request.method, responder.http10))
        responder.on_gone = self._left
        way = self._ways[len(self.asked) % len(self._ways)]
        if way == 0:
            responder.send(200, [(b"x-a", b"b")], b"whole")
        elif way == 1:
            self.later.append(lambda: responder.send(200, [], b"later"))
        elif way == 2:
            responder.start(200, [])
            responder.write(b"one")
            self.later.append(lambda: (responder.write(b"two"), responder.finish()))  # type: ignore[func-returns-value]
        elif way == 3:
            responder.start(200, [])
            responder.write(b"")
            self.broken += 1
            responder.abort()
        elif way == 4:
            raise Planned
        else:
            responder.send(204, [], b"")

    def _left(self) -> None:
        self.gone += 1
        self.later.clear()


def target(data: bytes) -> None:
    source = Source(data)
    client = _Client([source.number(6) for _ in range(3)])
    half_close = source.flag()
    cuts = source.cuts()
    transport = Transport()
    connections: set[ServerProtocol] = set()
    with Loop() as loop:
        protocol = ServerProtocol(client.handle, _LIMITS, connections)
        protocol.connection_made(transport)
        assert connections == {protocol}
        for piece in split(source.rest(), cuts):
            if transport.closed:
                break
            protocol.data_received(piece)
            if len(piece) % 2 and client.later:
                client.later.pop()()
            if len(piece) % 7 == 3:
                _stall(protocol, transport)
        if half_close and not transport.closed and not protocol.eof_received():
            transport.close()
        loop.turn()
        while client.later and not transport.closed:
            client.later.pop()()
        protocol.sweep(20.0)
        refused = sum(protocol._refused.values())
        protocol.connection_lost(None)
    assert not connections
    assert refused <= 1
    _check(transport, client, refused)


def _stall(protocol: ServerProtocol, transport: Transport) -> None:
    protocol.pause_writing()
    if not transport.closed:
        protocol.resume_writing()


def _check(transport: Transport, client: _Client, refused: int) -> None:
    """Every answer is one to a request, in order; one more for a refusal, if it came to it, and then the end."""
    rest = transport.written
    answered = 0
    while rest:
        if rest.startswith(_CONTINUE):
            rest = rest[len(_CONTINUE) :]
            continue
        method, http10 = client.asked[answered] if answered < len(client.asked) else ("REFUSED", False)
        answered += 1
        status, headers, rest = _head(rest)
        if method == "REFUSED":
            assert refused
            assert status in _STATUSES
            assert headers[b"connection"] == b"close"
            assert rest.startswith(b'{"error":')
            assert len(rest) == int(headers[b"content-length"])
            assert transport.ended
            return
        assert status in (200, 204, 500)
        whole, rest = _body(rest, headers, silent=method == "HEAD" or status == 204)
        if not whole or headers.get(b"connection") == b"close":
            assert not rest
            assert transport.ended or not whole or http10 or client.gone
    assert answered <= len(client.asked)
    assert answered + client.gone >= len(client.asked) - transport.reset


def _head(data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    head = _HEAD.match(data)
    assert head is not None, data
    lines = head[2].split(b"\r\n")[:-1]
    headers = dict(line.split(b": ", 1) for line in lines)  # type: ignore[misc]
    assert len(headers) == len(lines)
    return int(head[1]), headers, data[head.end() :]


def _body(data: bytes, headers: dict[bytes, bytes], *, silent: bool) -> tuple[bool, bytes]:
    """Whether it is whole, and what follows."""
    if silent:
        return True, data
    if b"content-length" in headers:
        length = int(headers[b"content-length"])
        assert len(data) >= length
        return True, data[length:]
    if b"transfer-encoding" not in headers:
        return True, b""  # up to the end of the connection
    while chunk := _CHUNK.match(data):
        size = int(chunk[1], 16)
        data = data[chunk.end() + size :]
        assert data.startswith(b"\r\n")
        data = data[2:]
        if not size:
            return True, data
    assert not data
    return False, b""
