"""Errors in the dialect of the OpenAI API: ours, and the engines' translated into it.

The error object is `{"error": {"message", "type", "param", "code"}}`. A message never names an upstream host or model,
and never carries a trace: what an engine says of a client's mistake is passed on, what it says of itself is not.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from router.errors import ClientError, ContextTooLong, EngineError, EngineProtocolError, WarmrouteError
from router.serving.usage import parse_object

_TRACE = re.compile(
    r"\s*\n\s*File \"|\s*\nTraceback \("
)  # SGLang 0.5.23 adds its own source lines to validation errors
_TOO_LONG = re.compile(r"maximum context length|longer than the model's context length|context_length_exceeded", re.I)
"""vLLM 0.32; SGLang 0.5.23; OpenAI's own code. Older engines say so with a 500."""
_DEAD = "EngineCore encountered an issue"  # vLLM 0.32, of every request, until its server is gone too
_MESSAGE_CHARS = 4096
CONTEXT_LENGTH_EXCEEDED = ContextTooLong.code
_NOT_THERE = "The engine does not serve this model or route."
_NO_ROUTE = "The engine of this model does not serve this route."
_ROUTE_MISSES = ("", "not found", "file not found", "method not allowed")  # FastAPI, llama.cpp: no word of a model
_OWN_WORDS = {
    401: "The engine refused the gateway.",
    403: "The engine refused the gateway.",
    429: "The engine is at its limit; try again later.",
    503: "The engine is too busy to take the request; try again later.",
    504: "The engine did not answer in time.",
}


class EngineRefusal(ClientError):
    """The engine's word that the client's request is at fault: its status, in our shape."""

    def __init__(self, status: int, message: str, *, type: str, param: str | None, code: Any) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.type = type
        self.code = code


class EngineFailure(EngineError):
    """The engine's word that it failed, with its status, in our own words. `died`: that it will never recover."""

    def __init__(self, status: int, *, retry_after_s: float | None = None, died: bool = False) -> None:
        message = _OWN_WORDS.get(status, "The engine failed to answer the request.")
        super().__init__(message, code="engine_error", retry_after_s=retry_after_s, detail=f"engine status {status}")
        self.engine_status = status
        self.died = died
        self.status = 502 if status in (401, 403) else status


def class_of(error: WarmrouteError) -> str:
    """What an error counts as: one of a short list, whatever an engine wrote into its own."""
    if isinstance(error, EngineFailure):
        return "engine_died" if error.died else f"engine_{error.engine_status}"
    if isinstance(error, EngineRefusal):
        return f"engine_{error.status}"
    return error.code or error.type


def render(error: WarmrouteError) -> bytes:
    """The body of an error answer."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    try:
        return orjson.dumps({"error": fields})
    except TypeError:  # an engine's words may hold half a surrogate pair, its code may exceed 64 bits
        return json.dumps({"error": fields}).encode()


def render_event(error: WarmrouteError) -> bytes:
    """The in-band error of a stream that has begun."""
    return b"data: %b\n\n" % render(error)


def engine_answer_error(status: int, body: bytes, retry_after: bytes | None = None) -> WarmrouteError:
    """What an engine's answer with another status than 200 means for the client."""
    answer = parse_object(body)
    if lacks_route(status, answer):
        return EngineRefusal(404, _NO_ROUTE, type="invalid_request_error", param=None, code="unknown_url")
    if 400 <= status < 500:
        return _engine_error(status, _error_object(answer) if answer is not None else {}, retry_after)
    if status >= 500:
        return _failure(status, _error_object(answer) if answer is not None else {}, retry_after)
    return EngineProtocolError("The engine answered with a status that is not understood.", detail=f"status {status}")


def lacks_route(status: int, answer: dict[str, Any] | None) -> bool:
    """Whether an engine's answer says that it does not have the route. `answer`: its body, None if that is no JSON."""
    if status != 404:
        return status in (405, 501)
    return answer is None or str(_error_object(answer).get("message", "")).strip(" .").lower() in _ROUTE_MISSES


def in_band_error(error: dict[str, Any]) -> WarmrouteError:
    """What the error object in an engine's event stream means for the client."""
    return _engine_error(_status_of(error), error, None)


def _engine_error(status: int, error: dict[str, Any], retry_after: bytes | None) -> WarmrouteError:
    if status >= 500 or status in (401, 403, 429):  # our key, or the engine's own limit: nothing the client did
        return _failure(status, error, retry_after)
    if status == 404:  # vLLM lists the names it does know
        return EngineRefusal(404, _NOT_THERE, type="invalid_request_error", param=None, code="model_not_found")
    return _refusal(400 if status == 422 else status, error)  # SDKs know 400; 422 is FastAPI's habit


def _failure(status: int, error: dict[str, Any], retry_after: bytes | None) -> WarmrouteError:
    if status == 500 and _is_too_long(error):
        return _refusal(400, error)
    died = status == 500 and _DEAD in _text(error.get("message"))
    return EngineFailure(status, retry_after_s=_seconds(retry_after), died=died)


def _refusal(status: int, error: dict[str, Any]) -> EngineRefusal:
    message, param, code = _text(error.get("message")), error.get("param"), error.get("code", status)
    if not isinstance(code, (str, int, type(None))):
        code = status
    return EngineRefusal(
        status,
        _clean(message) or "The engine refused the request.",
        type=_text(error.get("type")) or "invalid_request_error",
        param=param if isinstance(param, str) else None,
        code=CONTEXT_LENGTH_EXCEEDED if _is_too_long(error) else code,
    )


def _is_too_long(error: dict[str, Any]) -> bool:
    return any(isinstance(said := error.get(key), str) and _TOO_LONG.search(said) for key in ("code", "message"))


def _error_object(answer: dict[str, Any]) -> dict[str, Any]:
    """vLLM: {"error": {…}} or {"error": "text"}; SGLang: {"object": "error", "message": …}; FastAPI: {"detail": …}."""
    error = answer.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, str):
        return {"message": error}
    detail = answer.get("detail")
    if isinstance(detail, dict):
        return detail
    return answer if detail is None else {"message": _detail(detail)}


def _detail(detail: object) -> str:
    """FastAPI: a text, or a list of {"loc": ["body", …], "msg": …}; what has another shape says nothing."""
    if not isinstance(detail, list):
        return _text(detail)
    items = [(item.get("loc"), _text(item.get("msg"))) for item in detail if isinstance(item, dict)]
    return "; ".join(f"{_place(loc)}: {message}" if loc else message for loc, message in items)


def _place(loc: object) -> str:
    return ".".join(str(part) for part in loc if isinstance(part, (str, int))) if isinstance(loc, list) else _text(loc)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _status_of(error: dict[str, Any]) -> int:
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _clean(message: str) -> str:
    return _TRACE.split(message, maxsplit=1)[0][:_MESSAGE_CHARS]


def _seconds(retry_after: bytes | None) -> float | None:
    if retry_after is None or not retry_after.isdigit():
        return None
    return float(retry_after[:6])
