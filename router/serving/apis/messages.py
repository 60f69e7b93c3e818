"""Anthropic's Messages: as they are where an engine serves them (vLLM, SGLang), else by way of chat.

Errors are `{"type": "error", "error": {"type", "message"}, "request_id"}`, in a stream as the event `error`. A stream
goes from `message_start` to `message_stop`, without a `[DONE]`. Its usage comes in two parts: what `message_start` says
holds until `message_delta` says otherwise, field by field.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from router.errors import WarmrouteError
from router.serving.apis.api import Api, Fields, limit_of, session_of
from router.serving.apis.messages_as_chat import CountAsTokenize, MessagesAsChat
from router.serving.apis.named_events import NamedEventRelay
from router.serving.apis.plain import Light
from router.serving.limits.headers import Room, anthropic_lines
from router.serving.sse import EventRelay
from router.serving.usage import read_usage

_OVERLOADED = 529
_BUSY = frozenset(("overloaded", "queue_timeout", "no_engine_available"))
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
_STATUS_OF = {
    "invalid_request_error": 400,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 503,
}


class _Errors(Api):
    id_header = b"request-id"

    def status(self, error: WarmrouteError) -> int:
        """Anthropic's clients know a full house by 529."""
        return (
            _OVERLOADED
            if error.status == 503 and (error.code in _BUSY or error.code == "engine_error")
            else error.status
        )

    def render(self, error: WarmrouteError, request_id: str) -> bytes:
        status = self.status(error)
        kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        said = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
        return orjson.dumps(said)

    def limit_lines(self, requests: Room | None, tokens: Room | None, now: float) -> bytes:
        return anthropic_lines(requests, tokens, now)

    def render_event(self, error: WarmrouteError, request_id: str, events: int) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.render(error, request_id)


class Messages(_Errors):
    reads_prompt = True
    otherwise = MessagesAsChat()

    def output_limit(self, fields: Fields) -> int | None:
        return limit_of(fields.get("max_tokens"))

    def session(self, fields: Fields) -> str | None:
        """Claude Code names its session in `metadata.user_id`."""
        return session_of(fields) or session_of(fields, "user_id")

    def relay(self, *, wants_usage: bool, choices: int) -> EventRelay:
        return MessagesRelay()


class CountTokens(_Errors, Light):
    otherwise = CountAsTokenize()


class MessagesRelay(NamedEventRelay):
    __slots__ = ("_counts",)

    deltas = re.compile(rb"^event: content_block_delta\r?$", re.MULTILINE)
    last = frozenset((b"message_stop",))
    before_output = frozenset((b"message_start", b"ping", b"error", b""))

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, Any] = {}

    def failed(self, name: bytes, fields: dict[str, Any]) -> dict[str, Any] | None:
        error = super().failed(name, fields)
        if error is None:
            return {"code": 500} if name == b"error" else None
        return error if "code" in error else {**error, "code": _STATUS_OF.get(str(error.get("type")), 500)}

    def look(self, name: bytes, event: bytes, fields: dict[str, Any] | None) -> None:
        if fields is None or name not in (b"message_start", b"message_delta"):
            return
        holder = fields.get("message") if name == b"message_start" else fields
        counts = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(counts, dict):
            self._counts |= {field: count for field, count in counts.items() if count is not None}
            self.take_usage(read_usage(self._counts))
