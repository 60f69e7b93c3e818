from __future__ import annotations

import json
from typing import Any

import pytest

from router.serving.prompt.dialect import DIALECTS, Dialect, refuse_unknown_prompts
from router.serving.prompt.reason import Unreadable
from router.serving.prompt.template import ChatTemplate, ChatTemplates

VLLM, SGLANG, PLAIN = DIALECTS
TEXT = ChatTemplates(default=ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))
PARTS = ChatTemplates(
    default=ChatTemplate("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}")
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather for a city", "parameters": {"type": "object"}},
    },
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "required": ["q"]}}},
]
USER = {"role": "user", "content": "hi"}


def read(dialect: Dialect, *messages: Any, templates: ChatTemplates = TEXT, **fields: Any) -> Any:
    return dialect.read({"messages": list(messages), **fields}, templates, {})


def test_tools_as_vllm_shows_them_to_a_template() -> None:
    # The second line is what vLLM 0.32 answered on /tokenize for these tools, decoded.
    lines = [json.dumps(tool) for tool in read(VLLM, USER, tools=TOOLS).tools]
    assert lines[1] == (
        '{"type": "function", "function": {"name": "search", "description": null,'
        ' "parameters": {"type": "object", "required": ["q"]}}}'
    )
    assert json.loads(lines[0]) == TOOLS[0]


def test_tools_as_sglang_shows_them_to_a_template() -> None:
    # As SGLang 0.5.23 answered on /v1/tokenize, decoded.
    lines = [json.dumps(tool) for tool in read(SGLANG, USER, tools=TOOLS).tools]
    assert lines == [
        '{"type": "function", "function": {"name": "get_weather", "description": "Weather for a city",'
        ' "parameters": {"type": "object"}}, "defer_loading": null}',
        '{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "required": ["q"]},'
        ' "description": null}, "defer_loading": null}',
    ]


def test_vllm_keeps_its_own_order_of_tool_fields_and_drops_unknown_ones() -> None:
    tool = {"extra": 1, "function": {"parameters": {"b": 1, "a": 2}, "name": "f", "strict": True, "zz": 1}}
    assert json.dumps(read(VLLM, USER, tools=[tool]).tools[0]) == (
        '{"type": "function", "function": {"name": "f", "description": null,'
        ' "parameters": {"b": 1, "a": 2}, "strict": true}}'
    )


def test_a_client_s_order_of_tools_and_keys_is_kept() -> None:
    turned = list(reversed(TOOLS))
    assert [tool["function"]["name"] for tool in read(VLLM, USER, tools=turned).tools] == ["search", "get_weather"]


@pytest.mark.parametrize(("choice", "names"), [("auto", ["get_weather", "search"]), ("none", None)])
def test_tool_choice_hides_tools_in_sglang_only(choice: str, names: list[str] | None) -> None:
    found = read(SGLANG, USER, tools=TOOLS, tool_choice=choice).tools
    assert (found and [tool["function"]["name"] for tool in found]) == names
    assert len(read(VLLM, USER, tools=TOOLS, tool_choice=choice).tools) == 2
    named = {"type": "function", "function": {"name": "search"}}
    assert [t["function"]["name"] for t in read(SGLANG, USER, tools=TOOLS, tool_choice=named).tools] == ["search"]


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"a": 1}', {"a": 1}), ("", {}), ("not json", {}), ("[1]", {}), ("null", {})]
)
def test_tool_call_arguments_become_objects(arguments: str, expected: object) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}, "id": "c1", "index": 0}
    read_call = read(VLLM, {"role": "assistant", "content": None, "tool_calls": [call]}).messages[0]["tool_calls"][0]
    assert read_call["function"]["arguments"] == expected
    assert list(read_call) == ["id", "function", "type", "index"]
    assert list(read_call["function"]) == ["arguments", "name"]


def test_sglang_refuses_what_is_no_json_and_so_do_we() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    with pytest.raises(Unreadable):
        read(SGLANG, {"role": "assistant", "content": "", "tool_calls": [call]})


@pytest.mark.parametrize(("dialect", "joined"), [(VLLM, "one \ntwo"), (SGLANG, "one   two")], ids=["vllm", "sglang"])
def test_parts_are_joined_where_the_template_wants_text(dialect: Dialect, joined: str) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": ""}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert read(dialect, message).messages[0]["content"] == joined
    in_parts = read(dialect, message, templates=PARTS).messages[0]["content"]
    assert [part["text"] for part in in_parts] == ["one ", "", "two"]


def test_text_becomes_a_part_where_the_template_wants_parts() -> None:
    assert read(VLLM, USER, templates=PARTS).messages[0]["content"] == [{"type": "text", "text": "hi"}]
    tool = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]}
    assert read(VLLM, tool, templates=PARTS).messages[0]["content"] == "4"


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "text", "text": "see"}, {"type": "input_audio", "input_audio": {}}],
        [{"type": "text", "text": "x", "uuid": "u"}],
        [{"text": "no type"}],
        7,
    ],
)
def test_content_that_is_not_text_is_unreadable(dialect: Dialect, content: object) -> None:
    with pytest.raises(Unreadable):
        read(dialect, {"role": "user", "content": content})


def test_a_developer_becomes_the_system_where_templates_do_not_know_developers() -> None:
    developer = {"role": "developer", "content": "d"}
    assert read(VLLM, developer, USER).messages == [{"role": "system", "content": "d"}, USER]
    assert read(VLLM, {"role": "system", "content": "s"}, USER, developer).messages == [
        {"role": "system", "content": "s\n\nd"},
        USER,
    ]
    knows = ChatTemplates(default=ChatTemplate("{% if messages[0].role == 'developer' %}{% endif %}"))
    assert read(VLLM, developer, USER, templates=knows).messages[0]["role"] == "developer"


def test_missing_and_null_content_is_empty_text() -> None:
    for content in ({}, {"content": None}):
        assert read(VLLM, {"role": "assistant", **content}).messages[0]["content"] == ""
        assert read(SGLANG, {"role": "assistant", **content}).messages[0]["content"] == ""


def test_reasoning_has_one_name_for_clients_and_two_for_templates() -> None:
    message = read(VLLM, {"role": "assistant", "content": "a", "reasoning_content": "why"}).messages[0]
    assert (message["reasoning"], message["reasoning_content"]) == ("why", "why")


def test_a_billing_line_that_changes_with_every_request_is_not_rendered() -> None:
    system = {"role": "system", "content": "x-anthropic-billing-header: cch=1\nYou help."}
    assert read(VLLM, system).messages[0]["content"] == "You help."


def test_template_variables_and_who_wins() -> None:
    reading = VLLM.read(
        {
            "messages": [USER],
            "chat_template_kwargs": {"a": 2, "add_generation_prompt": False},
            "reasoning_effort": "high",
        },
        TEXT,
        {"a": 1, "b": 1},
    )
    assert reading.variables == {"a": 2, "b": 1, "reasoning_effort": "high", "enable_thinking": True}
    assert reading.add_generation_prompt is True
    assert read(VLLM, USER, reasoning_effort="none").variables["enable_thinking"] is False


@pytest.mark.parametrize("kwargs", [{"messages": []}, {"max_length": 3}, {"tools": []}, 5])
def test_arguments_that_are_not_template_variables_are_unreadable(kwargs: object) -> None:
    with pytest.raises(Unreadable):
        read(VLLM, USER, chat_template_kwargs=kwargs)


@pytest.mark.parametrize(
    "field",
    ["chat_template", "truncate_prompt_tokens", "suffix", "prompt_embeds", "kv_transfer_params", "prompt_logprobs"],
)
def test_fields_that_change_the_prompt_in_other_ways_are_unreadable(field: str) -> None:
    refuse_unknown_prompts({field: None})
    with pytest.raises(Unreadable):
        refuse_unknown_prompts({field: 1})


def test_sglang_tokenizes_a_continued_message_apart() -> None:
    with pytest.raises(Unreadable):
        read(SGLANG, USER, {"role": "assistant", "content": "It is"}, continue_final_message=True)
