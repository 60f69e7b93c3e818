"""The relay's side of each engine: its connections, and what every request to it carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from router.core import Adapter, Instance, Upstream
from router.errors import EngineError, EngineUnreachable

Header = tuple[bytes, bytes]

_ALWAYS: tuple[Header, ...] = ((b"content-type", b"application/json"), (b"accept", b"*/*"))


class Receiver(Protocol):
    """Takes an answer (`router/http`): exactly one of `on_end` and `on_error` is the last call."""

    def on_head(self, status: int, headers: list[Header]) -> None: ...
    def on_data(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_error(self, error: EngineError) -> None: ...


class Exchange(Protocol):
    def cancel(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Pool(Protocol):
    def send(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[Header],
        body: bytes | Sequence[bytes],
        receiver: Receiver,
    ) -> Exchange: ...

    async def aclose(self) -> None: ...


class Engine:
    """One engine. A client's own credentials and rank headers never reach it: headers are ours from the first on."""

    def __init__(self, instance: Instance, adapter: Adapter, pool: Pool) -> None:
        self.instance = instance
        self.pool = pool
        self._adapter = adapter
        self._upstreams: dict[int | None, Upstream] = {}

    def upstream(self, rank: int | None) -> Upstream:
        """All headers, and the body fields, of a request to `rank`. Few ranks, so all are kept."""
        upstream = self._upstreams.get(rank)
        if upstream is None:
            added = self._adapter.upstream(self.instance, rank)
            upstream = Upstream(headers=(*_ALWAYS, *self._authorization(), *added.headers), fields=added.fields)
            self._upstreams[rank] = upstream
        return upstream

    def _authorization(self) -> tuple[Header, ...]:
        key = self.instance.api_key
        return () if key is None else ((b"authorization", b"Bearer " + key.encode()),)


class Engines:
    """The engines by id. `make_pool` opens the connections to one."""

    def __init__(self, make_pool: Callable[[Instance], Pool]) -> None:
        self._make_pool = make_pool
        self._engines: dict[str, Engine] = {}

    def add(self, instance: Instance, adapter: Adapter) -> None:
        """Replaces an engine of the same id; close what `remove` returned before it is added again."""
        self._engines[instance.id] = Engine(instance, adapter, self._make_pool(instance))

    def remove(self, instance_id: str) -> Engine | None:
        """No new requests. Those that run go on until the caller closes the returned engine's pool."""
        return self._engines.pop(instance_id, None)

    def get(self, instance_id: str) -> Engine:
        """Raises EngineUnreachable for one that has been removed since it was chosen."""
        engine = self._engines.get(instance_id)
        if engine is None:
            raise EngineUnreachable("The engine has left the fleet.")
        return engine

    async def aclose(self) -> None:
        engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            await engine.pool.aclose()
