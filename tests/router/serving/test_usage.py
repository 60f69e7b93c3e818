from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Usage
from router.serving.usage import find_usage, parse_object, read_usage, usage_of_answer

FULL = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (FULL, Usage(10, 2, 8)),
        ({"prompt_tokens": 10, "completion_tokens": 2}, Usage(10, 2, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": None}, Usage(10, 0, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": None}}, Usage(10, 0, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}, Usage(10, 0, 0)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 11}}, Usage(10, 0, 10, doubtful=True)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": "8"}}, Usage(10, 0, None)),
        ({"prompt_tokens": -1, "completion_tokens": True}, None),
        ({"total_tokens": 5}, Usage(5, 0, None)),
        # OpenAI's Responses: cached ones are among the input
        ({"input_tokens": 51, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 32}}, Usage(51, 3, 32)),
        ({"input_tokens": 51, "output_tokens": 3, "input_tokens_details": None}, Usage(51, 3, None)),
        # Anthropic's Messages: they are not
        (
            {"input_tokens": 19, "output_tokens": 3, "cache_creation_input_tokens": 5, "cache_read_input_tokens": 32},
            Usage(56, 3, 32, cache_write_tokens=5),
        ),
        ({"input_tokens": 40, "cache_read_input_tokens": 0}, Usage(40, 0, 0)),
        ({"input_tokens": "40", "output_tokens": 3}, None),
        ({}, None),
        (None, None),
        ([1], None),
    ],
)
def test_usage_objects(usage: object, expected: Usage | None) -> None:
    read = read_usage(usage)
    assert read == expected or (read is not None and msgspec.structs.replace(read, raw="") == expected)


def test_a_large_answer_is_searched_from_its_end() -> None:
    text = 'he said "usage": {"prompt_tokens": 1} and "usage"'
    answer = {"choices": [{"message": {"content": text * 4000}}], "usage": FULL, "prompt_token_ids": [1] * 100_000}
    body = json.dumps(answer).encode()
    assert usage_of_answer(body) == Usage(10, 2, 8)
    assert find_usage(body) == Usage(10, 2, 8)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"usage":', b'{"usage": {"prompt_tokens": 1', b'"usage"', b'{"usage": 1}', b'{"usage": {}}']
)
def test_what_holds_no_usage(body: bytes) -> None:
    assert usage_of_answer(body) is None
    assert find_usage(body) is None


_COUNTS = st.sampled_from([0, 1, 7, 10**20, -1, 2.0, 2.5, True, None, "8", [], {}])
_DETAILS = st.dictionaries(st.sampled_from(["cached_tokens", "audio_tokens"]), _COUNTS) | _COUNTS
_USAGES = st.fixed_dictionaries(
    {},
    optional={"prompt_tokens": _COUNTS, "completion_tokens": _COUNTS, "x": _COUNTS, "prompt_tokens_details": _DETAILS},
)


@settings(max_examples=500, deadline=None)
@given(
    usage=_USAGES | _COUNTS,
    other=st.sampled_from([{}, {"choices": [{"text": "\ud83d"}]}, {"choices": [{"usage": FULL}]}, {"usages": FULL}]),
    doubled=st.booleans(),
    ascii_only=st.booleans(),
)
def test_it_is_read_as_by_a_parser(usage: object, other: dict[str, Any], doubled: bool, ascii_only: bool) -> None:
    text = json.dumps({**other, "usage": usage}, ensure_ascii=ascii_only or "\ud83d" in str(other))
    body = (('{"usage":{"prompt_tokens":3},' + text[1:]) if doubled else text).encode("utf-8", "surrogatepass")
    answer = parse_object(body)
    assert answer is not None
    assert usage_of_answer(body) == read_usage(answer["usage"])


def test_usage_beside_a_lone_surrogate() -> None:
    assert usage_of_answer(b'{"text":"\\ud83d","usage":{"prompt_tokens":3}}') == Usage(3, 0, None)


def test_usage_beside_what_is_nested_very_deep() -> None:
    assert usage_of_answer(b'{"a":%b,"usage":{"prompt_tokens":3}}' % (b"[" * 1000 + b"]" * 1000)) == Usage(3, 0, None)
