"""One connection to an engine: an exchange's bytes out, its answer in."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import httptools
import msgspec

from router.errors import EngineError, EngineProtocolError, EngineUnreachable
from router.http.known_head import KnownHead
from router.http.messages import Header, lower_names
from router.http.outbox import Outbox

_KEEP_ALIVE_TIMEOUT = re.compile(rb"timeout\s*=\s*(\d{1,6})", re.IGNORECASE).search
_SWITCHING = 101


class Receiver(Protocol):
    """Takes an answer. `on_head` comes before any data; exactly one of `on_end` and `on_error` is the last call."""

    def on_head(self, status: int, headers: list[Header]) -> None: ...

    def on_data(self, data: bytes) -> None:
        """Body bytes without chunk framing: all that one network read brought."""
        ...

    def on_end(self) -> None: ...

    def on_error(self, error: EngineError) -> None:
        """Three cases, of which only the first has surely left no trace at the engine.

        EngineUnreachable, code engine_unreachable, or EngineTlsError: no connection.
        EngineUnreachable, code engine_no_answer: the connection was lost before an answer.
        EngineProtocolError: the answer is malformed, or cut short.
        """
        ...


class Head(NamedTuple):
    """Of an answer with a length; `length_at`: the place of that header in `headers`."""

    status: int
    headers: list[Header]
    length_at: int
    keep_alive_s: float | None


KnownAnswer = KnownHead[Head]


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer. The receiver is never called from within `Pool.send`.

    receiver  None: over, or cancelled
    parts     what is sent; dropped when the answer begins, since it cannot be sent again then
    """

    _owner: Owner
    receiver: Receiver | None
    parts: Sequence[bytes]
    head_only: bool
    connection: ClientProtocol | None = None
    reused: bool = False
    paused: bool = False

    def cancel(self) -> None:
        """Drop the connection at once, so that the engine stops working. No call to the receiver follows."""
        self.receiver = None
        self.parts = ()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.drop()
        else:
            self._owner.withdrawn(self)

    def pause(self) -> None:
        """Stop reading the answer; the engine feels it once the socket buffers are full."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self.paused = False
        if self.connection is not None:
            self.connection.resume()

    def fail(self, error: EngineError) -> None:
        receiver, self.receiver = self.receiver, None
        self.connection = None
        self.parts = ()
        if receiver is not None:
            receiver.on_error(error)


class Owner(Protocol):
    """Who keeps the connections."""

    def released(self, connection: ClientProtocol) -> None:
        """Ready for another exchange."""
        ...

    def lost(self, connection: ClientProtocol) -> None:
        """Closed, whatever the reason. Called once."""
        ...

    def retry(self, exchange: Exchange) -> None:
        """A kept connection died before any byte of the answer: the engine had closed it for being idle."""
        ...

    def withdrawn(self, exchange: Exchange) -> None:
        """Cancelled before it had a connection."""
        ...


class ClientProtocol(asyncio.Protocol):
    """`keep_alive_s`: how long the engine said it keeps an idle connection, None if it did not say."""

    __slots__ = (
        "_complete", "_exchange", "_fields", "_fresh", "_head_due", "_head_limit", "_headers", "_held",
        "_keep", "_known", "_outbox", "_owner", "_parser", "_parts", "_status", "_transport", "_until_close",
        "_version_known", "alive", "idle_since", "keep_alive_s",
    )  # fmt: skip

    def __init__(
        self, owner: Owner, head_limit: int, *, known: KnownAnswer | None = None, outbox: Outbox | None = None
    ) -> None:
        """`known`: shared by the connections to one engine. `outbox`: as that of `ServerProtocol`."""
        self._owner = owner
        self._outbox = outbox
        self._head_limit = head_limit
        self._known = known or KnownAnswer(head_limit)
        self._exchange: Exchange | None = None
        self._parts: list[bytes] = []
        self._fields: list[Header] = []  # as they came; trailer fields end here too, and are dropped
        self._headers: list[Header] = []
        self.keep_alive_s: float | None = None
        self.idle_since = 0.0
        self.alive = False
        self._version_known = False
        self._reset()

    def _reset(self) -> None:
        self._fresh = True  # no byte of the answer yet
        self._status = 0  # of the final head, once it is read
        self._head_due = False  # and not yet handed on
        self._until_close = False
        self._complete = False
        self._keep = False
        self._held = 0  # bytes received since anything came of them

    # -- the pool's side

    def begin(self, exchange: Exchange, *, reused: bool) -> None:
        self._reset()
        self._exchange = exchange
        exchange.connection = self
        exchange.reused = reused
        parts = exchange.parts
        if len(parts) == 1:
            self._transport.write(parts[0])
        else:
            self._transport.writelines(parts)
        if not reused:
            exchange.parts = ()  # sent once only: a long prompt is not kept for nothing
        if exchange.paused:
            self.pause()

    def drop(self) -> None:
        self._exchange = None
        self.alive = False
        self._transport.abort()

    def close(self) -> None:
        self.alive = False
        self._transport.close()

    def abort(self) -> None:
        """Cut the connection; a running exchange ends with an error."""
        self.alive = False
        self._transport.abort()

    def pause(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # -- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        bare = cast(asyncio.Transport, transport)
        self._transport = bare if self._outbox is None else self._outbox.batched(bare)
        self._parser = httptools.HttpResponseParser(self)
        self.alive = True

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # nobody asked: whatever it is, it must not become the next answer
            self.drop()
            return
        exchange.parts = ()
        fresh, self._fresh = self._fresh, False
        if fresh and not exchange.head_only and (body := self._known.body_of(data)) is not None:
            self._deliver_known(exchange, body)
            return
        self._held += len(data)
        fault: EngineError | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            fault = _fault_of(error)
        if self._held > self._head_limit:
            fault = EngineProtocolError("The engine's answer has an oversized head.")
        if fresh and self._keep and fault is None and not exchange.head_only:
            self._learn(data)
        self._deliver(exchange, fault)

    def _learn(self, data: bytes) -> None:
        """`data` is all of an answer, unless an interim one came before it, which has another status."""
        names = [name for name, _ in self._headers]
        if self._status == 200 and data[9:12] == b"200" and b"content-length" in names:
            at = names.index(b"content-length")
            self._known.learn(data, Head(200, self._headers, at, self.keep_alive_s))

    def eof_received(self) -> None:
        self.alive = False  # at once: the transport says so only in the loop's next turn
        exchange = self._exchange
        if exchange is not None and self._until_close:
            self._finish(exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        del self._parser  # it holds us, and we it
        self.alive = False
        exchange, self._exchange = self._exchange, None
        self._owner.lost(self)
        if exchange is None:
            return
        exchange.connection = None
        if not self._fresh:
            exchange.fail(EngineProtocolError("The engine's answer was cut short.", detail=repr(exc)))
        elif exchange.reused:
            self._owner.retry(exchange)
        else:
            exchange.fail(no_answer(repr(exc)))

    # -- parser

    def on_message_begin(self) -> None:
        if self._complete:
            # A second answer to one request: taken for the next one's, it would reach the wrong client.
            self._keep = False
        self._fields = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        self._held = 0
        status = self._parser.get_status_code()
        if not self._version_known:
            self._check_version()
        if status == _SWITCHING:
            raise EngineProtocolError("The engine switched protocols unasked.")
        if status < 100:  # the parser would take it for a final answer
            raise EngineProtocolError("The engine's answer has no valid status.")
        if status < 200:  # an interim answer: the final one follows
            return
        self._status = status
        self._headers = lower_names(self._fields)
        self._head_due = True
        sized = self._check_framing()
        if self._exchange is not None and self._exchange.head_only:
            # The parser waits for the body that an answer to HEAD announces and has not: this connection ends here.
            self._complete = True
        else:
            self._until_close = not (sized or status in (204, 304))

    def on_body(self, part: bytes) -> None:
        self._held = 0
        if not self._complete:
            self._parts.append(part)

    def on_message_complete(self) -> None:
        if self._status and not self._complete:
            self._complete = True
            self._keep = self._parser.should_keep_alive()

    def _check_version(self) -> None:
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            raise EngineProtocolError("The engine does not speak HTTP/1.1.")
        self._version_known = True

    def _check_framing(self) -> bool:
        """Whether the head says where the body ends. That a length is one number and alone, llhttp has checked."""
        sized = False
        for name, value in self._headers:
            if name == b"content-length":
                sized = True
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise EngineProtocolError("The engine's answer uses an unknown transfer coding.")
                sized = True
            elif name == b"keep-alive":
                told = _KEEP_ALIVE_TIMEOUT(value)
                self.keep_alive_s = float(told[1]) if told else None
        return sized

    # -- receiver

    def _deliver(self, exchange: Exchange, fault: EngineError | None) -> None:
        """Hand on what one read brought. The receiver may cancel at any call."""
        receiver = exchange.receiver
        assert receiver is not None, "a connection holds an exchange only while it runs"
        if self._head_due:
            self._head_due = False
            receiver.on_head(self._status, self._headers)
        if self._parts:
            parts, self._parts = self._parts, []
            if self._exchange is exchange:
                receiver.on_data(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._exchange is not exchange:
            return
        if self._complete:
            self._keep = self._keep and fault is None
            self._finish(exchange)
        elif fault is not None:
            self.drop()
            exchange.fail(fault)

    def _deliver_known(self, exchange: Exchange, body: bytes) -> None:
        """A whole answer whose head is known: what the parser's callbacks and `_deliver` would have come to."""
        receiver, head = exchange.receiver, self._known.meaning
        assert receiver is not None, "a connection holds an exchange only while it runs"
        assert head is not None, "it gave the body"
        status, known, length_at, self.keep_alive_s = head
        headers = known.copy()
        headers[length_at] = (b"content-length", b"%d" % len(body))
        self._keep = True
        receiver.on_head(status, headers)
        if body and self._exchange is exchange:
            receiver.on_data(body)
        if self._exchange is exchange:
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        receiver, exchange.receiver = exchange.receiver, None
        exchange.connection = None
        self._exchange = None
        # An engine may answer before it has read the whole request: the rest would be taken for the next one.
        if self._keep and self.alive and not self._transport.get_write_buffer_size():
            if exchange.paused:
                self.resume()
            self._owner.released(self)
        else:
            self.drop()
        if receiver is not None:
            receiver.on_end()


def no_answer(detail: str = "") -> EngineUnreachable:
    message = "The engine closed the connection without an answer."
    return EngineUnreachable(message, code="engine_no_answer", detail=detail)


def _fault_of(error: Exception) -> EngineError:
    cause = error.__context__
    if isinstance(cause, EngineError):
        return cause
    if cause is not None:  # a callback's own mistake is not the engine's
        raise cause
    return EngineProtocolError("The engine's answer is not valid HTTP/1.1.", detail=str(error))
