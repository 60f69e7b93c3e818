"""An engine of which a test decides every byte: HTTP/1.1 on a plain socket, KV events on ZMQ.

What a gateway asks about itself it answers as a vLLM 0.32 does, and reads prompts with the demo model. Completions are
left to a script, which is handed the request and the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

from router.lab.calls import Rejected, read_tokenize
from router.lab.chat import ChatModel
from router.lab.options import SimEngineOptions
from router.lab.reception import Reception
from tests.cases.events import EventPort
from tests.listener import Listener

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
MODEL = "m-chat"
_COMPLETIONS = (
    *("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/embeddings", "/v1/responses"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/speech"),
)
SALTED = tuple(path for path in _COMPLETIONS if not path.startswith("/v1/audio/"))
"""Where it takes a cache_salt."""


def _described(salted: bool) -> dict[str, Any]:
    schema = {"properties": {"model": {}, **({"cache_salt": {}} if salted else {})}}
    return {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}


class Exchange:
    """One request as the engine received it, and the connection for its answer. Each method is one write."""

    def __init__(self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.path, _ = first.split(" ")
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.head = head
        self.body = body
        self._reader = reader
        self._writer = writer

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def begin_stream(self) -> None:
        await self.write(STREAM_HEAD)

    async def chunk(self, data: bytes) -> None:
        """A chunk of the body; the empty one ends it."""
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def stream(self, *pieces: bytes) -> None:
        """A whole body, one write a piece."""
        await self.begin_stream()
        for piece in (*pieces, b""):
            await self.chunk(piece)

    async def answer(self, body: Any, *, status: int = 200, content_type: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\n\r\n"
        await self.write(head.encode() + data)

    def reset(self) -> None:
        """The connection breaks off with a TCP reset."""
        raw: socket.socket = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def until_gone(self) -> None:
        """Until the gateway closes the connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass


Script = Callable[[Exchange], Awaitable[None]]


def event(chunk: Mapping[str, Any] | str) -> bytes:
    """One server-sent event; `"[DONE]"` stands for itself."""
    return b"data: %b\n\n" % (chunk if isinstance(chunk, str) else json.dumps(chunk)).encode()


def streaming(chunks: Sequence[Mapping[str, Any] | str]) -> Script:
    """Answers every request with these events, one write each."""

    async def script(exchange: Exchange) -> None:
        await exchange.stream(*map(event, chunks))

    return script


def whole_answer(usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "text": "ok", "finish_reason": "stop"}
    return {"id": "x-1", "object": "chat.completion", "model": MODEL, "choices": [choice]} | (
        {"usage": usage} if usage is not None else {}
    )


async def answer_ok(exchange: Exchange) -> None:
    await exchange.answer(whole_answer())


class Engine:
    """`ports`: its event publishers, one a rank as a rule; none: it publishes nothing, and has one rank.

    `seen` holds the completion requests that came, in order, `heard` all requests, as bytes. `started_at`, `asleep` and
    `capacity_tokens` show in its metrics and may be changed while it runs. With `tls` it speaks https. `salted`: where
    it takes a cache_salt. `lacks`: what the operator has to say, since it tells nothing of it.
    """

    def __init__(
        self,
        name: str = "A",
        *,
        script: Script = answer_ok,
        block_size: int = 4,
        ports: Sequence[EventPort] | None = None,
        ranks: int | None = None,
        capacity_tokens: int = 1 << 20,
        tls: ssl.SSLContext | None = None,
        salted: Sequence[str] = SALTED,
        max_model_tokens: int = 1 << 20,
        lacks: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.lacks = lacks
        self.max_model_tokens = max_model_tokens
        self.salted = salted
        self._probed: set[tuple[object, ...]] = set()
        self.script = script
        self.ports = [EventPort()] if ports is None else list(ports)
        self.seen: list[Exchange] = []
        self.asked: list[str] = []  # every path but those
        self._exchanges: list[Exchange] = []
        self.started_at = 1_700_000_000.25
        self.asleep = False
        self.block_size = block_size
        self.capacity_tokens = capacity_tokens
        self._ranks = ranks or max(1, len(self.ports))
        self._reception = Reception(SimEngineOptions(model=MODEL), _demo_model(), max_model_tokens=1 << 20)
        self._listener = Listener(self._serve_one, tls=tls)

    async def __aenter__(self) -> Engine:
        for port in self.ports:
            await port.start()
        await self._listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.stop()
        for port in self.ports:
            await port.stop()

    @property
    def url(self) -> str:
        return self._listener.url

    @property
    def heard(self) -> list[bytes]:
        return [exchange.head + b"\r\n\r\n" + exchange.body for exchange in self._exchanges]

    def hang_up(self) -> None:
        """Every connection is closed."""
        self._listener.hang_up()

    @property
    def port(self) -> EventPort:
        (port,) = self.ports
        return port

    async def tokens(self, path: str, body: Mapping[str, Any]) -> list[int]:
        """The prompt of a completion body, as this engine reads it. Raises `router.lab.calls.Rejected`."""
        prepared = await self._reception.prepare(json.dumps(body).encode(), chat=path.endswith("/chat/completions"))
        return prepared.prompts[0]

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
        exchange = Exchange(head, b"", reader, writer)
        exchange.body = await reader.readexactly(int(exchange.headers.get("content-length", 0)))
        self._exchanges.append(exchange)
        if exchange.path == "/v1/completions" and "x-request-id" not in exchange.headers:
            await self._probe(exchange)
        elif exchange.path in _COMPLETIONS:
            self.seen.append(exchange)
            await self.script(exchange)
        else:
            self.asked.append(exchange.path)
            await self._tell(exchange)

    async def _tell(self, exchange: Exchange) -> None:
        match exchange.path:
            case "/v1/models":
                card = {
                    "id": MODEL,
                    "object": "model",
                    "owned_by": "vllm",
                    "root": MODEL,
                    "max_model_len": self.max_model_tokens,
                }
                await exchange.answer({"object": "list", "data": [card]})
            case "/version":
                await exchange.answer({"version": "0.32.0"})
            case "/health":
                await exchange.answer(b"")
            case "/metrics":
                await exchange.answer(self._metrics(), content_type="text/plain; version=0.0.4")
            case "/kv_event_sources":
                await exchange.answer({str(port.rank): port.config() for port in self.ports})
            case "/tokenize":
                await self._tokenize(exchange)
            case "/openapi.json":
                await exchange.answer({"paths": {path: _described(path in self.salted) for path in _COMPLETIONS}})
            case _:
                await exchange.answer({"detail": "Not Found"}, status=404)

    async def _probe(self, exchange: Exchange) -> None:
        """The gateway asks for itself whether salts are honoured. They are where completions are `salted`."""
        body = exchange.json
        asked = (body["cache_salt"] if exchange.path in self.salted else None, *body["prompt"])
        cached = len(body["prompt"]) - 1 if asked in self._probed else 0
        self._probed.add(asked)
        await exchange.answer(
            whole_answer({"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": cached}})
        )

    async def _tokenize(self, exchange: Exchange) -> None:
        try:
            ids = self._reception.tokenize(read_tokenize(exchange.body))
        except Rejected as rejected:
            await exchange.answer(rejected.body, status=rejected.status)
        else:
            await exchange.answer(
                {"count": len(ids), "max_model_len": self.max_model_tokens, "tokens": ids, "token_strs": None}
            )

    def _metrics(self) -> bytes:
        lines = [f"process_start_time_seconds {self.started_at}"]
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            lines += [f'vllm:{name}{{engine="{rank}",model_name="{MODEL}"}} 0.0' for rank in range(self._ranks)]
        awake = 0.0 if self.asleep else 1.0
        lines += [
            f'vllm:engine_sleep_state{{engine="{rank}",model_name="{MODEL}",sleep_state="awake"}} {awake}'
            for rank in range(self._ranks)
        ]
        config = (
            f'block_size="{self.block_size}",cache_hit_alignment_tokens="None",enable_prefix_caching="True",'
            f'kv_cache_size_tokens="{self.capacity_tokens}"'
        )
        lines += [f'vllm:cache_config_info{{{config},engine="{rank}"}} 1.0' for rank in range(self._ranks)]
        return ("\n".join(lines) + "\n").encode()


@cache
def _demo_model() -> ChatModel:
    return ChatModel()
