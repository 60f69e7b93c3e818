"""Requests that have ended engines. After the second one they are answered here, before they end a third."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from xxhash import xxh3_128_digest

KEPT = 1_024
KEPT_S = 600.0
DEADLY = 2  # engines; one may have died of something else


class Quarantine:
    """Bodies by their hash: clients send what failed again, byte for byte. False while nothing is kept."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # engines, and until when that is kept

    def __bool__(self) -> bool:
        return bool(self._ended)

    def note(self, body: bytes) -> bool:
        """An engine died over this. Whether that makes it one too many."""
        key = xxh3_128_digest(body)
        engines = self._engines(key) + 1
        self._ended[key] = engines, self._clock() + KEPT_S
        self._ended.move_to_end(key)
        while len(self._ended) > KEPT:
            self._ended.popitem(last=False)
        return engines >= DEADLY

    def holds(self, body: bytes) -> bool:
        return self._engines(xxh3_128_digest(body)) >= DEADLY

    def _engines(self, key: bytes) -> int:
        engines, until = self._ended.get(key, (0, 0.0))
        if engines and self._clock() >= until:
            del self._ended[key]
            return 0
        return engines
