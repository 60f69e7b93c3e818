"""Anthropic's Messages by way of chat, for engines that have nothing else."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Usage
from router.errors import BadRequest
from router.serving.apis.messages_as_chat import ChatAsMessages, chat_body, message_of
from router.serving.apis.responses_as_chat import ChatAsResponse
from tests.router.serving.chat_engine import (
    DONE,
    MISSING,
    THOUGHTS_TEXT_AND_CALLS,
    USAGE,
    USAGE_CHUNK,
    WHOLE_CHATS,
    chat_only,
    chunk,
    read,
)
from tests.router.serving.stand import Stand

PATH = "/v1/messages"
BODY = {"model": "m-chat", "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**BODY, "stream": True}
ADAPTERS = Path(__file__).parents[2] / "adapters" / "recordings"


def message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of them. Checks the order in which blocks begin, grow and end."""
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    found: dict[str, Any] = events[0]["message"]
    pieces: dict[int, list[str]] = {}
    ended: set[int] = set()
    for event in events[1:-2]:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(found["content"])
            found["content"].append(event["content_block"])
            pieces[index] = []
        elif event["type"] == "content_block_delta":
            assert index not in ended
            (grown,) = (event["delta"][key] for key in event["delta"] if key != "type")
            pieces[index].append(grown)
        else:
            ended.add(index)
    assert ended == set(pieces)
    for index, block in enumerate(found["content"]):
        said = "".join(pieces[index])
        if block["type"] == "tool_use":
            block["input"] = json.loads(said or "{}")
        else:
            block[block["type"]] = said
    found |= events[-2]["delta"]
    found["usage"] |= events[-2]["usage"]
    return found


# -- the request


def test_a_request_in_the_words_of_a_chat() -> None:
    fields = {
        **STREAM,
        "system": "sys",
        "top_k": 5,
        "stop_sequences": ["END"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
        ],
    }
    function = {"name": "f", "description": None, "parameters": {"type": "object"}}
    assert json.loads(chat_body(fields, "served", {"routed_dp_rank": b"3"})) == {
        "model": "served",
        "messages": [
            {"role": "system", "content": "sys"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                "content": None,
            },
            {"role": "tool", "tool_call_id": "t", "content": "1"},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 16,
        "top_k": 5,
        "stop": ["END"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "routed_dp_rank": 3,
    }


def test_half_a_surrogate_pair_goes_on_as_it_is() -> None:
    fields = {"messages": [{"role": "user", "content": "\ud83d"}], "max_tokens": 2**70}
    assert json.loads(chat_body(fields, "m", {"x": b"1"})) == {
        "model": "m",
        "messages": [{"role": "user", "content": "\ud83d"}],
        "max_tokens": 2**70,
        "x": 1,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
        {"messages": [], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [], "mcp_servers": [{}]},
        {"messages": 7},
        {},
    ],
)
def test_what_a_chat_has_no_word_for_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        chat_body(fields, "m", {})


# -- whole answers


@pytest.mark.parametrize(
    ("said", "finish", "content", "reason"),
    [
        ({"content": "hi"}, "stop", [{"type": "text", "text": "hi"}], "end_turn"),
        ({"content": None, "refusal": None, "tool_calls": None}, "length", [], "max_tokens"),
        (
            {
                "reasoning_content": "hm",
                "content": "so",
                "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
            },
            "tool_calls",
            [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
            "tool_use",
        ),
        ({"content": ""}, "content_filter", [], "refusal"),
    ],
)
def test_a_whole_answer_as_a_message(said: object, finish: str, content: list[Any], reason: str) -> None:
    chat = {"id": "c-1", "model": "m", "choices": [{"message": said, "finish_reason": finish}], "usage": USAGE}
    found = message_of(json.dumps(chat).encode())
    assert found is not None
    assert json.loads(found) == {
        "id": "msg_c-1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 40,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 32,
            "output_tokens": 7,
        },
    }


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{}]}', b'{"choices":[{"message":7}]}']
)
def test_what_is_no_chat_answer(body: bytes) -> None:
    assert message_of(body) is None


# -- streams


def stream(*pieces: bytes) -> tuple[ChatAsMessages, bytes]:
    relay = ChatAsMessages(prompt_tokens=72)
    passed = b"".join(relay.feed(piece) for piece in pieces) + relay.end()
    return relay, passed + relay.tail


def test_text_thoughts_and_calls_become_blocks() -> None:
    relay, body = stream(*THOUGHTS_TEXT_AND_CALLS)
    events = read(body)
    assert relay.complete
    assert relay.usage == Usage(72, 7, 32)
    assert events[0]["message"]["usage"] == {"input_tokens": 72, "output_tokens": 0}
    assert message(events) == {
        "id": "msg_c-1",
        "type": "message",
        "role": "assistant",
        "model": "served",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "so é"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 40,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 32,
            "output_tokens": 7,
        },
    }


@pytest.mark.parametrize(
    "path",
    WHOLE_CHATS,
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_recorded_streams_cut_anywhere_are_whole_messages(path: Path) -> None:
    data = path.read_bytes()
    chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    dice = random.Random(1)
    for size in (1, 7, 100, 1 << 20):
        cuts = sorted({0, len(data), *(dice.randrange(len(data)) for _ in range(len(data) // size))})
        relay, body = stream(*[data[a:b] for a, b in itertools.pairwise(cuts)])
        assert relay.complete
        assert relay.first_token
        found = message(read(body))
        assert "".join(block.get("text", "") for block in found["content"]) == text
        assert found["stop_reason"] in ("max_tokens", "end_turn", "tool_use")


def test_which_stop_string_it_was() -> None:
    data = b'data: {"id":"c","choices":[{"delta":{"content":"a"},"finish_reason":"stop","stop_reason":"END"}]}\n\n'
    _, body = stream(data, DONE)
    found = message(read(body))
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")


def test_without_a_count_of_the_engines_ours_is_told() -> None:
    relay, body = stream(chunk(content="a"), chunk("stop"))  # and no [DONE]
    assert relay.complete
    assert message(read(body))["usage"] == {"input_tokens": 72, "output_tokens": 0}
    assert relay.usage is None


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([b'data: {"error":{"message":"m","code":400}}\n\n'], 400),
        ([b'data: {"choices":[7]}\n\n'], 500),
        ([b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{}}]}}]}\n\n'], 500),
        ([b"data: {" + b"x" * (1 << 21)], 500),
        ([b"data: {torn\n\n"], 502),
    ],
)
def test_a_chunk_that_cannot_be_translated_ends_the_stream(pieces: list[bytes], code: int) -> None:
    relay, body = stream(chunk(content="a"), *pieces, chunk(content="b"), DONE)
    assert not relay.complete
    assert relay.error is not None
    assert relay.error["code"] == code
    assert [event["type"] for event in read(body)] == ["message_start", "content_block_start", "content_block_delta"]


@pytest.mark.parametrize("pieces", [[chunk(content="a"), DONE], [DONE], [chunk(content="a")]])
def test_a_stream_without_an_end_of_its_choice_is_not_whole(pieces: list[bytes]) -> None:
    relay, body = stream(*pieces)
    assert not relay.complete
    assert b"message_stop" not in body


# -- through the gateway


@pytest.mark.parametrize(("status", "told"), MISSING)
async def test_an_engine_that_has_only_chat_is_asked_once_and_then_no_more(
    stand: Stand, status: int, told: bytes
) -> None:
    answers = [chunk(content="a"), chunk(content="b"), chunk("stop"), USAGE_CHUNK, DONE]
    await stand.start(chat_only(status, told, answers))
    for _ in range(2):
        answer = await stand.ask(STREAM, path=PATH)
        assert (answer.status, answer.broken) == (200, False)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert message(read(answer.body))["content"] == [{"type": "text", "text": "ab"}]
    paths = [side.head.split()[1].decode() for side in stand.engine.seen]
    assert paths == [PATH, "/v1/chat/completions", "/v1/chat/completions"]
    assert stand.engine.seen[-1].json["messages"] == BODY["messages"]
    assert stand.engine.seen[-1].json["model"] == "served-name"
    assert {outcome.finish for outcome in stand.outcomes} == {"complete"}
    assert stand.outcomes[0].usage == Usage(72, 7, 32)
    assert stand.outcomes[0].attempts == 1
    assert stand.placement.progressed == [1, 2]


async def test_a_whole_answer_comes_back_as_a_message(stand: Stand) -> None:
    said = {"message": {"content": "hi"}, "finish_reason": "stop"}
    chat = json.dumps({"id": "c", "model": "m", "choices": [said], "usage": USAGE}).encode()
    await stand.start(chat_only(*MISSING[0], chat))
    answer = await stand.ask(BODY, path=PATH)
    assert answer.json["content"] == [{"type": "text", "text": "hi"}]
    assert answer.headers["x-warmroute-cached-tokens"] == "32"
    assert stand.outcome.usage == Usage(72, 7, 32)


@pytest.mark.parametrize("answers", [b"{}", b'{"choices":[{"message":{"content":"' + b"x" * (2 << 20) + b'"}}]}'])
async def test_an_answer_that_cannot_be_translated_is_the_engines_fault(stand: Stand, answers: bytes) -> None:
    await stand.start(chat_only(*MISSING[0], answers))
    answer = await stand.ask(BODY, path=PATH)
    assert (answer.status, answer.json["error"]["type"]) == (502, "api_error")
    assert stand.outcome.finish == "upstream_failed"


async def test_what_cannot_be_translated_is_refused(stand: Stand) -> None:
    await stand.start(chat_only(*MISSING[0], b"{}"))
    body = {**BODY, "messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}
    for _ in range(2):
        answer = await stand.ask(body, path=PATH)
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
        assert "no Messages API" in answer.json["error"]["message"]
    assert [side.head.split()[1] for side in stand.engine.seen] == [PATH.encode()]
    assert [outcome.finish for outcome in stand.outcomes] == ["complete", "complete"]


async def test_a_translated_stream_that_is_cut(stand: Stand) -> None:
    await stand.start(chat_only(*MISSING[0], [chunk(content="a"), chunk(content="b")[:20]]))
    answer = await stand.ask(STREAM, path=PATH)
    assert answer.broken
    events = read(answer.body)
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
    assert stand.outcome.finish == "upstream_failed"


async def test_an_unknown_model_is_no_missing_route(stand: Stand) -> None:
    told = b'{"error":{"message":"The model `x` does not exist.","code":404}}'
    await stand.start(chat_only(404, told, b"{}"))
    answer = await stand.ask(BODY, path=PATH)
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
    assert len(stand.engine.seen) == 1


# -- both translations, against chunks of any shape

_NAMES = st.sampled_from(
    (
        *("choices", "delta", "content", "reasoning", "tool_calls", "index", "function", "name", "arguments", "id"),
        *("usage", "finish_reason", "stop_reason", "prompt_tokens", "completion_tokens", "error", "model"),
    )
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**70) | st.text(max_size=3) | st.just("\ud83d"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=8,
)
_DELTAS = st.dictionaries(_NAMES, _VALUES, max_size=3)
_CHUNKS = _VALUES | st.fixed_dictionaries(
    {"choices": st.lists(st.fixed_dictionaries({"delta": _DELTAS, "finish_reason": _VALUES}), min_size=1, max_size=1)},
    optional={"usage": _VALUES, "id": _VALUES},
)


@pytest.mark.parametrize(
    "make", [lambda: ChatAsMessages(prompt_tokens=1), lambda: ChatAsResponse({"tools": 7, "text": "\ud83d"})]
)
@settings(max_examples=500, deadline=None)
@given(chunks=st.lists(_CHUNKS | st.just(None), max_size=5))
def test_chunks_of_any_shape_are_translated_or_end_the_stream(make: Any, chunks: list[Any]) -> None:
    relay = make()
    pieces = [b"data: %b\n\n" % (b"[DONE]" if each is None else json.dumps(each).encode()) for each in chunks]
    passed = b"".join(relay.feed(piece) for piece in pieces) + relay.end()
    if relay.complete:
        passed += relay.tail
    for event in passed.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        assert name == b"event: " + json.loads(data.removeprefix(b"data: "))["type"].encode()
    ends = (b"event: message_stop", b"event: response.completed", b"event: response.incomplete")
    assert relay.complete == any(end in passed for end in ends)


# -- how many tokens


COUNT = "/v1/messages/count_tokens"
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]


async def test_tokens_are_counted_by_way_of_tokenize(stand: Stand) -> None:
    recorded = json.loads((ADAPTERS / "vllm-0.32.0" / "tokenize-chat-tools.json").read_text())
    await stand.start(chat_only(*MISSING[0], json.dumps(recorded["json"]).encode(), path="/tokenize"))
    asked = {"model": "m-chat", "system": "Be brief.", "messages": BODY["messages"], "tools": TOOLS}
    for _ in range(2):
        answer = await stand.ask(asked, path=COUNT)
        assert (answer.status, answer.json) == (200, {"input_tokens": len(recorded["json"]["tokens"])})
    paths = [side.head.split()[1] for side in stand.engine.seen]
    assert paths == [COUNT.encode(), b"/tokenize", b"/tokenize"], "it is known by then"
    sent = stand.engine.seen[1].json
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, *BODY["messages"]]
    assert (sent["model"], sent["add_generation_prompt"]) == ("served-name", True)
    assert sent["tools"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("told", [b'{"tokens":[1]}', b'{"count":"3"}', b"[]"])
async def test_what_is_no_count_is_not_told_as_one(stand: Stand, told: bytes) -> None:
    await stand.start(chat_only(*MISSING[0], told, path="/tokenize"))
    answer = await stand.ask({"model": "m-chat", "messages": BODY["messages"]}, path=COUNT)
    assert (answer.status, answer.json["error"]["type"]) == (502, "api_error")
