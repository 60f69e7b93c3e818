"""An engine that looks like vLLM, keeps every request as it came, and answers with bytes that are written here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Self

from router.http.messages import Request
from router.http.responder import Responder
from router.http.server import Server, serve

_JSON = ((b"content-type", b"application/json"),)
_TEXT = ((b"content-type", b"text/plain"),)
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)

WHOLE = (
    b'{"id":"x","object":"chat.completion","created":1,"model":"own","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"well"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":1,"total_tokens":8}}'
)
_CHUNK = b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"own","choices":%b%b}\n\n'
TOKEN = _CHUNK % (b'[{"index":0,"delta":{"role":"assistant","content":"well"},"finish_reason":null}]', b"")
STOP = _CHUNK % (b'[{"index":0,"delta":{},"finish_reason":"stop"}]', b"")
USAGE = _CHUNK % (b"[]", b',"usage":{"prompt_tokens":7,"completion_tokens":1,"total_tokens":8}')
DONE = b"data: [DONE]\n\n"


class RecordingEngine:
    """`sources`: the endpoint of each data-parallel rank's KV events. `stream`: what a streamed answer consists of;
    without `[DONE]` at its end the connection is cut there.
    """

    def __init__(self, *, served: str = "own", sources: Sequence[str] = ()) -> None:
        self.served = served
        self.sources = sources
        self.seen: list[Request] = []
        self.stream: list[bytes] = [TOKEN, STOP, USAGE, DONE]
        self.starting = False
        self._server: Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await serve(self._handle)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def url(self) -> str:
        assert self._server is not None, "not started"
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def bodies(self) -> list[bytes]:
        return [request.body for request in self.seen]

    def _handle(self, request: Request, responder: Responder) -> None:
        if request.method == "POST":
            self.seen.append(request)
            self._answer(json.loads(request.body), responder)
        elif self.starting:
            responder.send(503, (), b"")
        elif request.path == "/health":
            responder.send(200, (), b"")
        elif request.path == "/metrics":
            responder.send(200, _TEXT, self._page())
        else:
            told = self._told().get(request.path)
            responder.send(200 if told else 404, _JSON, json.dumps(told).encode())

    def _answer(self, body: dict[str, Any], responder: Responder) -> None:
        if not body.get("stream"):
            responder.send(200, _JSON, WHOLE)
            return
        responder.start(200, _EVENTS)
        for event in self.stream:
            responder.write(event)
        if self.stream[-1:] == [DONE]:
            responder.finish()
        else:
            responder.abort()

    def _told(self) -> dict[str, Any]:
        card = {"id": self.served, "object": "model", "owned_by": "vllm", "max_model_len": 100_000}
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv-events"}
        return {
            "/v1/models": {"object": "list", "data": [card]},
            "/version": {"version": "0.32.0"},
            "/kv_event_sources": {str(n): {**config, "endpoint": at} for n, at in enumerate(self.sources)},
        }

    def _page(self) -> bytes:
        lines = ["process_start_time_seconds 1.0"]
        for rank in range(max(1, len(self.sources))):
            cache = f'block_size="16",enable_prefix_caching="True",num_gpu_blocks="1000",engine="{rank}"'
            lines.append(f"vllm:cache_config_info{{{cache}}} 1.0")
            lines.append(f'vllm:num_requests_running{{engine="{rank}",model_name="{self.served}"}} 0.0')
        return "\n".join([*lines, ""]).encode()
