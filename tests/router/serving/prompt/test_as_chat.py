"""Messages and Responses as the chat that is made of them, and the keys their turns share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from router.core import Prompt
from router.serving.prompt import ModelPrompts, Parity, PromptLimits
from router.serving.prompt.as_chat import MESSAGES, RESPONSES, as_chat, chat_of_messages, spelled
from router.serving.prompt.reason import Unreadable

CHAT = "/v1/chat/completions"
PROSE = "The engineer reads the report because the assistant explains the price of bread to the customer. " * 3
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA" * 500}}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def now(prompts: ModelPrompts, path: str, body: Mapping[str, Any]) -> Prompt:
    found = prompts.prepare_now(path, body)
    assert isinstance(found, Prompt)
    return found


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"messages": [user("hi")]}, [user("hi")]),
        ({"system": "s", "messages": [user([text("hi")])]}, [{"role": "system", "content": "s"}, user("hi")]),
        (
            {
                "system": [text("x-anthropic-billing-header: cch=1;"), text("a", cache_control={}), text("b")],
                "messages": [user([text("hi"), text("there", cache_control={})])],
            },
            [{"role": "system", "content": "ab"}, user([text("hi"), text("there")])],
        ),
        (
            {
                "messages": [
                    user("do"),
                    assistant([text("I call"), {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}]),
                    user([{"type": "tool_result", "tool_use_id": "t1", "content": [text("1"), text("2")]}, text("go")]),
                    assistant([{"type": "tool_use", "id": "t2", "name": "f"}]),
                    user([{"type": "tool_result", "tool_use_id": "t2"}]),
                ]
            },
            [
                user("do"),
                {
                    "role": "assistant",
                    "content": "I call",
                    "tool_calls": [
                        {
                            "id": "t1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": "\\u00e9"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "1\n2"},
                user("go"),
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "t2", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "t2", "content": ""},
            ],
        ),
    ],
)
def test_messages(body: dict[str, Any], messages: list[Any]) -> None:
    assert as_chat(MESSAGES, body) == {"messages": messages}


def test_thoughts_come_back_as_reasoning() -> None:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking"}, text("yes")]
    assert as_chat(MESSAGES, {"messages": [assistant(blocks)]}) == {
        "messages": [{"role": "assistant", "reasoning": "hm", "content": "yes"}]
    }


def test_images_where_they_are_wanted() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("see"), IMAGE]}
    chat = chat_of_messages({"messages": [user([result, url])]}, images=True)
    data = "data:image/png;base64," + "AAAA" * 500
    assert chat["messages"] == [
        {"role": "tool", "tool_call_id": "t", "content": "see"},
        user([{"type": "image_url", "image_url": {"url": data}}]),
        user([{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]),
    ]


def test_tools_of_messages() -> None:
    chat = as_chat(MESSAGES, {"messages": [], "tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}})
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert as_chat(MESSAGES, {"messages": [], "tool_choice": {"type": "any"}})["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({"input": "hi"}, [user("hi")]),
        ({"instructions": "s", "input": [user("hi")]}, [{"role": "system", "content": "s"}, user("hi")]),
        (
            {
                "input": [
                    {"type": "message", **user([{"type": "input_text", "text": "hi"}])},
                    {"type": "message", "id": "m", **assistant([{"type": "output_text", "text": "yes"}])},
                ]
            },
            [user([{"type": "input_text", "text": "hi"}]), assistant("yes")],
        ),
    ],
)
def test_responses(body: dict[str, Any], messages: list[Any]) -> None:
    assert as_chat(RESPONSES, body) == {"messages": messages}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"messages": [user([IMAGE])]}),
        (MESSAGES, {"messages": [user([{"type": "document", "source": {}}])]}),
        (MESSAGES, {"messages": [user([{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}])]}),
        (MESSAGES, {"messages": [user("x")], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        (MESSAGES, {"messages": [{"role": "system", "content": "x"}]}),
        (RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f"}]}),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}),
    ],
)
def test_what_engines_read_differently_is_not_guessed(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(Unreadable):
        as_chat(path, body)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"system": [text(PROSE)], "tools": [TOOL], "messages": [user([text(PROSE)])]}),
        (RESPONSES, {"instructions": PROSE, "input": [user([{"type": "input_text", "text": PROSE}])]}),
    ],
)
def test_the_keys_are_those_of_the_chat(
    make_prompts: Callable[..., ModelPrompts], dialect: str, path: str, body: dict[str, Any]
) -> None:
    prompts = make_prompts(dialect=dialect)
    found, chat = now(prompts, path, body), now(prompts, CHAT, as_chat(path, body))
    assert len(found.keys[16]) > 3
    assert (found.keys, found.tokens, found.source) == (chat.keys, chat.tokens, "exact")
    assert found.reason == "read as the chat that is made of it"


def test_a_count_that_differs_says_nothing_of_the_models_chats(prompts: ModelPrompts) -> None:
    """How an engine reads Messages is its own affair; chats are compared for themselves."""
    prompts.settle(Parity("EXACT"))
    found = now(prompts, MESSAGES, {"messages": [user(PROSE)]})
    for _ in range(5):
        prompts.observe(found, found.tokens + 1)
    assert prompts.parity.state == "EXACT"


TURNS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        MESSAGES,
        {"system": [text(PROSE)], "tools": [TOOL], "messages": [user([text(PROSE, cache_control={"a": 1}), IMAGE])]},
        {
            "system": [text(PROSE)],
            "tools": [{**TOOL, "cache_control": None}],
            "messages": [user([text(PROSE), IMAGE]), assistant("yes"), user([text("and?", cache_control={"a": 1})])],
        },
    ),
    (
        RESPONSES,
        {"instructions": PROSE, "tools": [{"type": "function", "name": "f"}], "input": PROSE},
        {
            "instructions": PROSE,
            "tools": [{"type": "function", "name": "f"}],
            "input": [
                user(PROSE),
                {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
        },
    ),
]


@pytest.mark.parametrize(("path", "first", "second"), TURNS)
@pytest.mark.parametrize("mode", ["exact", "approximate", "engine"])
async def test_turns_share_keys_where_the_prompt_is_not_known(
    make_prompts: Callable[..., ModelPrompts], path: str, first: dict[str, Any], second: dict[str, Any], mode: str
) -> None:
    prompts = make_prompts(tokenizer=None if mode == "approximate" else "demo", limits=PromptLimits(always=True))
    if mode == "engine":
        prompts.engine_tokenize = _never
        prompts.settle(Parity("DEGRADED", "for a test"))
    one, two = await prompts.prepare(path, first), await prompts.prepare(path, second)
    assert (one.source, two.source) == ("approximate", "approximate")
    assert bool(one.reason) == (mode != "approximate")
    shared = sum(a == b for a, b in zip(one.keys[16], two.keys[16], strict=False))
    assert len(one.keys[16]) - 1 <= shared < len(two.keys[16])
    assert two.keys[16] != (await prompts.prepare(path, first | {"instructions": "x", "system": "x"})).keys[16]


async def _never(path: str, body: Mapping[str, Any]) -> list[int]:
    raise AssertionError("nobody can be asked")


async def test_an_engine_is_asked_for_the_chat(make_prompts: Callable[..., ModelPrompts]) -> None:
    asked: list[tuple[str, Mapping[str, Any]]] = []

    async def tokenize(path: str, body: Mapping[str, Any]) -> list[int]:
        asked.append((path, body))
        return list(range(40))

    prompts = make_prompts()
    prompts.engine_tokenize = tokenize
    prompts.settle(Parity("DEGRADED", "for a test"))
    found = await prompts.prepare(MESSAGES, {"system": "s", "messages": [user("hi")]})
    assert (found.source, found.tokens) == ("engine", 40)
    assert asked == [(CHAT, {"messages": [{"role": "system", "content": "s"}, user("hi")]})]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"messages": []}),
        (MESSAGES, {"messages": 7}),
        (MESSAGES, {}),
        (MESSAGES, {"messages": [7]}),
        (MESSAGES, {"messages": [user(7)], "system": 7}),
        (RESPONSES, {"input": 7}),
        (RESPONSES, {"input": []}),
        (RESPONSES, {"input": [{"role": "user"}]}),
        (RESPONSES, {"input": [{}]}),
    ],
)
async def test_bodies_of_odd_shapes_are_placed_all_the_same(
    prompts: ModelPrompts, path: str, body: dict[str, Any]
) -> None:
    found = await prompts.prepare(path, body)
    assert found.source in ("none", "approximate")


async def test_a_long_body_is_read_in_a_thread(make_prompts: Callable[..., ModelPrompts]) -> None:
    prompts = make_prompts(limits=PromptLimits(wait_s=10.0, read_at_once_chars=2_000, always=True))
    body = {"messages": [user([text(PROSE * 20)])]}
    asked = prompts.prepare_now(MESSAGES, body)
    assert not isinstance(asked, Prompt)
    found = await asked
    assert found.source == "exact"
    with_image = await prompts.prepare(MESSAGES, {"messages": [user([text(PROSE * 20), IMAGE])]})
    assert with_image.source == "approximate"
    assert len(with_image.keys[16]) > 20


def test_images_take_part_by_their_digest() -> None:
    (one,), (two,) = (
        list(spelled(MESSAGES, {"messages": [user([{**IMAGE, "source": {"data": data * 1000}}])]})) for data in "ab"
    )
    assert one != two
    assert len(one[1]) < 100
