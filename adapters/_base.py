"""What our adapters share: one HTTP client, one ZMQ context, one way to follow KV events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from weakref import WeakSet

import httpx

from adapters._answers import Models, read_models
from adapters._http import EngineHttp
from adapters._zmq import Follower, new_context
from router.core import EventBatch, EventSource, Instance, Lost, Upstream
from router.errors import EngineProtocolError

_ANYWHERE = Upstream()


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
