"""How a running gateway ends, and the signals it knows.

SIGTERM         drains: not ready from now on; for `accept_s` new requests are still taken, since balancers look only
                now and then; until `finish_s` running ones go on; what is left ends with an error, never as if whole
SIGINT          the same, but nothing new is taken: there is no balancer before a terminal
either, again   what runs ends with an error at once; once more: the process is gone
SIGHUP          reads the configuration again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol

from router.errors import WarmrouteError
from router.http.server import Server

log = logging.getLogger("warmroute")

FLUSH_S = 2.0
"""For clients to take what was written to them at the end."""


class Ending(Protocol):
    """Who has requests that run (`serving/edge.py`)."""

    @property
    def running(self) -> int: ...

    async def end_all(self) -> int: ...


async def drain(server: Server, edge: Ending, *, accept_s: float, finish_s: float, hurry: asyncio.Event) -> int:
    """Until nothing runs. `hurry` cuts every wait short. Returns how many requests had to be ended."""
    until = asyncio.get_running_loop().time() + finish_s
    server.wind_down()
    await _unless(hurry, asyncio.sleep(accept_s))
    server.stop_accepting()
    left_s = until - asyncio.get_running_loop().time()
    await _unless(hurry, asyncio.wait_for(server.emptied(), max(0.0, left_s)))
    ended = await edge.end_all()
    cut = await server.drain(FLUSH_S)
    if ended or cut:
        log.warning("%d requests did not end in time and were ended with an error", ended)
    return ended


async def _unless(hurry: asyncio.Event, work: Awaitable[object]) -> None:
    """Until `work` is done, has taken too long, or there is no time any more."""
    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(hurry.wait()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Signals:
    """What the process was told so far. SIGHUP calls `reload`, which says itself what became of it.

    stop    SIGTERM or SIGINT came; `at_once`: it was SIGINT
    hurry   another one came
    """

    def __init__(self, reload: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.at_once = False
        self._reload = reload
        self._reloads: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def heard(self) -> Iterator[Signals]:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._end, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._begin_reload)
        try:
            yield self
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._loop.remove_signal_handler(number)

    def _begin_reload(self) -> None:
        task = self._loop.create_task(self._reload_now())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload_now(self) -> None:
        try:
            await self._reload()
        except WarmrouteError as error:
            log.warning("%s", error.message)
        except Exception as error:  # of a plugin, say: the configuration before stays in force
            log.error("not reloaded: %s", type(error).__name__, exc_info=error)

    def _end(self, number: signal.Signals) -> None:
        if not self.stop.is_set():
            self.at_once = number == signal.SIGINT
            self.stop.set()
        elif not self.hurry.is_set():
            self.hurry.set()
            for each in (signal.SIGTERM, signal.SIGINT):  # the next one finds nobody who would wait for anything
                self._loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)
