"""A head that comes again and again, read once.

On one connection a sender writes the same head with every message, but for the length: SDKs set the same headers for
each call, engines for each answer (uvicorn's Date changes once a second). Between two messages a parser is always in
the same state, so the same bytes mean the same head, and the digits of Content-Length can only say how much body
follows. Such a message needs a few comparisons in place of a parser and a callback for each header.
"""

from __future__ import annotations

import re
from typing import Generic, TypeVar

_HEAD_BYTES = 4096  # what is remembered of a sender at most
_DIGITS = 16
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})(?=[ \t]*\r\n)", re.IGNORECASE)
_PATIENCE = 16  # heads in a row that are new; then only
_SELDOM = 64  # each of so many is remembered: some senders never write the same one twice (ids, traces)

Meaning = TypeVar("Meaning")


class KnownHead(Generic[Meaning]):
    """The last head of a sender. `meaning` is what a parser made of it, None while there is none.

    `head_bytes`: a head that could be larger is not remembered.
    """

    __slots__ = ("_after", "_before", "_head_bytes", "_new", "_reach", "_start", "meaning")

    def __init__(self, head_bytes: int) -> None:
        self._head_bytes = min(head_bytes, _HEAD_BYTES) - _DIGITS
        self.meaning: Meaning | None = None
        self._before = b""  # up to the digits of the length
        self._after = b""  # from behind them to the end of the head
        self._start = 0
        self._reach = 0
        self._new = 0

    def body_of(self, data: bytes) -> bytes | None:
        """The body, if `data` is one whole message with this head. None: a parser must tell."""
        if self.meaning is None or not data.startswith(self._before):
            return None
        end = data.find(self._after, self._start, self._reach)
        if end < 0:
            return None
        body = data[end + len(self._after) :]
        if data[self._start : end] != b"%d" % len(body):
            return None
        self._new = 0
        return body

    def learn(self, data: bytes, meaning: Meaning) -> None:
        """A parser that was between two messages took `data` for one whole message, its body told by its length."""
        self._new += 1
        if self._new > _PATIENCE and self._new % _SELDOM:
            return
        end = data.find(b"\r\n\r\n", 0, self._head_bytes) + 4
        lengths = list(_LENGTH.finditer(data, 0, end))
        if len(lengths) != 1 or int(lengths[0][1]) != len(data) - end:
            return
        start, stop = lengths[0].span(1)
        self._before, self._after = data[:start], data[stop:end]
        self._start, self._reach = start, start + _DIGITS + len(self._after)
        self.meaning = meaning
