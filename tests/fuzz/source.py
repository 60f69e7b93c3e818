"""Choices and text out of fuzzed bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T")

_NAMES = ("model", "stream", "stream_options", "include_usage", "usage", "choices", "error", "n", "a", "", "mod\u00e9l")
_TEXTS = ("\ud83d", "m", "usage", '"model":1', "\\", "}", "]{,", "\u00e9\U0001f30d", "\n", "\x7f", "data: [DONE]")
_NUMBERS = (10**30, 0, 1, -1, 2, 16, 404, 500, 2**31, 2**63, 2**64 - 1, 0.5, -0.0, 1e308)


class Source:
    """Read from the front; once it is used up, every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def empty(self) -> bool:
        return self._at >= len(self._data)

    def number(self, below: int) -> int:
        """Two bytes where one would not do."""
        size = 1 if below <= 256 else 2
        taken = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(taken, "little") % below

    def flag(self) -> bool:
        return self.number(2) == 1

    def pick(self, options: Sequence[T]) -> T:
        return options[self.number(len(options))]

    def cuts(self) -> list[int]:
        return [self.number(4096) for _ in range(self.number(8))]

    def take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def rest(self) -> bytes:
        rest, self._at = self._data[self._at :], len(self._data)
        return rest

    def value(self, *, binary: bool = False, depth: int = 4) -> Any:
        """A JSON value of any shape; with `binary` what msgpack can hold."""
        kind = self.number(12)
        if kind < 3 and depth:
            return [self.value(binary=binary, depth=depth - 1) for _ in range(self.number(5))]
        if kind < 6 and depth:
            return {self.pick(_NAMES): self.value(binary=binary, depth=depth - 1) for _ in range(self.number(5))}
        if kind < 8:
            return self.pick(_NUMBERS[1:] if binary else _NUMBERS)
        if kind < 10:
            return self.pick(_TEXTS[1:] if binary else _TEXTS)
        if kind == 10 and binary:
            return self.take(self.number(12))
        return self.pick((None, True, False))


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """`data` as a network might bring it."""
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]
