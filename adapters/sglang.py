"""SGLang 0.4.6 to 0.5.23. Tested against recordings of 0.5.23 (tests/adapters/recordings).

`/health` is never called: it generates a token, which costs a step and shows in the load (SGLang 0.5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from xxhash import xxh3_64_hexdigest

from adapters._answers import (
    Kind,
    connectable,
    events_note,
    kind_of,
    number,
    read_tokens,
    single_prompt,
    text,
)
from adapters._base import EngineAdapter
from adapters._home import at_home
from adapters._metrics import by_rank
from router.core import EngineFacts, EventSource, HitRule, Instance, Load, Need
from router.errors import EngineError, EngineProtocolError, EngineUnreachable

_EVENTS_FLAG = (
    '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\''
)
_CHAT_FIELDS = (
    "model",
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
)


class SglangAdapter(EngineAdapter):
    name = "sglang"
    continues_messages = True

    async def recognises(self, instance: Instance) -> float:
        """How surely there is an SGLang at `instance.url`: 0 no, 1 yes."""
        return 1.0 if await self._owner(instance) == "sglang" else 0.0

    async def inspect(self, instance: Instance) -> EngineFacts:
        info = await self._server_info(instance)
        if text(info, "status") not in (None, "ready"):
            raise EngineUnreachable("the engine is not ready")
        models = await self._models(instance)
        told = _sources(info, instance)
        sources, strangers = (told, ()) if instance.events is not None else await at_home(told, instance.url)
        ranks = max(1, len(sources), number(info, "dp_size") or 1)
        page_size = (number(info, "page_size") or instance.block_size or 1) * (number(info, "dcp_size") or 1)
        return EngineFacts(
            served=models.served,
            loras=models.loras,
            version=text(info, "version"),
            max_model_tokens=models.max_model_tokens or number(info, "context_length"),
            block_size=page_size,
            capacity_tokens=number(info, "max_total_num_tokens") or instance.capacity_tokens,
            max_running_requests=_max_running(info),
            ranks=ranks,
            rank_targeting=ranks > 1,
            sources=sources,
            prefix_caching=info.get("disable_radix_cache") is not True,
            reports_cached=info.get("enable_cache_report") is True,
            hit_rule=HitRule(alignment_tokens=page_size),
            boot_id=_boot_id(info),
            model_path=text(info, "model_path"),
            open_without_key=await self._is_open(instance),
            lacks=_lacks(await self._model_info(instance)),
            notes=(*_notes(info, instance, told), *strangers),
            tells_answers_late=True,  # events go out with a prefill, every 40th decode step, and when there is no work
        )

    async def load(self, instance: Instance) -> Mapping[int, Load]:
        answer = await self._http.json(instance, "/v1/loads")
        if answer is not None:
            return _load(answer, self._clock())
        page = await self._http.page(instance, "/metrics")  # before about 0.5.8
        if page is None:
            raise EngineProtocolError("the engine does not tell its load: add --enable-metrics")
        return _load_of_page(page, self._clock())

    async def tokenize(self, instance: Instance, path: str, body: Mapping[str, Any]) -> list[int]:
        if kind_of(path) is Kind.CHAT:
            request = {field: body[field] for field in _CHAT_FIELDS if body.get(field) is not None}
        else:
            prompt = single_prompt(body)
            if not isinstance(prompt, str):
                return prompt
            request = {"model": body.get("model", "default"), "prompt": prompt}
        if instance.served is not None:
            request["model"] = instance.served
        answer = await self._http.post(instance, "/tokenize", request)
        if answer is None:
            answer = await self._http.post(instance, "/v1/tokenize", request)
        return read_tokens(answer)

    async def _model_info(self, instance: Instance) -> Any:
        """Nothing that an engine could not be used without."""
        try:
            return await self._http.json(instance, "/model_info")
        except EngineError:
            return None

    async def _server_info(self, instance: Instance) -> dict[str, Any]:
        info = await self._http.json(instance, "/server_info")
        if info is None:
            info = await self._http.json(instance, "/get_server_info")  # before about 0.5.8
        if type(info) is not dict:
            raise EngineProtocolError("the engine's server info is not an object")
        return info


def _max_running(info: Mapping[str, Any]) -> int | None:
    """Of a rank: what its scheduler made of --max-running-requests, which is for all of them, and of its memory."""
    states = info.get("internal_states")
    state = states[0] if type(states) is list and states and type(states[0]) is dict else {}
    return number(state, "effective_max_running_requests_per_dp") or None


def _lacks(info: object) -> tuple[Need, ...]:
    """What it does not tell of itself it is thought to take."""
    told = info if isinstance(info, dict) else {}
    understood: dict[Need, Any] = {
        "audio": told.get("has_audio_understanding"),
        "image": told.get("has_image_understanding"),
    }
    return tuple(need for need, is_understood in understood.items() if is_understood is False)


def _sources(info: Mapping[str, Any], instance: Instance) -> tuple[EventSource, ...]:
    """One source a data-parallel rank: the ports are those of rank 0 plus the rank."""
    if instance.events is not None:
        return instance.events
    told = info.get("kv_events")  # since 0.5.15
    if type(told) is dict and told.get("publisher") == "zmq" and (base := number(told, "endpoint_port_base")):
        endpoint = f"tcp://{text(told, 'endpoint_host') or '*'}:{base}"
        replay_base = number(told, "replay_endpoint_port_base")
        replay = None if replay_base is None else f"tcp://*:{replay_base}"
        topic, ranks = text(told, "topic"), number(told, "dp_size")
    else:
        config = _events_config(info)
        endpoint, replay, topic, ranks = (
            text(config, "endpoint") or "tcp://*:5557",
            text(config, "replay_endpoint"),
            text(config, "topic"),
            number(info, "dp_size"),
        )
        if config.get("publisher") != "zmq":
            return ()
    return tuple(
        EventSource(
            rank=rank,
            endpoint=connectable(_port_plus(endpoint, rank), instance.url),
            replay=None if replay is None else connectable(_port_plus(replay, rank), instance.url),
            topic=topic or "",
        )
        for rank in range(ranks or 1)
    )


def _events_config(info: Mapping[str, Any]) -> dict[str, Any]:
    """What `--kv-events-config` was given, as it stands among the server's arguments."""
    try:
        config = orjson.loads(text(info, "kv_events_config") or "{}")
    except orjson.JSONDecodeError:
        return {}
    return config if type(config) is dict else {}


def _port_plus(endpoint: str, rank: int) -> str:
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if port.isdecimal() else endpoint


def _notes(info: Mapping[str, Any], instance: Instance, sources: tuple[EventSource, ...]) -> tuple[str, ...]:
    notes = []
    if info.get("disable_radix_cache") is True:
        notes.append("prefix caching is off: remove --disable-radix-cache")
    if not sources and instance.events is None:
        reason = 'publish nothing without "publisher": "zmq"' if _events_config(info) else "are off"
        notes.append(f"KV events {reason}: add {_EVENTS_FLAG}")
    if sources and number(info, "page_size") == 1:
        notes.append("a page of one token makes a KV event of every token: add --page-size 16")
    if info.get("enable_cache_report") is not True:
        notes.append("answers do not tell cached tokens: add --enable-cache-report")
    notes += [note for source in sources if (note := events_note(source, instance.url))]
    return tuple(dict.fromkeys(notes))


def _boot_id(info: Mapping[str, Any]) -> str | None:
    """SGLang tells no start time; the seed it draws and how long its scheduler took to start are new each time."""
    startup = info.get("startup_time")
    took = startup.get("scheduler_e2e") if type(startup) is dict else None
    seed = info.get("random_seed")
    return None if took is None else xxh3_64_hexdigest(f"{seed} {took}".encode())


def _load(answer: Any, at: float) -> dict[int, Load]:
    ranks = answer.get("loads") if type(answer) is dict else None
    if type(ranks) is not list or not all(type(rank) is dict for rank in ranks) or not ranks:
        raise EngineProtocolError("the engine's load is not what /v1/loads promises")
    return {
        number(rank, "dp_rank") or 0: Load(
            at=at,
            running=number(rank, "num_running_reqs") or 0,
            waiting=number(rank, "num_waiting_reqs") or 0,
            kv_usage=float(rank.get("token_usage") or 0.0),
        )
        for rank in ranks
    }


def _load_of_page(page: bytes, at: float) -> dict[int, Load]:
    running = by_rank(page, b"sglang:num_running_reqs", rank=b"dp_rank")
    if not running:
        raise EngineProtocolError("the engine's metrics do not tell its load")
    waiting = by_rank(page, b"sglang:num_queue_reqs", rank=b"dp_rank")
    usage = by_rank(page, b"sglang:token_usage", rank=b"dp_rank")
    prompt = by_rank(page, b"sglang:prompt_tokens_total", rank=b"dp_rank")
    cached = by_rank(page, b"sglang:cached_tokens_total", rank=b"dp_rank")
    return {
        rank: Load(
            at=at,
            running=int(count),
            waiting=int(waiting.get(rank, 0)),
            kv_usage=usage.get(rank, 0.0),
            prompt_tokens_total=prompt.get(rank, 0.0),
            cached_tokens_total=cached.get(rank, 0.0),
        )
        for rank, count in running.items()
    }
