"""Requests that have ended engines. After the second one they are answered here, before they end a third."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from math import inf

from xxhash import xxh3_64_intdigest, xxh3_128_digest

KEPT = 1_024
KEPT_S = 600.0
DEADLY = 2  # engines; one may have died of something else
FALLEN_S = 60.0  # an engine that died so short a time ago did not die of what it is sent now


class Quarantine:
    """Bodies by their hash: clients send what failed again, byte for byte.

    domain: of isolation; what one has sent is not told to another. ended: by such a hash, how many engines, and until
    when that is kept.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.ended: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._fallen: dict[str, float] = {}  # instance → when it died

    def note(self, body: bytes, instance: str, domain: str = "") -> bool:
        """An engine that was sent this is dead. Whether that makes it one too many."""
        now, key = self._clock(), _key(body, domain)
        if now - self._fallen.get(instance, -inf) < FALLEN_S:
            return False
        self._fallen = {name: at for name, at in self._fallen.items() if now - at < FALLEN_S}
        self._fallen[instance] = now
        engines = self._engines(key) + 1
        self.ended[key] = engines, now + KEPT_S
        self.ended.move_to_end(key)
        while len(self.ended) > KEPT:
            self.ended.popitem(last=False)
        return engines >= DEADLY

    def holds(self, body: bytes, domain: str = "") -> bool:
        return self._engines(_key(body, domain)) >= DEADLY

    def _engines(self, key: bytes) -> int:
        engines, until = self.ended.get(key, (0, 0.0))
        if engines and self._clock() >= until:
            del self.ended[key]
            return 0
        return engines


def _key(body: bytes, domain: str) -> bytes:
    return xxh3_128_digest(body, xxh3_64_intdigest(domain.encode()))
