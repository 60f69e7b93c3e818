"""One client connection of the server: requests are handed over and answered in their order."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import cast

from router.http.messages import CONTINUE, Limits, Refusal, Request, error_body
from router.http.outbox import BatchedTransport, Outbox
from router.http.reader import HEAD, IDLE, RequestReader
from router.http.responder import Responder

Handler = Callable[[Request, Responder], None]
Refuser = Callable[[Request, Responder, Refusal], None]

_OPEN, _LINGERING, _CLOSING = range(3)
_FIRST_PROBE_S = 0.1
_LAST_PROBE_S = 1.0
_TOLD_AT_ONCE = 64  # of those that are one too many
_JSON = ((b"content-type", b"application/json"),)

_log = logging.getLogger("warmroute.http")


class ServerProtocol(asyncio.Protocol):
    """Calls `handler(request, responder)` when a request is whole, in order, one at a time.

    The connection registers itself in `connections` while it lives. It keeps no timer: whoever serves calls `sweep`
    about once a second. `refused` counts the requests refused here, by status. Where the head is whole, `refuser` says
    it to the client, with what goes with every answer; it gets the request without a body. `outbox`: what is written
    waits there for the end of the turn; None: it goes out at once.
    """

    __slots__ = (
        "_active", "_advancing", "_connections", "_deaf", "_draining", "_eof", "_handler", "_limits", "_loop",
        "_outbox", "_paused", "_peer", "_reader", "_reading_paused", "_refusal", "_refused", "_refuser", "_stage",
        "_tls", "_transport", "_unsent", "_waited", "_winding_down",
    )  # fmt: skip

    _transport: asyncio.Transport
    _reader: RequestReader

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        connections: set[ServerProtocol],
        *,
        refused: Counter[int] | None = None,
        refuser: Refuser | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self._handler = handler
        self._refuser = refuser
        self._limits = limits
        self._outbox = outbox
        self._connections = connections
        self._refused: Counter[int] = Counter() if refused is None else refused
        self._loop = asyncio.get_running_loop()
        self._peer = ""
        self._tls = False
        self._active: Responder | None = None
        self._refusal: Refusal | None = None
        self._stage = _OPEN
        self._waited = 0.0  # seconds since the last answer, or since the client took some of what we wrote
        self._unsent = 0  # bytes of it that waited for the client when we last looked
        self._advancing = False
        self._deaf = False  # nothing the client sends is of interest any more
        self._eof = False
        self._winding_down = False  # the next answer is the last
        self._draining = False  # and an idle connection has nothing to wait for
        self._paused = False  # the client does not take what we write
        self._reading_paused = False

    # -- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        bare = cast(asyncio.Transport, transport)
        self._transport = bare if self._outbox is None else self._outbox.batched(bare)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        peer = self._transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self._tls = self._transport.get_extra_info("ssl_object") is not None
        self._reader = RequestReader(self._limits, self._peer)
        if len(self._connections) >= self._limits.connections:
            self._turn_away()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._deaf = True
        self._stage = _CLOSING
        self._reader.close()
        active, self._active = self._active, None
        if active is not None:
            active.leave()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        reader = self._reader
        if self._active is None and not (reader.requests or self._paused):
            request = reader.again(data)
            if request is not None:
                self._handle(request, http10=False, keep_alive=True)
                return
        try:
            reader.feed(data)
        except Refusal as refusal:
            self._refuse(refusal)
        else:
            self._deaf = reader.last
        if self._active is None:
            self._advance()
        elif len(reader.requests) >= self._limits.pipelined:
            self._pause_reading()

    def eof_received(self) -> bool:
        """A client may shut its side and still wait for its answer (RFC 9112 §9.6).

        Whether it has left instead shows only when something is written, so probes are. Over TLS (asyncio knows no
        half-closed one) it has left.
        """
        self._deaf = True
        if isinstance(self._transport, BatchedTransport):  # the bare one closes by itself, and knows nothing of it
            self._transport.flush()
        if self._tls:
            return False
        waiting = self._reader.requests
        active = self._active
        if active is None and not waiting:
            return False
        if active is not None and active.http10 and not waiting:
            # HTTP/1.0 knows no interim answers, so nothing tells a waiting client from one that left.
            return False
        self._eof = True
        if active is not None and not waiting:
            active.keep_alive = False
        self._probe(_FIRST_PROBE_S)
        return True

    def pause_writing(self) -> None:
        self._paused = True
        self._waited = 0.0
        active = self._active
        if active is None:
            return
        active.paused = True
        if active.on_pause is not None:
            active.on_pause()

    def resume_writing(self) -> None:
        self._paused = False
        self._waited = 0.0
        active = self._active
        if active is None:
            self._advance()
            return
        active.paused = False
        if active.on_resume is not None:
            active.on_resume()

    # -- requests in order

    def _advance(self) -> None:
        """Hand over what waits, as long as answers come at once; then see what else is to be done."""
        if self._advancing:
            return
        waiting = self._reader.requests
        self._advancing = True
        while waiting and self._active is None and not self._paused:
            request, http10, keep_alive = waiting.popleft()
            self._handle(request, http10=http10, keep_alive=keep_alive)
        self._advancing = False
        if self._active is None and not waiting:
            self._settle()
        if self._reading_paused and len(waiting) < self._limits.pipelined:
            self._resume_reading()

    def _handle(self, request: Request, *, http10: bool, keep_alive: bool) -> None:
        if (self._winding_down or self._eof) and not self._reader.requests:
            keep_alive = False
        responder = Responder(self._transport, self._answered, http10, request.method == "HEAD", keep_alive)
        self._active = responder
        try:
            self._handler(request, responder)
        except Exception as error:
            self._fail(responder, error)

    def _fail(self, responder: Responder, error: Exception) -> None:
        self._loop.call_exception_handler({"message": "HTTP handler failed", "exception": error, "protocol": self})
        if responder.started:
            responder.abort()
            return
        responder.keep_alive = False
        responder.send(500, _JSON, error_body("The server had an internal error.", kind="internal_error"))

    def _answered(self, keep_alive: bool) -> None:
        self._active = None
        self._waited = 0.0
        if not keep_alive:
            self._close()
        elif not self._is_quiet():
            self._advance()

    def _is_quiet(self) -> bool:
        """Nothing has come behind what was answered, and nobody wants this connection to end: mostly so."""
        reader = self._reader
        return not (reader.requests or self._deaf or self._draining or self._reading_paused or reader.owes_continue)

    def _settle(self) -> None:
        """Nothing runs and nothing waits."""
        reader = self._reader
        if self._refusal is not None:
            self._send_refusal(self._refusal)
        elif self._deaf or (self._draining and reader.stage == IDLE):
            self._close()
        elif reader.owes_continue:
            reader.owes_continue = False
            self._transport.write(CONTINUE)

    # -- refusals and ends

    def _refuse(self, refusal: Refusal) -> None:
        """To be sent once earlier requests are answered; what came later cannot be told from the refused one."""
        self._deaf = True
        self._refusal = refusal
        self._refused[refusal.status] += 1
        _log.info("refused a request with %d: %s", refusal.status, refusal.message)

    def _turn_away(self) -> None:
        """One connection more than there may be. Some are answered; without a word go those that come beside them."""
        if len(self._connections) >= self._limits.connections + _TOLD_AT_ONCE:
            self._refused[503] += 1
            self._deaf = True
            self._transport.abort()
        else:
            self._handler = self._say_full
            self._winding_down = True

    def _say_full(self, request: Request, responder: Responder) -> None:
        refusal = Refusal(503, "The gateway has as many connections as it can serve; try again.", code="overloaded")
        self._refused[503] += 1
        if self._refuser is None:
            responder.send(503, _JSON, error_body(refusal.message, code=refusal.code))
        else:
            self._refuser(request, responder, refusal)

    def _send_refusal(self, refusal: Refusal) -> None:
        if self._stage != _OPEN:
            return
        responder = Responder(self._transport, self._linger, False, False, False)
        refuser, known = self._refuser, self._reader.without_body()
        if refuser is None or known is None:
            responder.send(refusal.status, _JSON, error_body(refusal.message, code=refusal.code))
            return
        self._active = responder
        try:
            refuser(known, responder, refusal)
        except Exception as error:
            self._fail(responder, error)

    def _linger(self, _keep_alive: bool) -> None:
        """The refusal is written."""
        self._active = None
        if self._eof:
            self._close()
            return
        # Closing while the client still sends would make its kernel drop our answer unread (RFC 9112 §9.6).
        self._stage = _LINGERING
        self._waited = 0.0
        if not self._tls:
            self._transport.write_eof()

    def _close(self) -> None:
        """What is written is still sent."""
        self._deaf = True
        self._reader.requests.clear()
        self._stage = _CLOSING
        self._waited = 0.0
        if not self._transport.is_closing():  # asyncio's TLS loses itself when closed twice
            self._transport.close()

    def _pause_reading(self) -> None:
        if not self._reading_paused and not self._eof and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        self._reading_paused = False
        self._reader.waited = 0.0
        if not self._eof and not self._transport.is_closing():
            self._transport.resume_reading()

    def _probe(self, delay: float) -> None:
        """Tell a client that shut its side and waits from one that is gone: only a write shows the difference.

        An interim answer may be sent at any time before the final one, and the peer of a closed socket resets. In an
        answer that has started, only whoever writes it knows what means nothing.
        """
        active = self._active
        if active is None or active.http10 or self._transport.is_closing():
            return
        if not active.started:
            self._transport.write(CONTINUE)
        elif active.on_probe is not None:
            active.on_probe()
        if delay <= _LAST_PROBE_S:
            self._loop.call_later(delay, self._probe, delay * 2)

    # -- whoever serves

    def wind_down(self) -> None:
        """Close after the next answer. An idle connection stays open for it: its client may just be sending."""
        self._winding_down = True
        if self._active is not None and not self._reader.requests:
            self._active.keep_alive = False

    def drain(self) -> None:
        """Answer what is here, then close; an idle connection closes at once."""
        self.wind_down()
        self._draining = True
        if self._active is None:
            self._advance()

    def abort(self) -> None:
        self._transport.abort()

    def sweep(self, elapsed: float) -> None:
        """`elapsed` seconds have passed since the last call: end what waits for the client for too long."""
        self._waited += elapsed
        self._reader.waited += elapsed
        limits = self._limits
        if self._stage == _LINGERING:
            if self._waited > limits.linger_s:
                self._transport.abort()
        elif self._paused or self._stage == _CLOSING:
            self._sweep_writer()
        elif self._active is None:
            self._sweep_reader(elapsed)

    def _sweep_writer(self) -> None:
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent:  # slow, but it reads
            self._waited = 0.0
        self._unsent = unsent
        if self._waited > self._limits.stall_s:
            if self._active is not None:
                self._active.stalled = True
            self._transport.abort()
        elif self._waited > self._limits.linger_s and self._owes_nothing():
            self._transport.abort()

    def _owes_nothing(self) -> bool:
        """All is sent, and TLS only waits for the client to confirm the end, as few do at once."""
        return self._tls and self._stage == _CLOSING and not self._transport.get_write_buffer_size()

    def _sweep_reader(self, elapsed: float) -> None:
        limits, reader = self._limits, self._reader
        if reader.stage == IDLE:
            if self._waited > limits.keep_alive_s:
                self._close()
            return
        if reader.stage == HEAD:
            late = reader.waited > limits.head_s
        else:
            reader.body_s += elapsed
            allowed = limits.body_idle_s + reader.body_size / limits.body_bytes_per_s
            late = reader.waited > limits.body_idle_s or reader.body_s > allowed
        if late:
            self._refuse(Refusal(408, "The request did not arrive in time.", code="request_timeout"))
            self._advance()
