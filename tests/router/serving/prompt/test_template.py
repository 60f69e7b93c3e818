from __future__ import annotations

import json
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.serving.prompt.reason import Unreadable
from router.serving.prompt.template import ChatTemplate, ChatTemplates, load_chat_templates
from router.serving.prompt.tokenizer import demo_model

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **fields: Any) -> str:
    return ChatTemplate(source).render(messages, **fields)


def test_json_is_not_escaped_and_keeps_its_order() -> None:
    tools = [{"b": "<é & 'x'>", "a": 1}]
    assert render("{{ tools[0] | tojson }}", tools=tools) == '{"b": "<é & \'x\'>", "a": 1}'
    assert render("{{ tools[0] | tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}", tools=tools) == (
        '{"a":1,"b":"<\\u00e9 & \'x\'>"}'
    )
    assert render("{{ tools[0] | tojson(indent=1) }}", tools=[{"a": 1}]) == '{\n "a": 1\n}'


def test_blocks_leave_no_white_space() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_loop_controls() -> None:
    assert render("{% for n in [1, 2, 3] %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}") == "13"


def test_the_generation_tag_renders_its_body_in_a_scope_of_its_own() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}[{{ x }}]{% endgeneration %}{{ x }}"
    assert render(source) == "[2]1"


def test_today_comes_from_the_clock_that_was_handed_in() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content.__class__.__base__ }}",
        "{{ ('%s' ~ messages[0].missing.field) }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ messages[0].update({'a': 1}) }}",
    ],
)
def test_refusing_failing_and_forbidden_templates_are_unreadable(source: str) -> None:
    with pytest.raises(Unreadable):
        render(source)


def test_special_tokens_and_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ bos_token }}{{ effort }}{{ documents[0].text }}", specials={"bos_token": "<s>"})
    assert template.render(USER, documents=[{"text": "d"}], variables={"effort": "low"}) == "<s>lowd"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m['content'] | list %}{{ c }}{% endfor %}{% endfor %}", True),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", True),
        (
            "{% macro show(x) %}{% for c in x %}{{ c }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(content) %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.tool_calls) }}{{ m.content }}{% endfor %}",
            False,
        ),
        ("{% for tool in tools %}{% for p in tool.content %}{% endfor %}{% endfor %}", False),
    ],
)
def test_whether_content_is_wanted_in_parts(source: str, parts: bool) -> None:
    assert ChatTemplate(source).iterates_content is parts


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<q><It is "),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<q><It is"),
    ],
)
def test_a_final_message_to_continue_is_left_open(source: str, expected: str) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is "}]
    assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_nothing_to_continue_is_unreadable() -> None:
    with pytest.raises(Unreadable):
        render("{{ messages[0].content }}", [{"role": "assistant", "content": None}], continue_final_message=True)
    with pytest.raises(Unreadable):
        render("nothing of it", USER, continue_final_message=True)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    assert load_chat_templates(tmp_path) is None
    named = [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    both = load_chat_templates(tmp_path)
    assert both is not None
    assert both.pick(None).render(USER) == "D<s>"
    assert both.pick([{}]).render(USER) == "T"
    (tmp_path / "chat_template.jinja").write_text("J{{ bos_token }}")
    beside = load_chat_templates(tmp_path)
    assert beside is not None
    assert beside.pick([{}]).render(USER) == "J<s>"
    (tmp_path / "mine.jinja").write_text("M")
    given_file = load_chat_templates(tmp_path, file=tmp_path / "mine.jinja")
    assert given_file is not None
    assert given_file.pick(None).render(USER) == "M"


TEXTS = st.text(max_size=20)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": TEXTS}), min_size=1
)


PATHS_OF_THE_SANDBOX = (demo_model() / "chat_template.jinja").read_text("utf-8") + (
    "{%- set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content.strip() %}"
    "{{ loop.index0 }}{{ loop.last }}{{ m['role'].upper() }}{{ m.items() | list | length }}{{ m.missing }}"
    "{{ m.content.split('a')[-1].startswith('b') }}{% endfor %}{{ ns.last }}{{ messages[0:1][0].role }}"
)
OURS = ChatTemplate(PATHS_OF_THE_SANDBOX)
PLAIN = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
PLAIN.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
THEIRS = PLAIN.from_string(PATHS_OF_THE_SANDBOX)


@given(MESSAGES, st.booleans())
@settings(deadline=None)
def test_short_cuts_of_the_sandbox_change_nothing(messages: list[dict[str, Any]], generation: bool) -> None:
    expected = THEIRS.render(messages=messages, add_generation_prompt=generation)
    assert OURS.render(messages, add_generation_prompt=generation) == expected


def test_the_demo_template_grows_with_its_conversation(templates: ChatTemplates) -> None:
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "4"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    texts = [
        templates.default.render(turns[:n], tools=tools, documents=[{"text": "d"}], add_generation_prompt=False)
        for n in range(1, 5)
    ]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
    assert '<|call|>{"name": "f", "arguments": {"x": 1}}' in texts[-1]
    assert "# Document 1\nd" in texts[0]
