"""Which texts have been asked before: a filter in two generations of bits.

It may say yes to a text that was never seen (about 1 in 50 when full) and then costs a tokenization; it says no to a
text that was seen only after both generations have passed, and then costs a count that is estimated once more.

All bits of a key lie in one word, so that a look costs one miss of the processor's cache, not three.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

_WORDS = 1 << 17  # of 64 bits: 1 MiB a generation
_MASK = _WORDS - 1
_PATTERN_SHIFT = 54  # the pattern is chosen by the key's upper bits, the word by its lower ones
_DICE = random.Random(11)
_PATTERNS = array("Q", [sum(1 << bit for bit in _DICE.sample(range(64), 3)) for _ in range(1 << 64 - _PATTERN_SHIFT)])
_CAPACITY = 600_000  # keys a generation; three bits each, about 20 % of the bits set


class SeenTexts:
    """Keys are 64-bit hashes of text chains, rooted in the isolation domain: no domain can find another's."""

    __slots__ = ("_added", "_capacity", "_new", "_old")

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._new = _empty()
        self._old = _empty()
        self._added = 0

    def __contains__(self, key: int) -> bool:
        at, bits = key & _MASK, _PATTERNS[key >> _PATTERN_SHIFT]
        return self._new[at] & bits == bits or self._old[at] & bits == bits

    def add(self, keys: Sequence[int], start: int = 0) -> int:
        """Adds keys[start:]. Returns where among all keys the first stands that had not been added before."""
        if self._added >= self._capacity:
            self._old, self._new, self._added = self._new, _empty(), 0
        new, old = self._new, self._old
        first_unseen = -1
        for n in range(start, len(keys)):
            key = keys[n]
            at, bits = key & _MASK, _PATTERNS[key >> _PATTERN_SHIFT]
            word = new[at]
            if word & bits != bits:
                new[at] = word | bits
                self._added += 1
                if first_unseen < 0 and old[at] & bits != bits:
                    first_unseen = n
        return first_unseen if first_unseen >= 0 else len(keys)


def _empty() -> array[int]:
    return array("Q", bytes(8 * _WORDS))
