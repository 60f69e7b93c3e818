"""The accepting side of the engines that tests write byte by byte."""

from __future__ import annotations

import asyncio
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
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As when a process dies: the port is closed and every connection cut, but for one that this is called from."""
        self._server.close()
        tasks = self.hang_up()
        await asyncio.gather(*tasks, return_exceptions=True)

    def hang_up(self) -> list[asyncio.Task[None]]:
        """Every connection is cut, but for one that this is called from. Returns what ends soon."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while True:
                await self._serve_one(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
