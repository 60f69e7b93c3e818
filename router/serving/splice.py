"""Our fields in the client's own bytes.

A request body is forwarded as it came: key order, spacing, big integers, lone surrogates and unknown fields survive.
The few fields we own are appended before the last brace; a client's own copy of such a field is cut out at top level,
however its key is spelt and however often it is there. Nothing is serialised again.

Everything here expects the text of a JSON object (RFC 8259) that a parser has already accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_KEY = re.compile(rb"[\s,]*+(" + _STRING + rb")\s*+:\s*+")
_SCALAR = re.compile(_STRING + rb"|[^\s,}\]]++")
_NO_MEMBERS = re.compile(rb"\s*+\{\s*+\}")
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]*+' + _STRING + rb')*+[^"{}\[\]]*+([{}\[\]])')

Range = tuple[int, int]


def splice(body: bytes, fields: Mapping[str, bytes], *, present: Container[str] | None = None) -> bytes:
    """`body` with `fields` (name → JSON) as its last members, in place of the client's own.

    `present` holds the top-level keys of the parsed body: with it, a body that has none of the fields is not scanned.
    """
    if not fields:
        return body
    owned = [name for name in fields if _may_have(body, name, present)]
    if owned:
        body = without(body, owned)
    end = body.rindex(b"}")
    separator = b"" if _NO_MEMBERS.match(body) else b","
    return b"".join((body[:end], separator, b",".join(_member(*field) for field in fields.items()), body[end:]))


def without(body: bytes, names: Iterable[str]) -> bytes:
    """`body` without the top-level members `names`; all else byte for byte, but the commas and spaces before them."""
    owned = {name.encode() for name in names}
    cut, first_kept = [], True
    position = body.index(b"{") + 1
    for key, _, end in members(body):
        if key in owned:
            cut.append((position, end))
        elif first_kept:
            if cut:  # the first member that stays must not begin with the comma of one that went
                cut.append((position, body.index(b",", position) + 1))
            first_kept = False
        position = end
    return _without_ranges(body, cut) if cut else body


def value_of(body: bytes, name: str) -> bytes | None:
    """The bytes of a top-level value; of the last one where a key is doubled, as parsers read it."""
    wanted, found = name.encode(), None
    for key, start, end in members(body):
        if key == wanted:
            found = body[start:end]
    return found


def members(body: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(decoded key, start of value, end of value) of every top-level member, in order."""
    position = body.index(b"{") + 1
    while key := _KEY.match(body, position):
        start = key.end()
        position = value_end(body, start)
        yield _decoded(key[1]), start, position


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


def _may_have(body: bytes, name: str, present: Container[str] | None) -> bool:
    if present is not None:
        return name in present
    return _quoted(name) in body or b"\\u" in body  # a key may be spelt with escapes


def _quoted(name: str) -> bytes:
    return json.dumps(name).encode()


def _member(name: str, value: bytes) -> bytes:
    return b"%b:%b" % (_quoted(name), value)


def _decoded(key: bytes) -> bytes:
    if b"\\" not in key:
        return key[1:-1]
    return str(json.loads(key)).encode("utf-8", "surrogatepass")


def _without_ranges(body: bytes, cut: list[Range]) -> bytes:
    kept, position = [], 0
    for start, end in cut:
        kept.append(body[position:start])
        position = end
    kept.append(body[position:])
    return b"".join(kept)
