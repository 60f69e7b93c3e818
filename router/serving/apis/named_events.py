"""Streams of named events (`event: …`), as Anthropic's Messages and OpenAI's Responses send them."""

from __future__ import annotations

import re
from typing import Any

from router.serving.sse import DONE, HELD_BYTES, TORN, EventRelay, in_band_error_of
from router.serving.usage import parse_object

_NAME = re.compile(rb"(?:\A|[\r\n])event: ?([^\r\n]*)")
_LARGEST_EVENT_BYTES = 8 << 20  # the last event may hold the whole answer again


class NamedEventRelay(EventRelay):
    """A subclass says which events matter, by name. Deltas, of which most streams are made, are never looked into."""

    held_bytes = _LARGEST_EVENT_BYTES

    __slots__ = ("_passing",)

    deltas: re.Pattern[bytes]  # the lines that name them
    last: frozenset[bytes]  # the events that say the answer is whole
    before_output: frozenset[bytes]  # those that come before anything is generated

    def __init__(self) -> None:
        super().__init__()
        self._passing = b""  # the name of an event that is larger than the bound

    def look(self, name: bytes, event: bytes, fields: dict[str, Any] | None) -> None:
        """What an event that is no delta tells. `fields`: None if it is too large to be parsed on the loop."""
        raise NotImplementedError

    def failed(self, name: bytes, fields: dict[str, Any]) -> dict[str, Any] | None:
        """The error object of an event by which the engine says that it failed. `fields`: none if it is too large."""
        return in_band_error_of(fields)

    def _is_plain(self, data: bytes) -> bool:
        if not self.first_token or self.done or self.error is not None:
            return False
        events = data.count(b"\n\n") or data.count(b"\n\r\n")
        if not events or len(self.deltas.findall(data)) != events or data.count(b"}\n\n") != data.count(b"\n\n"):
            return False
        self.events += events
        return True

    def _read(self, event: bytes, payload: bytes) -> bytes:
        if payload.strip() == DONE:
            return b""  # belongs to other streams, and says nothing of this one
        fields = parse_object(payload) if len(payload) <= HELD_BYTES else None
        if fields is None and len(payload) <= HELD_BYTES and payload.startswith(b"{"):
            self.error = TORN
            return b""
        named = _NAME.search(event)
        name = named[1].strip() if named is not None else _type_of(fields)
        self.error = self.failed(name, fields or {})
        if self.error is not None:
            return b""
        if name not in self.before_output:
            self.first_token = True
        self.look(name, event, fields)
        if name in self.last:
            self.done, self.tail = True, event
            return b""
        return event

    def _look_at_part(self, part: bytes) -> None:
        named = _NAME.search(part)
        self._passing = named[1].strip() if named is not None else b""
        self.first_token = self.first_token or self._passing not in self.before_output

    def _oversized_ends(self) -> None:
        if self._passing in self.last:
            self.done = True


def _type_of(fields: dict[str, Any] | None) -> bytes:
    kind = fields.get("type") if fields is not None else None
    return kind.encode("utf-8", "replace") if isinstance(kind, str) else b""
