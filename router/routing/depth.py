"""How far each of many holders follows a chain of blocks.

Holders are bits of a mask, and one look at a block tells of all of them. Caches drop the tails of a chain before its
head (vLLM and SGLang: least recently used, leaves first), so holding a block implies holding what is before it, and the
end of a run can be bisected: 100,000 tokens take some dozens of looks, not 6,250.
"""

from __future__ import annotations

from collections.abc import Callable

MaskAt = Callable[[int], int]
"""Position in the chain → who holds that block."""
Runs = list[tuple[int, int]]
"""(depth in blocks, mask of those that hold exactly so many leading blocks); masks are disjoint."""

SHORT = 32  # a chain no longer than this is read block by block, which is exact
PROBES = 4
_WEYL = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: multiples of it spread evenly over a range


def scan(at: MaskAt, start: int, end: int, mask: int) -> Runs:
    """Reads every block of [start, end): exact. All in `mask` hold what is before `start`."""
    runs: Runs = []
    for position in range(start, end):
        holding = at(position) & mask
        if holding != mask:
            runs.append((position, mask ^ holding))
            if not holding:
                return runs
            mask = holding
    runs.append((end, mask))
    return runs


def bisect(at: MaskAt, start: int, end: int, mask: int) -> Runs:
    """Assumes that whoever holds a block holds all before it."""
    if end - start <= SHORT:
        return scan(at, start, end, mask)
    runs: Runs = []
    holding = at(start) & mask  # most holders have nothing of most prompts
    if holding != mask:
        runs.append((start, mask ^ holding))
    open_ranges = [(start + 1, end, holding)] if holding else []
    while open_ranges:
        low, high, mask = open_ranges.pop()
        if low == high:
            runs.append((low, mask))
            continue
        middle = (low + high) >> 1
        holding = at(middle) & mask
        if holding:
            open_ranges.append((middle + 1, high, holding))
        if holding != mask:
            open_ranges.append((low, middle, mask ^ holding))
    return runs


def audited(at: MaskAt, start: int, end: int, mask: int, *, dice: int) -> tuple[Runs, int]:
    """`bisect`, with a few probes inside each claimed run. Returns the runs, and the mask of those with a hole.

    A hole means that the assumption failed (a lost event, a tier that drops heads first): such holders are read block
    by block up to the hole. `dice` moves the probes, so that a hole missed by one call is found by a later one.
    """
    runs = bisect(at, start, end, mask)
    if end - start <= SHORT:
        return runs, 0
    broken, limit = 0, start
    for depth, holders in runs:
        for position in _probes(start, depth, dice):
            missing = holders & ~at(position)
            if missing:
                broken |= missing
                limit = max(limit, position + 1)
    if not broken:
        return runs, 0
    sound = [(depth, holders & ~broken) for depth, holders in runs if holders & ~broken]
    return sound + scan(at, start, limit, broken), broken


def _probes(start: int, depth: int, dice: int) -> list[int]:
    length = depth - start
    if length <= SHORT:
        return []
    return [start + ((dice + i * _WEYL & 0xFFFFFFFF) * length >> 32) for i in range(1, PROBES + 1)]
