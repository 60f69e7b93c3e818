"""Which texts have been asked before: a filter in two generations of bits.

It may say yes to a text that was never seen (about 1 in 50 when full) and then costs a tokenization; it says no to a
text that was seen only after both generations have passed, and then costs a count that is estimated once more.
"""

from __future__ import annotations

from collections.abc import Sequence

_BITS = 1 << 23  # 1 MiB a generation
_MASK = _BITS - 1
_CAPACITY = 600_000  # keys a generation; three bits each, about 20 % of the bits set


class SeenTexts:
    """Keys are 64-bit hashes of text chains, rooted in the isolation domain: no domain can find another's."""

    __slots__ = ("_added", "_capacity", "_new", "_old")

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._new = bytearray(_BITS // 8)
        self._old = bytearray(_BITS // 8)
        self._added = 0

    def __contains__(self, key: int) -> bool:
        return _all_set(self._new, key) or _all_set(self._old, key)

    def add(self, keys: Sequence[int]) -> None:
        if self._added >= self._capacity:
            self._old, self._new, self._added = self._new, bytearray(_BITS // 8), 0
        bits = self._new
        for key in keys:
            for at in (key & _MASK, key >> 23 & _MASK, key >> 41 & _MASK):
                bits[at >> 3] |= 1 << (at & 7)
        self._added += len(keys)


def _all_set(bits: bytearray, key: int) -> bool:
    first, second, third = key & _MASK, key >> 23 & _MASK, key >> 41 & _MASK
    return bool(
        bits[first >> 3] >> (first & 7) & bits[second >> 3] >> (second & 7) & bits[third >> 3] >> (third & 7) & 1
    )
