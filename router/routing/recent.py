"""What was just dispatched counts as held for some seconds, until the engine's events confirm it.

Blocks are announced only after the engine's step: without this, a burst of siblings would be placed before anybody is
known to hold their common prefix, and be spread over the fleet. Kept per isolation domain, so that no tenant's
placement tells what another has just sent.

Not every block is written down: the first 64, then 16 per doubling of the length. A prompt that shares d blocks with a
recent one is found to share more than 15/16 of d, and all of them where the recent one is its prefix (the next turn).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from router.routing.depth import bisect

Target = tuple[str, int]
"""(instance, rank)"""
TextKeys = Sequence[tuple[int, int]]
"""(key of the text so far, tokens so far), past the tokens that have block keys."""

GENERATIONS = 4
TEXT_KEYS = 256  # of one dispatch


def _grid(end: int) -> list[int]:
    counts = list(range(1, 65))
    while counts[-1] < end:
        full = counts[-1]
        counts.extend(full + full // 16 * i for i in range(1, 17))
    return counts


GRID = _grid(1 << 22)  # counts of leading blocks that are written down
LAST = [count - 1 for count in GRID]  # where the last of so many stands


class _Generation:
    """What was dispatched within a quarter of the time to live. Dropped as a whole."""

    __slots__ = ("ends", "entries", "expires", "serial", "tables", "tails")

    def __init__(self, serial: int, *, ends: float, expires: float) -> None:
        self.serial = serial
        self.ends = ends
        self.expires = expires
        self.tables: dict[str, dict[int, int]] = {}  # domain → key of a checkpoint → mask of targets
        self.tails: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}  # last checkpoint → bit → (blocks, key)
        self.entries = 0


class RecentDispatches:
    """clock: monotonic seconds. An entry lives for 3/4 to 4/4 of `ttl_s`, less when there are too many."""

    def __init__(self, *, clock: Callable[[], float], ttl_s: float = 15.0, max_entries: int = 1 << 17) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_entries = max_entries // GENERATIONS
        self._generations: deque[_Generation] = deque()  # oldest first
        self._serial = 0
        self._bits: dict[Target, int] = {}
        self._targets: dict[int, Target] = {}
        self._live = 0
        self._free: list[int] = []
        self._retired: list[tuple[int, int]] = []  # (last generation that may know the bit, bit)

    def insert(self, domain: str, target: Target, keys: Sequence[int], size: int, *, text_keys: TextKeys = ()) -> None:
        """`target` is about to compute this prompt. `keys` are those of blocks of `size` tokens."""
        generation = self._current()
        bit = self._bits.get(target) or self._enlist(target)
        table = generation.tables.setdefault(domain, {})
        before = len(table)
        known = table.get
        checkpoints = bisect_right(GRID, len(keys))
        for key in map(keys.__getitem__, LAST[:checkpoints]):
            table[key] = known(key, 0) | bit
        for key, _ in text_keys[:TEXT_KEYS]:
            table[key] = known(key, 0) | bit
        if checkpoints and GRID[checkpoints - 1] < len(keys):
            tails = generation.tails.setdefault((domain, keys[LAST[checkpoints - 1]]), {})
            tails[bit] = (len(keys), keys[-1])
            generation.entries += 1
        generation.entries += len(table) - before

    def match(self, domain: str, keys: Sequence[int], size: int, *, text_keys: TextKeys = ()) -> dict[Target, int]:
        """Leading tokens of this prompt that each target was recently given. Targets with none are left out."""
        self._drop_expired()
        found: dict[Target, int] = {}
        for generation in self._generations:
            table = generation.tables.get(domain)
            if table:
                for bit, tokens in self._match_one(generation, domain, table, keys, size, text_keys):
                    target = self._targets[bit]
                    if tokens > found.get(target, 0):
                        found[target] = tokens
        return found

    def forget(self, target: Target) -> None:
        """The engine restarted or is gone."""
        bit = self._bits.pop(target, None)
        if bit is not None:
            del self._targets[bit]
            self._live ^= bit
            self._retired.append((self._serial, bit))

    @property
    def bits_in_use(self) -> int:
        """Width of the masks."""
        return len(self._targets) + len(self._retired) + len(self._free)

    def __len__(self) -> int:
        return sum(generation.entries for generation in self._generations)

    def _match_one(
        self,
        generation: _Generation,
        domain: str,
        table: dict[int, int],
        keys: Sequence[int],
        size: int,
        text_keys: TextKeys,
    ) -> list[tuple[int, int]]:
        """(bit, tokens) of those who hold anything."""
        checkpoints = bisect_right(GRID, len(keys))

        def at(position: int) -> int:
            if position < checkpoints:
                return table.get(keys[LAST[position]], 0)
            return table.get(text_keys[position - checkpoints][0], 0)

        held: list[tuple[int, int]] = []
        for depth, mask in bisect(at, 0, checkpoints + min(len(text_keys), TEXT_KEYS), self._live):
            if not depth:
                continue
            in_blocks = depth <= checkpoints
            tokens = GRID[depth - 1] * size if in_blocks else text_keys[depth - checkpoints - 1][1]
            tails = generation.tails.get((domain, keys[LAST[depth - 1]])) if in_blocks else None
            while mask:
                bit = mask & -mask
                mask ^= bit
                held.append((bit, _with_tail(tails, bit, keys) * size or tokens))
        return held

    def _current(self) -> _Generation:
        now = self._clock()
        self._drop_expired()
        generations = self._generations
        if generations and now < generations[-1].ends and generations[-1].entries < self._max_entries:
            return generations[-1]
        if len(generations) == GENERATIONS:
            generations.popleft()
        self._serial += 1
        generation = _Generation(self._serial, ends=now + self._ttl_s / GENERATIONS, expires=now + self._ttl_s)
        generations.append(generation)
        self._recycle_bits()
        return generation

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._generations and self._generations[0].expires <= now:
            self._generations.popleft()

    def _recycle_bits(self) -> None:
        oldest = self._generations[0].serial
        self._free += [bit for last, bit in self._retired if last < oldest]
        self._retired = [(last, bit) for last, bit in self._retired if last >= oldest]

    def _enlist(self, target: Target) -> int:
        bit = self._bits[target] = self._free.pop() if self._free else 1 << self.bits_in_use
        self._targets[bit] = target
        self._live |= bit
        return bit


def _with_tail(tails: dict[int, tuple[int, int]] | None, bit: int, keys: Sequence[int]) -> int:
    """Blocks of the recent prompt, if all of it leads this one; else 0."""
    if not tails or bit not in tails:
        return 0
    blocks, last_key = tails[bit]
    return blocks if blocks <= len(keys) and keys[blocks - 1] == last_key else 0
