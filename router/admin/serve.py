"""Runs the admin API: in a process of its own, so that a page or a garbage collection there never stalls a stream."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import uvicorn

from router.admin.api import create_app
from router.core import Live
from router.tls import ServerContext, ServerTls
from router.wire import RemoteLive, WireClient


class _GuestServer(uvicorn.Server):
    """Leaves the signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """The admin API inside a running event loop."""

    def __init__(self, live: Live, *, host: str, port: int, tls: ServerTls | None = None) -> None:
        config = uvicorn.Config(
            create_app(live), host=host, port=port, log_level="warning", access_log=False, lifespan="off"
        )
        self._server = _GuestServer(config)
        self._tls = tls
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens; returns the port. Raises OSError when it is taken."""
        if self._tls is not None:
            certificates = await asyncio.to_thread(ServerContext, self._tls)
            self._server.config.load()
            self._server.config.ssl = certificates.context
            self._watching = asyncio.create_task(certificates.watch(), name="admin certificates")
        self._task = asyncio.create_task(self._server.serve(), name="admin")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise OSError(f"the admin port {self._server.config.port} cannot be opened")
            await asyncio.sleep(0.01)
        port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._task is not None:
            await self._task


def run(socket: str, host: str, port: int, parent: Connection, tls: ServerTls | None = None) -> None:
    """The admin process: talks to relay and brain over the Unix socket `socket`. Tells `parent` the port it has, or why
    it has none; ends when the other end of that is closed, by whatever the parent ended of.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # they reach the whole group, and are the parent's
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(socket, host, port, parent, tls))


async def _serve(socket: str, host: str, port: int, parent: Connection, tls: ServerTls | None) -> None:
    stop = asyncio.Event()
    client = WireClient(Path(socket))
    server = AdminServer(RemoteLive(client), host=host, port=port, tls=tls)
    try:
        parent.send(await server.start())
    except (OSError, SystemExit) as error:
        parent.send(str(error) or f"port {port} cannot be opened")
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(parent.fileno(), stop.set)  # nothing is ever sent this way: it has been closed
    gc.freeze()
    await stop.wait()
    loop.remove_reader(parent.fileno())
    await server.stop()
    await client.aclose()
