"""What is known of texts that were tokenized before, so that the cost of a turn is the cost of its new text.

A prompt is a chain of pieces; each link has a hash over all text before it and the isolation root. For each link the
memo holds how many tokens the text up to there has and the block keys that its own piece completed. Token ids are not
kept (they are four bytes a token, the keys half a byte at a block size of 16), except the few of the unfinished block:
when the block sizes in use change, what is known counts as unknown and is tokenized again as it is asked for.

Memory is bounded in bytes; what was used least recently goes first, ends of chains before their beginnings.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from router.routing.blocks import chain
from router.serving.prompt.tokenizer import Ids

Sizes = tuple[int, ...]
_OVERHEAD = 480  # bytes of a link beside its keys and ids, measured with tracemalloc


class Link:
    """The state of a chain after one piece. Immutable once made."""

    __slots__ = ("keys", "parents", "sizes", "tail", "tokens")

    def __init__(self, sizes: Sizes, tokens: int, keys: tuple[bytes, ...], parents: tuple[int, ...], tail: Ids) -> None:
        self.sizes = sizes
        self.tokens = tokens  # of the whole text so far
        self.keys = keys  # for each size: keys of the blocks this piece completed, as u64s
        self.parents = parents  # for each size: the key of the last whole block, else the root
        self.tail = tail  # the last ids, as many as the largest unfinished block needs

    @classmethod
    def root(cls, key: int, sizes: Sizes) -> Link:
        return cls(sizes, 0, (b"",) * len(sizes), (key,) * len(sizes), array("I"))

    def extend(self, ids: Ids) -> Link:
        """The state after `ids` more tokens."""
        tokens = self.tokens + len(ids)
        joined = self.tail + ids
        keys, parents, longest = [], [], 0
        for size, parent in zip(self.sizes, self.parents, strict=True):
            unfinished = self.tokens % size
            new = chain(parent, joined[len(self.tail) - unfinished :], size)
            keys.append(new.tobytes())
            parents.append(new[-1] if new else parent)
            longest = max(longest, tokens % size)
        return Link(self.sizes, tokens, tuple(keys), tuple(parents), joined[len(joined) - longest :])

    @property
    def cost(self) -> int:
        return _OVERHEAD + 4 * len(self.tail) + sum(map(len, self.keys))


class Memo:
    """Links by the hash of their chain. Used by one thread, but for `peek`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._links: OrderedDict[int, Link] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._links)

    def known(self, hashes: Sequence[int], sizes: Sizes) -> list[Link]:
        """Links of the longest known beginning of a chain, in order."""
        get = self._links.get
        known: list[Link] = []
        for key in hashes:
            link = get(key)
            if link is None or link.sizes != sizes:
                break
            known.append(link)
        touch = self._links.move_to_end
        for at in range(len(known) - 1, -1, -1):  # the beginning last, so that it outlives its continuations
            touch(hashes[at])
        return known

    def peek(self, key: int) -> Link | None:
        """A link that does not count as used by this. From any thread."""
        return self._links.get(key)

    def put(self, hashes: Sequence[int], links: Sequence[Link]) -> None:
        """`links` belong to the last hashes; the chain's beginning is touched again, to stay younger than its end."""
        first = len(hashes) - len(links)
        for at in range(len(links) - 1, -1, -1):
            key, link = hashes[first + at], links[at]
            old = self._links.pop(key, None)
            self.bytes += link.cost - (old.cost if old is not None else 0)
            self._links[key] = link
        for at in range(first - 1, -1, -1):
            if hashes[at] in self._links:
                self._links.move_to_end(hashes[at])
        while self.bytes > self._max_bytes and self._links:
            self.bytes -= self._links.popitem(last=False)[1].cost


def joined_keys(links: Sequence[Link], sizes: Sizes) -> dict[int, array[int]]:
    """All keys of a chain, for each block size."""
    keys: dict[int, array[int]] = {}
    for at, size in enumerate(sizes):
        own = links[0].keys[at] if len(links) == 1 else b"".join([link.keys[at] for link in links])
        keys[size] = array("Q", own)
    return keys
