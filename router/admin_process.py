"""The admin API in a process of its own, which asks this one over a socket that only we can open."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from router.admin.serve import AdminSettings, run
from router.core import Live
from router.errors import ConfigError
from router.wire import WireServer, live_methods

_START_S = 30.0
_END_S = 5.0


@asynccontextmanager
async def served(live: Live, settings: AdminSettings) -> AsyncIterator[int]:
    """Its port. Raises ConfigError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="warmroute-") as folder:
        path = Path(folder) / "live"
        wire = WireServer(live_methods(live))
        await wire.start(path)
        try:
            context = multiprocessing.get_context("spawn")
            here, there = context.Pipe()
            process = context.Process(target=run, args=(str(path), settings, there), daemon=True)
            process.start()
            there.close()
            try:
                yield await asyncio.to_thread(_answer, here, settings)
            finally:
                await asyncio.to_thread(_end, process, here)
        finally:
            await wire.stop()


def _answer(connection: Connection, settings: AdminSettings) -> int:
    try:
        answer = connection.recv() if connection.poll(_START_S) else "it did not answer"
    except EOFError:
        answer = "it ended at once"
    if not isinstance(answer, int):
        where = f"{settings.host}:{settings.port}"
        raise ConfigError([f"admin: the admin API did not start on {where}: {answer}"])
    return answer


def _end(process: BaseProcess, connection: Connection) -> None:
    """`connection`: that the process lives by."""
    connection.close()
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join()
