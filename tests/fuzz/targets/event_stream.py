"""An engine's event stream: relayed the same however it is cut, and as a slow and plain reader of the format would."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

from router.core import Usage
from router.serving import sse
from router.serving.sse import SseRelay
from router.serving.usage import parse_object, read_usage
from tests.fuzz.source import Source, split

WORDS = (
    b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r\r", b"\r", b":", b" ", b"data:", b"data: ", b"event: x", b"id: 1",
    b": ping\n\n", b"data: [DONE]\n\n", b"[DONE]", b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'"usage"', b'"error"', b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}\n\n',
    b"{", b"}", b"[", b"]", b",", b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\n',
    b'"choices":[{"index":1}]', b"null", b'data: {"error":{"message":"m","code":400}}\n\n',
    b'data: {"object":"error","message":"m"}\n\n', b'"\\ud83d"', b"\xff",
    b'data: {"error":null,"choices":[{"index":0}]}\n\n', b'"usage":{"prompt_tokens":3}',
    b'"finish_reason":"length"', b"{}",
    b'data: {"choices":[{"index":0,"delta":{"content":"\\"usage\\":[DONE]"}}]}\n\n',
    b'data: {"error":' + b"[" * 1000, b"]" * 1000 + b"}\n\n",
)  # fmt: skip

_EVENT = re.compile(rb"(?s:.*?)(?:\n\n|\n\r\n|\r\r)|(?s:.+)\Z")
_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
_SMALL = 64

Told = tuple[Any, ...]


def target(data: bytes) -> None:
    source = Source(data)
    hide, choices = source.flag(), source.number(3) + 1
    cuts = source.cuts()
    stream = source.rest()
    pieces = split(stream, cuts)
    passed, told = _run([stream], hide=hide, choices=choices)
    in_pieces, told_too = _run(pieces, hide=hide, choices=choices)
    assert (_events(in_pieces), told_too) == (_events(passed), told)
    assert all(event.endswith(_ENDS) for event in _events(passed))
    if b"\\u00" not in stream:  # a marker spelt in escapes is not looked for: no engine writes one
        _compare(passed, told, stream, hide=hide)
    with patch.object(SseRelay, "held_bytes", _SMALL):
        _check_bounded(pieces, stream, hide=hide)


def _events(stream: bytes) -> list[bytes]:
    """Empty lines between events mean nothing: which event they are counted to depends on how they come."""
    return [event.lstrip(b"\r\n") for event in _EVENT.findall(stream) if event.strip(b"\r\n")]


def _run(pieces: list[bytes], *, hide: bool, choices: int) -> tuple[bytes, Told]:
    relay = SseRelay(hide_usage=hide, choices=choices)
    passed = b""
    for piece in pieces:
        ended = relay.done or relay.error is not None
        new = relay.feed(piece)
        assert not (ended and new), "something after the end"
        passed += new
    passed += relay.end()
    assert relay.begun or not passed.strip(b"\r\n")
    assert not relay.inside
    return passed, (relay.done, relay.tail.lstrip(b"\r\n"), relay.error, relay.usage, relay.complete, relay.first_token)


def _compare(passed: bytes, told: Told, stream: bytes, *, hide: bool) -> None:
    """With a plain reading of the format, event by event."""
    usage, first_token = None, False
    end: Told = (False, b"", None)
    ours = iter(_events(passed))
    for event in _events(stream):
        lines = re.split(rb"\r\n|\n|\r", event)
        payload = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if payload.strip() == b"[DONE]":
            end = (True, event, None)
            break
        chunk = parse_object(payload) if payload else None
        is_comment = not payload and event.startswith(b":")
        if chunk is None and not is_comment and not event.endswith(_ENDS):
            break  # torn
        if chunk is None and payload.startswith(b"{") and (not first_token or _is_looked_into(event)):
            end = (False, b"", sse.TORN)
            break
        error = chunk and (chunk if chunk.get("object") == "error" else not chunk.get("choices") and chunk.get("error"))
        if error:
            said = error if isinstance(error, dict) else {"message": error if isinstance(error, str) else ""}
            end = (False, b"", said)
            break
        if chunk is not None:
            usage = read_usage(chunk.get("usage")) or usage
            choices = chunk.get("choices")
            first_token = first_token or bool(choices and isinstance(choices, list))
            if hide and "usage" in chunk:
                if choices or chunk["usage"] is None:
                    _check_cut(next(ours), chunk)
                continue
        assert next(ours).startswith(event)  # the last one may have been closed
    assert told[:4] == (*end, usage)
    assert next(ours, None) is None
    assert told[5] == first_token


def _is_looked_into(event: bytes) -> bool:
    """Most events are passed on unread; of these only one that does not end as an object does is found out."""
    marked = any(mark in event for mark in (b'"usage"', b'"error"', b"[DONE]")) or sse._FINISHED.search(event)
    return bool(marked) or event.startswith(b":") or b"\n:" in event or event.count(b"}\n\n") != event.count(b"\n\n")


def _check_cut(event: bytes, chunk: dict[str, Any]) -> None:
    lines = re.split(rb"\r\n|\n|\r", event)
    payload = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
    assert parse_object(payload) == {name: value for name, value in chunk.items() if name != "usage"}


def _check_bounded(pieces: list[bytes], stream: bytes, *, hide: bool) -> None:
    """Where events are larger than what is held, nothing is lost but what had to be hidden, and nothing piles up."""
    relay = SseRelay(hide_usage=hide)
    passed = b""
    for piece in pieces:
        passed += relay.feed(piece)
        assert len(relay._held) <= _SMALL
    passed += relay.end()
    if not hide:
        assert stream.startswith(passed) or passed.rstrip(b"\n") in stream
    assert isinstance(relay.usage, Usage | None)
