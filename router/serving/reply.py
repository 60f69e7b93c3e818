"""The answer to one client: headers that every answer carries, JSON, streams, and errors before and after the start."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, Protocol

import msgspec
import orjson

from router.errors import WarmrouteError
from router.http.messages import Header, header_lines
from router.serving.apis import OPENAI, Api

_NO_STORE: Header = (b"cache-control", b"no-store")  # an answer may hold what only this client may see
_JSON = b"application/json"


def content_lines(content_type: bytes, *more: Header) -> bytes:
    """What is said of a body."""
    return header_lines(((b"content-type", content_type), _NO_STORE, *more))


JSON = content_lines(_JSON)
_STREAM = content_lines(b"text/event-stream; charset=utf-8", (b"x-accel-buffering", b"no"))


class Responder(Protocol):
    """The server's side of one exchange (`router/http/responder.py`)."""

    started: bool
    gone: bool
    paused: bool
    stalled: bool
    on_gone: Callable[[], None] | None
    on_pause: Callable[[], None] | None
    on_probe: Callable[[], None] | None
    on_resume: Callable[[], None] | None

    def send_lines(self, status: int, lines: bytes, body: bytes) -> None: ...
    def start_lines(self, status: int, lines: bytes) -> None: ...
    def write(self, data: bytes) -> None: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...


class Reply(msgspec.Struct, eq=False):
    """The answer to one request. Headers are lines as `header_lines` writes them.

    lines        what goes with every answer
    receipt      what goes with one that was placed
    request_id   what the client may know this request by
    serial       the same, or a name of ours where the client chose that one
    upstream_id  what engines know it by: ours from its first byte, so that no client can take another's
    status       what the client was told, 0 for nothing yet
    api          whose shape errors have
    waiting      a stream is open in which there are comments only: what comes of it is as open as before
    """

    responder: Responder
    lines: bytes
    request_id: str
    upstream_id: bytes
    serial: str
    receipt: bytes = b""
    status: int = 0
    waiting: bool = False
    api: Api = OPENAI

    @property
    def started(self) -> bool:
        """The client has some of an answer."""
        return self.responder.started and not self.waiting

    def json(self, value: Any, *, status: int = 200) -> None:
        self.whole(status, JSON, orjson.dumps(value))

    def whole(self, status: int, content: bytes, body: bytes) -> None:
        """`content`: of `content_lines`."""
        self.status = status
        self.responder.send_lines(status, content + self.lines + self.receipt, body)

    def empty(self, status: int) -> None:
        self.status = status
        self.responder.send_lines(status, self.lines, b"")

    def start(self, content: bytes = _STREAM) -> None:
        """Begin an answer of unknown length: an event stream unless said otherwise."""
        if self.waiting:  # one that is open already
            self.waiting = False
            return
        self.status = 200
        self.responder.start_lines(200, content + self.lines + self.receipt)

    def comment(self, comments: bytes) -> None:
        """Whole comments, before an event stream has anything else in it."""
        if not self.responder.started:
            self.start()
            self.waiting = True
        self.responder.write(comments)

    def finish(self, tail: bytes = b"") -> None:
        if tail:
            self.responder.write(tail)
        self.responder.finish()

    def fail(self, error: WarmrouteError) -> None:
        """Say `error` instead of an answer."""
        if self.waiting:
            self.break_off(error)
            return
        if error.status == 401:
            self.lines += b"\r\nwww-authenticate: Bearer"
        if error.retry_after_s is not None:
            self.lines += b"\r\nretry-after: %d" % ceil(error.retry_after_s)
        if error.final:
            self.lines += b"\r\nx-should-retry: false"
        self.whole(self.api.status(error), JSON, self.api.render(error, self.request_id))

    def break_off(self, error: WarmrouteError | None, *, inside: bool = False, events: int = 0) -> None:
        """End an answer that has begun so that it cannot be taken for a whole one.

        In a stream, `error` is said in-band after so many `events`, and the end of the one the client is `inside` of.
        """
        if error is not None:
            self.responder.write((b"\n\n" if inside else b"") + self.api.render_event(error, self.request_id, events))
        self.responder.abort()
