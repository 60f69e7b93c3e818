"""The answer to one client: headers that every answer carries, JSON, streams, and errors before and after the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, Protocol

import orjson

from router.errors import WarmrouteError
from router.serving.openai_errors import render, render_event

Header = tuple[bytes, bytes]

JSON: Header = (b"content-type", b"application/json")
NO_STORE: Header = (b"cache-control", b"no-store")  # an answer may hold what only this client may see
_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), NO_STORE, (b"x-accel-buffering", b"no"))


class Responder(Protocol):
    """The server's side of one exchange (`router/http/responder.py`)."""

    started: bool
    gone: bool
    on_gone: Callable[[], None] | None
    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None

    def send(self, status: int, headers: Sequence[Header], body: bytes) -> None: ...
    def start(self, status: int, headers: Sequence[Header]) -> None: ...
    def write(self, data: bytes) -> None: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...


class Reply:
    """`headers` go with every answer, `receipt` with one that was placed.

    request_id   what the client may know this request by
    upstream_id  what engines know it by: ours from its first byte, so that no client can take another's
    status       what the client was told, 0 for nothing yet
    """

    __slots__ = ("headers", "receipt", "request_id", "responder", "status", "upstream_id", "write")

    def __init__(self, responder: Responder, headers: list[Header], *, request_id: str, upstream_id: bytes) -> None:
        self.responder = responder
        self.headers = headers
        self.request_id = request_id
        self.upstream_id = upstream_id
        self.receipt: tuple[Header, ...] = ()
        self.status = 0
        self.write = responder.write

    @property
    def started(self) -> bool:
        return self.responder.started

    def json(self, value: Any, *, status: int = 200) -> None:
        self.whole(status, JSON, orjson.dumps(value))

    def whole(self, status: int, content_type: Header, body: bytes) -> None:
        self.status = status
        self.responder.send(status, [content_type, NO_STORE, *self.headers, *self.receipt], body)

    def empty(self, status: int) -> None:
        self.status = status
        self.responder.send(status, self.headers, b"")

    def start(self, *content_type: Header) -> None:
        """Begin an answer of unknown length: an event stream unless said otherwise."""
        self.status = 200
        self.responder.start(200, [*(content_type or _STREAM), *self.headers, *self.receipt])

    def finish(self, tail: bytes = b"") -> None:
        if tail:
            self.write(tail)
        self.responder.finish()

    def fail(self, error: WarmrouteError) -> None:
        """Say `error` instead of an answer."""
        if error.retry_after_s is not None:
            self.headers.append((b"retry-after", b"%d" % ceil(error.retry_after_s)))
        self.whole(error.status, JSON, render(error))

    def break_off(self, error: WarmrouteError | None, *, inside: bool = False) -> None:
        """End an answer that has begun so that it cannot be taken for a whole one.

        In an event stream `error` is said in-band, after the end of the event that the client may be `inside` of.
        """
        if error is not None:
            self.write((b"\n\n" if inside else b"") + render_event(error))
        self.responder.abort()
