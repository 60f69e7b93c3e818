"""How an engine joins the fleet, and what follows from it: its adapter, its public model, that model's prompts.

    url --discovery--> addresses --recognise--> adapter --inspect--> public model --> feed, engines, prompts, parity

An engine that does not answer yet is tried again for as long as it is configured; until its kind and model are known it
is shown as pending and gets nothing. One that is no longer configured, or whose address has gone, gets nothing new, and
is forgotten some time after its last request has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from router import plugins
from router.config import Config, Engine, Model
from router.core import Adapter, EngineFacts, Instance, Outcome, Rates
from router.errors import EngineError, EngineProtocolError, EngineTimeout, EngineUnreachable
from router.routing.feed import Feed
from router.routing.fleet import Fleet, Health, Rank
from router.serving.deadlines import TimeLimits
from router.serving.engines import Engines
from router.serving.failover import FailoverRule, Fault
from router.serving.isolation.shadow import IsolationShadow
from router.serving.models import Models, ServedModel
from router.serving.prompt import ModelPrompts, Parity, PromptLimits, check, load_prompts
from router.serving.split import arms

log = logging.getLogger("warmroute.roster")

OPERATOR = "by the operator"
RETRY_S = 2.0
SPARE_SHARE = 0.05  # of the loop's time, for tokens that only make a prediction exact
REFRESH_S = 1.0
LEAVING_POLL_S = 0.2
KEPT_S = 30.0
"""How long at least an engine that is gone is remembered. Names lose an address for some seconds where a busy engine
fails a probe, and files are edited twice: its cache is still there then."""
HANDOVER_S = 300.0
"""How long at most engines that left the configuration serve on where those that replace them have not joined."""
UNREPORTED_ANSWERS = 3  # answers to warm prompts without a cached count before the operator is told

REPORT_FLAGS = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}


class Discovery(Protocol):
    """Finds the engines behind a name (entry points `warmroute.discovery`)."""

    def changes(self) -> AsyncGenerator[set[str]]:
        """All URLs now, and again whenever they differ."""
        ...


def load_adapters() -> dict[str, Any]:
    """One of each installed adapter, by name; the caller closes them (`close_adapters`)."""
    return {name: plugins.load(plugins.ADAPTERS, name)() for name in plugins.names(plugins.ADAPTERS)}


async def close_adapters(adapters: Mapping[str, Any]) -> None:
    """All that are there by now: those that engines name by `module:attr` come later than the installed ones."""
    for adapter in adapters.values():
        await adapter.aclose()


async def recognise(engine: Engine, url: str, adapters: Mapping[str, Any]) -> str:
    """The name of the adapter that knows best what answers at `url`. Raises EngineError when none does, and when one
    that may know better than the best has had no answer: an engine keeps its adapter for as long as it is there.
    """
    if engine.kind != "auto":
        return engine.kind
    instance = engine.instance(engine="auto", model=engine.model or "", url=url)
    scores: dict[str, float] = {}
    failure: EngineError = EngineProtocolError("nothing there answers as an engine does")
    unanswered = False
    for name, adapter in adapters.items():
        try:
            scores[name] = await adapter.recognises(instance)
        except EngineError as error:
            failure = error
            unanswered = unanswered or isinstance(error, EngineTimeout | EngineUnreachable)
    best = max(scores, key=scores.__getitem__, default="")
    score = scores.get(best, 0.0)
    if not score or (unanswered and score < 1.0):
        raise failure
    return best


Stamps = dict[Path, tuple[int, int] | None]


class _Member:
    """An entry of the configuration, and the engines it has become."""

    __slots__ = ("engine", "ids", "joins", "search")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ids: dict[str, str] = {}  # URL → instance, of those that have joined
        self.joins: dict[str, asyncio.Task[None]] = {}  # URL → its way in
        self.search: asyncio.Task[None] | None = None  # for addresses behind a name

    def stop(self) -> None:
        """Look for nobody any more."""
        for task in (*self.joins.values(), *filter(None, [self.search])):
            task.cancel()


class EngineChanges(NamedTuple):
    """Names of configured engines."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class Changes(NamedTuple):
    """`read_anew`: models whose prompts are read in another way, or with other files."""

    engines: EngineChanges
    read_anew: tuple[str, ...]


class Roster:
    """Every configured engine, from its URL to the model it serves. `start` and `stop` on the running loop.

    `secret` roots all block keys; `executor` runs what takes longer than the loop may wait.
    """

    def __init__(
        self,
        config: Config,
        *,
        adapters: dict[str, Any],
        fleet: Fleet,
        feed: Feed,
        engines: Engines,
        models: Models,
        secret: bytes,
        executor: Executor,
        shadow: IsolationShadow | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._shadow = shadow
        self._adapters = adapters
        self._fleet = fleet
        self._feed = feed
        self._engines = engines
        self._models = models
        self._secret = secret
        self._executor = executor
        self._clock = clock
        self.prompts: dict[str, ModelPrompts] = {}
        self.pending: dict[str, str] = {}  # URL → why it has not joined
        self._found: dict[str, Parity] = {}  # by instance
        self._checked: dict[str, str | None] = {}  # instance → the process that was compared
        self._created = int(time.time())
        self._shown: list[ServedModel] = []
        self._turn = itertools.count()
        self._members: dict[str, _Member] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}  # by instance
        self._held: set[str] = set()  # instances that the operator has drained
        self._rates: dict[str, Rates | None] = {}  # by instance, as configured
        self._files: dict[str, Stamps] = {}  # by model: of its tokenizer and template, when they were loaded
        self._stale: set[str] = set()  # models whose prompts are to be read otherwise
        self._left: set[str] = set()  # models of engines that have gone
        self._tasks: set[asyncio.Task[None]] = set()
        self._unreported: dict[str, int] = {}

    async def start(self) -> None:
        for engine in self._config.engines:
            self._enter(engine)
        self._spawn(self._refresh())

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def reconfigure(self, config: Config) -> Changes:
        """Takes over engines and models. Those that stay as they are notice nothing."""
        before, self._config = self._config, config
        renamed = before.aliases != config.aliases
        wanted = {_key(engine): engine for engine in config.engines}
        removed = [key for key in self._members if key not in wanted]
        added = [key for key in wanted if key not in self._members]
        changed = [key for key in wanted if key not in added and wanted[key] != self._members[key].engine]
        moved = [key for key in wanted if renamed and wanted[key].model is None and key not in (*added, *changed)]
        going = [gone for key in removed for gone in self._dismiss(self._members.pop(key))]
        for key in (*added, *changed, *moved):
            going += self._enter(wanted[key], self._members.get(key))
        for instance_id, reason in going:  # now that those have entered who may replace them
            self._hand_over(instance_id, reason)
        read_anew = tuple(
            name for name in {**self.prompts, **self._fleet.models()} if self._is_read_otherwise(name, before)
        )
        self._stale.update(read_anew)
        self._list_models()
        return Changes(EngineChanges(tuple(added), tuple(changed), tuple(removed)), read_anew)

    def _is_read_otherwise(self, name: str, before: Config) -> bool:
        config = self._config
        if before.prompt != config.prompt or _reading(before.model(name)) != _reading(config.model(name)):
            return True
        return any(_stamp(file) != stamp for file, stamp in self._files.get(name, {}).items())

    # --- joining

    def _enter(self, engine: Engine, before: _Member | None = None) -> list[tuple[str, str]]:
        """`before`: what the entry was until now. Its engines serve on until they have been looked at anew.

        Returns those that it does not name any more, and why they are to go.
        """
        member = self._members[_key(engine)] = _Member(engine)
        if before is not None:
            before.stop()
            self._forget_pending(before)
            member.ids = before.ids
        if engine.discovered:
            member.search = self._spawn(self._discover(member))
            return []
        member.joins[engine.url] = self._spawn(self._join(member, engine.url))
        others = [url for url in member.ids if url != engine.url]
        return [(member.ids.pop(url), "the configuration names another url") for url in others]

    def _dismiss(self, member: _Member) -> list[tuple[str, str]]:
        """Its engines, and why they are to go."""
        member.stop()
        self._forget_pending(member)
        return [(instance_id, "removed from the configuration") for instance_id in member.ids.values()]

    def _forget_pending(self, member: _Member) -> None:
        for url in (member.engine.url, *member.joins):
            self.pending.pop(url, None)

    async def _discover(self, member: _Member) -> None:
        """All addresses behind a name, for as long as it is configured."""
        engine, joins = member.engine, member.joins
        scheme, _, rest = engine.url.partition("+")
        parts = urlsplit(rest)
        kind = plugins.load("warmroute.discovery", scheme)
        discovery: Discovery = kind(parts.hostname, parts.port or 80, scheme=parts.scheme)
        self.pending[engine.url] = "the name has no address yet"
        async for urls in discovery.changes():
            for url in [url for url in {*joins, *member.ids} if url not in urls]:
                if url in joins:
                    joins.pop(url).cancel()
                if url in member.ids:
                    self._leave(member.ids.pop(url), "its address is gone from the name")
                self.pending.pop(url, None)
            for url in urls:
                if url not in joins:
                    joins[url] = self._spawn(self._join(member, url))
            self.pending.pop(engine.url, None)
            if not urls:
                self.pending[engine.url] = "the name has no address"

    async def _join(self, member: _Member, url: str) -> None:
        engine = member.engine
        while True:
            try:
                instance = await self._identify(engine, url)
                break
            except EngineError as error:
                if self.pending.get(url) != error.message:
                    log.warning("%s has not joined: %s", url, error.message)
                self.pending[url] = error.message
            await asyncio.sleep(RETRY_S)
        self.pending.pop(url, None)
        member.ids[url] = instance.id
        self._take(instance, engine.rates.rates() if engine.rates else None)

    def _take(self, instance: Instance, rates: Rates | None) -> None:
        """A new engine, one with other settings, or one that was about to leave."""
        known = self._engines.instance(instance.id)
        leaving = self._leaving.pop(instance.id, None)
        if leaving is not None:
            leaving.cancel()
            self._fleet.undrain(instance.id, now=self._clock())
        if known != instance or self._rates.get(instance.id) != rates:
            self._put(instance, rates, known)
        if instance.id in self._held:
            self._fleet.drain(instance.id, OPERATOR, now=self._clock())

    def _put(self, instance: Instance, rates: Rates | None, known: Instance | None) -> None:
        if known is not None and _body(known) != _body(instance):
            self._feed.remove(instance.id)  # what was believed of it does not hold for what it is now
        self._checked.pop(instance.id, None)
        self._found.pop(instance.id, None)
        self._rates[instance.id] = rates
        self._engines.add(instance, self._adapters[instance.engine])
        self._feed.add(instance, rates=rates)

    async def _identify(self, engine: Engine, url: str) -> Instance:
        kind = await recognise(engine, url, self._adapters)
        if kind not in self._adapters:  # "module:attr"
            self._adapters[kind] = plugins.load(plugins.ADAPTERS, kind)()
        if engine.model is not None:
            return engine.instance(engine=kind, model=engine.model, url=url)
        facts = await self._adapters[kind].inspect(engine.instance(engine=kind, model="", url=url))
        name = engine.served or (facts.served[0] if facts.served else None)
        if name is None:
            raise EngineProtocolError("the engine lists no model")
        return engine.instance(engine=kind, model=self._config.aliases.get(name, name), url=url)

    # --- leaving

    def is_leaving(self, instance_id: str) -> bool:
        """It is no longer configured, and will be gone when its requests are."""
        return instance_id in self._leaving

    def drain(self, instance_id: str) -> None:
        """By the operator: until `undrain`, or until it is gone."""
        self._held.add(instance_id)
        self._fleet.drain(instance_id, OPERATOR, now=self._clock())

    def undrain(self, instance_id: str) -> None:
        """For one that is not leaving."""
        self._held.discard(instance_id)
        self._fleet.undrain(instance_id, now=self._clock())

    def _leave(self, instance_id: str, reason: str, *, after: float = 0.0) -> None:
        """No new requests; what it holds stays known until those that run have ended: it may come back before.

        `after`: seconds for which it serves on where it is the last of its model.
        """
        if instance_id not in self._leaving:
            self._leaving[instance_id] = self._spawn(self._go(instance_id, reason, until=self._clock() + after))
        if not after:
            self._fleet.drain(instance_id, reason, now=self._clock())

    def _hand_over(self, instance_id: str, reason: str) -> None:
        """It leaves when an engine serves its model that stays, or none is to come."""
        known = self._engines.instance(instance_id)
        serves = any(rank.health is Health.READY for rank in self._fleet.ranks(instance_id))
        if known is None or not serves or not self._is_missed(known.model):
            self._leave(instance_id, reason)
            return
        log.warning("%s serves on until another engine of %s has joined: %s", instance_id, known.model, reason)
        self._leave(instance_id, reason, after=HANDOVER_S)

    def _is_missed(self, model: str) -> bool:
        """Of the engines that stay none serves it yet, and one may come to."""
        members = self._members.values()
        if not any(self._may_serve(member, model) for member in members):
            return False
        staying = {instance_id for member in members for instance_id in member.ids.values()}
        ranks = self._fleet.models().get(model, ())
        return not any(rank.health is Health.READY and rank.instance.id in staying for rank in ranks)

    async def _go(self, instance_id: str, reason: str, *, until: float) -> None:
        known = self._engines.instance(instance_id)
        while known is not None and self._clock() < until and self._is_missed(known.model):  # noqa: ASYNC110 (too)
            await asyncio.sleep(LEAVING_POLL_S)
        self._fleet.drain(instance_id, reason, now=self._clock())
        await asyncio.sleep(KEPT_S)
        while any(rank.booked.requests for rank in self._fleet.ranks(instance_id)):  # noqa: ASYNC110 (seldom, and cheap)
            await asyncio.sleep(LEAVING_POLL_S)
        del self._leaving[instance_id]
        self._held.discard(instance_id)
        known = self._engines.instance(instance_id)
        self._feed.remove(instance_id)
        self._engines.remove(instance_id)
        for told in (self._checked, self._found, self._rates, self._unreported):
            told.pop(instance_id, None)
        if known is not None:
            self._left.add(known.model)

    # --- models and their prompts

    async def _refresh(self) -> None:
        """Follows what the fleet learns: models and adapters to list, prompts to load, engines to compare with."""
        while True:
            for name, ranks in self._fleet.models().items():
                known = [rank for rank in ranks if rank.facts.served]
                if known and (name not in self.prompts or name in self._stale):
                    self._stale.discard(name)
                    await self._load_prompts(name, known[0])
            self._drop_models()
            self._list_models()
            for instance in self._fleet.instances():
                await self._compare(instance)
            await asyncio.sleep(REFRESH_S if self._shown else 0.05)

    def _drop_models(self) -> None:
        """Those that nobody serves any more, nor will: clients try again after a 503, not after a 404."""
        served = self._fleet.models().keys()
        for name in list(self._left):
            if name in served or not any(self._may_serve(member, name) for member in self._members.values()):
                self._left.discard(name)
                if name not in served:
                    self.prompts.pop(name, None)
                    self._files.pop(name, None)
                    self._stale.discard(name)

    @staticmethod
    def _may_serve(member: _Member, name: str) -> bool:
        """It says so, or it has not told yet what it serves."""
        engine = member.engine
        return engine.model == name or (engine.model is None and (engine.discovered or not member.ids))

    def _list_models(self) -> None:
        shown = [
            ServedModel(
                name=name,
                prompts=prompts,
                aliases=self._config.model(name).aliases,
                loras=tuple(sorted(self._fleet.loras(name))),
                max_model_tokens=self._fleet.max_model_tokens(name),
                created=self._created,
                limits=_limits(self._config, name),
                failover=_failover(self._config, name),
                fallbacks=self._config.model(name).fallbacks,
                larger=self._config.model(name).context_window_fallbacks,
                keep_alive_comments_s=self._config.model(name).keep_alive_comments_s,
            )
            for name, prompts in self.prompts.items()
        ]
        shown += self._splits({model.name: model for model in shown})
        if shown != self._shown:
            self._models.replace(shown)
            self._shown = shown

    def _splits(self, served: Mapping[str, ServedModel]) -> Iterator[ServedModel]:
        """Names that stand for several models, once one of these is there."""
        for name, settings in self._config.models.items():
            of = [served[arm] for arm in settings.split if arm in served]
            if of and name not in served:
                split = arms(settings.split)
                yield ServedModel(name, of[0].prompts, aliases=settings.aliases, created=self._created, split=split)

    async def _load_prompts(self, name: str, rank: Rank) -> None:
        settings, dialect = self._config.model(name), rank.instance.engine
        tokenizer = _tokenizer(settings, rank.facts)
        self._files[name] = {file: _stamp(file) for file in _files(settings, tokenizer)}
        prompts = await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: self._make_prompts(name, settings, tokenizer, dialect)
        )
        prompts.engine_tokenize = None if settings.tokenizer == "none" else lambda p, b: self._tokenize(name, p, b)
        prompts.shadow = self._shadow
        if tokenizer is None:
            prompts.settle(Parity("DEGRADED", _no_tokenizer(settings)))
        self.prompts[name] = prompts
        for instance in self._fleet.instances():
            if instance.model == name:
                self._checked.pop(instance.id, None)
                self._found.pop(instance.id, None)

    def _make_prompts(self, name: str, settings: Model, tokenizer: str | None, dialect: str) -> ModelPrompts:
        reading = self._config.prompt
        return load_prompts(
            name,
            tokenizer=tokenizer,
            secret=self._secret,
            block_sizes=partial(self._fleet.block_sizes, name),
            executor=self._executor,
            chat_template=settings.chat_template,
            template_variables=settings.chat_template_kwargs,
            dialect=dialect,
            limits=PromptLimits(
                memo_bytes=int(reading.memo_bytes),
                wait_s=reading.wait_ms / 1e3,
                always=settings.tokenize == "always",
                spare_share=SPARE_SHARE,
            ),
            unseen_counts=lambda: self._fleet.unseen_counts(name, self._clock()),
            on_difference=settings.parity,
        )

    async def _tokenize(self, model: str, path: str, body: Mapping[str, Any]) -> list[int]:
        """By one of the model's engines, in turn."""
        ready = [r for r in self._fleet.models().get(model, ()) if r.health is Health.READY and r.rank == 0]
        if not ready:
            raise EngineUnreachable("no engine of the model is ready")
        instance = ready[next(self._turn) % len(ready)].instance
        adapter: Adapter = self._adapters[instance.engine]
        return await adapter.tokenize(instance, path, body)

    # --- parity

    async def _compare(self, instance: Instance) -> None:
        """Our tokens with this engine's, once for each of its processes."""
        rank = self._fleet.rank(instance.id, 0)
        prompts = self.prompts.get(instance.model)
        settings = self._config.model(instance.model)
        if rank is None or prompts is None or rank.health is not Health.READY or prompts.dialect is None:
            return
        if settings.parity == "off":
            if prompts.parity.state == "UNCHECKED" and prompts.parity.reason != _NOT_COMPARED.reason:
                prompts.settle(_NOT_COMPARED)
            return
        if self._checked.get(instance.id, "") == rank.facts.boot_id and instance.id in self._checked:
            return
        self._checked[instance.id] = rank.facts.boot_id
        for note in rank.facts.notes:
            log.warning("%s: %s", instance.id, note)
        await self._check(instance, prompts)

    async def _check(self, instance: Instance, prompts: ModelPrompts) -> None:
        adapter: Adapter = self._adapters[instance.engine]
        self._found[instance.id] = found = await check(prompts, lambda p, b: adapter.tokenize(instance, p, b))
        members = {i.id for i in self._fleet.instances() if i.model == instance.model}
        worst = next((p for i, p in self._found.items() if i in members and p.state == "DEGRADED"), None)
        if worst is not None and found.state != "DEGRADED":  # one engine of a mixed fleet agrees, another does not
            prompts.settle(worst)

    async def compare_again(self, model: str | None) -> list[dict[str, Any]]:
        """The parity probe on demand: one row an engine."""
        rows = []
        for instance in self._fleet.instances():
            prompts = self.prompts.get(instance.model)
            if prompts is None or model not in (None, instance.model):
                continue
            await self._check(instance, prompts)
            rows.append({"instance": instance.id, "model": instance.model} | _parity_row(self._found[instance.id]))
        return rows

    def parity(self, model: str) -> dict[str, Any]:
        """State of a model's prompts, and how they are read now."""
        prompts = self.prompts[model]
        return _parity_row(prompts.parity) | {"mode": prompts.mode}

    # --- what answers tell

    def observe(self, outcome: Outcome) -> None:
        """Listener: an engine that never reports cached counts is named, with the flag to add."""
        instance = outcome.instance
        if instance is None or outcome.usage is None or not outcome.predicted_hit_tokens:
            return
        if outcome.usage.cached_tokens is not None:
            self._unreported[instance] = -1
            return
        seen = self._unreported.get(instance, 0)
        if seen < 0 or seen > UNREPORTED_ANSWERS:
            return
        self._unreported[instance] = seen + 1
        if seen + 1 == UNREPORTED_ANSWERS:
            self._warn_unreported(instance)

    def _warn_unreported(self, instance_id: str) -> None:
        rank = self._fleet.rank(instance_id, 0)
        flag = REPORT_FLAGS.get(rank.instance.engine, "") if rank is not None else ""
        mend = f": start it with {flag}" if flag else ""
        log.warning("%s does not report cached tokens, so predicted hits cannot be checked%s", instance_id, mend)

    # --- tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the roster ended: %s", type(error).__name__, exc_info=error)


_NOT_COMPARED = Parity("UNCHECKED", "not compared, by configuration")


def _limits(config: Config, model: str) -> TimeLimits:
    general, own = config.timeouts, config.model(model).timeouts
    return TimeLimits(
        own.first_byte_s or general.first_byte_s, own.between_s or general.between_s, own.total_s or general.total_s
    )


def _failover(config: Config, model: str) -> FailoverRule:
    rule = config.model(model).failover or config.failover
    return FailoverRule(
        attempts=rule.attempts,
        retry_on=frozenset(map(Fault, rule.retry_on)),
        within_s=rule.within_s,
        wait_s=rule.wait_s,
        move_on_s=rule.move_on_s,
        resume=rule.resume,
    )


def _key(engine: Engine) -> str:
    """What stays the same when an entry is changed."""
    return engine.id or engine.address


def _body(instance: Instance) -> tuple[object, ...]:
    """What makes an engine another one: nothing that was known of its cache holds any more."""
    return instance.url, instance.engine, instance.model, instance.block_size, instance.capacity_tokens


def _reading(settings: Model) -> dict[str, Any]:
    """What decides how prompts are read."""
    return settings.model_dump(include={"tokenizer", "chat_template", "chat_template_kwargs", "parity", "tokenize"})


def _files(settings: Model, tokenizer: str | None) -> list[Path]:
    """What the prompts of a model are read with."""
    files = [settings.chat_template] if settings.chat_template is not None else []
    if tokenizer is None or tokenizer == "demo":
        return files
    if tokenizer.startswith("tiktoken:"):
        return [*files, Path(tokenizer.partition("@")[2])]
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return [*files, *(Path(tokenizer) / name for name in names)]


def _stamp(file: Path) -> tuple[int, int] | None:
    """Changes with the file. None: it is not there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _tokenizer(settings: Model, facts: EngineFacts) -> str | None:
    """As configured; else the engine's own files, where it runs on the same machine."""
    if settings.tokenizer in ("engine", "none"):
        return None
    if settings.tokenizer is not None:
        return str(settings.tokenizer)
    files = Path(facts.model_path) if facts.model_path else None
    return str(files) if files is not None and (files / "tokenizer.json").is_file() else None


def _no_tokenizer(settings: Model) -> str:
    if settings.tokenizer in ("engine", "none"):
        return f"tokenizer: {settings.tokenizer}, by configuration"
    return "no tokenizer files here: name the model's tokenizer in the configuration"


def _parity_row(parity: Parity) -> dict[str, Any]:
    row: dict[str, Any] = {"state": parity.state, "reason": parity.reason, "compared": parity.compared}
    if parity.probe is not None:
        row |= {"probe": parity.probe, "position": parity.position}
    return row
