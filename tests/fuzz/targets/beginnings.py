"""Bodies one after the other: each is what a parser makes of it alone, whatever came before it."""

from __future__ import annotations

from typing import Any

from router.errors import BadRequest
from router.serving.beginnings import Beginnings
from router.serving.call import parse_body
from tests.fuzz.source import Source

WORDS = (
    b'{"role"', b'{"role":"user","content":"', b'"}', b'"},', b'"}],', b'"}]}', b"[", b"]", b"{", b"}", b",", b":",
    b'"', b"\\", b" ", b"\n", b"\xff", b"\xc3\xa9", b'"messages":[', b'"mess\\u0061ges":[', b'{"messages":[',
    b"null", b"1", b'{"content":"a","role":"user"},', b'"model":"m"', b'{"role":"user","content":[]},',
    b'{"role":"user"},',
)  # fmt: skip

_STARTS = (b'{"messages":[', b'{"model":"m","messages": [', b'{"x":[', b'{"messages":[],"messages":[', b"")
_MESSAGES = (
    b'{"role":"user","content":"%b"},',
    b'{"role":"assistant","content":"%b"}, ',
    b'{"role":"user","content":"%b","name":"n"},',
    b'{"content":"%b","role":"user"},',
    b'{ "role":"user","content":"%b"},',
)
_LONG = b"It is the engine that holds it. " * 4


def target(data: bytes) -> None:
    source = Source(data)
    known = Beginnings(shortest=64, max_bytes=4_096)
    bodies = [b""]
    for _ in range(source.number(8) + 1):
        bodies.append(_body(source, source.pick(bodies)))
        expected = _parsed(bodies[-1], None)
        for _ in range(2):
            assert _parsed(bodies[-1], known) == expected
            assert known.bytes <= 4_096


def _body(source: Source, before: bytes) -> bytes:
    """One that begins like another, goes on with messages, and ends somehow."""
    start = before[: source.number(len(before) + 1)] if source.flag() else before[: max(0, before.rfind(b'{"role"'))]
    start = start or source.pick(_STARTS)
    for _ in range(source.number(4)):
        start += source.pick(_MESSAGES) % (source.pick((b"a", _LONG, b"")) + b"%d" % source.number(3))
    end = b'{"role":"user","content":"last"}]}' if source.flag() else source.take(source.number(64))
    return start + end


def _parsed(body: bytes, known: Beginnings | None) -> tuple[list[Any], Any] | str:
    try:
        fields = parse_body(body) if known is None else known.parse(body, "", parse_body)[0]
    except BadRequest as refusal:
        return str(refusal)
    return list(fields), fields
