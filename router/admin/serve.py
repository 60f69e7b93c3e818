"""Runs the admin API: in a process of its own, so that a page or a garbage collection there never stalls a stream."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from fastapi import FastAPI

from router.admin.access import Access
from router.admin.answers import WithoutTraces
from router.admin.api import create_app
from router.admin.desk import Desk
from router.admin.oidc import Oidc
from router.core import Live
from router.errors import ConfigError
from router.store.database import open_database
from router.tls import ServerContext, ServerTls
from router.wire import RemoteLive, WireClient

_PROVIDER_S = 5.0


class _GuestServer(uvicorn.Server):
    """Leaves the signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminSettings(msgspec.Struct, frozen=True):
    """All that the admin API needs to start, as plain values: it may do so in another process.

    database_url: None: there is none. open: without any admin key, anybody may do anything. oidc: the arguments of
    `Oidc`; None: no JWTs.
    """

    host: str
    port: int
    tls: ServerTls | None = None
    database_url: str | None = None
    pepper: bytes = b""
    audit_secret: bytes = b""
    bootstrap_key: str | None = None
    open: bool = True
    metrics_open: bool = True
    oidc: Mapping[str, Any] | None = None

    def __repr__(self) -> str:  # nothing of what it holds is for a log
        return f"AdminSettings({self.host!r}, {self.port})"


class AdminServer:
    """The admin API inside a running event loop."""

    def __init__(self, live: Live, settings: AdminSettings) -> None:
        self._at_end = AsyncExitStack()
        app = self._app(live, settings)
        config = uvicorn.Config(
            WithoutTraces(app),
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            lifespan="off",
        )
        self._server = _GuestServer(config)
        self._tls = settings.tls
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def _app(self, live: Live, settings: AdminSettings) -> FastAPI:
        desk = database = tokens = None
        if settings.database_url is not None:
            database = open_database(settings.database_url)
            self._at_end.push_async_callback(database.aclose)
            desk = Desk(database, audit_secret=settings.audit_secret, pepper=settings.pepper)
        if settings.oidc is not None:
            http = httpx.AsyncClient(timeout=_PROVIDER_S)
            self._at_end.push_async_callback(http.aclose)
            tokens = Oidc(http, **settings.oidc).administrator
        access = Access(
            database,
            pepper=settings.pepper,
            bootstrap_key=settings.bootstrap_key,
            tokens=tokens,
            open=settings.open,
        )
        return create_app(live, desk, access, metrics_open=settings.metrics_open)

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
        await self._at_end.aclose()


@asynccontextmanager
async def served(live: Live, settings: AdminSettings) -> AsyncIterator[int]:
    """Its port, in this process."""
    server = AdminServer(live, settings)
    port = await server.start()
    try:
        yield port
    finally:
        await server.stop()


def run(socket: str, settings: AdminSettings, parent: Connection) -> None:
    """The admin process: talks to relay and brain over the Unix socket `socket`. Tells `parent` the port it has, or why
    it has none; ends when the other end of that is closed, by whatever the parent ended of.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # they reach the whole group, and are the parent's
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(socket, settings, parent))


async def _serve(socket: str, settings: AdminSettings, parent: Connection) -> None:
    stop = asyncio.Event()
    client = WireClient(Path(socket))
    try:
        server = AdminServer(RemoteLive(client), settings)
        parent.send(await server.start())
    except (OSError, SystemExit, ConfigError) as error:
        parent.send(str(error) or f"port {settings.port} cannot be opened")
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(parent.fileno(), stop.set)  # nothing is ever sent this way: it has been closed
    gc.freeze()
    await stop.wait()
    loop.remove_reader(parent.fileno())
    await server.stop()
    await client.aclose()
