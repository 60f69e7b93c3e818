"""Splicing keeps the client's bytes: checked against a parser for arbitrary JSON objects."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from router.serving.splice import _members, splice, value_of, without
from router.serving.usage import parse_object

OWNED = ("model", "stream_options", "cache_salt")
NESTED = b"[" * 1000 + b"]" * 1000  # deeper than msgspec goes, less deep than orjson does
FIELDS = {"model": b'"served"', "stream_options": b'{"include_usage":true}'}

TEXTS = ("", "a", "messages", "модель", 'a"b', "\\", '{"model":1}', "},{", '"stream_options"', "]", *OWNED)
NUMBERS = (0, -1, 7, 2**53 + 1, -(10**30), 0.5, -0.0, 5e-324, 1.7976931348623157e308)


def a_text(dice: Random) -> str:
    """One of the nasty ones, or characters from all planes but no lone surrogates."""
    if dice.random() < 0.5:
        return dice.choice(TEXTS)
    ends = (0x7F, 0x7F, 0xFF, 0xD7FF, 0x10FFFF)
    drawn = (dice.randint(0, dice.choice(ends)) for _ in range(dice.randint(0, 6)))
    return "".join(chr(point) for point in drawn if not 0xD800 <= point <= 0xDFFF)


def a_value(dice: Random, depth: int = 3) -> Any:
    kind = dice.randrange(6 if depth else 4)
    if kind == 4:
        return [a_value(dice, depth - 1) for _ in range(dice.randint(0, 4))]
    if kind == 5:
        return {a_text(dice): a_value(dice, depth - 1) for _ in range(dice.randint(0, 4))}
    return dice.choice((None, True, False)) if kind == 0 else dice.choice(NUMBERS) if kind == 1 else a_text(dice)


def escaped(key: str) -> str:
    return (
        '"' + "".join(f"\\u{unit:04x}" for unit in memoryview(key.encode("utf-16-le", "surrogatepass")).cast("H")) + '"'
    )


def spaces(dice: Random) -> str:
    return "".join(dice.choices(" \t\r\n", k=dice.choice((0, 0, 1, 3))))


def an_object(dice: Random) -> tuple[bytes, list[tuple[str, str]]]:
    """A JSON object as clients may write it, and its members as (decoded key, text of the value)."""
    parts, texts = [], []
    for _ in range(dice.choice((0, 1, 2, 3, 5, 8))):
        key, value = a_text(dice), a_value(dice)
        name = escaped(key) if dice.random() < 0.3 else json.dumps(key, ensure_ascii=dice.random() < 0.5)
        text = json.dumps(value, ensure_ascii=dice.random() < 0.5, indent=dice.choice((None, 1)))
        parts.append("".join((spaces(dice), name, spaces(dice), ":", spaces(dice), text, spaces(dice))))
        texts.append((key, text))
    body = f"{spaces(dice)}{{{','.join(parts) or spaces(dice)}}}{spaces(dice)}"
    return body.encode(), texts


@cache
def objects() -> list[tuple[bytes, list[tuple[str, str]]]]:
    """The same ones each time, by plain dice: hypothesis takes ten seconds to draw them."""
    return [an_object(Random(seed)) for seed in range(2000)]


def loads(body: bytes) -> list[tuple[str, Any]]:
    return json.loads(body.decode("utf-8", "surrogatepass"), object_pairs_hook=list)


@pytest.mark.parametrize("parsed", [True, False])
def test_spliced_body_is_the_clients_without_owned_members_plus_ours(parsed: bool) -> None:
    for body, texts in objects():
        present = {key for key, _ in texts} if parsed else None
        spliced = splice(body, FIELDS, present=present)
        theirs = [pair for pair in loads(body) if pair[0] not in FIELDS]
        ours = [[name, json.loads(value, object_pairs_hook=list)] for name, value in FIELDS.items()]
        assert [list(pair) for pair in loads(spliced)] == [list(pair) for pair in theirs] + ours
        position = 0
        for key, text in texts:  # every value of theirs stands there byte for byte, in order
            if key not in FIELDS:
                position = spliced.index(text.encode("utf-8", "surrogatepass"), position)


def test_value_of_is_the_value_a_parser_takes() -> None:
    for body, texts in objects():
        for name in OWNED:
            expected = dict(texts).get(name)
            assert value_of(body, name, present=dict(texts)) == value_of(body, name)
            assert value_of(body, name) == (None if expected is None else expected.encode("utf-8", "surrogatepass"))


def test_members_are_found_the_same_way_by_their_texts_and_by_their_brackets() -> None:
    for body, texts in objects():
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
