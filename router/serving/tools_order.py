"""Finds tools that come back in another order: the same to a reader, another prompt to a cache.

Tools stand at the front of a prompt, so that a client that writes its dictionaries in random order has each of its
requests computed from the first token on. The gateway never reorders what a client sends; it says so to the operator.
"""

from __future__ import annotations

from collections import OrderedDict

import orjson
from xxhash import xxh3_64_intdigest

_LARGEST_BYTES = 64 * 1024  # sorted in a quarter of a millisecond; larger lists are passed over


class ToolsOrder:
    """`counts`: public model name → requests whose tools were another order of tools seen before.

    Both the order of keys in an object and that of the tools in their list count; lists within a tool (`required`,
    `enum`) mean what they say. Of each model the last `max_lists` are remembered, as digests: some 200 bytes each.
    """

    def __init__(self, *, max_lists: int = 512) -> None:
        self.counts: dict[str, int] = {}
        self._max_lists = max_lists
        self._seen: dict[str, _Seen] = {}

    def observe(self, model: str, tools: object) -> None:
        """`tools` as parsed. About 1 µs a KB for a list that is known. Never raises for what a client sends."""
        if not isinstance(tools, list) or not tools:
            return
        try:
            written = orjson.dumps(tools)
            if len(written) > _LARGEST_BYTES:
                return
            seen = self._seen.get(model)
            if seen is None:
                seen = self._seen[model] = _Seen(self._max_lists)
            if seen.is_reordered(written, tools):
                self.counts[model] = self.counts.get(model, 0) + 1
        except TypeError:  # half a surrogate pair, or an integer beyond 64 bits: orjson cannot write them
            return


class _Seen:
    """Of one model: which list of tools each spelling stands for, and how each list was spelled last."""

    def __init__(self, max_lists: int) -> None:
        self._max_lists = max_lists
        self._content: OrderedDict[int, int] = OrderedDict()  # digest as written → digest without order
        self._last: OrderedDict[int, int] = OrderedDict()  # digest without order → the last one as written

    def is_reordered(self, written: bytes, tools: list[object]) -> bool:
        spelling = xxh3_64_intdigest(written)
        content = self._content.get(spelling)
        if content is None:
            content = _without_order(tools)
        before = self._last.get(content, spelling)
        self._keep(self._content, spelling, content)
        self._keep(self._last, content, spelling)
        return before != spelling

    def _keep(self, digests: OrderedDict[int, int], name: int, value: int) -> None:
        digests[name] = value
        digests.move_to_end(name)
        if len(digests) > self._max_lists:
            digests.popitem(last=False)


def _without_order(tools: list[object]) -> int:
    return xxh3_64_intdigest(b"\n".join(sorted([orjson.dumps(tool, option=orjson.OPT_SORT_KEYS) for tool in tools])))
