"""Bodies that begin like one before them: only what is new in a turn of a long conversation is parsed.

    {"model": "m", "messages": [{…}, {…}, {…}, {"role": "user", …}], "stream": true}
    '--------- opening --------'              '- from here on it is new
    '----- known: found again by its length, its end and its digest

Of a body that begins with known bytes `opening MARK, what is new` is parsed in their place. MARK is a random number of
this process: where it comes back as the first of the messages, the bytes it stands for were messages, and what they
were parsed to goes in its place. Where it does not (another field of that name follows, say), the body is parsed whole.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from router.serving.prompt.pieces import Beginning, Begun

SHORTEST = 16 << 10
"""Bytes of a body from which on it is worth it: a shorter one is parsed in some microseconds."""
LONGEST = 4 << 20
"""Of a longer one the first time, in which what is remembered is parsed once more, would take the loop too long."""
MAX_BYTES = 64 << 20
"""Text that is remembered; the same again is what it is worth in memory."""
_ALIKE = 16  # beginnings of one place: conversations that share a long system prompt do not differ there
_SAMPLE = 64  # bytes
_MESSAGE = b'{"role"'  # inside a string its quotes would be escaped: wherever it stands, an object begins
_OPENING = 4 << 10  # bytes, at most, before the first message
_BRACES = 256  # at most, from the last message on
_SPACE = b" \t\r\n"
_MARK = secrets.randbits(62)
_MARKED = b"%d," % _MARK

_Place = tuple[str, int, bytes]
"""Isolation domain, an offset, and the bytes before it."""
Parse = Callable[[bytes], dict[str, Any]]


class Beginnings:
    """What bodies began with lately, apart for each isolation domain: how long a parse takes tells nobody of another's.

    Used by one thread. The least recently used go first, by the place at which they are found.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES, shortest: int = SHORTEST) -> None:
        self._max_bytes = max_bytes
        self._shortest = shortest
        self._seed = secrets.randbits(64)
        self._places: OrderedDict[_Place, list[Beginning]] = OrderedDict()
        self.bytes = 0

    def parse(self, body: bytes, domain: str, parse: Parse) -> tuple[dict[str, Any], Beginning | None]:
        """What `parse` makes of a body, and what of it is known. Raises what `parse` does."""
        if not self._shortest <= len(body) <= LONGEST:
            return parse(body), None
        found = self._find(body, domain)
        fields = _gone_on(found, body) if found is not None else parse(body)
        return (fields, self._keep(body, fields, found, domain)) if fields is not None else (parse(body), None)

    def _find(self, body: bytes, domain: str) -> Beginning | None:
        for length in (len(body), len(body) >> 1):
            place = _place_of(body, length, domain)
            for beginning in self._places.get(place, ()):
                end = beginning.length
                if body.startswith(beginning.end, end - _SAMPLE) and self._digest(body, end) == beginning.digest:
                    self._places.move_to_end(place)
                    return beginning
        return None

    def _digest(self, body: bytes, length: int) -> int:
        return xxh3_64_intdigest(memoryview(body)[:length], self._seed)

    def _keep(self, body: bytes, fields: dict[str, Any], found: Beginning | None, domain: str) -> Beginning | None:
        """The beginning of `body` up to its last message. None: it is not written as most are, or not long enough."""
        known = found.messages if found is not None else ()
        messages = fields.get("messages")
        if not isinstance(messages, list) or not all([_is_plain(message) for message in messages[len(known) :]]):
            return found
        length = _last_message(body)
        start = found.length if found is not None else body.find(_MESSAGE, 0, _OPENING)
        more = _messages_in(body, start, length) if 0 <= start < length else ()
        if not more:
            return found
        if found is None:
            opening, notes = body[:start], dict[object, Begun]()
        else:
            opening, notes = found.opening, dict(found.notes)
            self._forget(found, body, domain)
        end, digest = body[length - _SAMPLE : length], self._digest(body, length)
        kept = Beginning(length, digest, end, opening, (*known, *more), notes)
        self._add(kept, _place_of(body, length, domain))
        return kept

    def _add(self, beginning: Beginning, place: _Place) -> None:
        alike = self._places.setdefault(place, [])
        alike.insert(0, beginning)
        self.bytes += beginning.length
        if len(alike) > _ALIKE:
            self.bytes -= alike.pop().length
        self._places.move_to_end(place)
        while self.bytes > self._max_bytes:
            self.bytes -= sum([dropped.length for dropped in self._places.popitem(last=False)[1]])

    def _forget(self, beginning: Beginning, body: bytes, domain: str) -> None:
        """A turn takes the place of the one before it."""
        place = _place_of(body, beginning.length, domain)
        alike = self._places[place]
        alike.remove(beginning)
        self.bytes -= beginning.length
        if not alike:
            del self._places[place]


def _place_of(body: bytes, length: int, domain: str) -> _Place:
    """Where a beginning of this length is looked for: at the greatest power of two in it."""
    at = 1 << length.bit_length() - 1
    return domain, at, body[max(0, at - _SAMPLE) : at]


def _gone_on(beginning: Beginning, body: bytes) -> dict[str, Any] | None:
    try:
        fields: dict[str, Any] = orjson.loads(
            b"".join((beginning.opening, _MARKED, memoryview(body)[beginning.length :]))
        )
    except orjson.JSONDecodeError:
        return None  # parsed whole, it gets the message that belongs to it
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages or messages[0] != _MARK:
        return None
    messages[:1] = beginning.messages
    return fields


def _last_message(body: bytes) -> int:
    """Where it starts, if that is in the latter half; else -1. To look for one byte is ten times as fast as for all."""
    at, half = len(body), len(body) >> 1
    for _ in range(_BRACES):
        at = body.rfind(b"{", half, at)
        if at < 0 or body.startswith(_MESSAGE, at):
            return at
    return -1


def _messages_in(body: bytes, start: int, stop: int) -> Sequence[dict[str, Any]]:
    """Those of body[start:stop], if it is nothing but whole ones, each with a comma behind it."""
    text = body[start:stop].rstrip(_SPACE)
    if not text.endswith(b","):
        return ()
    try:
        messages = orjson.loads(b"[%b]" % text[:-1])
    except orjson.JSONDecodeError:
        return ()
    return messages if all([_is_plain(message) for message in messages]) else ()


def _is_plain(message: object) -> bool:
    """A role and a text: nothing in it that any reader would change, for all bodies that begin so share it."""
    return (
        isinstance(message, dict)
        and len(message) == 2
        and type(message.get("role")) is str
        and type(message.get("content")) is str
    )
