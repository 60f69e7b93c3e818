"""Our fields in the client's own bytes.

A request body is forwarded as it came: key order, spacing, big integers, lone surrogates and unknown fields survive.
The few fields we own are appended before the last brace; a client's own copy of such a field is cut out at top level,
however its key is spelt and however often it is there. Nothing is serialised again.

Everything here expects the text of a JSON object (RFC 8259) that a parser has already accepted, and names of letters,
digits, "_" and "-". `present` holds the top-level keys that the parser found. With it most bodies need no scan: a key
that stands there once, with no key spelt in escapes beside it, can only be the one the parser saw.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_KEY = re.compile(rb"[\s,]*+(" + _STRING + rb")\s*+:\s*+")
_COLON = re.compile(rb"\s*+:\s*+")
_SCALAR = re.compile(_STRING + rb"|[^\s,}\]]++")
_NO_MEMBERS = re.compile(rb"\s*+\{\s*+\}")
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]*+' + _STRING + rb')*+[^"{}\[\]]*+([{}\[\]])')
_COMMA = re.compile(rb"\s*+,")
_SPACE = b" \t\r\n"
_CONTAINERS = b"{["
_ESCAPED_KEY = re.compile(rb'\\u00[0-7][0-9a-fA-F][\w-]*+"\s*+:')  # the end of a key that spells ASCII in escapes


_text_of_values = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Member(NamedTuple):
    """Where a top-level member stands: from the quote of its key to the end of its value."""

    start: int
    value: int
    end: int


def splice(body: bytes, fields: Mapping[str, bytes], *, present: Container[str] | None = None) -> bytes:
    """`body` with `fields` (name → JSON) as its last members, in place of the client's own."""
    if not fields:
        return body
    body = without(body, fields, present=present)
    end = body.rindex(b"}")
    separator = b"" if _NO_MEMBERS.match(body) else b","
    return b"".join((body[:end], separator, b",".join(_written(*field) for field in fields.items()), body[end:]))


def without(body: bytes, names: Iterable[str], *, present: Container[str] | None = None) -> bytes:
    """`body` without the top-level members `names`, and without the commas that parted them; all else byte for byte."""
    for name in names:
        for member in reversed(_find(body, name, present)):
            body = _cut(body, member)
    return body


def value_of(body: bytes, name: str, *, present: Container[str] | None = None) -> bytes | None:
    """The bytes of a top-level value; of the last one where a key is doubled, as parsers read it."""
    found = _find(body, name, present)
    return body[found[-1].value : found[-1].end] if found else None


def value_end(body: bytes, start: int) -> int:
    """Where the JSON value that begins at `start` ends. Raises ValueError when it does not end."""
    if body[start : start + 1] not in (b"{", b"["):
        scalar = _SCALAR.match(body, start)
        if scalar is None:
            raise ValueError("no JSON value")
        return scalar.end()
    depth, position = 1, start + 1
    while depth:
        bracket = _TO_BRACKET.match(body, position)
        if bracket is None:
            raise ValueError("a JSON value without an end")
        position = bracket.end()
        depth += 1 if bracket[1] in b"{[" else -1
    return position


def _find(body: bytes, name: str, present: Container[str] | None) -> list[Member]:
    """All top-level members called `name`."""
    quoted = f'"{name}"'.encode()
    if present is not None:
        if name not in present:
            return []
        if (only := _only(body, quoted)) is not None:
            return [only]
    elif quoted not in body and b"\\u00" not in body:
        return []
    return [member for member in _members(body) if _is_called(body, member, quoted)]


def _only(body: bytes, quoted: bytes) -> Member | None:
    """The one member there can be. None: a scan must tell."""
    start = body.find(quoted)
    if start < 0 or body.find(quoted, start + 1) >= 0 or (b"\\u00" in body and _ESCAPED_KEY.search(body)):
        return None
    colon = _COLON.match(body, start + len(quoted))
    assert colon is not None, "what a parser found as a key has a colon"
    return Member(start, colon.end(), value_end(body, colon.end()))


def _members(body: bytes) -> Iterator[Member]:
    values = _values(body)
    position = body.index(b"{") + 1
    while key := _KEY.match(body, position):
        position = _member_end(body, key, values)
        yield Member(key.start(1), key.end(), position)


def _values(body: bytes) -> Mapping[str, msgspec.Raw]:
    """The text of each value (of a doubled key's last). Empty where msgspec reads less than other parsers do.

    It also goes less deep: how deep depends on the stack it is called from, where orjson always goes 1,024.

    Found forty times as fast as by looking at every bracket: 0.3 ms for 500 KB in 2,400 messages.
    """
    try:
        return _text_of_values(body)
    except (msgspec.DecodeError, RecursionError):  # it nests less deeply than orjson
        return {}


def _member_end(body: bytes, key: re.Match[bytes], values: Mapping[str, msgspec.Raw]) -> int:
    """Where the value after `key` ends."""
    start = key.end()
    if values and body[start] in _CONTAINERS:
        text = bytes(values.get(json.loads(key[1]), b"?"))
        if body.startswith(text, start):
            return start + len(text)  # a container is whole where its bracket closes, whatever comes after it
    return value_end(body, start)


def _is_called(body: bytes, member: Member, quoted: bytes) -> bool:
    key = body[member.start : value_end(body, member.start)]
    return key == quoted or (b"\\" in key and json.loads(key) == json.loads(quoted))


def _cut(body: bytes, member: Member) -> bytes:
    """With the comma before the member; the first member takes the comma after it."""
    start, end = member.start, member.end
    while body[start - 1] in _SPACE:
        start -= 1
    if body[start - 1] == ord(","):
        return body[: start - 1] + body[end:]
    comma = _COMMA.match(body, end)
    return body[: member.start] + body[comma.end() if comma is not None else end :]


def _written(name: str, value: bytes) -> bytes:
    return b'"%b":%b' % (name.encode(), value)
