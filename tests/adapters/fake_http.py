"""An engine's HTTP side played back from recordings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx

from tests.adapters.wire import recorded_answer, recorded_bytes

Answer = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


def as_recorded(engine: str, name: str) -> httpx.Response:
    answer = recorded_answer(engine, name)
    if "json" in answer:
        return httpx.Response(answer["status"], json=answer["json"])
    return httpx.Response(answer["status"], text=answer["text"])


def page(engine: str, name: str = "metrics.txt") -> httpx.Response:
    return httpx.Response(200, content=recorded_bytes(engine, name))


def changed(engine: str, name: str, **fields: Any) -> httpx.Response:
    """A recorded JSON answer with some fields set, or taken out where they are set to `...`."""
    body = recorded_answer(engine, name)["json"] | fields
    return httpx.Response(200, json={key: value for key, value in body.items() if value is not ...})


class FakeEngine(httpx.AsyncBaseTransport):
    """Answers by path, 404 for all others. `requests`: what was asked."""

    def __init__(self, answers: Mapping[str, Answer], *, key: str | None = None) -> None:
        self.answers = dict(answers)
        self.requests: list[httpx.Request] = []
        self._key = key

    @property
    def paths(self) -> list[str]:
        return [request.url.path for request in self.requests]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        is_guarded = self._key is not None and request.url.path.startswith("/v1/")  # as vLLM 0.32 guards its routes
        if is_guarded and request.headers.get("authorization") != f"Bearer {self._key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        answer = self.answers.get(request.url.path, httpx.Response(404, json={"detail": "Not Found"}))
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, httpx.Response):
            return answer(request)
        return httpx.Response(answer.status_code, content=answer.content, headers={"content-type": "application/json"})


def vllm(**more: Answer) -> dict[str, Answer]:
    return {
        "/health": as_recorded("vllm-0.32.0", "health"),
        "/version": as_recorded("vllm-0.32.0", "version"),
        "/v1/models": as_recorded("vllm-0.32.0", "models"),
        "/kv_event_sources": as_recorded("vllm-0.32.0", "kv-event-sources"),
        "/metrics": page("vllm-0.32.0"),
        **more,
    }


def sglang(**more: Answer) -> dict[str, Answer]:
    return {
        "/v1/models": as_recorded("sglang-0.5.23", "models"),
        "/server_info": as_recorded("sglang-0.5.23", "server-info"),
        "/model_info": as_recorded("sglang-0.5.23", "model-info"),
        "/v1/loads": as_recorded("sglang-0.5.23", "loads"),
        "/metrics": page("sglang-0.5.23"),
        **more,
    }
