"""What a piece of work leaves that only the garbage collector finds."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

OURS = (
    "router.core",
    "router.errors",
    "router.http.upstream.Exchange",
    "router.routing",
    "router.serving",
)  # the rest is the engine's, too


@contextmanager
def gathered() -> Iterator[Counter[str]]:
    """Kinds of ours in it, filled when the block ends."""
    left: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield left
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = (f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.garbage)
        left.update(kind for kind in kinds if kind.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
