"""Requests off the wire: the same however they are cut, within the limits, and as h11 reads them."""

from __future__ import annotations

import re
from typing import Any

import h11

from router.http.messages import Limits, Refusal, Request
from router.http.reader import RequestReader
from tests.fuzz.source import Source, split

WORDS = (
    b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b"\t", b" ", b":", b"0\r\n\r\n", b"5\r\nabcde\r\n",
    b"ffffffffffffffff\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n", b"HTTP/1.0", b"HTTP/2.0", b"HEAD ", b"OPTIONS * ",
    b"CONNECT ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"http://b/c?d#e", b"Host: b\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: 5, 5\r\n", b"Content-Length: +5\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: identity\r\n", b"Connection: close\r\n",
    b"Connection: keep-alive\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n",
    b"Trailer: x\r\n", b"X-Request-Id: \xff\r\n", b" folded\r\n", b";ext=1", b"abcde",
)  # fmt: skip

_SMALL = Limits(head_bytes=256, headers=4, url_bytes=32, body_bytes=16)
_STATUSES = frozenset((400, 405, 413, 414, 417, 431, 505))

Read = tuple[list[tuple[Any, ...]], int | None]
"""The requests, and the status of the refusal after them."""


def target(data: bytes) -> None:
    source = Source(data)
    cuts = source.cuts()
    text = source.rest()
    whole, reader = _read([text], Limits())
    assert whole == _read(split(text, cuts), Limits())[0]
    assert whole[1] is None or whole[1] in _STATUSES
    _check_bounds(split(text, cuts))
    _compare_with_h11(text, *whole, last=reader.last)


def _read(pieces: list[bytes], limits: Limits) -> tuple[Read, RequestReader]:
    reader = RequestReader(limits, "")
    refused = None
    for piece in pieces:
        try:
            reader.feed(piece)
        except Refusal as refusal:
            refused = refusal.status
            break
        if reader.last:
            break
    return ([(*_meaning(request), http10) for request, http10, _ in reader.requests], refused), reader


def _meaning(request: Request) -> tuple[Any, ...]:
    assert request.path.startswith("/") or request.path == "*"
    for name, value in request.headers:
        assert name == name.lower()
        assert not set(name + value) & set(b"\r\n\0")
    return request.method, request.path, request.query, tuple(request.headers), request.body


def _check_bounds(pieces: list[bytes]) -> None:
    (requests, refused), reader = _read(pieces, _SMALL)
    assert refused is None or refused in _STATUSES
    for _, path, query, headers, body, _ in requests:
        assert len(path) + len(query) <= _SMALL.url_bytes
        assert len(headers) <= _SMALL.headers
        assert len(body) <= _SMALL.body_bytes
    if refused is None and not reader.last:
        held = sum(map(len, reader._parts)) + len(reader._url) + sum(len(n) + len(v) for n, v in reader._fields)
        assert held <= _SMALL.head_bytes + _SMALL.url_bytes + _SMALL.body_bytes + max(map(len, pieces), default=0)


def _compare_with_h11(text: bytes, requests: list[tuple[Any, ...]], refused: int | None, *, last: bool) -> None:
    """h11 is a parser by other hands. What both take for requests must be the same ones."""
    theirs = _read_with_h11(text)
    if theirs is None:
        return
    for ours, other in zip(requests, theirs, strict=False):
        method, path, query, headers, body, http10 = ours
        target = path.encode() + (b"?" + query if query else b"")
        assert (method, body, http10) == (other[0], other[3], other[4])
        assert _without_authority(other[1]).removesuffix(b"?") == target.removesuffix(b"?")
        assert [header for header in headers if header[0] not in _OURS] == [h for h in other[2] if h[0] not in _OURS]
        if http10:
            return  # h11 never keeps such a connection
    assert len(requests) <= len(theirs), "what we accept, h11 refuses"
    assert refused is not None or last or len(requests) == len(theirs), "a request that h11 sees is not seen"


_WIDE_SPACE = re.compile(rb"(?=[^\r\n]*  )[A-Z]+ +[^ \r\n]+ +HTTP/").match
"""llhttp takes more than one space in a request line, as RFC 9112 §3 allows; h11 does not."""

_OURS = frozenset((b"host", b"upgrade", b"connection", b"content-length"))
"""An absolute target takes the place of Host, an upgrade is taken out, and a length has no leading zeros."""


def _without_authority(target: bytes) -> bytes:
    if target.startswith((b"/", b"*")):
        return target
    rest = re.sub(rb"^[^:/]*://[^/?]*", b"", target)
    return rest if rest.startswith(b"/") else b"/" + rest


def _read_with_h11(text: bytes) -> list[tuple[Any, ...]] | None:
    requests: list[tuple[Any, ...]] = []
    while text := text.lstrip(b"\r\n"):  # empty lines before a request are ignored (RFC 9112 §2.2); h11 refuses some
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(text)
        body = b""
        try:
            head = connection.next_event()
            if not isinstance(head, h11.Request):
                return requests
            while isinstance(event := connection.next_event(), h11.Data):
                body += bytes(event.data)
        except h11.RemoteProtocolError:
            return None if _WIDE_SPACE(text) else requests
        if not isinstance(event, h11.EndOfMessage):
            return requests
        http10 = head.http_version == b"1.0"
        requests.append((head.method.decode(), bytes(head.target), list(head.headers), body, http10))
        if connection.their_state is h11.MUST_CLOSE:
            return requests
        text = connection.trailing_data[0]
    return requests
