"""Splicing keeps the client's bytes: checked against a parser for arbitrary JSON objects."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.serving.splice import _members, splice, value_of, without
from router.serving.usage import parse_object

OWNED = ("model", "stream_options", "cache_salt")
NESTED = b"[" * 1000 + b"]" * 1000  # deeper than msgspec goes, less deep than orjson does
FIELDS = {"model": b'"served"', "stream_options": b'{"include_usage":true}'}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(['a"b', "\\", '{"model":1}', "},{", '"stream_options"', "]"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.sampled_from(OWNED), inner, max_size=4)
    ),
    max_leaves=12,
)
members = st.lists(st.tuples(st.sampled_from([*OWNED, "a", "messages", "модель"]) | st.text(max_size=4), json_values))
spaces = st.text(alphabet=" \t\r\n", max_size=3)


def escaped(key: str) -> str:
    return (
        '"' + "".join(f"\\u{unit:04x}" for unit in memoryview(key.encode("utf-16-le", "surrogatepass")).cast("H")) + '"'
    )


@st.composite
def json_objects(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, str]]]:
    """A JSON object as clients may write it, and its members as (decoded key, text of the value)."""
    parts, texts = [], []
    for key, value in draw(members):
        name = escaped(key) if draw(st.booleans()) else json.dumps(key, ensure_ascii=draw(st.booleans()))
        text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        parts.append(f"{draw(spaces)}{name}{draw(spaces)}:{draw(spaces)}{text}{draw(spaces)}")
        texts.append((key, text))
    body = f"{draw(spaces)}{{{','.join(parts) or draw(spaces)}}}{draw(spaces)}"
    return body.encode("utf-8", "surrogatepass"), texts


def loads(body: bytes) -> list[tuple[str, Any]]:
    return json.loads(body.decode("utf-8", "surrogatepass"), object_pairs_hook=list)


@settings(max_examples=2000, deadline=None)
@given(json_objects(), st.booleans())
def test_spliced_body_is_the_clients_without_owned_members_plus_ours(
    made: tuple[bytes, list[tuple[str, str]]], parsed: bool
) -> None:
    body, texts = made
    present = {key for key, _ in texts} if parsed else None
    spliced = splice(body, FIELDS, present=present)
    theirs = [pair for pair in loads(body) if pair[0] not in FIELDS]
    ours = [[name, json.loads(value, object_pairs_hook=list)] for name, value in FIELDS.items()]
    assert [list(pair) for pair in loads(spliced)] == [list(pair) for pair in theirs] + ours
    position = 0
    for key, text in texts:  # every value of theirs stands there byte for byte, in order
        if key not in FIELDS:
            position = spliced.index(text.encode("utf-8", "surrogatepass"), position)


@settings(max_examples=300, deadline=None)
@given(json_objects())
def test_value_of_is_the_value_a_parser_takes(made: tuple[bytes, list[tuple[str, str]]]) -> None:
    body, texts = made
    for name in OWNED:
        expected = dict(texts).get(name)
        assert value_of(body, name, present=dict(texts)) == value_of(body, name)
        assert value_of(body, name) == (None if expected is None else expected.encode("utf-8", "surrogatepass"))


@settings(max_examples=500, deadline=None)
@given(json_objects())
def test_members_are_found_the_same_way_by_their_texts_and_by_their_brackets(
    made: tuple[bytes, list[tuple[str, str]]],
) -> None:
    body, texts = made
    found = list(_members(body))
    with patch("router.serving.splice._values", return_value={}):
        assert found == list(_members(body))
    assert [body[member.value : member.end] for member in found] == [
        text.encode("utf-8", "surrogatepass") for _, text in texts
    ]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"model":"m"}'),
        (b" { } \n", b' { "model":"m"} \n'),
        (b'{"a":1}', b'{"a":1,"model":"m"}'),
        (b'{"model":"x"}', b'{"model":"m"}'),
        (b'{"model":"x","a":1}', b'{"a":1,"model":"m"}'),
        (b'{"a":1, "model" : "x" , "b":2}', b'{"a":1 , "b":2,"model":"m"}'),
        (b'{"a":1 , "model":"x"}', b'{"a":1 ,"model":"m"}'),
        (b'{ "model":"x" , "a":1}', b'{  "a":1,"model":"m"}'),
        (b'{"x":{"model":1},"model":"x"}', b'{"x":{"model":1},"model":"m"}'),
        (b'{"x":"model","model":"x"}', b'{"x":"model","model":"m"}'),
        (b'{"model":"a","m\\u006fdel":"b"}', b'{"model":"m"}'),
        (b'{"x":{"model":1},"m\\u006fdel" :"b"}', b'{"x":{"model":1},"model":"m"}'),
        (b'{"model":1,"model":[{"model":2}],"a":{"model":3}}', b'{"a":{"model":3},"model":"m"}'),
        (b'{"m\\u006fdel":"x","a":1}', b'{"a":1,"model":"m"}'),
        (b'{"a":"\\"model\\":1}{","b":"\\\\"}', b'{"a":"\\"model\\":1}{","b":"\\\\","model":"m"}'),
        (b'{"a":{},"b":[]}', b'{"a":{},"b":[],"model":"m"}'),
        (b'{"a":[1,{"model":2}],"model":"x","a":[1]}', b'{"a":[1,{"model":2}],"a":[1],"model":"m"}'),
        (b'{"a":[1],"model":"x","a":[1,{"model":2}]}', b'{"a":[1],"a":[1,{"model":2}],"model":"m"}'),
        (b'{"a":{"model":"\\ud83d"},"model":"x"}', b'{"a":{"model":"\\ud83d"},"model":"m"}'),
        (b'{"a":"\\ud83d"}', b'{"a":"\\ud83d","model":"m"}'),
        (b'{"a":%b,"model":1,"model":2}' % NESTED, b'{"a":%b,"model":"m"}' % NESTED),
    ],
)
def test_spliced_bytes(body: bytes, expected: bytes) -> None:
    assert splice(body, {"model": b'"m"'}) == expected
    assert splice(body, {"model": b'"m"'}, present=parse_object(body)) == expected


def test_no_field_means_no_change() -> None:
    body = b'{"a": 1}'
    assert splice(body, {}) is body


def test_cutting_every_member_leaves_an_empty_object() -> None:
    assert without(b'{ "a":1 , "b":{} }', ["a", "b"]) == b"{   }"


def test_cutting_what_is_not_there_returns_the_same_bytes() -> None:
    body = b'{"a":1}'
    assert without(body, ["b"]) is body
