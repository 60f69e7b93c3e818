"""What our adapters share: one HTTP client, one ZMQ context, one way to follow KV events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from weakref import WeakSet

import httpx

from adapters._answers import Models, number, read_models, read_request_fields
from adapters._http import EngineHttp
from adapters._zmq import Follower, new_context
from router.core import EventBatch, EventSource, Instance, Lost, Upstream
from router.errors import EngineProtocolError

_ANYWHERE = Upstream()
_PROBE_S = 60.0  # for a probe, which may have to wait its turn; a description is made when it is first asked for


class EngineAdapter:
    """`transport` stands in for the network in tests; `clock` is monotonic, in seconds."""

    def __init__(
        self, *, transport: httpx.AsyncBaseTransport | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._http = EngineHttp(transport)
        self._clock = clock
        self._zmq = new_context()
        self._followers: WeakSet[Follower] = WeakSet()

    async def aclose(self) -> None:
        """Event streams that are still open end here."""
        await self._http.aclose()
        for follower in list(self._followers):
            follower.close()
        self._zmq.destroy(linger=0)

    def events(self, instance: Instance, source: EventSource, after: int | None) -> AsyncGenerator[EventBatch | Lost]:
        follower = Follower(self._zmq, source, after, clock=self._clock)
        self._followers.add(follower)
        return follower.items()

    def upstream(self, instance: Instance, rank: int | None) -> Upstream:
        """The header by which vLLM (since about 0.13) and SGLang send a request to one data-parallel rank.

        In SGLang it overrides the body's `routed_dp_rank`, so that the body can stay as it is.
        """
        return _ANYWHERE if rank is None else Upstream(headers=((b"x-data-parallel-rank", b"%d" % rank),))

    async def probe(self, instance: Instance, tokens: list[int], salt: str, rank: int | None) -> int | None:
        """By a completion of one token. Raises EngineProtocolError where the engine has no completions."""
        served = instance.served or (await self._models(instance)).served[0]
        body = {"model": served, "prompt": tokens, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
        headers = self.upstream(instance, rank).headers
        answer = await self._http.post(instance, "/v1/completions", body, headers=headers, timeout_s=_PROBE_S)
        if type(answer) is not dict:
            raise EngineProtocolError("the engine has no completions to be probed by")
        usage = answer.get("usage")
        details = usage.get("prompt_tokens_details") if type(usage) is dict else None
        return number(details, "cached_tokens") if type(details) is dict else None

    async def request_fields(self, instance: Instance) -> Mapping[str, Sequence[frozenset[str]]]:
        """By the engine's `/openapi.json`, as FastAPI writes it: vLLM, SGLang, TensorRT-LLM."""
        try:
            page = await self._http.page(instance, "/openapi.json", timeout_s=_PROBE_S)
        except EngineProtocolError:
            return {}
        return {} if page is None else await asyncio.to_thread(read_request_fields, page)

    async def _models(self, instance: Instance) -> Models:
        return read_models(await self._http.json(instance, "/v1/models"))

    async def _owner(self, instance: Instance) -> str | None:
        """Who `/v1/models` says owns the model: the engine's name, for vLLM and SGLang."""
        try:
            return (await self._models(instance)).owner
        except EngineProtocolError:
            return None

    async def _is_open(self, instance: Instance) -> bool:
        """Whether the engine serves without a key; called when it has just answered with ours, if we have one."""
        return instance.api_key is None or await self._http.status(instance, "/v1/models", with_key=False) == 200
