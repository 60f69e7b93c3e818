"""The relay's side of each engine: its connections, and what every request to it carries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol
from weakref import WeakSet

from router.core import Adapter, Instance
from router.errors import EngineError, EngineUnreachable
from router.http.client import PoolStats
from router.serving.apis import FORMS
from router.serving.isolation.salts import salted_paths

Header = tuple[bytes, bytes]

_ALWAYS: tuple[Header, ...] = ((b"accept", b"*/*"),)
_JSON: tuple[Header, ...] = ((b"content-type", b"application/json"),)  # a form's names its boundary: see `Call`


class Receiver(Protocol):
    """Takes an answer (`router/http`): exactly one of `on_end` and `on_error` is the last call."""

    def on_head(self, status: int, headers: list[Header]) -> None: ...
    def on_data(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_error(self, error: EngineError) -> None: ...


class Exchange(Protocol):
    paused: bool

    def cancel(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Pool(Protocol):
    stats: PoolStats

    def post_lines(self, target: bytes, headers: Iterable[Header]) -> bytes: ...
    def post(self, lines: bytes, body: bytes, receiver: Receiver) -> Exchange: ...
    def retire(self) -> None: ...
    async def answers(self, *, within_s: float) -> bool: ...
    async def aclose(self) -> None: ...


class Route(NamedTuple):
    """What all requests have in common that go to one path of one rank."""

    lines: bytes  # the head up to what is the request's own
    fields: Mapping[str, bytes]  # of the body, in place of a client's own
    salted: bool  # it takes a cache_salt


class Engine:
    """One engine. A client's own credentials and rank headers never reach it: headers are ours from the first on.

    `lacks`: paths that it said it does not have. `continues_messages`: it knows `continue_final_message`.
    `salted`: paths on which it takes a cache_salt.
    """

    def __init__(self, instance: Instance, adapter: Adapter, pool: Pool) -> None:
        self.instance = instance
        self.lacks: set[str] = set()
        self.salted = salted_paths(instance.engine)
        self.pool = pool
        self.continues_messages: bool = getattr(adapter, "continues_messages", False)
        self._adapter = adapter
        self._routes: dict[tuple[str, int | None], Route] = {}

    def route(self, path: str, rank: int | None) -> Route:
        """How to reach `path` on `rank` (None: any). Few paths and ranks, so all are kept."""
        route = self._routes.get((path, rank))
        if route is None:
            added = self._adapter.upstream(self.instance, rank)
            content = () if path in FORMS else _JSON
            headers = (*content, *_ALWAYS, *self._authorization(), *added.headers)
            route = Route(self.pool.post_lines(path.encode("ascii"), headers), added.fields, path in self.salted)
            self._routes[path, rank] = route
        return route

    def salt(self, paths: frozenset[str]) -> None:
        """What is known now of where it takes a cache_salt."""
        if paths != self.salted:
            self.salted = paths
            self._routes.clear()

    def renew(self, pool: Pool) -> None:
        """Further requests go over `pool`; those that run end over the one they began with."""
        self.pool.retire()
        self.pool = pool
        self._routes.clear()  # their lines were the old pool's

    def _authorization(self) -> tuple[Header, ...]:
        key = self.instance.api_key
        return () if key is None else ((b"authorization", b"Bearer " + key.encode()),)


class Engines:
    """The engines by id. `make_pool` opens the connections to one."""

    def __init__(self, make_pool: Callable[[Instance], Pool]) -> None:
        self._make_pool = make_pool
        self._engines: dict[str, Engine] = {}
        self._retired: WeakSet[Pool] = WeakSet()  # a pool is kept by its connections

    def add(self, instance: Instance, adapter: Adapter) -> None:
        """Replaces an engine of the same id, whose running requests go on."""
        self.remove(instance.id)
        self._engines[instance.id] = Engine(instance, adapter, self._make_pool(instance))

    def remove(self, instance_id: str) -> None:
        """No new requests. Those that run go on."""
        engine = self._engines.pop(instance_id, None)
        if engine is not None:
            self._retired.add(engine.pool)
            engine.pool.retire()

    def renew_pools(self) -> None:
        """What `make_pool` makes has changed."""
        for engine in self._engines.values():
            self._retired.add(engine.pool)
            engine.renew(self._make_pool(engine.instance))

    def find(self, instance_id: str) -> Engine | None:
        return self._engines.get(instance_id)

    def instance(self, instance_id: str) -> Instance | None:
        engine = self._engines.get(instance_id)
        return engine.instance if engine is not None else None

    def get(self, instance_id: str) -> Engine:
        """Raises EngineUnreachable for one that has been removed since it was chosen."""
        engine = self._engines.get(instance_id)
        if engine is None:
            raise EngineUnreachable("The engine has left the fleet.")
        return engine

    def without_continuing(self) -> tuple[str, ...]:
        """Those that cannot go on with an unfinished message."""
        return tuple(name for name, engine in self._engines.items() if not engine.continues_messages)

    def connections(self) -> dict[str, PoolStats]:
        """What has become of the connections to each engine."""
        return {name: engine.pool.stats for name, engine in self._engines.items()}

    async def aclose(self) -> None:
        engines, self._engines = list(self._engines.values()), {}
        for pool in (*[engine.pool for engine in engines], *self._retired):
            await pool.aclose()
