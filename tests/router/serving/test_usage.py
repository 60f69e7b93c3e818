from __future__ import annotations

import json

import pytest

from router.core import Usage
from router.serving.usage import find_usage, read_usage, usage_of_answer

FULL = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (FULL, Usage(10, 2, 8)),
        ({"prompt_tokens": 10, "completion_tokens": 2}, Usage(10, 2, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": None}, Usage(10, 0, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": None}}, Usage(10, 0, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}, Usage(10, 0, 0)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 11}}, Usage(10, 0, 10)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": "8"}}, Usage(10, 0, None)),
        ({"prompt_tokens": -1, "completion_tokens": True}, None),
        ({}, None),
        (None, None),
        ([1], None),
    ],
)
def test_usage_objects(usage: object, expected: Usage | None) -> None:
    assert read_usage(usage) == expected


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


def test_usage_beside_a_lone_surrogate() -> None:
    assert usage_of_answer(b'{"text":"\\ud83d","usage":{"prompt_tokens":3}}') == Usage(3, 0, None)
