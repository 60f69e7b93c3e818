"""A gateway on loopback in front of engines whose every byte a test decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from router.core import Ask, Booking, Decision, Instance, Outcome, Prompt, Upstream
from router.errors import NoEngine
from router.http.client import Pool
from router.http.messages import Limits
from router.http.server import serve
from router.serving.edge import Edge
from router.serving.engines import Engines
from router.serving.gateway import Gateway
from router.serving.models import Models, ServedModel
from router.serving.proxy import Proxy
from tests.listener import Listener

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class EngineSide:
    """The engine's side of one exchange."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        self.head = head
        self.body = body
        self.writer = writer
        self._reader = reader

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def stream(self, *parts: bytes) -> None:
        """A whole event stream, one part a write."""
        await self.raw(STREAM_HEAD)
        for part in parts:
            await self.chunk(part)
            await asyncio.sleep(0)
        await self.raw(b"0\r\n\r\n")

    async def whole(self, body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        lines = {"content-type": "application/json", **(headers or {}), "content-length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        await self.raw(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)

    def reset(self) -> None:
        self.writer.transport.abort()

    async def until_gone(self) -> None:
        """Returns when the gateway closes its connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass


Script = Callable[[EngineSide], Awaitable[None]]


class FakeEngine:
    """Answers every request with `script`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[EngineSide] = []
        self._listener = Listener(self._serve_one)
        self.start, self.stop = self._listener.start, self._listener.stop

    @property
    def url(self) -> str:
        return self._listener.url

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        side = EngineSide(await reader.readuntil(b"\r\n\r\n"), b"", writer, reader)
        side.body = await reader.readexactly(int(side.headers["content-length"]))
        self.seen.append(side)
        await self.script(side)


class FakePlacement:
    """Takes the first instance that is not excluded."""

    def __init__(self) -> None:
        self.instances: list[str] = []
        self.asks: list[Ask] = []
        self.progressed: list[int] = []
        self.released: list[tuple[int, Outcome]] = []
        self.open: set[int] = set()
        self.gate: asyncio.Event | None = None
        self.served = "served-name"

    async def place(self, ask: Ask) -> Booking:
        self.asks.append(ask)
        if self.gate is not None:
            await self.gate.wait()
        return self._booked(ask)

    def place_here(self, ask: Ask) -> Booking:
        """What a placement in the same process may do (`place_now`)."""
        self.asks.append(ask)
        return self._booked(ask)

    def _booked(self, ask: Ask) -> Booking:
        chosen = next((name for name in self.instances if name not in ask.exclude), None)
        if chosen is None:
            raise NoEngine(f"No engine serves {ask.model!r} now.", retry_after_s=2.0)
        number = len(self.asks)
        self.open.add(number)
        return Booking(
            id=number,
            request_id=ask.request_id,
            instance=chosen,
            rank=3,
            url="",
            served=self.served,
            engine="fake",
            target_rank=True,
            tokens=ask.prompt.tokens,
            best_hit_tokens=64,
            predicted_hit_tokens=48,
            predicted_prefill_ms=1.0,
            alone=True,
            policy="kv_aware",
        )

    def progress(self, booking_id: int) -> None:
        self.progressed.append(booking_id)

    def release(self, booking_id: int, outcome: Outcome) -> None:
        self.open.remove(booking_id)  # a second release of a booking is an error here
        self.released.append((booking_id, outcome))

    async def explain(self, ask: Ask) -> Decision:
        raise NotImplementedError


class FakePrompts:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Mapping[str, Any]]] = []

    def observe(self, prompt: Prompt, engine_tokens: int) -> None:
        pass

    async def prepare(self, path: str, body: Mapping[str, Any], **_: Any) -> Prompt:
        self.seen.append((path, body))
        return Prompt(tokens=100, known_tokens=96, keys={16: array("Q", range(6))})


class FakeAdapter:
    name = "fake"

    def upstream(self, instance: Instance, rank: int | None) -> Upstream:
        return Upstream(headers=((b"x-data-parallel-rank", b"%d" % rank),) if rank is not None else ())


class Answered:
    """What a client got: `broken` when the body never ended."""

    def __init__(self, raw: bytes) -> None:
        head, _, rest = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.broken = False
        self.body = self._dechunked(rest) if "transfer-encoding" in self.headers else rest

    def _dechunked(self, rest: bytes) -> bytes:
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            if length == 0:
                return b"".join(parts)
            parts.append(rest[:length])
            rest = rest[length + 2 :]
        self.broken = True
        return b"".join(parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Stand:
    """The gateway, its engines, and what it was told of them."""

    def __init__(self) -> None:
        self.started = False
        self.placement = FakePlacement()
        self.prompts = FakePrompts()
        self.models = Models([self._model()])
        self.outcomes: list[Outcome] = []
        self.engines_by_id: dict[str, FakeEngine] = {}
        self._stack = AsyncExitStack()

    async def start(
        self,
        *scripts: Script,
        body_limit: int = 1 << 20,
        connections: int = 100,
        model: Mapping[str, Any] | None = None,
        **edge: Any,
    ) -> None:
        """`model`: what differs from the defaults of its `ServedModel`."""
        self.models.replace([self._model(**(model or {}))])
        self.engines = Engines(lambda instance: Pool(instance.url))
        for number, script in enumerate(scripts):
            engine = FakeEngine(script)
            await engine.start()
            self._stack.push_async_callback(engine.stop)
            self.add(f"engine-{number}", engine.url)
            self.engines_by_id[f"engine-{number}"] = engine
        self._stack.push_async_callback(self.engines.aclose)
        proxy = Proxy(self.engines)
        self._stack.callback(proxy.close)
        receipts = edge.pop("receipts", False)
        self.gateway = Gateway(
            self.models,
            self.placement,
            proxy,
            listeners=[self.outcomes.append],
            body_limit=body_limit,
            receipts=receipts,
            limiter=edge.pop("limiter", None),
        )
        self.started = True
        self.edge = Edge(self.gateway, self.models, readiness=edge.pop("readiness", self._ready), **edge)
        limits = Limits(write_buffer_bytes=4096, connections=connections)
        server = await serve(self.edge, limits=limits, refuser=self.edge.refuse)
        self._stack.callback(server.close)
        self.port = server.port

    def _model(self, **settings: Any) -> ServedModel:
        return ServedModel("m-chat", self.prompts, aliases=("alias",), loras=("tuned",), **settings)

    def add(self, name: str, url: str) -> None:
        instance = Instance(id=name, url=url, engine="fake", model="m-chat", api_key="engine-key")
        self.engines.add(instance, FakeAdapter())
        self.placement.instances.append(name)

    @property
    def engine(self) -> FakeEngine:
        return self.engines_by_id["engine-0"]

    @property
    def outcome(self) -> Outcome:
        (outcome,) = self.outcomes
        return outcome

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)

        async def close() -> None:
            writer.transport.abort()

        self._stack.push_async_callback(close)
        return reader, writer

    async def send(
        self,
        body: Any = None,
        *,
        path: str = "/v1/chat/completions",
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not isinstance(body, bytes):
            body = b"" if body is None else json.dumps(body).encode()
        lines = {"host": "x", "connection": "close", "content-length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        reader, writer = await self.connect()
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        return reader, writer

    async def ask(self, body: Any = None, **how: Any) -> Answered:
        reader, writer = await self.send(body, **how)
        raw = await reader.read()
        writer.close()
        return Answered(raw)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(500):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came about")

    async def stop(self) -> None:
        await self._stack.aclose()

    async def _ready(self) -> dict[str, Any]:
        return {"ready": True, "models": {"m-chat": {"prompts": "EXACT"}}}
