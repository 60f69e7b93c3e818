"""A client's body on its way to the engine: refused with a 400, or forwarded as it came with the fields we own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from router.core import Prompt
from router.errors import ClientError
from router.serving.apis import CHAT, COMPLETIONS
from router.serving.call import Call
from router.serving.models import Models, ServedModel
from router.serving.openai_errors import render
from router.serving.splice import splice, value_of, without
from router.serving.tools_order import ToolsOrder
from tests.fuzz.source import Source

WORDS = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b" ", b"\n", b"\\u0000", b"\\ud83d", b"\xc3\xa9", b"\xff",
    b'"model"', b'"m\\u006fdel"', b'"stream"', b'"stream_options"', b'"include_usage"', b'"cache_salt"',
    b'"extra_key"', b'"prompt_cache_key"', b'"metadata"', b'"session_id"', b'"n"', b'"max_tokens"', b'"prompt"',
    b'"messages"', b'"tools"', b'"m"', b"true", b"false", b"null", b"NaN", b"1", b"-0", b"1e999",
    b"99999999999999999999999999", b"{}", b"[]", b'{"model":"m"', b',"stream":true', b'{"a":' * 300, b"}" * 300,
    b',"a":' + b"[" * 1000 + b"]" * 1000,
)  # fmt: skip

_SERVED = "served/\u00e9"
_RANK = {"data_parallel_rank": b"3"}
_NAMES = ("model", "stream_options", "cache_salt", "n")
_MEMBERS = ("model", "stream", "stream_options", "cache_salt", "extra_key", "n", "prompt", "metadata", "tools", "a", "")
_SPACES = ("", " ", "\n", "\t \r\n")


class _NoPrompts:
    def observe(self, prompt: Prompt, engine_tokens: int) -> None: ...

    async def prepare(self, path: str, body: Any, **_: Any) -> Prompt:
        return Prompt(tokens=0, known_tokens=0, keys={})


_MODELS = Models([ServedModel("m", _NoPrompts()), ServedModel("n", _NoPrompts())])


def target(data: bytes) -> None:
    source = Source(data)
    built, path = source.flag(), source.pick((CHAT, COMPLETIONS))
    body = _written(source) if built else source.rest()
    try:
        call = Call(path, body, headers={}, models=_MODELS)
    except ClientError as error:
        render(error)
        return
    assert 0 < call.choices <= 16_384 * max(1, len(body))
    theirs = _members(body)
    assert call.fields.keys() == dict(theirs).keys()
    _check_forwarded(call, theirs)
    _check_cut(body, call, theirs)
    ToolsOrder().observe("m", call.fields.get("tools"))
    call.ask("r", Prompt(tokens=0, known_tokens=0, keys={}))


def _check_forwarded(call: Call, theirs: list[tuple[str, Any]]) -> None:
    owned = {*_RANK, "model"}
    if call.stream and not call.wants_usage:
        owned.add("stream_options")
    sent = _members(call.upstream_body(_SERVED, _RANK))
    assert _same([member for member in sent if member[0] not in owned], [m for m in theirs if m[0] not in owned])
    ours = [member for member in sent if member[0] in owned]
    assert sorted(name for name, _ in ours) == sorted(owned)
    assert ("model", _SERVED) in ours
    assert ("data_parallel_rank", "3") in ours
    if "stream_options" in owned:
        before = dict(theirs).get("stream_options") or _Pairs()
        after = dict(ours)["stream_options"]
        assert _same(after, [*[pair for pair in before if pair[0] != "include_usage"], ("include_usage", True)])


def _check_cut(body: bytes, call: Call, theirs: list[tuple[str, Any]]) -> None:
    """With and without the parser's word on which keys there are."""
    for name in _NAMES:
        rest = without(body, (name,))
        assert rest == without(body, (name,), present=call.fields)
        assert _same(_members(rest), [member for member in theirs if member[0] != name])
        found = value_of(body, name)
        assert found == value_of(body, name, present=call.fields)
        assert (found is None) == (name not in call.fields)
        if found is not None:
            assert _same(_parse(found), dict(theirs)[name])
    assert splice(body, {}) is body


class _Pairs(list[tuple[str, Any]]):
    """An object with the order of its members, and with doubled ones."""


def _members(body: bytes) -> list[tuple[str, Any]]:
    members = _parse(body)
    assert isinstance(members, _Pairs)
    return members


def _parse(text: bytes) -> Any:
    """Deeper than the code under test may go."""
    with _deep():
        return json.loads(text.decode(), object_pairs_hook=_Pairs, parse_constant=str, parse_float=str, parse_int=str)


def _same(left: object, right: object) -> bool:
    with _deep():
        return left == right


@contextmanager
def _deep() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(3 * limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _written(source: Source) -> bytes:
    """A JSON object as clients may write it."""
    parts = []
    for _ in range(source.number(7)):
        name = source.pick(_MEMBERS)
        key = "".join(f"\\u{ord(c):04x}" if source.flag() else c for c in name) if source.flag() else name
        value = json.dumps(source.value(), ensure_ascii=True, indent=source.pick((None, 1)))
        if name == "model" and source.flag():
            value = '"m"'
        elif name == "stream":
            value = source.pick(("true", "false"))
        between = [source.pick(_SPACES) for _ in range(4)] if source.flag() else [""] * 4
        parts.append(f'{between[0]}"{key}"{between[1]}:{between[2]}{value}{between[3]}')
    return f"{source.pick(_SPACES)}{{{','.join(parts) or ' '}}}{source.pick(_SPACES)}".encode()
