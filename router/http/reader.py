"""Bytes of one client connection in, whole requests out."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import httptools

from router.http.known_head import KnownHead
from router.http.messages import CRLF, Header, Headers, Limits, Refusal, Request, header_lines, lower_names
from router.http.strictness import check_framing, check_method, check_version, split_target

IDLE, HEAD, BODY = range(3)
"""Between requests, within a head, within a body."""

_OTHER_VERSION = (
    "Invalid HTTP version",
    "Expected HTTP/2",
    "Pause on PRI",
)  # llhttp 9's words, the last two for HTTP/2
_UPGRADE = frozenset((b"upgrade",))


class Incoming(NamedTuple):
    """keep_alive: whether the client wants the connection kept afterwards; without it nothing follows."""

    request: Request
    http10: bool
    keep_alive: bool


class RequestReader:
    """A whole request is appended to `requests`. Memory is bounded by the limits and the size of one read.

    stage           IDLE, HEAD or BODY
    waited          seconds without progress in this stage; set to 0 here, counted up by the connection
    body_s          seconds since the body began; likewise
    body_size       bytes of the body so far
    owes_continue   the client waits for a 100 before it sends the body of the request being read
    last            the client said that no request follows those read; what it sends is ignored
    """

    __slots__ = (
        "_fields", "_headers", "_held", "_http10", "_known", "_limits", "_method", "_named", "_parser",
        "_parts", "_read_size", "_room", "_target", "_understood", "_upgrade", "_url",
        "body_s", "body_size", "last", "owes_continue", "peer", "requests", "stage", "waited",
    )  # fmt: skip

    def __init__(self, limits: Limits, peer: str) -> None:
        self._limits = limits
        self.peer = peer
        self._parser = httptools.HttpRequestParser(self)
        self.requests: deque[Incoming] = deque()
        self.stage = IDLE
        self.waited = 0.0
        self.body_s = 0.0
        self.body_size = 0
        self.owes_continue = False
        self.last = False
        self._read_size = 0
        self._held = 0  # bytes of whole reads since anything came of them
        self._room = 0  # bytes of the read in which the head began
        self._upgrade = False  # the request being read asks for one
        self._understood = False  # its head is whole and nothing is wrong with it
        self._http10 = False
        self._method = ""
        self._target = ("", b"")
        self._url = b""
        self._known: KnownHead[Request] = KnownHead(limits.head_bytes)
        self._headers: list[Header] = []
        self._named: Headers = {}
        self._fields: list[Header] = []  # as they came; trailer fields end here too, and are ignored (RFC 9110 §6.5.1)
        self._parts: list[bytes] = []

    def again(self, data: bytes) -> Request | None:
        """The request that `data` is, if its head is the last one's. None: `feed` it."""
        if self.stage != IDLE or (body := self._known.body_of(data)) is None or len(body) > self._limits.body_bytes:
            return None
        last = self._known.meaning
        assert last is not None
        return Request(last.method, last.path, last.query, last.head, last.named, body, self.peer)

    def feed(self, data: bytes) -> None:
        """Raises Refusal; the reader is of no use after that."""
        self._read_size = len(data)
        self._held += len(data)
        between = self.stage == IDLE and not self.requests
        try:
            taken = self._parse(data)
            if taken is not None:
                self._parse_without_upgrade(memoryview(data), taken)
            elif between and self.stage == IDLE and len(self.requests) == 1:
                self._learn(data, self.requests[0])
        except httptools.HttpParserError as error:
            if self.last:
                return
            if error.__context__ is not None:  # raised by a callback of ours
                raise error.__context__ from None
            raise _refusal_of(str(error)) from None
        if self._held > self._limits.head_bytes:
            raise Refusal(431, f"The head or a trailer of the request is longer than {self._limits.head_bytes} bytes.")

    def without_body(self) -> Request | None:
        """The request being read, if its head is whole and in order."""
        return self._request(b"") if self.stage == BODY and self._understood else None

    def close(self) -> None:
        """Lets go of everything held: the parser holds the reader, and the reader it."""
        del self._parser
        self.requests.clear()
        self._parts = []

    def _parse(self, data: bytes | memoryview) -> int | None:
        """How far the parser came when it stopped for an upgrade, else None."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as wish:
            return int(wish.args[0])
        return None

    def _parse_without_upgrade(self, rest: memoryview, taken: int | None) -> None:
        """The parser skips the body of a request that asks for an upgrade; Java's client does so with its first POST.

        The wish may be ignored (RFC 9110 §7.8), so a fresh parser reads on from the same head without it.
        """
        while taken is not None:
            self._upgrade = False
            rest = rest[taken:]
            self._parser = httptools.HttpRequestParser(self)
            first = b"%b %b HTTP/%b" % (self._method.encode(), self._url, b"1.0" if self._http10 else b"1.1")
            self._parse(first + header_lines(self._headers, _UPGRADE) + CRLF + CRLF)
            taken = self._parse(rest)

    def _learn(self, data: bytes, whole: Incoming) -> None:
        if whole.keep_alive and not whole.http10:
            self._known.learn(data, self._request(b""))

    def _request(self, body: bytes) -> Request:
        path, query = self._target
        return Request(self._method, path, query, self._headers, self._named, body, self.peer)

    # -- parser

    def on_message_begin(self) -> None:
        self.stage = HEAD
        self.waited = 0.0
        self._room = self._read_size
        self._held = 0
        self._url = b""
        self._fields = []
        self._parts = []
        self.body_size = 0
        self._understood = False

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.url_bytes:
            raise Refusal(414, f"The request target is longer than {self._limits.url_bytes} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        self._headers = headers = lower_names(self._fields)
        self._check_head_size()
        self._http10 = check_version(self._parser.get_http_version())
        self._method = check_method(self._parser.get_method())
        self.stage = BODY
        self.waited = 0.0
        self.body_s = 0.0
        self._held = 0
        if self._parser.should_upgrade():
            self._upgrade = True
            return
        self._target = split_target(self._url, self._method, headers)
        self._named = named = dict(reversed(headers))
        named.pop(b"content-length", None)
        length, self.owes_continue = check_framing(headers, http10=self._http10)
        self._understood = True
        if length > self._limits.body_bytes:
            raise self._too_large()

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)
        self.body_size += len(part)
        self.waited = 0.0
        self._held = 0
        self.owes_continue = False
        if self.body_size > self._limits.body_bytes:
            raise self._too_large()

    def on_message_complete(self) -> None:
        if self._upgrade:
            return
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        keep_alive = self._parser.should_keep_alive()
        self.requests.append(Incoming(self._request(body), self._http10, keep_alive))
        self.last = not keep_alive
        self.owes_continue = False
        self.stage = IDLE
        self._held = 0
        self._parts = []

    def _check_head_size(self) -> None:
        limits = self._limits
        if len(self._headers) > limits.headers:
            raise Refusal(431, f"The request has more than {limits.headers} headers.")
        if self._room + self._held > limits.head_bytes:  # else it cannot be: spares the sum
            size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > limits.head_bytes:
                raise Refusal(431, f"The head of the request is longer than {limits.head_bytes} bytes.")

    def _too_large(self) -> Refusal:
        limit = self._limits.body_bytes
        return Refusal(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def _refusal_of(reason: str) -> Refusal:
    if reason.startswith(_OTHER_VERSION):
        return Refusal(505, "Only HTTP/1.1 and HTTP/1.0 are spoken here.")
    return Refusal(400, f"The request is not valid HTTP/1.1: {reason}.")
