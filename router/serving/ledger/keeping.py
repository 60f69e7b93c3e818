"""The ledger, kept: the spool open, a writer at work beside the loop, and what is looked at again and again."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from router.errors import ConfigError, StoreUnavailable
from router.serving.ledger.ledger import EngineThere, Ledger
from router.serving.ledger.spool import Spool
from router.serving.ledger.writer import Writer, WriterSettings
from router.store import retention
from router.store.database import open_database

_log = logging.getLogger("warmroute")

FOLDER = "ledger"
"""In state_dir."""
_MEASURE_S = 0.5
_SEEN_S = 60.0
_NICE = 5  # of a writer's process: no request waits for it
_AGAIN_S = 5.0  # at most so often
_END_S = 30.0  # for the writer to write what is left


class Bookkeeping:
    """`ledger` is for the gateway; from `start` to `stop` what it notes comes into the database.

    engines: those that there are. in_process: the writer has a process of its own, else a thread, which has to share
    the interpreter with the loop.
    """

    def __init__(
        self,
        ledger: Ledger,
        spool: Spool,
        settings: WriterSettings,
        database_url: str,
        *,
        engines: Callable[[], Iterable[EngineThere]],
        in_process: bool,
        fsync_s: float | None = None,
    ) -> None:
        self.ledger = ledger
        self._spool = spool
        self._engines = engines
        self._fsync_s = fsync_s
        self._told: dict[str, float] = {}
        self._in_process = in_process
        self._arguments = (settings, database_url)
        self._worker: BaseProcess | threading.Thread | None = None
        self._writer: Connection | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def flush(self) -> None:
        """Before anything goes out of what has been noted."""
        self._spool.flush()

    def start(self) -> None:
        self._begin_writing()
        self._tasks = [asyncio.ensure_future(self._measure()), asyncio.ensure_future(self._note_engines())]
        if self._fsync_s is not None:
            self._tasks.append(asyncio.ensure_future(self._sync(self._fsync_s)))

    async def stop(self) -> None:
        """The run is over. What is in the spool is written, unless the database is away."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._spool.close()
        if self._worker is None or self._writer is None:
            return
        with suppress(OSError):  # it may have ended by itself
            self._writer.send(None)
        await asyncio.to_thread(self._worker.join, _END_S)
        if isinstance(self._worker, BaseProcess) and self._worker.is_alive():
            self._worker.kill()  # nothing is lost: the spool is read on at the next start
        self._writer.close()

    def figures(self) -> dict[str, float]:
        """For metrics."""
        return {**self.ledger.figures(), **self._told, "writer_up": float(self._is_writing)}

    @property
    def _is_writing(self) -> bool:
        return self._worker is not None and self._worker.is_alive()

    def _begin_writing(self) -> None:
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        make: Callable[..., Any] = context.Process if self._in_process else threading.Thread
        self._worker = make(target=run_writer, args=(*self._arguments, there), name="ledger", daemon=True)
        self._writer = here
        self._worker.start()
        if self._in_process:
            there.close()

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(_MEASURE_S)
            self.ledger.measure()
            with suppress(EOFError, OSError):
                while self._writer is not None and self._writer.poll():
                    self._told = self._writer.recv()
            if not self._is_writing:
                _log.error("the ledger's writer has ended, and is begun again")
                self._begin_writing()
                await asyncio.sleep(_AGAIN_S)

    async def _note_engines(self) -> None:
        while True:
            self.ledger.seen(self._engines(), time.time())
            await asyncio.sleep(_SEEN_S)

    async def _sync(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(self._spool.sync)
            except OSError as error:
                _log.error("the ledger's spool cannot be brought to the disk: %s", error.strerror)


def open_spool(state_dir: Path, max_bytes: int, *, is_synced: bool) -> Spool:
    """For the running loop. Raises ConfigError."""
    later = asyncio.get_running_loop().call_soon
    try:
        return Spool(state_dir / FOLDER, max_bytes=max_bytes, is_synced=is_synced, later=later)
    except OSError as error:
        raise ConfigError([f"state_dir: the ledger cannot be written there: {error.strerror}"]) from error


# ---------------------------------------------------------------------------------------------------------------------
# The writer's thread, or process


def run_writer(settings: WriterSettings, database_url: str, told: Connection) -> None:
    """Until there is something to be read from `told`: a word, or that the other side is gone."""
    if threading.current_thread() is threading.main_thread():  # of a process of its own
        os.nice(_NICE)
        for told_to_all in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # the gateway says when it is time
            signal.signal(told_to_all, signal.SIG_IGN)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    asyncio.run(_run_writer(settings, database_url, told))


async def _run_writer(settings: WriterSettings, database_url: str, told: Connection) -> None:
    database = open_database(database_url)
    writer = Writer(settings, database)
    loop = asyncio.get_running_loop()
    loop.add_reader(told.fileno(), _stop, writer, told)
    beside = [
        asyncio.ensure_future(_tell(writer, told)),
        asyncio.ensure_future(retention.keep(database, retention_days=settings.retention_days)),
    ]
    try:
        await writer.run()
    except StoreUnavailable:  # in the middle of its last words
        pass
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        loop.remove_reader(told.fileno())
        await database.aclose()
        told.close()


def _stop(writer: Writer, told: Connection) -> None:
    with suppress(EOFError, OSError):
        told.recv()
    asyncio.get_running_loop().remove_reader(told.fileno())
    writer.stop()


async def _tell(writer: Writer, told: Connection) -> None:
    while True:
        await asyncio.sleep(_MEASURE_S)
        with suppress(OSError):
            told.send(writer.figures())
