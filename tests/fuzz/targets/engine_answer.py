"""A whole answer of an engine: its usage as a parser reads it, its errors in our dialect and writable."""

from __future__ import annotations

import json
from typing import Any

from router.errors import WarmrouteError
from router.serving.openai_errors import class_of, engine_answer_error, in_band_error, render, render_event
from router.serving.usage import find_usage, parse_object, read_usage, usage_of_answer
from tests.fuzz.source import Source

WORDS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b" ", b"\n", b"\\ud83d", b"\xc3\xa9", b"\xff", b"null",
    b"true", b"NaN", b'"usage"', b'"prompt_tokens"', b'"completion_tokens"', b'"prompt_tokens_details"',
    b'"cached_tokens"', b'"error"', b'"message"', b'"type"', b'"param"', b'"code"', b'"detail"', b'"loc"', b'"msg"',
    b'"object":"error"', b'"choices"', b"400", b"404", b"-1", b"1.5", b"99999999999999999999999", b'{"error":{',
    b'{"usage":{', b'\n  File "', b"Traceback (", b',"a":' + b"[" * 1000 + b"]" * 1000,
    b',"detail":' + b"[" * 1000 + b"]" * 1000,
)  # fmt: skip

_STATUSES = (400, 401, 404, 413, 422, 429, 499, 500, 503, 204, 302, 599)
_RETRY = (None, b"2", b"", b"99999999999999", b"Wed, 21 Oct 2026", b"\xb2")
_MEMBERS = ("error", "message", "type", "param", "code", "detail", "object", "usage", "choices")


def target(data: bytes) -> None:
    source = Source(data)
    built, status, retry_after = source.flag(), source.pick(_STATUSES), source.pick(_RETRY)
    body = _written(source) if built else source.rest()
    _check_usage(body)
    error = engine_answer_error(status, body, retry_after)
    assert error.status >= 400
    _check_error(error)
    answer = parse_object(body)
    if answer is not None:
        _check_error(in_band_error(answer))


def _check_usage(body: bytes) -> None:
    usage = usage_of_answer(body)
    answer = parse_object(body)
    if answer is not None:
        assert usage == read_usage(answer.get("usage"))
    for found in (usage, find_usage(body)):
        if found is not None:
            assert found.input_tokens >= 0
            assert found.output_tokens >= 0
            assert found.cached_tokens is None or found.cached_tokens >= 0


def _check_error(error: WarmrouteError) -> None:
    written: dict[str, Any] = json.loads(render(error))["error"]
    assert written.keys() == {"message", "type", "param", "code"}
    assert isinstance(written["message"], str)
    assert written["message"]
    assert isinstance(written["type"], str)
    assert 'File "' not in written["message"] or '\n  File "' not in written["message"]
    event = render_event(error)
    assert event.startswith(b"data: {")
    assert event.count(b"\n") == 2
    assert len(class_of(error)) < 40


def _written(source: Source) -> bytes:
    members = {source.pick(_MEMBERS): source.value() for _ in range(source.number(6))}
    if source.flag():
        members["detail"] = [{"loc": source.value(), "msg": source.value()}, source.value()]
    if source.flag():
        members["error"] = {source.pick(_MEMBERS): source.value() for _ in range(source.number(6))}
    return json.dumps(members).encode()
