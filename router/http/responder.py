"""The answer to one request, written piece by piece or whole."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence

import msgspec

from router.http.messages import HOP_BY_HOP, ONE_WRITE_BYTES, Header, header_lines, status_line

_RESET = struct.pack("ii", 1, 0)  # struct linger: on, 0 s


class Responder(msgspec.Struct, eq=False):
    """One per exchange. Once it is over (answered, aborted, client gone) every call does nothing.

    gone        the client left before the answer was over; `on_gone` was called, once.
    stalled     it did not leave, but was dropped for taking nothing of its answer
    paused      it is too slow just now
    on_pause    the client reads too slowly: stop writing until `on_resume`. What is written in between is still sent.
    on_probe    something is to be written that means nothing, in an answer that has started, to see whether it is taken
    keep_alive  whether the connection is kept afterwards; the server may take it back until the head is out
    http10      the client speaks HTTP/1.0
    _answered   called when the answer is over, unless the client left, with whether to keep the connection

    One for each request, so it is a Struct, as all such are: made without a Python frame, in a third of the time.
    """

    _transport: asyncio.Transport
    _answered: Callable[[bool], None]
    http10: bool
    _head_only: bool
    keep_alive: bool
    _chunked: bool = False
    _silent: bool = False  # no body may follow the head
    _live: bool = True
    started: bool = False
    gone: bool = False
    paused: bool = False
    stalled: bool = False
    on_gone: Callable[[], None] | None = None
    on_pause: Callable[[], None] | None = None
    on_probe: Callable[[], None] | None = None
    on_resume: Callable[[], None] | None = None

    def send(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """The whole answer in one write. Length, coding and connection headers are made here, passed ones dropped."""
        if self._live:
            self.send_lines(status, header_lines(headers, HOP_BY_HOP), body)

    def send_lines(self, status: int, lines: bytes, body: bytes) -> None:
        """`send` with headers that are written already (`header_lines`), none of them of this connection."""
        if not self._live:
            return
        assert not self.started, "the answer has started"
        self.started = True
        length = b"" if status == 204 or (self._head_only and not body) else b"\r\ncontent-length: %d" % len(body)
        if self._head_only or status in (204, 304):
            body = b""
        connection = b"" if self.keep_alive and not self.http10 else self._connection_line()
        head = b"%b%b%b%b\r\n\r\n" % (status_line(status), lines, length, connection)
        if len(body) <= ONE_WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        self._end()

    def start(self, status: int, headers: Sequence[Header]) -> None:
        """Begin an answer of unknown length: chunked, or for HTTP/1.0 ended by closing the connection."""
        if self._live:
            self.start_lines(status, header_lines(headers, HOP_BY_HOP))

    def start_lines(self, status: int, lines: bytes) -> None:
        """`start` with headers that are written already (`header_lines`), none of them of this connection."""
        if not self._live:
            return
        assert not self.started, "the answer has started"
        self.started = True
        self._silent = self._head_only or status in (204, 304)
        self._chunked = not (self.http10 or self._silent)
        if self.http10:
            self.keep_alive = False
        coding = b"\r\ntransfer-encoding: chunked" if self._chunked else b""
        self._transport.write(b"%b%b%b%b\r\n\r\n" % (status_line(status), lines, coding, self._connection_line()))

    def write(self, data: bytes) -> None:
        """One piece of the body. An empty one is nothing: an empty chunk would end the answer."""
        if not self._live or not data:
            return
        assert self.started, "the answer has not started"
        if self._chunked:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif not self._silent:
            self._transport.write(data)

    def finish(self) -> None:
        """The answer that `start` began is complete."""
        if not self._live:
            return
        assert self.started, "the answer has not started"
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")
        self._end()

    def abort(self) -> None:
        """End a broken answer so that the client can tell: what was written is sent, the end of the body never is."""
        if not self._live:
            return
        self.keep_alive = False
        if self.started and not self._chunked:
            self._reset()
        self._end()

    def leave(self) -> None:
        """The server's word that the client is gone."""
        if not self._live:
            return
        self.gone = True
        on_gone = self.on_gone
        self._let_go()
        if on_gone is not None:
            on_gone()

    def _end(self) -> None:
        self._let_go()
        self._answered(self.keep_alive)

    def _let_go(self) -> None:
        """Of whoever answers: they hold us, and what holds each other is left to the garbage collector."""
        self._live = False
        self.on_gone = self.on_pause = self.on_probe = self.on_resume = None

    def _reset(self) -> None:
        # Where closing is the end of the body, an orderly close would make the broken answer look whole.
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def _connection_line(self) -> bytes:
        if not self.keep_alive:
            return b"\r\nconnection: close"
        return b"\r\nconnection: keep-alive" if self.http10 else b""
