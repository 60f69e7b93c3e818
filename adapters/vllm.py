"""vLLM 0.9 to 0.33. Tested against recordings of 0.32.0 (tests/adapters/recordings)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple

import httpx
from msgspec.structs import replace

from adapters._answers import Kind, connectable, events_note, kind_of, read_tokens, single_prompt, text
from adapters._base import EngineAdapter
from adapters._home import at_home
from adapters._metrics import by_rank, first, label, rank_of, samples, whole
from router.core import EngineFacts, EventBatch, EventSource, HitRule, Instance, Load, Lost
from router.errors import EngineProtocolError, EngineUnreachable

_EVENTS_FLAG = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5657"}\''
)
_CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "tools",
)
# Chat fields that reach the template as arguments; /tokenize knows them only among `chat_template_kwargs`.
_TEMPLATE_FIELDS = ("reasoning_effort", "documents")


class VllmAdapter(EngineAdapter):
    """Ranks are numbered from 0 behind each URL, as the header that steers to them is.

    vLLM's own numbers are global, so that with an external or hybrid load balancer a URL's ranks may begin at 2: in
    event sources, in batches and in metrics.
    """

    name = "vllm"
    continues_messages = True

    def __init__(
        self, *, transport: httpx.AsyncBaseTransport | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(transport=transport, clock=clock)
        self._first_rank: dict[str, int] = {}  # by instance, where it is not 0

    async def recognises(self, instance: Instance) -> float:
        """How surely there is a vLLM at `instance.url`: 0 no, 1 yes."""
        return 1.0 if await self._owner(instance) == "vllm" else 0.0

    async def inspect(self, instance: Instance) -> EngineFacts:
        if await self._http.status(instance, "/health") != 200:
            raise EngineUnreachable("the engine is not healthy")
        models = await self._models(instance)
        version = await self._http.json(instance, "/version")
        page = await self._http.page(instance, "/metrics") or b""
        config = _cache_config(page)
        sources, notes = await self._sources(instance)
        if config.prefix_caching is False:
            notes = ("prefix caching is off: add --enable-prefix-caching", *notes)
        block_size = config.block_size or instance.block_size
        ranks = max(1, len(sources), config.ranks)
        return EngineFacts(
            served=models.served,
            loras=models.loras,
            version=text(version, "version") if type(version) is dict else None,
            max_model_tokens=models.max_model_tokens,
            block_size=block_size,
            capacity_tokens=config.capacity_tokens or instance.capacity_tokens,
            ranks=ranks,
            rank_targeting=ranks > 1,
            sources=sources,
            prefix_caching=config.prefix_caching,
            reports_cached=None,  # --enable-prompt-tokens-details shows in answers only
            hit_rule=HitRule(alignment_tokens=config.alignment_tokens or block_size or 1),
            boot_id=_boot_id(page),
            model_path=models.root,
            open_without_key=await self._is_open(instance),
            notes=notes,
        )

    async def load(self, instance: Instance) -> Mapping[int, Load]:
        page = await self._http.page(instance, "/metrics")
        if page is None:
            raise EngineProtocolError("the engine has no metrics")
        return _load(page, self._clock())

    def events(self, instance: Instance, source: EventSource, after: int | None) -> AsyncGenerator[EventBatch | Lost]:
        items = super().events(instance, source, after)
        first_rank = self._first_rank.get(instance.id)
        return items if first_rank is None else _renumbered(items, first_rank)

    async def tokenize(self, instance: Instance, path: str, body: Mapping[str, Any]) -> list[int]:
        if kind_of(path) is Kind.CHAT:
            request = _chat_request(body)
        else:
            prompt = single_prompt(body)
            if not isinstance(prompt, str):
                return prompt
            request = {"prompt": prompt, "add_special_tokens": body.get("add_special_tokens", True)}
        return read_tokens(await self._http.post(instance, "/tokenize", request))

    async def _sources(self, instance: Instance) -> tuple[tuple[EventSource, ...], tuple[str, ...]]:
        """What publishes events, and what the operator should mend."""
        if instance.events is not None:
            return instance.events, ()
        answer = await self._http.json(instance, "/kv_event_sources")
        if type(answer) is not dict:
            return (), (
                "vLLM before 0.31 does not tell where its KV events are: name the sources in the configuration",
            )
        sources, notes = [], []
        for rank, config in answer.items():
            source, note = _source(rank, config, instance.url)
            sources += [source] if source is not None else []
            notes += [note] if note is not None else []
        if not answer:
            notes.append(f"KV events are off: add {_EVENTS_FLAG}")
        home, strangers = await at_home(sources, instance.url)
        return self._numbered(instance, list(home)), tuple(dict.fromkeys((*notes, *strangers)))

    def _numbered(self, instance: Instance, sources: list[EventSource]) -> tuple[EventSource, ...]:
        first_rank = min((source.rank for source in sources), default=0)
        self._first_rank.pop(instance.id, None)
        if first_rank:
            self._first_rank[instance.id] = first_rank
        sources.sort(key=lambda source: source.rank)
        return tuple(replace(source, rank=source.rank - first_rank) for source in sources)


async def _renumbered(items: AsyncGenerator[EventBatch | Lost], first_rank: int) -> AsyncGenerator[EventBatch | Lost]:
    try:
        async for item in items:
            if isinstance(item, EventBatch) and item.rank is not None:
                item = replace(item, rank=item.rank - first_rank)
            yield item
    finally:
        await items.aclose()


class _CacheConfig(NamedTuple):
    ranks: int = 0
    block_size: int | None = None
    capacity_tokens: int | None = None
    alignment_tokens: int | None = None
    prefix_caching: bool | None = None


def _cache_config(page: bytes) -> _CacheConfig:
    """The labels of `vllm:cache_config_info`: every value is text, and "None" where there is none."""
    lines = [labels for labels, _ in samples(page, b"vllm:cache_config_info")]
    if not lines:
        return _CacheConfig()
    labels = lines[0]
    block_size, blocks = whole(labels, b"block_size"), whole(labels, b"num_gpu_blocks")
    return _CacheConfig(
        ranks=len({label(line, b"engine") for line in lines}),
        block_size=block_size,
        capacity_tokens=whole(labels, b"kv_cache_size_tokens") or (blocks and block_size and blocks * block_size),
        alignment_tokens=whole(labels, b"cache_hit_alignment_tokens"),
        prefix_caching={"True": True, "False": False}.get(label(labels, b"enable_prefix_caching") or ""),
    )


def _boot_id(page: bytes) -> str | None:
    started = first(page, b"process_start_time_seconds")
    return None if started is None else str(started)


def _load(page: bytes, at: float) -> dict[int, Load]:
    running = by_rank(page, b"vllm:num_requests_running", rank=b"engine")
    if not running:
        raise EngineProtocolError("the engine's metrics do not tell its load")
    waiting = by_rank(page, b"vllm:num_requests_waiting", rank=b"engine")
    usage = by_rank(page, b"vllm:kv_cache_usage_perc", rank=b"engine")
    usage = usage or by_rank(page, b"vllm:gpu_cache_usage_perc", rank=b"engine")  # before 0.9.2
    prompt = by_rank(page, b"vllm:prompt_tokens_total", rank=b"engine")
    cached = by_rank(page, b"vllm:prefix_cache_hits_total", rank=b"engine")
    preemptions = by_rank(page, b"vllm:num_preemptions_total", rank=b"engine")
    asleep = _sleeping(page)
    boot_id = _boot_id(page)
    first_rank = min(running)
    return {
        rank - first_rank: Load(
            at=at,
            running=int(count),
            waiting=int(waiting.get(rank, 0)),
            kv_usage=usage.get(rank, 0.0),
            sleeping=rank in asleep,
            boot_id=boot_id,
            prompt_tokens_total=prompt.get(rank, 0.0),
            cached_tokens_total=cached.get(rank, 0.0),
            preemptions_total=preemptions.get(rank, 0.0),
        )
        for rank, count in running.items()
    }


def _sleeping(page: bytes) -> set[int]:
    """The ranks that are not awake. /health stays 200 while an engine sleeps."""
    return {
        rank_of(labels, b"engine")
        for labels, value in samples(page, b"vllm:engine_sleep_state")
        if label(labels, b"sleep_state") == "awake" and value == 0
    }


def _source(rank: str, config: Any, url: str) -> tuple[EventSource | None, str | None]:
    if type(config) is not dict or not config.get("enable_kv_cache_events") or config.get("publisher") != "zmq":
        return None, f"KV events are off: add {_EVENTS_FLAG}"
    endpoint, replay = text(config, "endpoint"), text(config, "replay_endpoint")
    if endpoint is None or not rank.isdecimal():
        return None, "/kv_event_sources tells no endpoint: name the sources in the configuration"
    if endpoint.startswith("tcp://0.0.0.0:"):
        return (
            None,
            f"vLLM connects to {endpoint} instead of binding it, so nobody hears its KV events: write tcp://*:PORT",
        )
    source = EventSource(
        rank=int(rank),
        endpoint=connectable(endpoint, url),
        replay=None if replay is None else connectable(replay, url),
        topic=text(config, "topic") or "",
    )
    return source, events_note(source, url)


def _chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {"messages": body.get("messages")}
    request.update((field, body[field]) for field in _CHAT_FIELDS if body.get(field) is not None)
    arguments = {field: body[field] for field in _TEMPLATE_FIELDS if body.get(field) is not None}
    if arguments:
        request["chat_template_kwargs"] = arguments | dict(request.get("chat_template_kwargs") or {})
    return request
