"""What is right by itself and wrong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from router.config.engines import Events
from router.config.models import Failover
from router.config.placing import PolicyChoice
from router.config.source import Where
from router.tls import BadTlsFile, check_client, check_server

if TYPE_CHECKING:
    from router.config import Config

Mistake = tuple[Where, str]
Check = Callable[["Config"], Iterable[Mistake]]


def contradictions(config: Config) -> Iterator[Mistake]:
    yield from _name_clashes(config)
    yield from _fallback_mistakes(config)
    yield from _failover_mistakes(config)
    yield from _engine_clashes(config)
    yield from _policy_clashes(config.policy)
    yield from _port_clashes(config)
    if config.listen.proxy_protocol and not config.listen.trusted_proxies:
        yield ("listen", "proxy_protocol"), "needs listen.trusted_proxies: from nobody else it would be believed"
    if config.listen.proxy_protocol and config.listen.tls is not None:
        yield ("listen", "proxy_protocol"), "comes before TLS, which is not supported with listen.tls (end TLS there)"
    yield from _identity_mistakes(config)
    drain = config.listen.drain
    if drain.accept_s > drain.finish_s:
        yield ("listen", "drain", "accept_s"), f"is longer than finish_s ({drain.finish_s:g}): no request outlives that"
    yield from _tls_mistakes(config)


def _identity_mistakes(config: Config) -> Iterator[Mistake]:
    header = config.auth.header
    if header is None:
        return
    if config.auth.mode == "open":
        yield ("auth", "header"), "does nothing with auth.mode: open, where all are one tenant"
    tls = config.listen.tls
    if not header.peers and (tls is None or tls.client_ca is None):
        yield ("auth", "header", "peers"), "is missing: without listen.tls.client_ca anybody could name any tenant"
    if header.name in config.listen.forward_headers:
        yield ("listen", "forward_headers"), f"has {header.name}, which is auth.header.name and not for engines"


def _failover_mistakes(config: Config) -> Iterator[Mistake]:
    rules: list[tuple[Where, Failover]] = [(("failover",), config.failover)]
    rules += [(("models", name, "failover"), model.failover) for name, model in config.models.items() if model.failover]
    for where, rule in rules:
        if rule.move_on_s is not None and "silent" not in rule.retry_on:
            yield (*where, "move_on_s"), 'does nothing unless retry_on has "silent"'


def _fallback_mistakes(config: Config) -> Iterator[Mistake]:
    declared = {engine.model for engine in config.engines}
    known = None if None in declared else declared | set(config.models) | set(config.aliases)
    for name, model in config.models.items():
        others: list[tuple[Where, str]] = [(("models", name, "split", other), other) for other in model.split]
        for key in ("fallbacks", "context_window_fallbacks"):
            others += [(("models", name, key, at), other) for at, other in enumerate(getattr(model, key))]
        for where, other in others:
            if other == name or config.aliases.get(other) == name:
                yield where, f"{other!r} is the model itself"
            elif known is not None and other not in known:
                yield where, f"no engine serves {other!r}"
        if model.split and name == "*":
            yield ("models", name, "split"), "is for a name of its own (write it under that)"
        elif model.split and name in declared:
            yield ("models", name, "split"), "has engines of its own (give the split another name)"
        for other in model.split:
            if other in config.models and config.models[other].split:
                yield ("models", name, "split", other), f"{other!r} is a split, too"
        if model.failover is not None and "share" in model.failover.model_fields_set:
            yield ("models", name, "failover", "share"), "is for all models together (write it under failover)"


def _name_clashes(config: Config) -> Iterator[Mistake]:
    owner: dict[str, str] = {}
    for name, model in config.models.items():
        for position, alias in enumerate(model.aliases):
            where: Where = ("models", name, "aliases", position)
            if alias == "*" or name == "*":
                yield where, "'*' stands for all other models: it has no alias and is none"
            elif alias in config.models:
                yield where, f"{alias!r} is a model of its own (take another alias)"
            elif alias in owner:
                yield where, f"{alias!r} is already an alias of {owner[alias]!r}"
            else:
                owner[alias] = name
    for position, engine in enumerate(config.engines):
        if engine.model in owner:
            yield ("engines", position, "model"), f"is an alias (write its model: {owner[engine.model]!r})"
        elif engine.model == "*":
            yield ("engines", position, "model"), "'*' is not a model (leave it out to take what the engine lists)"


def _engine_clashes(config: Config) -> Iterator[Mistake]:
    urls: dict[str, int] = {}
    ids: dict[str, int] = {}
    for position, engine in enumerate(config.engines):
        first = urls.setdefault(engine.url, position)
        if first != position:
            yield ("engines", position, "url"), f"is the same as engines[{first}].url (one entry an engine)"
            continue
        first = ids.setdefault(engine.id or engine.address, position)
        if first != position:
            yield ("engines", position, "id"), f"is the same as the id of engines[{first}] (ids must differ)"
        if not isinstance(engine.events, str):
            yield from _rank_clashes(("engines", position, "events"), engine.events)


def _rank_clashes(where: Where, sources: Sequence[Events]) -> Iterator[Mistake]:
    seen: set[int] = set()
    for position, source in enumerate(sources):
        if source.rank in seen:
            yield (*where, position, "rank"), f"rank {source.rank} is given twice (one entry a rank)"
        seen.add(source.rank)


def _policy_clashes(policy: PolicyChoice) -> Iterator[Mistake]:
    if policy.ttft_slo_per_1k_tokens_ms and policy.ttft_slo_s is None:
        yield ("policy", "ttft_slo_per_1k_tokens_ms"), "adds to ttft_slo_s, which is not given (SMetric takes 1)"
    for position, name in enumerate(policy.shadow):
        if name in policy.shadow[:position]:
            yield ("policy", "shadow", position), f"{name!r} is given twice"


def _port_clashes(config: Config) -> Iterator[Mistake]:
    listen, admin = config.listen, config.admin
    if admin.enabled and listen.port and (listen.host, listen.port) == (admin.host, admin.port):
        yield ("admin", "port"), f"is taken by listen ({listen.port}); use another"
    for position, engine in enumerate(config.engines):
        if engine.address == f"{listen.host}:{listen.port}":
            yield ("engines", position, "url"), "is the gateway's own address (write the engine's)"


def _tls_mistakes(config: Config) -> Iterator[Mistake]:
    """Files that are there but of no use; what contradicts itself."""
    for name, tls in (("listen", config.listen.tls), ("admin", config.admin.tls)):
        if tls is not None:
            try:
                check_server(tls.settings())
            except BadTlsFile as error:
                yield (name, "tls", error.key), error.what
    for position, engine in enumerate(config.engines):
        where: Where = ("engines", position, "tls")
        tls_there, settings = engine.tls, engine.client_tls
        if tls_there is None:
            continue
        if settings is None:
            yield where, "is for an https:// url (and this one is http)"
        elif tls_there.key and not tls_there.cert:
            yield (*where, "key"), "is the key of a certificate: cert is missing"
        elif tls_there.ca and not tls_there.verify:
            yield (*where, "verify"), "is false, so that ca is of no use (leave one of them out)"
        else:
            try:
                check_client(settings)
            except BadTlsFile as error:
                yield (*where, error.key), error.what
