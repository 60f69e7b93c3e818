"""Relays of named events against recorded streams, cut at every kind of position, and against streams that are odd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Usage
from router.serving.apis.messages import MessagesRelay
from router.serving.apis.named_events import NamedEventRelay
from router.serving.apis.responses import ResponsesRelay
from tests.router.serving.test_sse import run, splits

RECORDED = Path(__file__).parent / "recordings" / "vllm-0.32.0" / "named"
STREAMS: list[tuple[type[NamedEventRelay], str, Usage]] = [
    (MessagesRelay, "messages-stream", Usage(51, 3, 32)),
    (ResponsesRelay, "responses-stream", Usage(51, 3, 32)),
]


def named(name: str, **fields: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()


def event(kind: str, **fields: object) -> bytes:
    """Without a name, as some servers send them."""
    return f"data: {json.dumps({'type': kind, **fields})}\n\n".encode()


DELTA = named("content_block_delta", index=0, delta={"type": "text_delta", "text": 'event: message_stop\n\n "error"'})
STOP = named("message_stop")
TEXT = named("response.output_text.delta", delta="a")
COMPLETED = named("response.completed", response={"usage": {"input_tokens": 7, "output_tokens": 2}})


@pytest.mark.parametrize(("relay", "name", "usage"), STREAMS)
def test_a_recorded_stream_passes_byte_for_byte(relay: type[NamedEventRelay], name: str, usage: Usage) -> None:
    data = (RECORDED / f"{name}.sse").read_bytes()
    events = data.count(b"event: ")
    for pieces in splits(data):
        one = relay()
        assert run(one, pieces) + one.tail == data.rstrip(b"\n") + b"\n\n"
        assert one.complete
        assert one.first_token
        assert one.usage == usage
        assert one.events == events - 1  # the last is the tail


@pytest.mark.parametrize(("relay", "name", "usage"), STREAMS)
def test_a_stream_that_is_cut_is_never_whole(relay: type[NamedEventRelay], name: str, usage: Usage) -> None:
    data = (RECORDED / f"{name}.sse").read_bytes().rstrip(b"\n")
    last = data.rindex(b"event: ")
    for cut in {*range(0, last, 37), last}:
        one = relay()
        passed = run(one, [data[:cut]])
        assert not one.complete
        assert data.startswith(passed)
        assert one.tail == b""


@pytest.mark.parametrize(
    ("relay", "before", "first"),
    [
        (MessagesRelay, [named("message_start", message={}), named("ping"), b": hi\n\n"], named("content_block_start")),
        (MessagesRelay, [named("message_start", message={})], DELTA),
        (
            ResponsesRelay,
            [named("response.created"), named("response.in_progress")],
            named("response.output_item.added"),
        ),
        (ResponsesRelay, [event("response.created")], event("response.output_text.delta", delta="a")),
    ],
)
def test_the_first_token_is_the_first_event_with_output(
    relay: type[NamedEventRelay], before: list[bytes], first: bytes
) -> None:
    one = relay()
    for each in before:
        assert one.feed(each) == each
        assert not one.first_token
    one.feed(first)
    assert one.first_token


def test_deltas_pass_together_and_are_counted() -> None:
    one = MessagesRelay()
    one.feed(named("content_block_start"))
    assert one.feed(DELTA * 5 + named("ping") + DELTA) == DELTA * 5 + named("ping") + DELTA
    assert one.events == 8
    crlf = DELTA.replace(b"\n", b"\r\n")
    assert one.feed(crlf * 3) == crlf * 3
    assert one.events == 11


@pytest.mark.parametrize("relay", [MessagesRelay, ResponsesRelay])
def test_done_is_no_end(relay: type[NamedEventRelay]) -> None:
    one = relay()
    assert run(one, [DELTA, b"data: [DONE]\n\n"]) == DELTA
    assert not one.complete


def test_a_failure_that_repeats_a_long_request() -> None:
    one = ResponsesRelay()
    one.feed(named("response.failed", response={"instructions": "x" * 100_000, "error": {"code": "invalid_prompt"}}))
    assert one.error is not None
    assert one.error["code"] == 500


def test_nothing_passes_after_the_end() -> None:
    one = MessagesRelay()
    assert one.feed(DELTA + STOP + b"data: [DONE]\n\n" + DELTA) == DELTA
    assert one.feed(DELTA) == b""
    assert one.end() == b""
    assert one.tail == STOP


@pytest.mark.parametrize(
    ("start", "delta", "usage"),
    [
        # https://github.com/BerriAI/litellm/pull/38657: the parts hold until they are told anew
        (
            {"input_tokens": 40, "cache_read_input_tokens": 32, "output_tokens": 1},
            {"output_tokens": 7},
            Usage(72, 7, 32),
        ),
        (
            {"input_tokens": 51, "output_tokens": 0},
            {"input_tokens": 19, "output_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 32},
            Usage(51, 3, 32),
        ),
        ({"input_tokens": 9}, {"output_tokens": 2, "input_tokens": None}, Usage(9, 2, None)),
        ({}, {"output_tokens": 2}, None),
        ([], 7, None),
    ],
)
def test_usage_in_two_parts(start: object, delta: object, usage: Usage | None) -> None:
    one = MessagesRelay()
    one.feed(named("message_start", message={"usage": start}) + named("message_delta", usage=delta) + STOP)
    assert one.usage == usage
    assert one.complete


@pytest.mark.parametrize(
    ("relay", "said", "code", "message"),
    [
        (MessagesRelay, named("error", error={"type": "overloaded_error", "message": "m"}), 503, "m"),
        (MessagesRelay, named("error", error={"type": "invalid_request_error", "message": "m"}), 400, "m"),
        (MessagesRelay, named("error", error={"type": "internal_error", "message": "m"}), 500, "m"),
        (MessagesRelay, named("error"), 500, None),
        (MessagesRelay, b'data: {"error":{"message":"m","code":400}}\n\n', 400, "m"),
        (ResponsesRelay, named("error", code="server_error", message="m"), 500, "m"),
        (ResponsesRelay, named("error", code="invalid_prompt", message="m"), 400, "m"),
        (
            ResponsesRelay,
            named("response.failed", response={"error": {"code": "server_error", "message": "m"}}),
            500,
            "m",
        ),
        (ResponsesRelay, named("response.failed", response={"error": None}), 500, None),
        (ResponsesRelay, b'data: {"error":{"message":"m","code":500}}\n\n', 500, "m"),
    ],
)
def test_an_engines_error_ends_the_stream(
    relay: type[NamedEventRelay], said: bytes, code: int, message: str | None
) -> None:
    one = relay()
    assert one.feed(TEXT + said + TEXT) == TEXT
    assert one.error is not None
    assert (one.error.get("code"), one.error.get("message")) == (code, message)
    assert not one.complete
    assert one.end() == b""


def test_a_response_that_is_incomplete_is_whole() -> None:
    one = ResponsesRelay()
    last = named("response.incomplete", response={"usage": {"input_tokens": 7, "output_tokens": 2}, "error": None})
    one.feed(named("response.created", response={"error": None}) + TEXT + last)
    assert one.complete
    assert (one.usage, one.tail) == (Usage(7, 2, None), last)


@pytest.mark.parametrize("size", [100_000, 9 << 20])
def test_a_last_event_that_repeats_a_long_answer(size: int) -> None:
    """Up to 8 MiB it is held and its usage searched; beyond, it passes as it comes."""
    response = {"output": "x" * size, "usage": {"input_tokens": 7, "output_tokens": 2}}
    last = named("response.completed", response=response)
    one = ResponsesRelay()
    passed = b"".join(one.feed(last[at : at + 65_536]) for at in range(0, len(last), 65_536))
    assert one.complete
    assert passed + one.tail == last
    assert one.tail == (last if size < 8 << 20 else b"")
    assert one.usage == (Usage(7, 2, None) if size < 8 << 20 else None)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [DELTA, STOP, TEXT, COMPLETED, b"event: message_start\n", b"data: {}\n\n", b"\n", b"\r\n", b"\r"]
        )
        | st.binary(max_size=20),
        max_size=12,
    ),
    st.integers(1, 50),
    st.sampled_from([MessagesRelay, ResponsesRelay]),
)
def test_any_bytes_pass_unchanged_up_to_the_end(parts: list[bytes], size: int, relay: type[NamedEventRelay]) -> None:
    data, one = b"".join(parts), relay()
    passed = b"".join(one.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert data.startswith(passed + one.tail)
    assert passed + one.tail + one.end() in (data, passed + one.tail) or data.startswith(passed)
