"""The composition root: builds every object once, wires them, and takes them down in the opposite order.

serve   relay and brain in this process, the admin API in one of its own
demo, tests   all in one process (`Running(config, admin="inline")`)
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import uvloop

from router import __version__, plugins
from router.admin import serve as admin_process
from router.admin.serve import AdminServer
from router.config import Config, ListenTls, PolicyChoice, WaitingRoom
from router.core import Instance, Placement, Policy
from router.errors import ConfigError
from router.http.client import Pool
from router.http.messages import Limits, PoolLimits
from router.http.server import Server, serve
from router.live import LiveView, feed_counts, room_figures
from router.roster import Roster, load_adapters
from router.routing import persist
from router.routing.bookings import Bookings
from router.routing.brain import Brain, Placed
from router.routing.feed import Feed
from router.routing.fleet import Fleet
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches
from router.routing.room_rule import RoomRule
from router.routing.sent import SentIndex
from router.routing.shadow import Shadows
from router.routing.trace_log import TraceLog
from router.routing.waiting_room import RoomLimits
from router.serving.edge import Edge
from router.serving.engines import Engines
from router.serving.gateway import Gateway
from router.serving.models import Models
from router.serving.proxy import Proxy
from router.serving.tools_order import ToolsOrder
from router.telemetry import Telemetry, log_access
from router.tls import ServerContext, ServerTls
from router.wire import WireServer, live_methods

log = logging.getLogger("warmroute")

SWITCH_INTERVAL_S = 0.0005  # a thread that tokenizes gives the loop its turn ten times as often as by default
DRAIN_S = 30.0
ADMIN_START_S = 30.0
TIMER_S = 0.0005  # uvloop rounds to whole milliseconds: half of its timers would come too early

AdminMode = Literal["process", "inline", "off"]
CallAt = Callable[[float, Callable[[], None]], None]
Door = Callable[[Placement], AbstractAsyncContextManager[Placement]]


class Running:
    """A gateway, from `async with` to its end. `url` and `admin_url` are where it listens; `live` is `core.Live`.

    `door`: what stands between serving and routing, e.g. a socket (`router/wire.py`); by default nothing does.
    """

    url: str
    admin_url: str | None
    live: LiveView

    def __init__(
        self, config: Config, *, admin: AdminMode = "inline", drain_s: float = DRAIN_S, door: Door | None = None
    ) -> None:
        self._config = config
        self._admin: AdminMode = admin if config.admin.enabled else "off"
        self._drain_s = drain_s
        self._door = door
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Running:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config, clock, dice = self._config, time.monotonic, random.Random()
        state = config.make_state_dir()
        secret = deployment_secret(state)
        executor = ThreadPoolExecutor(1, "tokenize")
        self._at_end(lambda: executor.shutdown(wait=False, cancel_futures=True))

        # What is known, and how it chooses
        fleet, bookings = Fleet(), Bookings[Placed](first_id=dice.getrandbits(40))
        index = BlockIndex(secret, max_bytes=int(config.index.max_bytes), clock=clock)
        sent = SentIndex(index, clock=clock)
        recent = RecentDispatches(clock=clock)
        tools_order, trace_log = ToolsOrder(), TraceLog()
        telemetry = Telemetry(
            fleet=lambda: fleet.rows(clock()),
            feed=lambda: feed_counts(feed, index),
            reordered_tools=lambda: tools_order.counts,
            room=lambda: room_figures(brain.room, clock()),
            shadows=lambda: {} if shadows is None else shadows.figures(),
        )
        policies, by_model = load_policies(config, dice)
        shadows = open_shadows(config.policy, _timer(clock), clock)
        brain = Brain(
            fleet=fleet,
            index=index,
            sent=sent,
            recent=recent,
            bookings=bookings,
            policies=policies,
            default_policy=config.policy.name,
            model_policies=by_model,
            ttft_slo_ms=ttft_slo_ms(config.policy),
            shadows=shadows,
            decided=telemetry.decided,
            ended=trace_log.note,
            clock=clock,
            dice=dice,
        )
        if config.waiting_room.enabled:
            _open_room(brain, config.waiting_room, clock)
        adapters = load_adapters()
        for adapter in adapters.values():
            self._at_end(adapter.aclose)
        index_file = state / "index"
        feed = Feed(
            fleet=fleet,
            index=index,
            sent=sent,
            recent=recent,
            bookings=bookings,
            adapters=adapters,
            clock=clock,
            dice=dice,
            saved=await asyncio.to_thread(persist.load, index_file, secret=secret),
        )

        # The request's path
        engines, models = Engines(self._pool), Models(expected=expected_models(config))
        self._at_end(engines.aclose)
        proxy = Proxy(engines, first_byte_s=config.timeouts.first_byte_s)
        self._at_end(proxy.close)
        roster = Roster(
            config,
            adapters=adapters,
            fleet=fleet,
            feed=feed,
            engines=engines,
            models=models,
            secret=secret,
            executor=executor,
        )
        placement = brain if self._door is None else await self._stack.enter_async_context(self._door(brain))
        gateway = Gateway(
            models,
            placement,
            proxy,
            listeners=(telemetry.observe, roster.observe, *((log_access,) if config.listen.access_log else ())),
            body_limit=int(config.listen.max_body_bytes),
            receipts=config.listen.receipts,
            tools_order=tools_order,
        )
        self.live = LiveView(
            fleet=fleet,
            brain=brain,
            models=models,
            roster=roster,
            telemetry=telemetry,
            trace_log=trace_log,
            clock=clock,
        )
        edge = Edge(gateway, models, readiness=self.live.readiness, origins=config.listen.cors.origins)

        # Life
        await feed.start()
        self._at_end(feed.stop)
        await roster.start()
        self._at_end(roster.stop)
        self._every(config.index.save_every_s, lambda: self._save(index_file, index, secret, feed), at_end=True)
        self._stack.push_async_callback(self._spawned(telemetry.sample_lag()))
        await self._listen(edge)
        await self._serve_admin()
        gc.collect()
        gc.freeze()  # what was built at the start is not looked at again by every collection

    # --- listening

    async def _listen(self, edge: Edge) -> None:
        listen = self._config.listen
        limits = Limits(body_bytes=int(listen.max_body_bytes), keep_alive_s=listen.keep_alive_s)
        tls = None
        if listen.tls is not None:
            certificates = await asyncio.to_thread(ServerContext, listen.tls.settings())
            self._stack.push_async_callback(self._spawned(certificates.watch()))
            tls = certificates.context
        server: Server = await serve(edge, host=listen.host, port=listen.port, limits=limits, tls=tls)
        self._at_end(lambda: server.drain(self._drain_s))
        self.url = f"{_scheme(listen.tls)}://{_host(listen.host)}:{server.port}"

    async def _serve_admin(self) -> None:
        self.admin_url = None
        admin = self._config.admin
        if self._admin == "inline":
            server = AdminServer(self.live, host=admin.host, port=admin.port, tls=_server_tls(admin.tls))
            port = await server.start()
            self._at_end(server.stop)
        elif self._admin == "process":
            port = await self._start_admin_process()
        else:
            return
        self.admin_url = f"{_scheme(admin.tls)}://{_host(admin.host)}:{port}"

    async def _start_admin_process(self) -> int:
        """The admin API in a process of its own, which asks this one over a socket that only we can open."""
        folder = tempfile.TemporaryDirectory(prefix="warmroute-")
        self._at_end(folder.cleanup)
        path = Path(folder.name) / "live"
        wire = WireServer(live_methods(self.live))
        await wire.start(path)
        self._at_end(wire.stop)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        admin = self._config.admin
        process = context.Process(
            target=admin_process.run,
            args=(str(path), admin.host, admin.port, there, _server_tls(admin.tls)),
            daemon=True,
        )
        process.start()
        there.close()
        self._at_end(lambda: asyncio.to_thread(_end, process))
        answered = await asyncio.to_thread(here.poll, ADMIN_START_S)
        try:
            answer = here.recv() if answered else "it did not answer"
        except EOFError:
            answer = "it ended at once"
        if not isinstance(answer, int):
            raise ConfigError([f"admin: the admin API did not start on {admin.host}:{admin.port}: {answer}"])
        return answer

    # --- pieces

    def _pool(self, instance: Instance) -> Pool:
        limits = PoolLimits(connect_s=self._config.timeouts.connect_s)
        return Pool(instance.url, limits=limits, tls=instance.tls)

    async def _save(self, path: Path, index: BlockIndex, secret: bytes, feed: Feed) -> None:
        try:
            await persist.save(path, index, secret=secret, position=feed.position)
        except OSError as error:
            log.warning("the index could not be saved: %s", error.strerror)

    def _at_end(self, close: Callable[[], object]) -> None:
        async def call() -> None:
            result = close()
            if isinstance(result, Awaitable):
                await result

        self._stack.push_async_callback(call)

    def _spawned(self, work: Awaitable[None]) -> Callable[[], Awaitable[None]]:
        task = asyncio.ensure_future(work)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        return end

    def _every(self, seconds: float, work: Callable[[], Awaitable[None]], *, at_end: bool) -> None:
        async def loop() -> None:
            while True:
                await asyncio.sleep(seconds)
                await work()

        if at_end:
            self._stack.push_async_callback(work)
        self._stack.push_async_callback(self._spawned(loop()))


def load_policies(config: Config, dice: random.Random) -> tuple[dict[str, Policy], dict[str, str]]:
    """Every policy the configuration names, and which model has one of its own."""
    by_model = {name: model.policy for name, model in config.models.items() if model.policy}
    policies: dict[str, Policy] = {}
    for name in {config.policy.name, *by_model.values()}:
        weights = config.policy.weights if name == config.policy.name else {}
        try:
            policies[name] = plugins.load(plugins.POLICIES, name)(weights, dice)
        except ValueError as error:
            raise ConfigError([f"policy.weights: {error}"]) from error
    return policies, by_model


def open_shadows(settings: PolicyChoice, call_at: CallAt, clock: Callable[[], float]) -> Shadows | None:
    """With dice of their own: those of the policies that act do not feel them. None: there are none."""
    dice = random.Random()
    policies: dict[str, Policy] = {}
    for name in settings.shadow:
        try:
            policies[name] = plugins.load(plugins.POLICIES, name)({}, dice)
        except ValueError as error:
            raise ConfigError([f"policy.shadow: {name}: {error}"]) from error
    return Shadows(policies, call_at=call_at, clock=clock, dice=dice) if policies else None


def ttft_slo_ms(settings: PolicyChoice) -> Callable[[int], float] | None:
    """The objective for a prompt of so many tokens, ms. None: there is none."""
    if settings.ttft_slo_s is None:
        return None
    base, per_token = settings.ttft_slo_s * 1e3, settings.ttft_slo_per_1k_tokens_ms / 1e3
    return lambda tokens: base + per_token * tokens


def _timer(clock: Callable[[], float]) -> CallAt:
    """Calls back at a time of `clock`."""
    loop = asyncio.get_running_loop()

    def call_at(when: float, call: Callable[[], None]) -> None:
        after = when - clock()
        if after > 0:
            loop.call_later(after + TIMER_S, call)
        else:
            loop.call_soon(call)

    return call_at


def _open_room(brain: Brain, settings: WaitingRoom, clock: Callable[[], float]) -> None:
    brain.open_room(
        _timer(clock),
        rule=RoomRule(free_tokens=settings.free_tokens, head_start_max_s=settings.head_start_max_s),
        limits=RoomLimits(requests=settings.max_requests, body_bytes=int(settings.max_bytes), wait_s=settings.wait_s),
    )


def expected_models(config: Config) -> set[str]:
    """Names that clients may use as soon as their engines have joined."""
    named = {engine.model for engine in config.engines if engine.model is not None}
    return named | set(config.aliases) | (set(config.models) - {"*"})


def deployment_secret(state_dir: Path) -> bytes:
    """Made at the first start; all block keys hang on it."""
    path = state_dir / "secret"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        secret = secrets.token_bytes(32)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secret)
        return secret


def run(config: Config) -> None:
    """`warmroute serve`: until SIGTERM or ctrl-c, then drains. Raises ConfigError and OSError for what cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config.prepare_process()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(_run(config))


async def _run(config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    async with Running(config, admin="process") as running:
        log.info("warmroute %s: base_url %s/v1, admin %s", __version__, running.url, running.admin_url or "off")
        await stop.wait()
        log.info("draining")


def _server_tls(tls: ListenTls | None) -> ServerTls | None:
    return None if tls is None else tls.settings()


def _scheme(tls: ListenTls | None) -> str:
    return "http" if tls is None else "https"


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _end(process: BaseProcess) -> None:
    process.terminate()
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
