"""The simulated engine server: looks like vLLM 0.32 over HTTP and ZMQ, and computes nothing.

async with SimEngineServer(SimEngineOptions()) as engine:
    ... engine.url, engine.events_endpoint
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

import orjson
import uvloop

from router.http.messages import Request
from router.http.responder import Responder
from router.http.server import Server, serve
from router.lab.calls import Rejected, read_detokenize, read_tokenize
from router.lab.chat import ChatModel
from router.lab.engine import EngineModel
from router.lab.events import EventPublisher
from router.lab.exposition import EngineMetrics
from router.lab.live import LiveEngine
from router.lab.options import SimEngineOptions
from router.lab.reception import Prepared, Reception
from router.lab.sessions import CRASHED, JSON, Session

__all__ = ["SimEngineOptions", "SimEngineServer", "run"]

VERSION = "0.32.0"
_PAGE = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)
_BUSY = {
    "message": "The engine is currently busy and cannot accept new requests. "
    "Please try again later or on a different instance.",
    "type": "ServiceUnavailable",
    "param": None,
    "code": 503,
}
_NOT_JSON = {
    "message": "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
    "type": "Bad Request",
    "param": None,
    "code": 400,
}

_log = logging.getLogger("warmroute.lab")

Route = Callable[[Request, Responder], None]


class SimEngineServer:
    """One engine. `start` and `stop` in one event loop, once each."""

    def __init__(self, options: SimEngineOptions, *, chat: ChatModel | None = None) -> None:
        """`chat`: what `options.tokenizer` names, where several engines share it: loading takes 70 ms.

        Raises OSError or ValueError for a tokenizer directory or limits that cannot be used.
        """
        self.options = options
        self.model = EngineModel(
            options.engine,
            block_size=options.block_size,
            capacity_tokens=options.capacity_tokens,
            max_num_seqs=options.max_num_seqs,
            max_batched_tokens=options.max_batched_tokens,
            order=options.order,
            record_events=options.events_port is not None,
        )
        longest = self.model.capacity_tokens
        if options.max_model_tokens is not None:
            longest = min(longest, options.max_model_tokens)
        self._chat = chat or ChatModel(options.tokenizer)
        self._reception = Reception(options, self._chat, max_model_tokens=longest)
        self._metrics = EngineMetrics(options.model, started_at=time.time())
        self._tasks: set[asyncio.Task[None]] = set()
        self._publisher: EventPublisher | None = None
        self._server: Server | None = None
        self._live: LiveEngine | None = None
        self._routes = self._table()

    # Life ------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises OSError for a port that is taken."""
        options = self.options
        if options.events_port is not None:
            self._publisher = EventPublisher(
                host=options.host,
                port=options.events_port,
                replay_port=options.replay_port,
                buffer_steps=options.buffer_steps,
            )
        try:
            self._server = await serve(self._handle, host=options.host, port=options.port)
        except BaseException:
            await self._close_publisher()
            raise
        self._live = LiveEngine(self.model, self._metrics, publisher=self._publisher, speed=options.speed)
        self._own(self._live.run())

    async def stop(self) -> None:
        """Ends every answer as a real engine does when it is told to go, then closes."""
        if self._live is not None:
            self._live.crash()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.drain(1.0)
        await self._close_publisher()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def port(self) -> int:
        assert self._server is not None, "not started"
        return self._server.port

    @property
    def url(self) -> str:
        return f"http://{self._connectable}:{self.port}"

    @property
    def events_endpoint(self) -> str | None:
        return None if self._publisher is None else f"tcp://{self._connectable}:{self._publisher.port}"

    @property
    def replay_endpoint(self) -> str | None:
        if self._publisher is None or self._publisher.replay_port is None:
            return None
        return f"tcp://{self._connectable}:{self._publisher.replay_port}"

    @property
    def published(self) -> int:
        """Event batches so far."""
        return 0 if self._publisher is None else self._publisher.sequence

    def crash(self) -> None:
        """The engine core dies: answers break off, from then on only errors. For tests of what stands in front."""
        self._engine.crash()

    @property
    def _engine(self) -> LiveEngine:
        assert self._live is not None, "not started"
        return self._live

    @property
    def _connectable(self) -> str:
        return "127.0.0.1" if self.options.host in ("0.0.0.0", "") else self.options.host

    async def _close_publisher(self) -> None:
        if self._publisher is not None:
            await self._publisher.aclose()

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:  # only the steps can fail, and then for good
            _log.error("the engine model failed", exc_info=task.exception())
            self._engine.crash()

    # HTTP ------------------------------------------------------------------------------------------------------------

    def _table(self) -> dict[str, dict[str, Route]]:
        return {
            "/v1/chat/completions": {"POST": self._chat_completions},
            "/v1/completions": {"POST": self._completions},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": _answering(lambda: {"version": VERSION})},
            "/load": {"GET": _answering(lambda: {"server_load": len(self._engine)})},
            "/metrics": {"GET": self._metrics_page},
            "/kv_event_sources": {"GET": _answering(self._event_sources)},
            "/reset_prefix_cache": {"POST": _answering(lambda: {"success": self.model.reset_cache()})},
            "/sleep": {"POST": self._sleep},
            "/wake_up": {"POST": self._wake_up},
            "/is_sleeping": {"GET": _answering(lambda: {"is_sleeping": not self._engine.awake})},
        }

    def _handle(self, request: Request, responder: Responder) -> None:
        methods = self._routes.get(request.path)
        if request.path.startswith("/v1") and not self._has_key(request):
            _send(responder, 401, {"error": "Unauthorized"})
        elif methods is None:
            _send(responder, 404, {"detail": "Not Found"})
        elif request.method not in methods:
            allow = (b"allow", ", ".join(methods).encode())
            responder.send(405, (*JSON, allow), b'{"detail":"Method Not Allowed"}')
        else:
            methods[request.method](request, responder)

    def _has_key(self, request: Request) -> bool:
        key = self.options.api_key
        return key is None or hmac.compare_digest(request.header(b"authorization") or b"", b"Bearer " + key.encode())

    def _health(self, request: Request, responder: Responder) -> None:
        responder.send(503 if self._engine.crashed else 200, (), b"")

    def _metrics_page(self, request: Request, responder: Responder) -> None:
        page = self._metrics.page(self.model, self._cache_config())
        responder.send(200, _PAGE, page)

    def _cache_config(self) -> dict[str, str]:
        blocks = self.model.pool.total + 1  # vLLM counts its null block, which holds nothing
        return {
            "block_size": str(self.options.block_size),
            "cache_dtype": "auto",
            "cache_hit_alignment_tokens": "None",
            "enable_prefix_caching": "True",
            "hash_block_size": "None",
            "kv_cache_size_tokens": str(blocks * self.options.block_size),
            "num_gpu_blocks": str(blocks),
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": "None",
        }

    def _event_sources(self) -> dict[str, Any]:
        publisher = self._publisher
        if publisher is None:
            return {}
        replay = None if publisher.replay_port is None else f"tcp://*:{publisher.replay_port}"
        return {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{publisher.port}",  # a wildcard whatever the host, as vLLM's default has it
                "replay_endpoint": replay,
                "buffer_steps": publisher.buffer_steps,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": publisher.topic,
            }
        }

    def _models(self, request: Request, responder: Responder) -> None:
        base = self.options.model
        cards = [self._card(base, None, self._reception.max_model_tokens)]
        cards += [self._card(lora, base, None) for lora in self.options.loras]
        _send(responder, 200, {"object": "list", "data": cards})

    def _card(self, name: str, parent: str | None, max_model_tokens: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": str(self.options.tokenizer) if parent is None else name,
            "parent": parent,
            "max_model_len": max_model_tokens,
            "permission": [],
        }

    def _sleep(self, request: Request, responder: Responder) -> None:
        given = parse_qs(request.query.decode("latin-1")).get("level", ["1"])[0]
        level = int(given) if given in ("0", "1", "2") else 1
        self._engine.sleep(level)
        _send(responder, 200, {"status": "sleeping", "level": level})

    def _wake_up(self, request: Request, responder: Responder) -> None:
        self._engine.wake()
        _send(responder, 200, {"status": "awake", "tags": None})

    def _tokenize(self, request: Request, responder: Responder) -> None:
        self._own(_rejecting(partial(self._answer_tokenize, request, responder), responder))

    async def _answer_tokenize(self, request: Request, responder: Responder) -> None:
        wanted = read_tokenize(request.body)
        self._reception.lora_of(wanted.model)
        tokens = await asyncio.to_thread(self._reception.tokenize, wanted)
        strings = self._chat.token_strings(tokens) if wanted.return_token_strs else None
        most = self._reception.max_model_tokens
        _send(responder, 200, {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": strings})

    def _detokenize(self, request: Request, responder: Responder) -> None:
        self._own(_rejecting(partial(self._answer_detokenize, request, responder), responder))

    async def _answer_detokenize(self, request: Request, responder: Responder) -> None:
        text = await asyncio.to_thread(self._chat.decode, read_detokenize(request.body).tokens)
        _send(responder, 200, {"prompt": text})

    def _chat_completions(self, request: Request, responder: Responder) -> None:
        self._own(_rejecting(partial(self._complete, request, responder, chat=True), responder))

    def _completions(self, request: Request, responder: Responder) -> None:
        self._own(_rejecting(partial(self._complete, request, responder, chat=False), responder))

    async def _complete(self, request: Request, responder: Responder, *, chat: bool) -> None:
        began = asyncio.get_running_loop().time()
        kind = request.header(b"content-type") or b"application/json"
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            raise Rejected(400, {"error": _NOT_JSON})
        prepared = await self._reception.prepare(request.body, chat=chat)
        if self._engine.crashed:
            raise Rejected(500, {"error": CRASHED})
        if self.options.max_queued is not None and self.model.waiting >= self.options.max_queued:
            self._metrics.rejected += 1
            raise Rejected(503, {"error": _BUSY})
        if not responder.gone:
            session = self._session(prepared, responder, _answer_id(request, chat=chat), chat=chat, began=began)
            self._engine.admit(session)

    def _session(self, prepared: Prepared, responder: Responder, id: str, *, chat: bool, began: float) -> Session:
        call = prepared.call
        session = Session(
            prepared.shape(chat=chat, id=id, created=int(time.time()), model=self.options.model),
            responder,
            streams=bool(call.stream),
            include_usage=call.stream_options is not None and call.stream_options.include_usage,
            report_cached=self.options.report_cached,
            began=began,
        )
        session.open(
            prepared.requests, prepared.replies, block_size=self.options.block_size, prompts=len(prepared.prompts)
        )
        return session


async def _rejecting(work: Callable[[], Awaitable[None]], responder: Responder) -> None:
    """What `work` rejects becomes the answer; a body that nobody foresaw is answered too, as by vLLM."""
    try:
        await work()
    except Rejected as rejected:
        _send(responder, rejected.status, rejected.body)
    except Exception as error:
        _log.error("a request failed: %s", type(error).__name__)  # its message may hold text of the prompt
        responder.send(500, (), b"Internal Server Error")


def _answer_id(request: Request, *, chat: bool) -> str:
    name = request.header(b"x-request-id")
    unique = secrets.token_hex(8) if name is None else name.decode("latin-1")
    return f"{'chatcmpl' if chat else 'cmpl'}-{unique}"


def _answering(make: Callable[[], Any]) -> Route:
    def route(request: Request, responder: Responder) -> None:
        _send(responder, 200, make())

    return route


def _send(responder: Responder, status: int, body: Any) -> None:
    responder.send(status, JSON, orjson.dumps(body))


def run(options: SimEngineOptions, *, ready: Callable[[SimEngineServer], None] | None = None) -> None:
    """Serves until SIGINT or SIGTERM, on uvloop. `ready` is called once, when every port is open."""

    async def serve_until_told() -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, told.set)
        async with SimEngineServer(options) as engine:
            if ready is not None:
                ready(engine)
            await told.wait()

    uvloop.run(serve_until_told())
