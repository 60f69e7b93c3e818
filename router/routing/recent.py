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
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from router.routing.depth import Runs, bisect

Target = tuple[str, int]
"""(instance, rank)"""
TextKeys = Sequence[tuple[int, int]]
"""(key of the text so far, tokens so far), past the tokens that have block keys."""

GENERATIONS = 4
DENSE = 64  # of so many blocks, each is written down
TEXT_KEYS = 256  # of one dispatch
NAMED = 256  # masks whose targets are remembered: few occur, since most of a fleet was sent the same prefixes


def _grid(end: int) -> list[int]:
    counts = list(range(1, DENSE + 1))
    while counts[-1] < end:
        full = counts[-1]
        counts.extend(full + full // 16 * i for i in range(1, 17))
    return counts


GRID = _grid(1 << 22)  # counts of leading blocks that are written down
_first = itemgetter(0)

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
        self._generations: deque[_Generation] = deque()  # newest first
        self._serial = 0
        self._bits: dict[Target, int] = {}
        self._targets: dict[int, Target] = {}
        self._named: dict[int, tuple[Target, ...]] = {}  # mask → its targets
        self._live = 0
        self._free: list[int] = []
        self._retired: list[tuple[int, int]] = []  # (last generation that may know the bit, bit)

    def insert(self, domain: str, target: Target, keys: Sequence[int], size: int, *, text_keys: TextKeys = ()) -> None:
        """`target` is about to compute this prompt. `keys` are those of blocks of `size` tokens."""
        generation = self._current()
        bit = self._bits.get(target) or self._enlist(target)
        table = generation.tables.get(domain)
        if table is None:
            table = generation.tables[domain] = {}
        before = len(table)
        known = table.get
        if keys:
            reach = GRID[bisect_right(GRID, len(keys)) - 1]
            last = keys[reach - 1]
            # Most prompts begin like one of the last seconds: where its first and last point are known, so are all.
            if not known(keys[0], 0) & known(last, 0) & bit:
                for key in _checkpoints(keys):
                    table[key] = known(key, 0) | bit
            if reach < len(keys):
                generation.tails.setdefault((domain, last), {})[bit] = (len(keys), keys[-1])
                generation.entries += 1
        for key, _ in text_keys[:TEXT_KEYS]:
            table[key] = known(key, 0) | bit
        generation.entries += len(table) - before

    def match(self, domain: str, keys: Sequence[int], size: int, *, text_keys: TextKeys = ()) -> dict[Target, int]:
        """Leading tokens of this prompt that each target was recently given. Targets with none are left out."""
        generations, now = self._generations, self._clock()
        if generations and generations[-1].expires <= now:
            self._drop_expired(now)
        if not (keys or text_keys):
            return {}
        if len(keys) > DENSE or len(text_keys) > DENSE:
            return self._match_long(domain, keys, size, text_keys)
        return self._match_short(domain, keys, size, text_keys)

    def match_text(self, domain: str, text_keys: TextKeys) -> dict[Target, int]:
        """The same by text alone: what a target was given before its tokens were known. `text_keys` in order.

        A text key stands for all text before it, so the last one that is found says all there is to say.
        """
        found: dict[Target, int] = {}
        for generation in self._generations:
            table = generation.tables.get(domain)
            if table is None:
                continue
            for key, tokens in reversed(text_keys):
                if holders := table.get(key, 0) & self._live:
                    self._deepen(found, holders, tokens)
                    break
        return found

    def withdraw(self, domain: str, target: Target, keys: Sequence[int], *, text_keys: TextKeys = ()) -> None:
        """`target` may never have begun this prompt, so neither what it shares with others can be counted on there."""
        bit = self._bits.get(target, 0)
        blocks = _checkpoints(keys)
        points = [*blocks, *[key for key, _ in text_keys[:TEXT_KEYS]]]
        for generation in self._generations:
            if blocks:
                generation.tails.get((domain, blocks[-1]), {}).pop(bit, None)
            table = generation.tables.get(domain, {})
            for key in points:
                if table.get(key, 0) & bit:
                    table[key] ^= bit

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

    def _match_short(self, domain: str, keys: Sequence[int], size: int, text_keys: TextKeys) -> dict[Target, int]:
        """Every key is written down, and there are few: read one by one.

        Newer generations mostly know all that older ones do. An older one is read only where it tells of a target not
        yet known to hold the most (`settled`), or knows the key `beyond` that.
        """
        blocks, live = len(keys), self._live
        texts = list(map(_first, text_keys))
        first, last = (keys[0], keys[-1]) if blocks else (texts[0], 0)
        found: dict[Target, int] = {}
        deepest = settled = 0
        beyond: int | None = first
        for generation in self._generations:
            table = generation.tables.get(domain)
            if table is None or not (mask := table.get(first, 0) & live):
                continue
            if not mask & ~settled and beyond not in table:
                continue
            if blocks and table.get(last, 0) & live == mask:  # mostly: a prefix that everybody knows
                runs = _leading(table, texts, blocks, mask)
            else:
                runs = _leading(table, [*keys, *texts], 0, mask)
            for depth, holders in runs:
                self._deepen(found, holders, depth * size if depth <= blocks else text_keys[depth - blocks - 1][1])
                if depth > deepest:
                    deepest, settled = depth, holders
                    past = depth - blocks
                    beyond = keys[depth] if past < 0 else texts[past] if past < len(texts) else None
                elif depth == deepest:
                    settled |= holders
        return found

    def _deepen(self, found: dict[Target, int], holders: int, tokens: int) -> None:
        for target in self._named.get(holders) or self._names(holders):
            if tokens > found.get(target, 0):
                found[target] = tokens

    def _names(self, holders: int) -> tuple[Target, ...]:
        named = tuple([target for bit, target in self._targets.items() if bit & holders])
        if len(self._named) >= NAMED:
            self._named.clear()
        self._named[holders] = named
        return named

    def _match_long(self, domain: str, keys: Sequence[int], size: int, text_keys: TextKeys) -> dict[Target, int]:
        found: dict[Target, int] = {}
        for generation in self._generations:
            table = generation.tables.get(domain)
            if table:
                for bit, tokens in self._match_one(generation, domain, table, keys, size, text_keys):
                    self._deepen(found, bit, tokens)
        return found

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
        generations = self._generations
        if generations:
            newest = generations[0]
            if now < newest.ends and newest.entries < self._max_entries:
                return newest
        return self._begin(now)

    def _begin(self, now: float) -> _Generation:
        self._drop_expired(now)
        generations = self._generations
        if len(generations) == GENERATIONS:
            generations.pop()
        self._serial += 1
        generation = _Generation(self._serial, ends=now + self._ttl_s / GENERATIONS, expires=now + self._ttl_s)
        generations.appendleft(generation)
        self._recycle_bits()
        return generation

    def _drop_expired(self, now: float) -> None:
        while self._generations and self._generations[-1].expires <= now:
            self._generations.pop()

    def _recycle_bits(self) -> None:
        oldest = self._generations[-1].serial
        self._free += [bit for last, bit in self._retired if last < oldest]
        self._retired = [(last, bit) for last, bit in self._retired if last >= oldest]

    def _enlist(self, target: Target) -> int:
        bit = self._bits[target] = self._free.pop() if self._free else 1 << self.bits_in_use
        self._targets[bit] = target
        self._named.clear()
        self._live |= bit
        return bit


def _checkpoints(keys: Sequence[int]) -> Sequence[int]:
    """Those that are written down."""
    return keys if len(keys) <= DENSE else list(map(keys.__getitem__, LAST[: bisect_right(GRID, len(keys))]))


def _leading(table: Mapping[int, int], points: Sequence[int], depth: int, mask: int) -> Runs:
    """How far each of `mask` is found. All of them have the `depth` points that come before `points`."""
    runs: Runs = []
    for point in points:
        holding = table.get(point, 0) & mask
        if holding != mask:
            runs.append((depth, mask ^ holding))
            if not holding:
                return runs
            mask = holding
        depth += 1
    runs.append((depth, mask))
    return runs


def _with_tail(tails: dict[int, tuple[int, int]] | None, bit: int, keys: Sequence[int]) -> int:
    """Blocks of the recent prompt, if all of it leads this one; else 0."""
    if not tails or bit not in tails:
        return 0
    blocks, last_key = tails[bit]
    return blocks if blocks <= len(keys) and keys[blocks - 1] == last_key else 0
