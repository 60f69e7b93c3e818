"""The composition root: builds every object once, wires them, and takes them down in the opposite order.

serve   relay and brain in this process, the admin API in one of its own
demo, tests   all in one process (`Running(config, admin="inline")`)

What signals do to it is in `life.py`, what a new configuration changes in `reload.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import random
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import uvloop

from router import __version__, admin_process, life
from router.admin.account_relay import ROUTES as ACCOUNT_ROUTES
from router.admin.account_relay import AccountRelay
from router.admin.serve import served
from router.config import Config, ListenTls
from router.config.listen import asks_for_certificates, is_loopback
from router.core import Instance, Outcome, Placement, Policy
from router.errors import ConfigError, Conflict, StoreUnavailable, WarmrouteError, place_of
from router.http.client import Pool
from router.http.messages import PoolLimits, Request
from router.http.outbox import Outbox
from router.http.proxies import TrustedProxies
from router.http.server import Server, serve
from router.isolation import IsolationView
from router.life import Signals
from router.live import LiveView, feed_counts, room_figures
from router.prover import Prover
from router.reload import compare
from router.roster import Changes, Roster, close_adapters, load_adapters
from router.routing import persist
from router.routing.bookings import Bookings
from router.routing.brain import Brain, Placed
from router.routing.feed import Feed
from router.routing.fleet import Fleet
from router.routing.footprint import Footprints
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches
from router.routing.sent import SentIndex
from router.routing.shadow import Shadows
from router.routing.trace_log import TraceLog
from router.serving.callers import Callers
from router.serving.edge import Edge
from router.serving.engines import Engines
from router.serving.gateway import Gateway, Listener
from router.serving.identity import Identity
from router.serving.isolation.fields import FieldRules
from router.serving.isolation.salts import Salts
from router.serving.isolation.shadow import IsolationShadow
from router.serving.ledger.keeping import FOLDER, Bookkeeping, open_spool
from router.serving.ledger.ledger import EngineThere, Ledger
from router.serving.ledger.writer import WriterSettings
from router.serving.limits.limiter import Limiter
from router.serving.limits.opening import open_limits
from router.serving.models import Models
from router.serving.pricing import Prices
from router.serving.prompt.encode import let_the_loop_go_first
from router.serving.proxy import Proxy
from router.serving.tools_order import ToolsOrder
from router.settings import (
    CallAt,
    admin_settings,
    expected_models,
    http_limits,
    identity_header,
    load_policies,
    open_shadows,
    room_settings,
    ttft_slo_ms,
    weights,
)
from router.state import deployment_secret, isolation_secret, open_store, pepper, store_url
from router.store.database import Database
from router.store.isolation import ProofStore
from router.store.pseudonyms import pseudonym
from router.telemetry import Telemetry, log_access
from router.tls import ServerContext

log = logging.getLogger("warmroute")

SWITCH_INTERVAL_S = 0.0005  # a thread that tokenizes gives the loop its turn ten times as often as by default
GC_THRESHOLDS = (5_000, 20, 20)
"""A request leaves nothing to the garbage collector (a test sees to it), so it is asked seldom: with Python's 700 its
looks at what is under way cost 14 µs a request, with these 1 µs."""
DRAIN_S = 30.0
TIMER_S = 0.0005  # uvloop rounds to whole milliseconds: half of its timers would come too early

AdminMode = Literal["process", "inline", "off"]
Door = Callable[[Placement], AbstractAsyncContextManager[Placement]]
ReadAgain = Callable[[], Config]
"""Reads the configuration as it is now. Raises ConfigError."""


class Running:
    """A gateway, from `async with` to its end. `url` and `admin_url` are where it listens; `live` is `core.Live`.

    `door`: what stands between serving and routing, e.g. a socket (`router/wire.py`); by default nothing does.
    `listeners`: who else is told of every Outcome.
    `read_again`: for `reload`; None: there is no file to read. `drain_s`: how long running requests may go on at the
    end, if `drain` was not called before.
    """

    url: str
    admin_url: str | None
    live: LiveView
    store: Database
    _server: Server

    def __init__(
        self,
        config: Config,
        *,
        admin: AdminMode = "inline",
        drain_s: float = DRAIN_S,
        door: Door | None = None,
        listeners: Sequence[Listener] = (),
        read_again: ReadAgain | None = None,
    ) -> None:
        self._config = config
        self._read_again = read_again
        self._reloading = asyncio.Lock()
        self._clock = time.monotonic
        self._hurried = False  # to the end
        self._in_processes = admin == "process"
        self._admin: AdminMode = admin if config.admin.enabled else "off"
        self._drain_s = drain_s
        self._door = door
        self._listeners = listeners
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Running:
        try:
            async with self._reloading:  # a reload that is asked for meanwhile waits
                await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config, clock = self._config, self._clock
        dice = self._dice = random.Random()
        state = config.make_state_dir()
        secret, key_pepper = deployment_secret(state), pepper(config, state)
        store = self.store = await open_store(config, state)
        self._at_end(store.aclose)
        salts = Salts(isolation_secret(config, state), config.isolation.version)
        identity = await self._identify(key_pepper, salts)
        prices = await self._keep_prices() if identity is not None else None
        books = self._keep_books(state, prices, lambda: engines_there(fleet))
        executor = ThreadPoolExecutor(1, "tokenize", initializer=let_the_loop_go_first)
        self._at_end(lambda: executor.shutdown(wait=False, cancel_futures=True))

        # What is known, and how it chooses
        fleet = Fleet(unverified=config.isolation.unverified)
        bookings = Bookings[Placed](first_id=dice.getrandbits(40))
        index = BlockIndex(secret, max_bytes=int(config.index.max_bytes), clock=clock)
        sent = SentIndex(index, clock=clock)
        recent = RecentDispatches(clock=clock)
        tools_order, trace_log = ToolsOrder(), TraceLog()
        footprints = Footprints(most=config.isolation.cold_share)
        shadow = IsolationShadow(call_at=_timer(clock), clock=clock)
        telemetry = Telemetry(
            fleet=lambda: fleet.rows(clock()),
            feed=lambda: feed_counts(feed, index),
            reordered_tools=lambda: tools_order.counts,
            room=lambda: room_figures(brain.room, clock()),
            shadows=self._shadow_figures,
            isolation=lambda: isolation.figures(),
            connections=lambda: engines.connections(),
            limits=lambda: {} if limiter is None else limiter.figures(),
            refused=lambda: self._server.refused,
            callers=dict if identity is None else identity.figures,
            strangers=dict if identity is None else lambda: identity.refused,
            ledger=dict if books is None else books.figures,
        )
        self._policies, by_model = load_policies(config, dice)
        self._shadows = open_shadows(config.policy, _timer(clock), clock)
        brain = self._brain = Brain(
            fleet=fleet,
            index=index,
            sent=sent,
            recent=recent,
            bookings=bookings,
            policies=self._policies,
            default_policy=config.policy.name,
            model_policies=by_model,
            ttft_slo_ms=ttft_slo_ms(config.policy),
            shadows=self._shadows,
            footprints=footprints,
            decided=telemetry.decided,
            ended=trace_log.note,
            clock=clock,
            dice=dice,
        )
        if config.waiting_room.enabled:
            rule, limits = room_settings(config.waiting_room)
            brain.open_room(_timer(clock), rule=rule, limits=limits)
        adapters = load_adapters()
        self._at_end(partial(close_adapters, adapters))
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
        self._outbox = Outbox() if books is None else Outbox(before=books.flush)
        proxies = TrustedProxies(map(ipaddress.ip_network, config.listen.trusted_proxies))
        engines = self._engines = Engines(self._pool)
        models = self._models = Models(expected=expected_models(config))
        self._at_end(engines.aclose)
        proxy = Proxy(engines)
        self._at_end(proxy.close)
        roster = self._roster = Roster(
            config,
            adapters=adapters,
            fleet=fleet,
            feed=feed,
            engines=engines,
            models=models,
            secret=secret,
            executor=executor,
            shadow=shadow,
        )
        prover = Prover(
            fleet=fleet,
            index=index,
            engines=engines,
            adapters=adapters,
            secret=secret,
            wanted=lambda: identity is not None and identity.mode == "keys",
            store=ProofStore(store),
            open_engines=config.isolation.open_engines == "note",
            clock=clock,
        )
        isolation = IsolationView(
            lambda: self._config.isolation, fleet=fleet, prover=prover, footprints=footprints, shadow=shadow
        )
        limiter = None if prices is None else await self._open_limits(prices)
        placement = brain if self._door is None else await self._stack.enter_async_context(self._door(brain))
        gateway = self._gateway = Gateway(
            models,
            placement,
            proxy,
            listeners=(telemetry.observe, roster.observe, *self._listeners),
            body_limit=int(config.listen.max_body_bytes),
            receipts=config.listen.receipts,
            access=access_log(proxies) if config.listen.access_log else None,
            forward_headers=config.listen.forward_headers,
            tools_order=tools_order,
            ledger=None if books is None else books.ledger,
            field_rules=FieldRules(safe=config.isolation.safe_fields, media_hosts=config.isolation.media_hosts),
            retry_share=config.failover.share,
            on_fault=telemetry.fault,
            limiter=limiter,
            dice=dice,
            pseudonym=partial(pseudonym, key_pepper),
        )
        self.live = LiveView(
            fleet=fleet,
            brain=brain,
            models=models,
            roster=roster,
            telemetry=telemetry,
            trace_log=trace_log,
            clock=clock,
            config=lambda: self._config,
            compare=self._compare_file,
            reload=self.reload,
            shadows=self._shadow_figures,
            identity=identity,
            limits=dict if limiter is None else limiter.state,
            isolation=isolation.report,
        )
        self._edge = Edge(
            gateway,
            models,
            readiness=self.live.readiness,
            identify=identity,
            is_open=None if identity is None else lambda: identity.mode == "open",
            origins=config.listen.cors.origins,
        )

        # Life
        await feed.start()
        self._at_end(feed.stop)
        await roster.start()
        self._at_end(roster.stop)
        prover.start()
        self._at_end(prover.stop)
        self._save = partial(_save, index_file, index, secret, feed)
        self._every(config.index.save_every_s, self._save, at_end=True)
        self._stack.push_async_callback(self._spawned(telemetry.sample_lag()))
        if books is not None:
            books.start()
            self._at_end(books.stop)  # after the last request, whose listening ends before
        await self._listen(self._edge, proxies)
        await self._serve_admin()

    async def _identify(self, key_pepper: bytes, salts: Salts) -> Identity | None:
        """None: nobody is asked who they are."""
        config = self._config
        auth, listen = config.auth, config.listen
        if auth.mode == "open":
            return None
        callers = Callers(
            self.store,
            pepper=key_pepper,
            salt_of=salts.of,
            refresh_s=auth.refresh_s,
            stale_s=auth.stale_s,
        )
        identity = Identity(
            callers,
            needs_key=auth.mode == "keys",
            private=is_loopback(listen.host) or asks_for_certificates(listen.tls),
            header=identity_header(auth),
        )
        await identity.refresh()
        self._every(auth.refresh_s, identity.refresh, at_end=False)
        return identity

    async def _keep_prices(self) -> Prices:
        prices = Prices()
        read = partial(_read_prices, prices, self.store)
        await read()
        self._every(self._config.auth.refresh_s, read, at_end=False)
        return prices

    def _keep_books(
        self, state: Path, prices: Prices | None, engines: Callable[[], Iterable[EngineThere]]
    ) -> Bookkeeping | None:
        """None: nothing is kept of what requests cost."""
        config, settings = self._config, self._config.ledger
        if not settings.enabled:
            return None
        spool = open_spool(state, int(config.store.spool_max_bytes), is_synced=settings.fsync_s is not None)
        needed = prices if settings.on_missing_price == "refuse" else None
        return Bookkeeping(
            Ledger(spool, prices=needed),
            spool,
            WriterSettings(
                folder=state / FOLDER,
                unknown_cached=settings.unknown_cached,
                currency=settings.currency,
                retention_days=config.store.retention_days,
            ),
            store_url(config, state),
            engines=engines,
            in_process=self._in_processes,
            fsync_s=settings.fsync_s,
        )

    # --- while it runs

    async def drain(self, *, accept: bool = True, hurry: asyncio.Event) -> int:
        """Until nothing runs any more, as `listen.drain` says; `hurry` cuts every wait short.

        accept: whether new requests are still taken for a while. Returns how many requests were ended with an error.
        """
        settings = self._config.listen.drain
        self.live.draining = True
        saving = asyncio.ensure_future(self._save())  # now: whoever waits for us may lose patience before the end
        try:
            return await life.drain(
                self._server,
                self._edge,
                accept_s=settings.accept_s if accept else 0.0,
                finish_s=settings.finish_s,
                hurry=hurry,
            )
        finally:
            self._hurried = hurry.is_set()
            if self._hurried:
                saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)

    async def _end_requests(self) -> None:
        """What `drain` has left, or all if nobody called it."""
        await life.drain(self._server, self._edge, accept_s=0.0, finish_s=self._drain_s, hurry=asyncio.Event())

    async def reload(self) -> dict[str, Any]:
        """`core.Live.reload`. The new configuration is checked as a whole before any of it is taken over."""
        if self._read_again is None:
            raise Conflict("There is nothing to reload: the gateway was started without a configuration file.")
        async with self._reloading:
            if self.live.draining:
                raise Conflict("The gateway is about to end.")
            try:
                read = await asyncio.to_thread(self._read_again)
                taken = compare(self._config, read)
                policies, by_model, shadows = self._policies_of(taken.in_force)
            except ConfigError as error:
                for mistake in error.mistakes:
                    log.error("not reloaded: %s", mistake)
                return {"mistakes": list(error.mistakes)}
            self._take_policies(taken.in_force, policies, by_model, shadows)
            taken_over = self._take_over(taken.in_force)
        log.info("reloaded: %s", ", ".join(taken.changed) or "nothing has changed")
        for key in taken.needs_restart:
            log.warning("%s has changed and needs a restart", key)
        return {
            "changed": list(taken.changed),
            "engines": taken_over.engines._asdict(),
            "prompts_read_anew": list(taken_over.read_anew),
            "needs_restart": list(taken.needs_restart),
            "notes": list(read.notes),
        }

    async def _compare_file(self) -> dict[str, Any]:
        """What its file says by now and is not in force: what a reload would take over, and what needs a restart."""
        if self._read_again is None:
            return {"changed": [], "needs_restart": []}
        try:
            taken = compare(self._config, await asyncio.to_thread(self._read_again))
        except ConfigError as error:
            return {"changed": [], "needs_restart": [], "mistakes": list(error.mistakes)}
        return {"changed": list(taken.changed), "needs_restart": list(taken.needs_restart)}

    def _shadow_figures(self) -> dict[str, dict[str, float]]:
        return {} if self._shadows is None else self._shadows.figures()

    def _policies_of(self, config: Config) -> tuple[dict[str, Policy], dict[str, str], Shadows | None]:
        """As configured, those that are the same as before being the same objects: a policy may remember things."""
        before, policy = self._config.policy, config.policy
        policies, by_model = load_policies(config, self._dice)
        for name in self._policies.keys() & policies.keys():
            if weights(before, name) == weights(policy, name):
                policies[name] = self._policies[name]
        same = policy.shadow == before.shadow
        return policies, by_model, self._shadows if same else open_shadows(policy, _timer(self._clock), self._clock)

    def _take_policies(
        self, config: Config, policies: dict[str, Policy], by_model: dict[str, str], shadows: Shadows | None
    ) -> None:
        self._policies, self._shadows = policies, shadows
        self._brain.reconfigure(
            policies=policies,
            default_policy=config.policy.name,
            model_policies=by_model,
            ttft_slo_ms=ttft_slo_ms(config.policy),
            shadows=shadows,
        )

    def _take_over(self, config: Config) -> Changes:
        """In one turn of the loop: no request sees half of it."""
        before, self._config = self._config, config
        if self._brain.room is not None:
            self._brain.room.reconfigure(*room_settings(config.waiting_room))
        if config.timeouts.connect_s != before.timeouts.connect_s:
            self._engines.renew_pools()
        self._gateway.budget.share = config.failover.share
        self._models.expect(expected_models(config))
        return self._roster.reconfigure(config)

    # --- listening

    async def _listen(self, edge: Edge, proxies: TrustedProxies) -> None:
        listen = self._config.listen
        tls = None
        if listen.tls is not None:
            certificates = await asyncio.to_thread(ServerContext, listen.tls.settings())
            self._stack.push_async_callback(self._spawned(certificates.watch()))
            tls = certificates.context
        try:
            self._server = server = await serve(
                edge,
                host=listen.host,
                port=listen.port,
                limits=http_limits(listen),
                tls=tls,
                behind=proxies if listen.proxy_protocol else None,
                refuser=edge.refuse,
                outbox=self._outbox,
            )
        except OSError as error:  # a port in use, or one that is not ours to take
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise WarmrouteError(f"Cannot listen on {listen.host}:{listen.port}: {reason}") from error
        self._at_end(self._end_requests)
        self.url = f"{_scheme(listen.tls)}://{_host(listen.host)}:{server.port}"

    async def _serve_admin(self) -> None:
        self.admin_url = None
        if self._admin == "off":
            return
        admin, settings = self._config.admin, admin_settings(self._config)
        serving = admin_process.served(self.live, settings) if self._admin == "process" else served(self.live, settings)
        port = await self._stack.enter_async_context(serving)
        self.admin_url = f"{_scheme(admin.tls)}://{_host(admin.host)}:{port}"
        if admin.tls is None:  # else who asks must know its certificate, and may have to show one
            accounts = AccountRelay(f"http://{_host(_reached(admin.host))}:{port}")
            self._at_end(accounts.aclose)
            self._edge.offer_accounts(accounts, ACCOUNT_ROUTES)

    # --- pieces

    async def _open_limits(self, prices: Prices) -> Limiter:
        redis, auth = self._config.redis, self._config.auth
        limits = open_limits(
            self.store,
            price_of=prices.now,
            unknown_cached=self._config.ledger.unknown_cached,
            redis_url=None if redis.url is None else redis.url.get_secret_value(),
            redis_timeout_s=redis.timeout_s,
            refresh_s=auth.refresh_s,
        )
        try:
            return await self._stack.enter_async_context(limits)
        except ValueError as error:
            raise ConfigError(["redis.url: must be redis://[:PASSWORD@]HOST:PORT[/DB] or rediss://…"]) from error

    def _pool(self, instance: Instance) -> Pool:
        limits = PoolLimits(connect_s=self._config.timeouts.connect_s)
        return Pool(instance.url, limits=limits, tls=instance.tls, outbox=self._outbox)

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

        async def last() -> None:
            if not self._hurried:
                await work()

        if at_end:
            self._stack.push_async_callback(last)
        self._stack.push_async_callback(self._spawned(loop()))


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


def access_log(proxies: TrustedProxies) -> Callable[[Request], Callable[[Outcome], None]]:
    """Who the client is, is found when it comes: its request is gone when it has ended."""
    return lambda request: partial(log_access, client=proxies.client(request))


def engines_there(fleet: Fleet) -> Iterator[EngineThere]:
    """As the ledger notes them."""
    for instance in fleet.instances():
        ranks = fleet.ranks(instance.id)
        yield EngineThere(instance.id, instance.price_per_hour, len(ranks), sum(rank.capacity_tokens for rank in ranks))


async def _read_prices(prices: Prices, store: Database) -> None:
    """Those that are known go on where they cannot be read."""
    try:
        await prices.refresh(store)
    except StoreUnavailable:
        pass  # told by who reads the keys
    except Exception as unexpected:  # of a database without tables, e.g.; it must not be the last time
        log.warning("prices cannot be read: %s", place_of(unexpected))


async def _save(path: Path, index: BlockIndex, secret: bytes, feed: Feed) -> None:
    try:
        await persist.save(path, index, secret=secret, position=feed.position)
    except OSError as error:
        log.warning("the index could not be saved: %s", error.strerror)


def run(config: Config, *, read_again: ReadAgain | None = None) -> None:
    """`warmroute serve`: until SIGTERM or ctrl-c, then drains. Raises WarmrouteError for what cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config.prepare_process()
    _allow_open_files()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    uvloop.run(_run(config, read_again))


def _allow_open_files() -> None:
    """As many as the system lets us have: a stream takes two, and the 1,024 of most shells are soon used up."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run(config: Config, read_again: ReadAgain | None) -> None:
    running = Running(config, admin="process", read_again=read_again)
    with Signals(reload=running.reload).heard() as told:
        async with running:
            gc.collect()
            gc.freeze()  # what was built at the start is not looked at again by every collection
            log.info("warmroute %s: base_url %s/v1, admin %s", __version__, running.url, running.admin_url or "off")
            await told.stop.wait()
            log.info("draining")
            await running.drain(accept=not told.at_once, hurry=told.hurry)


def _scheme(tls: ListenTls | None) -> str:
    return "http" if tls is None else "https"


def _reached(host: str) -> str:
    """Where this machine reaches what listens there."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
