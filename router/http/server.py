"""Listening, sweeping and draining."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from router.http.behind_proxy import ServerProtocolBehindProxy
from router.http.connection import Handler, Refuser, ServerProtocol
from router.http.messages import Limits, Request
from router.http.outbox import Outbox
from router.http.proxies import TrustedProxies
from router.http.responder import Responder

__all__ = ["Handler", "Limits", "Request", "Responder", "Server", "ServerProtocol", "serve"]

_BACKLOG = 2048
_SWEEP_SLICE = 500  # connections looked at in one go: about 100 µs
_DRAIN_POLL_S = 0.02
_KERNEL_UNSENT_BYTES = 128 * 1024
"""What the kernel holds for a client that does not read, beyond what is on its way; Linux grows to 4 MiB by itself."""


class Server:
    """A listener and its connections.

    port     the bound TCP port, 0 for a Unix socket
    refused  counts, by status, the requests the server answered itself
    """

    def __init__(
        self,
        listener: asyncio.Server,
        limits: Limits,
        connections: set[ServerProtocol],
        refused: Counter[int],
    ) -> None:
        address = listener.sockets[0].getsockname()
        self.port = int(address[1]) if isinstance(address, tuple) else 0
        self._listener = listener
        self.connections = connections
        self.refused = refused
        self.winding_down = False
        self._loop = asyncio.get_running_loop()
        shortest = min(limits.keep_alive_s, limits.head_s, limits.body_idle_s, limits.stall_s, limits.linger_s)
        self._interval = min(1.0, shortest / 4)
        self._round: Iterator[ServerProtocol] = iter(())
        self._elapsed = 0.0
        self._swept_at = self._loop.time()
        self._timer = self._loop.call_later(self._interval, self._begin_round)

    def close(self) -> None:
        """Stop at once: every connection is cut."""
        self._listener.close()
        self._timer.cancel()
        for connection in list(self.connections):
            connection.abort()

    def wind_down(self) -> None:
        """From now on every answer says that its connection closes. What comes is still accepted and answered."""
        self.winding_down = True
        for connection in list(self.connections):
            connection.wind_down()

    def stop_accepting(self) -> None:
        """Accept no connection any more; those that are idle close, the others after their answer."""
        self._listener.close()
        for connection in list(self.connections):
            connection.drain()

    async def emptied(self) -> None:
        """Until the last connection has closed."""
        while self.connections:  # noqa: ASYNC110 (once in a process's life)
            await asyncio.sleep(_DRAIN_POLL_S)

    async def drain(self, seconds: float) -> int:
        """Accept nothing new, answer what runs, for `seconds` at most. Returns how many connections were cut."""
        self.stop_accepting()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.emptied()
        cut = len(self.connections)
        self.close()
        return cut

    def _sweep(self) -> None:
        batch = list(islice(self._round, _SWEEP_SLICE))
        for connection in batch:
            connection.sweep(self._elapsed)
        if len(batch) == _SWEEP_SLICE:
            self._timer = self._loop.call_later(0, self._sweep)
            return
        self._timer = self._loop.call_later(self._interval, self._begin_round)

    def _begin_round(self) -> None:
        now = self._loop.time()
        self._elapsed, self._swept_at = now - self._swept_at, now
        self._round = iter(list(self.connections))
        self._sweep()


async def serve(
    handler: Handler,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: Limits | None = None,
    sock: socket.socket | None = None,
    unix_path: str | None = None,
    tls: ssl.SSLContext | None = None,
    behind: TrustedProxies | None = None,
    refuser: Refuser | None = None,
    outbox: Outbox | None = None,
) -> Server:
    """Listen on `sock`, else on `unix_path`, else on host and port (0: any); with `tls`, for https. Raises OSError.

    `behind`: the proxies whose connections begin with the PROXY protocol; others' do not. `refuser`: see
    `ServerProtocol`. `outbox`: by default one of its own.
    """
    loop = asyncio.get_running_loop()
    limits = limits or Limits()
    connections: set[ServerProtocol] = set()
    refused: Counter[int] = Counter()
    server: Server | None = None
    connect = ServerProtocol if behind is None else partial(ServerProtocolBehindProxy, behind)
    how_answered: dict[str, Any] = {"refused": refused, "refuser": refuser, "outbox": outbox or Outbox()}

    def accept() -> ServerProtocol:
        connection = connect(handler, limits, connections, **how_answered)
        if server is not None and server.winding_down:
            connection.wind_down()
        return connection

    how: dict[str, Any] = {"backlog": _BACKLOG}
    if tls is not None:
        # Closing flushes, which a slow client may take as long for as for an answer.
        how |= {"ssl": tls, "ssl_handshake_timeout": limits.head_s, "ssl_shutdown_timeout": limits.stall_s}
    if sock is not None:
        listener = await loop.create_server(accept, sock=sock, **how)
    elif unix_path is not None:
        listener = await loop.create_unix_server(accept, unix_path, **how)
    else:
        listener = await loop.create_server(accept, host, port, **how)
    for each in listener.sockets:
        if each.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted connections inherit it
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _KERNEL_UNSENT_BYTES)
    server = Server(listener, limits, connections, refused)
    return server
