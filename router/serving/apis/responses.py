"""OpenAI's Responses: as they are where an engine serves them (vLLM, SGLang), else by way of chat.

A stream of typed events, whole with `response.completed` or `response.incomplete`. What is stored by one engine cannot
be found again behind a gateway, so that each request has to bring its whole conversation in `input`.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from router.errors import BadRequest, WarmrouteError
from router.serving.apis.api import Api, Fields, limit_of
from router.serving.apis.named_events import NamedEventRelay
from router.serving.apis.responses_as_chat import ResponsesAsChat
from router.serving.sse import EventRelay
from router.serving.usage import find_usage, read_usage

NOT_STORED = "Responses are not stored here: send the whole conversation in `input`."
_STORED = ("previous_response_id", "conversation", "background")
_OURS = frozenset(("server_error", "rate_limit_exceeded"))  # error codes that say nothing against the request


class Responses(Api):
    reads_prompt = True
    otherwise = ResponsesAsChat()

    def check(self, fields: Fields) -> None:
        for field in _STORED:
            if fields.get(field):
                raise BadRequest(NOT_STORED, param=field, code="unsupported_parameter")

    def output_limit(self, fields: Fields) -> int | None:
        return limit_of(fields.get("max_output_tokens"))

    def relay(self, *, wants_usage: bool, choices: int) -> EventRelay:
        return ResponsesRelay()

    def render_event(self, error: WarmrouteError, request_id: str, events: int) -> bytes:
        """OpenAI's error event. Its SDKs raise what stands in `error`; others look for the same beside it."""
        said: dict[str, Any] = {"message": error.message, "param": error.param, "code": error.code}
        whole = {"type": "error", "sequence_number": events, **said, "error": {"type": error.type, **said}}
        return b"event: error\ndata: %b\n\n" % orjson.dumps(whole)


class ResponsesRelay(NamedEventRelay):
    deltas = re.compile(rb"^event: response\.[a-z_.]*delta\r?$", re.MULTILINE)
    last = frozenset((b"response.completed", b"response.incomplete"))
    before_output = frozenset((b"response.created", b"response.in_progress", b"response.queued", b"error", b""))

    __slots__ = ()

    def failed(self, name: bytes, fields: dict[str, Any]) -> dict[str, Any] | None:
        if name == b"response.failed":
            response = fields.get("response")
            error = response.get("error") if isinstance(response, dict) else None
            return _with_status(error if isinstance(error, dict) else {})
        if name == b"error" and not fields.get("error"):
            return _with_status(fields)
        return super().failed(name, fields)

    def look(self, name: bytes, event: bytes, fields: dict[str, Any] | None) -> None:
        if name not in self.last:
            return
        response = fields.get("response") if fields is not None else None
        self.take_usage(read_usage(response.get("usage")) if isinstance(response, dict) else find_usage(event))


def _with_status(error: dict[str, Any]) -> dict[str, Any]:
    code = error.get("code")
    if isinstance(code, int):
        return error
    refused = isinstance(code, str) and code not in _OURS
    return {"message": error.get("message"), "param": error.get("param"), "code": 400 if refused else 500}
