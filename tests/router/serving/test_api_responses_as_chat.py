"""OpenAI's Responses by way of chat, for engines that have nothing else. OpenAI's own SDK judges the answers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from router.core import Usage
from router.errors import BadRequest
from router.serving.apis.responses_as_chat import ChatAsResponse, chat_body, response_of
from tests.router.serving.chat_engine import (
    DONE,
    MISSING,
    THOUGHTS_TEXT_AND_CALLS,
    USAGE,
    USAGE_CHUNK,
    WHOLE_CHATS,
    call,
    chat_only,
    chunk,
)
from tests.router.serving.chat_engine import read as read_named
from tests.router.serving.stand import Stand

PATH = "/v1/responses"
BODY = {"model": "m-chat", "input": "hello", "max_output_tokens": 16}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def read(body: bytes) -> list[dict[str, Any]]:
    """The events, numbered without a hole."""
    events = read_named(body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of them, which must be what the last one says."""
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    grown: dict[str, str] = {}
    for event in events[2:-1]:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                assert event["item"]["status"] == "in_progress"
                items.append({})
                grown[event["item"]["id"]] = ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert items[event["output_index"]] == {}
                grown[event["item_id"]] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == grown[event["item_id"]]
            case "function_call_arguments.done":
                assert event["arguments"] == grown[event["item_id"]]
            case "output_item.done":
                items[event["output_index"]] = event["item"]
    last: dict[str, Any] = events[-1]["response"]
    assert last["output"] == items
    assert kinds[-1] == f"response.{last['status']}"
    return last


# -- the request


def test_a_request_in_the_words_of_a_chat() -> None:
    fields = {
        **BODY,
        "instructions": "sys",
        "stream": True,
        "store": False,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}, "verbosity": "low"},
        "parallel_tool_calls": False,
        "input": [
            {
                "role": "developer",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": "http://x", "detail": "low"},
                ],
            },
            {"type": "reasoning", "id": "rs", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I call"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
            {"role": "user", "content": "so?"},
        ],
    }

    def said(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    assert json.loads(chat_body(fields, "served", {"routed_dp_rank": b"3"})) == {
        "model": "served",
        "messages": [
            {"role": "system", "content": "sys"},
            {
                "role": "developer",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": "http://x", "detail": "low"}},
                ],
            },
            {"role": "assistant", "content": "I call", "tool_calls": [said("c1"), said("c2")]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "tool", "tool_call_id": "c2", "content": "2"},
            {"role": "assistant", "content": None, "tool_calls": [said("c3")]},
            {"role": "user", "content": "so?"},
        ],
        "parallel_tool_calls": False,
        "stream": True,
        "max_tokens": 16,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
        "stream_options": {"include_usage": True},
        "routed_dp_rank": 3,
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"verbosity": "low"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"tool_choice": "required", "reasoning": None}, {"tool_choice": "required"}),
    ],
)
def test_settings(fields: dict[str, Any], said: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert json.loads(chat_body({"input": "x", **fields}, "m", {})) == {"model": "m", "messages": messages, **said}


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "x", "tools": [{"type": "web_search"}]},
        {"input": "x", "tools": [{"type": "custom", "name": "f"}]},
        {"input": "x", "tool_choice": {"type": "allowed_tools"}},
        {"input": "x", "prompt": {"id": "p"}},
        {"input": [{"type": "item_reference", "id": "m"}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        {"input": 7},
        {},
    ],
)
def test_what_a_chat_has_no_word_for_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        chat_body(fields, "m", {})


# -- whole answers


@pytest.mark.parametrize(
    ("finish", "status", "details"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"reason": "content_filter"}),
    ],
)
def test_a_whole_answer_as_a_response(finish: str, status: str, details: object) -> None:
    said = {
        "reasoning": "hm",
        "content": "so",
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
    }
    choices = [{"message": said, "finish_reason": finish}]
    chat = {"id": "c", "model": "m", "created": 5, "choices": choices, "usage": USAGE}
    found = response_of({**BODY, "tools": [TOOL]}, json.dumps(chat).encode())
    assert found is not None
    told = json.loads(found)
    assert (told["status"], told["incomplete_details"], told["id"], told["created_at"]) == (
        status,
        details,
        "resp_c",
        5,
    )
    assert (told["model"], told["tools"], told["max_output_tokens"], told["error"]) == ("m", [TOOL], 16, None)
    assert [item["type"] for item in told["output"]] == ["reasoning", "message", "function_call"]
    assert told["output"][2]["call_id"] == "t"
    assert told["output"][2]["arguments"] == '{"a":1}'
    assert told["usage"] == {
        "input_tokens": 72,
        "input_tokens_details": {"cached_tokens": 32},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 79,
    }


@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices":[{}]}', b'{"choices":[{"message":7}]}'])
def test_what_is_no_chat_answer(body: bytes) -> None:
    assert response_of(BODY, body) is None


# -- streams


def stream(*pieces: bytes) -> tuple[ChatAsResponse, bytes]:
    relay = ChatAsResponse(BODY)
    passed = b"".join(relay.feed(piece) for piece in pieces) + relay.end()
    return relay, passed + relay.tail


def test_text_thoughts_and_calls_become_items() -> None:
    relay, body = stream(*THOUGHTS_TEXT_AND_CALLS)
    events = read(body)
    assert relay.complete
    assert relay.usage == Usage(72, 7, 32)
    assert relay.events == len(events) - 1
    found = response(events)
    texts = [item["content"][0]["text"] for item in found["output"][:2]]
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in found["output"][2:]]
    assert (texts, calls) == (["hm", "so é"], [("t1", "f", '{"a":1}'), ("t2", "g", "{}")])
    assert (found["status"], found["usage"]["total_tokens"]) == ("completed", 79)


@pytest.mark.parametrize(
    "path",
    WHOLE_CHATS,
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_recorded_streams_cut_anywhere_are_whole_responses(path: Path) -> None:
    data = path.read_bytes()
    for size in (1, 50, 1 << 20):
        cuts = [*range(0, len(data), size), len(data)]
        relay, body = stream(*[data[a:b] for a, b in itertools.pairwise(cuts)])
        assert relay.complete
        found = response(read(body))
        assert found["status"] in ("completed", "incomplete")


def test_a_stream_that_breaks_has_no_end() -> None:
    for pieces in (
        [chunk(content="a")],
        [chunk(content="a"), DONE],
        [chunk(content="a"), b'data: {"choices":[7]}\n\n'],
    ):
        relay, body = stream(*pieces)
        assert not relay.complete
        assert read(body)[-1]["type"] == "response.output_text.delta"


# -- through the gateway, read by OpenAI's SDK


def client(stand: Stand) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{stand.port}/v1", api_key="x", max_retries=0)


async def test_openais_sdk_reads_a_translated_stream(stand: Stand) -> None:
    answers = [
        chunk(content="so"),
        chunk(content=" é"),
        chunk(tool_calls=[call(0, '{"a":', id="t1", name="f")]),
        chunk(tool_calls=[call(0, "1}")]),
        chunk("tool_calls"),
        USAGE_CHUNK,
        DONE,
    ]
    await stand.start(chat_only(*MISSING[0], answers))
    async with client(stand) as sdk:
        for _ in range(2):
            async with sdk.responses.stream(model="m-chat", input="hello") as events:
                async for _event in events:
                    pass
                found = await events.get_final_response()
            assert found.output_text == "so é"
            assert found.output[1].type == "function_call"
            assert found.output[1].arguments == '{"a":1}'
            assert found.usage is not None
            assert found.usage.input_tokens_details.cached_tokens == 32
    paths = [side.head.split()[1].decode() for side in stand.engine.seen]
    assert paths == [PATH, "/v1/chat/completions", "/v1/chat/completions"]
    assert {outcome.usage for outcome in stand.outcomes} == {Usage(72, 7, 32)}


async def test_openais_sdk_reads_a_translated_answer(stand: Stand) -> None:
    choices = [{"message": {"content": "hi"}, "finish_reason": "length"}]
    chat = json.dumps({"id": "c", "model": "m", "choices": choices, "usage": USAGE}).encode()
    await stand.start(chat_only(*MISSING[0], chat))
    async with client(stand) as sdk:
        found = await sdk.responses.create(model="m-chat", input="hello")
    assert (found.output_text, found.status) == ("hi", "incomplete")
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"


async def test_a_translated_stream_that_is_cut(stand: Stand) -> None:
    await stand.start(chat_only(*MISSING[0], [chunk(content="a"), chunk(content="b")[:20]]))
    answer = await stand.ask({**BODY, "stream": True}, path=PATH)
    assert answer.broken
    assert read(answer.body)[-1]["type"] == "error"  # numbered like the others
    assert stand.outcome.finish == "upstream_failed"


async def test_what_cannot_be_translated_is_refused(stand: Stand) -> None:
    await stand.start(chat_only(*MISSING[0], b"{}"))
    answer = await stand.ask({**BODY, "tools": [{"type": "web_search"}]}, path=PATH)
    assert answer.status == 400
    assert "no Responses API" in answer.json["error"]["message"]
