"""The accepting side of the engines that tests write byte by byte."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable


class Listener:
    """A port of loopback where `serve_one` answers request after request of a connection, until the client leaves.

    `port` is 0 until it has started, and the same when it is started again.
    """

    def __init__(
        self,
        serve_one: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.port = 0
        self._serve_one = serve_one
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", self.port))
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """As when a process dies: the port is closed and every connection cut, but for one that this is called from."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, *self.hang_up(), return_exceptions=True)
        self._socket.close()

    def hang_up(self) -> list[asyncio.Task[None]]:
        """Every connection is cut, but for one that this is called from. Returns what ends soon."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    async def _accept(self) -> None:
        """By hand: a server of asyncio's forgets connections that have not ended their TLS handshake when it stops."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            task = loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        except OSError:  # no handshake
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            while True:
                await self._serve_one(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
