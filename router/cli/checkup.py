"""The checks behind `warmroute doctor`: what an engine says, what it does when asked, and what it puts on the wire.

Every finding carries its mend. A check sends an engine some small requests, and nothing else that changes its state.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import httpx
import msgspec

from router.cli.event_probe import EventProbe, Heard
from router.core import Adapter, ClientTls, EngineFacts, EventSource, Instance
from router.errors import EngineError
from router.routing.proof import prove
from router.serving.isolation.catalogue import unreviewed
from router.tls import server_name

State = Literal["ok", "warn", "fail", "skip"]

REACHABLE = "reachable"
EVENTS = "events"
REPLAY = "replay"
PREFIX_CACHING = "prefix caching"
CACHED_COUNTS = "cached counts"
BLOCK_SIZE = "block size"
PAGE_SIZE = "page size"
KEY = "key"
EVENT_PORT = "event port"
ISOLATION = "isolation"
FIELDS = "request fields"
PARITY = "parity"
TLS = "tls"
NOTES = "engine's word"

_EVENTS_MEND = (
    'start the engine with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\' (SGLang: less the first key), or set events: off'
)
_BIND_MEND = (
    'write "endpoint": "tcp://*:PORT": with tcp://0.0.0.0:PORT vLLM connects instead of binding; or open the port'
)
_SILENT_MEND = (
    "check enable_kv_cache_events, publisher (zmq) and topic in --kv-events-config, and that prefix caching is on"
)
_REPLAY_MEND = 'add "replay_endpoint": "tcp://*:5657" to --kv-events-config: without it a gap forgets the whole engine'
_CACHED_MEND = "start it with --enable-prompt-tokens-details (vLLM) or --enable-cache-report (SGLang)"
_TLS_MEND = "correct engines[].tls: ca (whom to trust), server_name (its name), cert and key (what it is shown)"
_ISOLATION_MEND = "see why it refuses /v1/completions; without them it cannot be seen whether it keeps caches apart"
_FIELDS_MEND = "review them and name those that are safe in isolation.safe_fields; isolated keys may not set the others"
_PROBE_BLOCKS = 4
_PROBE_TIMEOUT_S = 60.0


class Finding(msgspec.Struct, frozen=True):
    check: str
    engine: str  # instance id; "*" for what concerns several
    state: State
    seen: str
    mend: str = ""


class Examined(NamedTuple):
    instance: Instance
    facts: EngineFacts | None
    findings: list[Finding]


async def examine(
    instance: Instance, adapter: Adapter, client: httpx.AsyncClient, *, isolates: bool = False
) -> Examined:
    """All checks of one engine. Never raises for what the engine does.

    isolates: the gateway keeps tenants' caches apart, so that what lets others into the engine is a failure.
    """
    try:
        facts = await adapter.inspect(instance)
    except EngineError as error:
        return Examined(instance, None, [unreachable(instance, error.message, error.detail)])
    served = ", ".join((*facts.served, *facts.loras))
    seen = f"{adapter.name} {facts.version or '(version unknown)'} serves {served}"
    findings = [Finding(REACHABLE, instance.id, "ok", seen)]
    sources = facts.sources if instance.events is None else instance.events
    async with EventProbe(sources) as events:
        counts = await _cached_counts(instance, facts, client)
        heard = await events.heard()
        replayed = await events.replayed()
        isolation = await _isolation(instance, adapter, facts, events, isolates=isolates)
    any_heard = any(at_rank.messages for at_rank in heard.values())
    findings += [_events(instance, source, heard[source.rank], any_heard=any_heard) for source in sources]
    findings += [_replay(instance, source, replayed[source.rank]) for source in sources]
    if instance.events == ():
        findings.append(Finding(EVENTS, instance.id, "skip", "off by configuration: placed by what was sent there"))
    elif not sources:
        findings.append(Finding(EVENTS, instance.id, "warn", "it publishes no KV events", _EVENTS_MEND))
    findings += [
        _prefix_caching(instance, facts),
        counts,
        _block_size(instance, facts),
        _key(instance, facts, isolates),
    ]
    findings += [isolation, *await _fields(instance, adapter)]
    findings += _tls(instance)
    findings += await _event_ports(instance, sources, events, isolates)
    findings += [Finding(NOTES, instance.id, "warn", *_split(note)) for note in facts.notes]
    return Examined(instance, facts, findings)


def unreachable(instance: Instance, why: str, detail: str = "") -> Finding:
    """An engine that cannot be asked; `why` is an EngineError's message."""
    if why.startswith("tls_"):
        return Finding(TLS, instance.id, "fail", why, _TLS_MEND)
    mend = "start it, or correct its url; with --api-key, set api_key; where it is of a rare kind, kind: openai"
    return Finding(REACHABLE, instance.id, "fail", why, mend + (f" ({detail})" if detail else ""))


def compare(examined: Sequence[Examined]) -> list[Finding]:
    """What only shows beside others: one model in blocks of different size is read, and keyed, once for each."""
    sizes: dict[str, dict[int, list[str]]] = {}
    for instance, facts, _ in examined:
        if facts and facts.block_size:
            model = instance.model or facts.served[0]
            sizes.setdefault(model, {}).setdefault(facts.block_size, []).append(instance.id)
    return [
        Finding(
            BLOCK_SIZE,
            "*",
            "warn",
            f"{model}: " + "; ".join(f"{size} on {', '.join(ids)}" for size, ids in sorted(by_size.items())),
            "give all engines of a model one --block-size (SGLang: --page-size)",
        )
        for model, by_size in sizes.items()
        if len(by_size) > 1
    ]


# ---------------------------------------------------------------------------------------------------------------------
# One function a check


def _events(instance: Instance, source: EventSource, heard: Heard, *, any_heard: bool) -> Finding:
    where = f"rank {source.rank} at {source.endpoint}"
    if heard.messages:
        return Finding(EVENTS, instance.id, "ok", f"{where}: heard {heard.messages} batch(es) of what was just sent")
    if not heard.connected:
        return Finding(EVENTS, instance.id, "fail", f"{where}: nothing listens there", _BIND_MEND)
    if any_heard:
        return Finding(EVENTS, instance.id, "skip", f"{where}: silent, another rank served the probe")
    return Finding(EVENTS, instance.id, "fail", f"{where}: silent", _SILENT_MEND)


def _replay(instance: Instance, source: EventSource, heard: Heard | None) -> Finding:
    where = f"rank {source.rank}"
    if heard is None:
        return Finding(REPLAY, instance.id, "warn", f"{where}: no replay endpoint", _REPLAY_MEND)
    if heard.messages:
        return Finding(REPLAY, instance.id, "ok", f"{where}: {heard.messages} batch(es) replayed from {source.replay}")
    if heard.connected:
        return Finding(REPLAY, instance.id, "warn", f"{where}: {source.replay} answers, but has nothing", "")
    return Finding(REPLAY, instance.id, "fail", f"{where}: no answer from {source.replay}", _REPLAY_MEND)


def _prefix_caching(instance: Instance, facts: EngineFacts) -> Finding:
    if facts.prefix_caching is None:
        return Finding(PREFIX_CACHING, instance.id, "skip", "the engine does not say")
    if facts.prefix_caching:
        return Finding(PREFIX_CACHING, instance.id, "ok", "on")
    mend = "start it with --enable-prefix-caching (SGLang: without --disable-radix-cache)"
    return Finding(PREFIX_CACHING, instance.id, "fail", "off: there is nothing to route by", mend)


def _block_size(instance: Instance, facts: EngineFacts) -> Finding:
    size = facts.block_size or instance.block_size
    if size is None:
        mend = "set block_size for this engine in the configuration"
        return Finding(BLOCK_SIZE, instance.id, "warn", "the engine does not tell", mend)
    if size == 1:
        mend = "start it with --page-size 16 or more: with 1, every token is an event entry and a key"
        return Finding(PAGE_SIZE, instance.id, "fail", "1 token", mend)
    return Finding(BLOCK_SIZE, instance.id, "ok", f"{size} tokens")


async def _isolation(
    instance: Instance, adapter: Adapter, facts: EngineFacts, events: EventProbe, *, isolates: bool
) -> Finding:
    state: State = "fail" if isolates else "warn"
    if facts.prefix_caching is False:
        return Finding(ISOLATION, instance.id, "ok", "it keeps nothing of a prompt")
    try:
        proof = await prove(instance, adapter, facts, lambda tokens, salt, wait_s: events.saw(salt, wait_s))
    except EngineError as error:
        return Finding(ISOLATION, instance.id, state, f"the probe failed: {error.message}", _ISOLATION_MEND)
    if proof.verified:
        return Finding(ISOLATION, instance.id, "ok", f"honours cache salts, seen by {proof.method}: {proof.detail}")
    return Finding(ISOLATION, instance.id, state, *_split(proof.detail))


async def _fields(instance: Instance, adapter: Adapter) -> list[Finding]:
    """What the engine knows and our catalogue does not: keys that are kept apart may not set it."""
    describe = getattr(adapter, "request_fields", None)
    try:
        described = {} if describe is None else await describe(instance)
    except EngineError:
        described = {}
    if not described:
        return [Finding(FIELDS, instance.id, "skip", "the engine does not describe its requests")]
    unknown = sorted({field for _, field in unreviewed(described)})
    if not unknown:
        return [Finding(FIELDS, instance.id, "ok", "all have been reviewed")]
    return [Finding(FIELDS, instance.id, "warn", f"not reviewed: {', '.join(unknown)}", _FIELDS_MEND)]


def _key(instance: Instance, facts: EngineFacts, isolates: bool) -> Finding:
    if facts.open_without_key is None:
        return Finding(KEY, instance.id, "skip", "cannot be told")
    if not facts.open_without_key:
        return Finding(KEY, instance.id, "ok", "refuses requests without its key")
    mend = "start it with --api-key KEY and set api_key, so that nobody goes past the gateway"
    state: State = "fail" if instance.api_key or isolates else "warn"
    return Finding(KEY, instance.id, state, "answers without a key", mend)


def _tls(instance: Instance) -> list[Finding]:
    """That it answered says that its certificate is accepted, if anybody looked at it."""
    if not instance.url.startswith("https:"):
        return []
    settings = instance.tls or ClientTls()
    if not settings.verify:
        mend = "name its CA in tls.ca and leave verify out: whoever stands between reads prompts and keys"
        return [Finding(TLS, instance.id, "warn", "any certificate is accepted (verify: false)", mend)]
    return [
        Finding(TLS, instance.id, "ok", f"its certificate is accepted, by {settings.ca or 'the CAs of the system'}")
    ]


async def _event_ports(
    instance: Instance, sources: Sequence[EventSource], probe: EventProbe, isolates: bool
) -> list[Finding]:
    state: State = "fail" if isolates else "warn"
    findings = []
    for source in sources:
        elsewhere = await probe.reachable_elsewhere(source)
        if elsewhere is None:
            seen = f"rank {source.rank}: only on this machine"
            findings.append(Finding(EVENT_PORT, instance.id, "ok", seen))
            continue
        mend = "events carry token ids of prompts: let only the gateway reach the port (network policy, or ipc://)"
        findings.append(Finding(EVENT_PORT, instance.id, state, f"rank {source.rank}: open at {elsewhere}", mend))
    return findings


async def _cached_counts(instance: Instance, facts: EngineFacts, client: httpx.AsyncClient) -> Finding:
    """The same prompt twice: the second time its blocks are there, and the answer should say so."""
    blocks = (facts.block_size or instance.block_size or 16) * _PROBE_BLOCKS
    prompt = _new_prompt(min(blocks, (facts.max_model_tokens or blocks * 4) // 4))
    try:
        await _ask(instance, facts, prompt, client)
        usage = await _ask(instance, facts, prompt, client)
    except (httpx.HTTPError, ValueError) as error:
        seen = f"the probe request failed: {_short(error)}"
        return Finding(CACHED_COUNTS, instance.id, "fail", seen, "send the engine a chat request by hand and see why")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        return Finding(CACHED_COUNTS, instance.id, "warn", "answers don't say how much was cached", _CACHED_MEND)
    seen = f"{cached} of {usage.get('prompt_tokens')} tokens when asked again"
    if not cached:
        mend = "see prefix caching; or the prompt was routed to another rank, or evicted at once"
        return Finding(CACHED_COUNTS, instance.id, "warn", seen, mend)
    return Finding(CACHED_COUNTS, instance.id, "ok", seen)


# ---------------------------------------------------------------------------------------------------------------------
# The probe request


def _new_prompt(tokens: int) -> str:
    """At least so many tokens that no cache can hold: the first word is random."""
    return " ".join([secrets.token_hex(8), *(f"word {number}" for number in range(tokens // 2))])


async def _ask(instance: Instance, facts: EngineFacts, prompt: str, client: httpx.AsyncClient) -> dict[str, Any]:
    """The usage of an answer of one token. Raises ValueError when the answer has none."""
    body = {
        "model": instance.served or facts.served[0],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 1,
        "temperature": 0,
    }
    headers = {"authorization": f"Bearer {instance.api_key}"} if instance.api_key else {}
    url = f"{instance.url}/v1/chat/completions"
    response = await client.post(
        url, json=body, headers=headers, timeout=_PROBE_TIMEOUT_S, extensions=server_name(instance.tls)
    )
    response.raise_for_status()
    usage = response.json().get("usage")
    if not isinstance(usage, dict):
        raise ValueError("the answer has no usage")
    return usage


def _short(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    return str(error) or type(error).__name__


def _split(note: str) -> tuple[str, str]:
    """Adapters write "what is seen: what to do"."""
    seen, _, mend = note.partition(": ")
    return seen, mend
