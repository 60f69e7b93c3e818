from __future__ import annotations

import pytest
from jinja2 import Environment

from router.serving.prompt.content_marks import content_marks

EACH = "{% for m in messages %}BODY{% endfor %}"


def marks(body: str) -> set[str]:
    return set(content_marks(Environment().parse(EACH.replace("BODY", body))))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<|x|>{{ m.role }}{{ m.content + '<|y|>' }}", set()),
        ("{% if m.role == 'user' and m.content %}{{ m['content'] }}{% endif %}", set()),
        ("{% if '</think>' in m.content %}{% endif %}", {"</think>"}),
        ("{% if m['content'].startswith('<a>') or m.content == 'b' %}{% endif %}", {"<a>", "b"}),
        ("{{ m.content.split('</think>')[-1].lstrip('\n').replace('q', 'r') }}", {"</think>", "q", "r"}),
        ("{{ m.content | replace('x', y='z') }}", {"x", "z"}),
        ("{% if m.get('content') != 'n' %}{% endif %}", {"n"}),
        ("{% if 'content' in m and 'tool_calls' in m and m.type == 'function' %}{% endif %}", set()),
        ("{% set text = m.content %}{% set text = text | trim %}{% if text == 'a' %}{% endif %}", {"a"}),
        ("{% set text %}{{ m.content }}{% endset %}{% if text == 'a' %}{% endif %}", {"a"}),
        ("{% set ns.last = m.content %}{% if ns.last.endswith('a') %}{% endif %}", {"a"}),
        ("{% for part in m.content %}{% if part.text == 'a' %}{% endif %}{% endfor %}", {"a"}),
        ("{% for a, b in m.content | items %}{% if b in ['c', 'd'] %}{% endif %}{% endfor %}", {"c", "d"}),
        ("{% macro f(x, y) %}{% if x == 'a' or y == 'b' %}{% endif %}{% endmacro %}{{ f(m.content, m.role) }}", {"a"}),
        ("{% macro f(x, y) %}{% if x == 'a' or y == 'b' %}{% endif %}{% endmacro %}{{ f(y=m.content) }}", {"b"}),
        ("{% macro f() %}{{ m.content }}{% endmacro %}{% if f() == 'a' %}{% endif %}", {"a"}),
        ("{% if m.content is eq('a') and m.content is string %}{% endif %}", {"a"}),
        ("{% if messages[0]['role'] == 'system' and messages[0]['content'] == 'a' %}{% endif %}", {"a"}),
        ("{{ '\n\n' if m.content.endswith(' ') else m.content.strip('\n') }}", set()),
    ],
)
def test_what_a_template_looks_for_in_contents(body: str, expected: set[str]) -> None:
    assert marks(body) == expected
