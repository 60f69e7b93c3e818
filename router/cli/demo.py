"""`warmroute demo`: simulated engines, the gateway before them, and a live table of what their caches do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple, Self

import typer
import uvloop
from rich.console import Console, Group
from rich.live import Live as Display

from router import config as configuration
from router.cli import live_table
from router.cli.figures import write_json
from router.cli.keyboard import pressed
from router.cli.options import JsonFile, plugin_mistakes
from router.cli.traffic import Traffic
from router.config import Config
from router.core import Live
from router.lab.options import SimEngineOptions
from router.lab.server import SimEngineServer

MODEL = "demo"
JOIN_S = 10.0
JOIN_POLL_S = 0.05
TABLE_EVERY_S = 0.5
LINES_EVERY_S = 5.0
CAPACITY_TOKENS = 40_000
"""Small for the profile, so that caches fill and evict while one watches."""

WELCOME = """\
{engines} simulated engines behind one base_url. In another terminal:

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "demo", "messages": [{{"role": "user", "content": "Hello"}}]}}'

or in Python (pip install openai):

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  print(client.chat.completions.create(model="demo", messages=[{{"role": "user", "content": "Hello"}}]))

What the engines hold and do: {admin}/admin/v1/fleet
"""


class Plan(NamedTuple):
    """What the options ask for."""

    engines: int
    port: int
    admin_port: int
    speed: float
    seconds: float | None
    traffic: bool
    people: int
    policy: str | None


def demo(
    engines: Annotated[int, typer.Option(min=1, max=64, help="Simulated engines.")] = 3,
    port: Annotated[int, typer.Option(help="The gateway's port; 0 takes a free one.")] = 4000,
    admin_port: Annotated[int, typer.Option(help="The admin port; 0 takes a free one.")] = 4001,
    speed: Annotated[float, typer.Option(min=0.01, help="2: engines run, and people think, twice as fast.")] = 1.0,
    seconds: Annotated[float | None, typer.Option(min=0, help="End by itself after so long.")] = None,
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Start with sample traffic; t turns it on and off.")
    ] = False,
    people: Annotated[int, typer.Option(min=1, max=1000, help="Conversations at once in the sample traffic.")] = 12,
    policy: Annotated[str | None, typer.Option(help="An installed policy or module:attr.")] = None,
    json: JsonFile = None,
) -> None:
    """See it work, without a GPU.

    Starts simulated engines and the gateway, shows a live table of their caches, and prints what to type to try it.
    Ctrl-c ends it; it leaves nothing behind.
    """
    rows = uvloop.run(run(Plan(engines, port, admin_port, speed, seconds, traffic, people, policy)))
    if json:
        write_json(json, rows)


async def run(plan: Plan) -> list[live_table.Row]:
    """Until ctrl-c, SIGTERM or the time is over. The rows of the fleet as they were at the end."""
    from router.app import Running  # here, not at the top: no other command should wait for the whole gateway

    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        state_dir = stack.enter_context(TemporaryDirectory(prefix="warmroute-demo-"))
        engines = [await stack.enter_async_context(_engine(plan, seed)) for seed in range(plan.engines)]
        config = _config(plan, [engine.url for engine in engines], state_dir)
        running = await stack.enter_async_context(Running(config))
        await _joined(running.live, plan.engines)
        print(WELCOME.format(engines=plan.engines, url=running.url, admin=running.admin_url), flush=True)
        traffic = Traffic(running.url, MODEL, people=plan.people, speed=plan.speed, dice=random.Random(0))
        switch = await stack.enter_async_context(Switch(traffic, on=plan.traffic))
        stack.enter_context(_told_to_end(stop, plan.seconds))
        await _watch(running.live, switch, stop)
        return await _rows(running.live)


def _engine(plan: Plan, seed: int) -> SimEngineServer:
    return SimEngineServer(SimEngineOptions(model=MODEL, speed=plan.speed, capacity_tokens=CAPACITY_TOKENS, seed=seed))


def _config(plan: Plan, urls: Sequence[str], state_dir: str) -> Config:
    flags = {
        "port": plan.port,
        "admin_port": plan.admin_port,
        "tokenizer": "demo",
        "policy": plan.policy,
        "state_dir": state_dir,
    }
    return configuration.from_flags(urls, flags=flags, check=plugin_mistakes)


class Switch:
    """Sample traffic that can be turned on and off, and is off after `async with`."""

    def __init__(self, traffic: Traffic, *, on: bool) -> None:
        self.traffic = traffic
        self._task: asyncio.Task[None] | None = None
        if on:
            self.toggle()

    def toggle(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self.traffic.run(), name="sample traffic")
        else:
            self._task.cancel()
            self._task = None

    @property
    def on(self) -> bool:
        """Raises what the traffic died of, if it did."""
        if self._task is not None and self._task.done():
            self._task.result()
        return self._task is not None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))


@contextlib.contextmanager
def _told_to_end(stop: asyncio.Event, seconds: float | None) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    timer = loop.call_later(seconds, stop.set) if seconds is not None else None
    try:
        yield
    finally:
        if timer:
            timer.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _joined(live: Live, engines: int) -> None:
    """Waits, if not forever, until the gateway knows all engines and how they read: no first request is refused."""
    for _ in range(round(JOIN_S / JOIN_POLL_S)):
        if _complete((await live.readiness())["models"].get(MODEL), engines):
            return
        await asyncio.sleep(JOIN_POLL_S)


def _complete(model: live_table.Row | None, engines: int) -> bool:
    return model is not None and model["ready"] == engines and model["prompts"]["state"] in ("EXACT", "DEGRADED")


async def _rows(live: Live) -> list[live_table.Row]:
    return live_table.with_recent(await live.fleet(), await live.requests(None))


async def _watch(live: Live, switch: Switch, stop: asyncio.Event) -> None:
    console = Console(highlight=False)
    await (_watch_table(console, live, switch, stop) if console.is_terminal else _watch_lines(live, switch, stop))


async def _watch_lines(live: Live, switch: Switch, stop: asyncio.Event) -> None:
    ended = False
    while not ended:
        ended = await _within(LINES_EVERY_S, stop)
        for row in await _rows(live):
            print(live_table.line(row))
        print(_status(switch), flush=True)


async def _watch_table(console: Console, live: Live, switch: Switch, stop: asyncio.Event) -> None:
    with pressed({"t": switch.toggle}) as keys, Display(console=console, auto_refresh=False) as display:
        ended = False
        while not ended:
            hint = "; t switches it, ctrl-c ends" if keys else "; ctrl-c ends"
            table = live_table.table(await _rows(live))
            display.update(Group(table, live_table.LEGEND, _status(switch) + hint), refresh=True)
            ended = await _within(TABLE_EVERY_S, stop)


def _status(switch: Switch) -> str:
    failed = f", {switch.traffic.failed} failed" if switch.traffic.failed else ""
    return f"sample traffic {'on' if switch.on else 'off'}: {switch.traffic.answered} answered{failed}"


async def _within(seconds: float, stop: asyncio.Event) -> bool:
    """Waits so long at most; whether it is time to end."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    return stop.is_set()
