"""The connections to one engine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from urllib.parse import urlsplit

from router.core import ClientTls
from router.errors import EngineTlsError, EngineUnreachable
from router.http.messages import HOP_BY_HOP, ONE_WRITE_BYTES, Header, PoolLimits, header_lines
from router.http.outbox import Outbox
from router.http.upstream import ClientProtocol, Exchange, KnownAnswer, Receiver, no_answer
from router.tls import client_context, tls_fault

__all__ = ["Exchange", "Pool", "PoolLimits", "PoolStats", "Receiver"]

_OMIT = HOP_BY_HOP | {b"host", b"accept-encoding", b"expect"}
"""Written here, or never sent: an encoded answer could not be read for its usage, and we do not wait for a 100."""

_WITH_BODY = frozenset((b"POST", b"PUT", b"PATCH"))
_KEEP_ALIVE_MARGIN = 0.8  # of the time the engine says it keeps an idle connection


class PoolStats:
    """Counts since the pool began. `retried`: exchanges begun again because a kept connection had died."""

    __slots__ = ("exchanges", "opened", "retried", "reused", "unreachable")

    def __init__(self) -> None:
        self.exchanges = self.opened = self.reused = self.retried = self.unreachable = 0


class Pool:
    """Keeps connections to the origin of `url`, newest first; a path in `url` is put before each target.

    Built on the running loop. For https, `tls` says whom to trust and what to show (default: the system's CAs); a
    certificate that is not accepted counts as an engine that cannot be reached, and nothing is sent.
    """

    def __init__(
        self,
        url: str,
        *,
        limits: PoolLimits | None = None,
        tls: ClientTls | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        """`outbox`: what is sent waits there for the end of the turn; by default in one of its own.

        Raises ValueError for a url that is not http:// or https:// with a host."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https url: {url!r}")
        secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if secure else 80)
        self._tls = (tls or ClientTls()) if secure else None
        self._prefix = parts.path.rstrip("/").encode("ascii")
        self._host_line = b"\r\nhost: " + parts.netloc.rpartition("@")[2].encode("ascii")
        self._limits = limits or PoolLimits()
        self._idle_s = self._limits.idle_s
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox or Outbox()
        self._idle: deque[ClientProtocol] = deque()  # oldest first; the dead are dropped when met
        self._connections: set[ClientProtocol] = set()
        self._connecting: set[asyncio.Task[ClientProtocol]] = set()
        self._waiting: OrderedDict[Exchange, None] = OrderedDict()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self._retired = False
        self._known = KnownAnswer(self._limits.head_bytes)
        self.stats = PoolStats()

    @property
    def open(self) -> int:
        """Connections, those being opened included."""
        return len(self._connections) + len(self._connecting)

    @property
    def idle(self) -> int:
        return sum(connection.alive for connection in self._idle)

    def send(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[Header],
        body: bytes | Sequence[bytes],
        receiver: Receiver,
    ) -> Exchange:
        """Begin an exchange. Host, length and connection headers are written here; Accept-Encoding is never sent.

        Raises ValueError when a header holds a line break. Every other failure reaches the receiver.
        """
        pieces = (body,) if isinstance(body, bytes) else body
        lines = self._lines(method, target, headers)
        size = sum(map(len, pieces))
        if size or method in _WITH_BODY:
            lines += b"\r\ncontent-length: %d" % size
        lines += b"\r\n\r\n"
        parts = (b"".join((lines, *pieces)),) if size <= ONE_WRITE_BYTES else (lines, *pieces)
        return self._begin(Exchange(self, receiver, parts, method == b"HEAD"))

    def post_lines(self, target: bytes, headers: Iterable[Header]) -> bytes:
        """What POST requests that are alike have in common, written once. Raises ValueError as `send` does."""
        return self._lines(b"POST", target, headers)

    def post(self, lines: bytes, body: bytes, receiver: Receiver) -> Exchange:
        """`send`, with a head that is written already: `post_lines`, and behind it what else `header_lines` made."""
        head = b"%b\r\ncontent-length: %d\r\n\r\n" % (lines, len(body))
        parts = (head + body,) if len(body) <= ONE_WRITE_BYTES else (head, body)
        return self._begin(Exchange(self, receiver, parts, False))

    async def answers(self, *, within_s: float) -> bool:
        """Whether somebody takes a connection there now. Sends nothing."""
        try:
            async with asyncio.timeout(within_s):
                _, writer = await asyncio.open_connection(self._host, self._port)
        except OSError:  # TimeoutError is one
            return False
        writer.close()
        return True

    def retire(self) -> None:
        """Begin nothing new here: exchanges that run go on, and their connections close behind them."""
        self._retired = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        while self._idle:
            self._idle.popleft().close()

    async def aclose(self) -> None:
        """Cut every connection; running exchanges end with an error."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._connecting:
            task.cancel()
        for connection in self._connections:
            connection.abort()
        while self._waiting:
            self._waiting.popitem(last=False)[0].fail(_closing())
        while self._connecting or self._connections:  # noqa: ASYNC110 (the loop's next turns bring their ends)
            await asyncio.sleep(0)

    def _lines(self, method: bytes, target: bytes, headers: Iterable[Header]) -> bytes:
        if b"\r" in target or b"\n" in target:
            raise ValueError("a request target holds a line break")
        first = b"%b %b%b HTTP/1.1" % (method, self._prefix, target)
        return first + self._host_line + header_lines(headers, _OMIT)

    # -- connections

    def _begin(self, exchange: Exchange) -> Exchange:
        self.stats.exchanges += 1
        connection = self._take_idle()
        if connection is not None:
            self.stats.reused += 1
            connection.begin(exchange, reused=True)
        else:
            self._begin_fresh(exchange)
        return exchange

    def _take_idle(self) -> ClientProtocol | None:
        idle = self._idle
        while idle:
            connection = idle.pop()
            if not connection.alive:
                continue
            if self._loop.time() - connection.idle_since < self._idle_s:
                return connection
            connection.close()
        return None

    def _begin_fresh(self, exchange: Exchange) -> None:
        if self._closed:
            self._loop.call_soon(exchange.fail, _closing())
            return
        if self._limits.connections and self.open >= self._limits.connections:
            self._waiting[exchange] = None
            return
        task = self._loop.create_task(self._connect())
        self._connecting.add(task)
        task.add_done_callback(partial(self._connected, exchange))

    async def _connect(self) -> ClientProtocol:
        async with asyncio.timeout(self._limits.connect_s):  # the handshake is part of it
            if self._tls is None:
                _, connection = await self._loop.create_connection(self._new_connection, self._host, self._port)
            else:
                _, connection = await self._loop.create_connection(
                    self._new_connection,
                    self._host,
                    self._port,
                    ssl=await client_context(self._tls),
                    server_hostname=self._tls.server_name,
                    ssl_shutdown_timeout=self._limits.connect_s,
                )
        return connection

    def _new_connection(self) -> ClientProtocol:
        return ClientProtocol(self, self._limits.head_bytes, known=self._known, outbox=self._outbox)

    def _connected(self, exchange: Exchange, task: asyncio.Task[ClientProtocol]) -> None:
        self._connecting.discard(task)
        error = _closing() if task.cancelled() else task.exception()
        if error is not None:
            self._unreachable(exchange, error)
            self._begin_waiting()
            return
        connection = task.result()
        if not connection.alive:
            self._unreachable(exchange, None)
            return
        self.stats.opened += 1
        self._connections.add(connection)
        if self._closed or exchange.receiver is None:
            self.released(connection)
        else:
            connection.begin(exchange, reused=False)

    def _unreachable(self, exchange: Exchange, error: BaseException | None) -> None:
        self.stats.unreachable += 1
        fault = None if error is None or self._tls is None else tls_fault(error)
        if fault is not None:
            exchange.fail(EngineTlsError("The engine cannot be reached.", code=fault.code, detail=fault.message))
        else:
            exchange.fail(EngineUnreachable("The engine cannot be reached.", detail=repr(error)))

    def _begin_waiting(self) -> None:
        if self._waiting and not self._closed:
            exchange, _ = self._waiting.popitem(last=False)
            self._begin_fresh(exchange)

    def _sweep(self) -> None:
        idle = self._idle
        oldest = self._loop.time() - self._idle_s
        while idle and (not idle[0].alive or idle[0].idle_since <= oldest):
            idle.popleft().close()
        self._sweeper = self._loop.call_later(self._idle_s, self._sweep) if idle else None

    # -- what connections and exchanges report

    def released(self, connection: ClientProtocol) -> None:
        if self._closed:
            connection.drop()
        elif self._waiting:
            exchange, _ = self._waiting.popitem(last=False)
            self.stats.reused += 1
            connection.begin(exchange, reused=True)
        elif self._retired:
            connection.close()
        else:
            if connection.keep_alive_s is not None:
                self._idle_s = min(self._limits.idle_s, connection.keep_alive_s * _KEEP_ALIVE_MARGIN)
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
            if self._sweeper is None:
                self._sweeper = self._loop.call_later(self._idle_s, self._sweep)

    def lost(self, connection: ClientProtocol) -> None:
        self._connections.discard(connection)
        self._begin_waiting()

    def retry(self, exchange: Exchange) -> None:
        if self._closed:  # it was not the engine that ended the connection
            exchange.fail(no_answer())
            return
        self.stats.retried += 1
        self._begin_fresh(exchange)

    def withdrawn(self, exchange: Exchange) -> None:
        self._waiting.pop(exchange, None)


def _closing() -> EngineUnreachable:
    return EngineUnreachable("The engine's connections are being closed.")
