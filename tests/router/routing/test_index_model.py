"""The index against the simplest thing that obeys the same rules: dicts of counts, read block by block."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Cleared, KVEvent, Removed, Stored
from router.routing.blocks import chain, root_key
from router.routing.index import BlockIndex
from router.routing.slots import SLOWER, Slot

SECRET = b"model"
SIZE = 2
RANKS = 3
TIERS = ("gpu", "host", "disk")

Path = tuple[int, ...]
"""A block, named by the choices that lead to it: (0, 1) is the second block of one prompt."""
Name = tuple[str, int, int]
"""(tier, group, engine hash)"""


def engine_hash(path: Path, alias: int) -> int:
    """Two engine hashes a block, so that two names can mean one content."""
    number = 1
    for choice in path:
        number = number * 3 + choice + 1
    return number * 2 + alias


def tokens(path: Path) -> list[int]:
    return [token for depth, choice in enumerate(path) for token in (choice, depth)]


@dataclass
class Parked:
    parent: int
    names: list[int]
    tier: str
    group: int
    paths: list[Path]
    reannounced: bool
    absent: set[int] = field(default_factory=set)


@dataclass
class ModelRank:
    copies: Counter[Name] = field(default_factory=Counter)
    paths: dict[int, Path] = field(default_factory=dict)
    parked: list[Parked] = field(default_factory=list)

    def known(self, name: int) -> bool:
        return any(hashed == name for (_, _, hashed), n in self.copies.items() if n > 0)

    def store(self, parent: int | None, block: Parked) -> None:
        if parent is not None and not self.known(parent):
            self.parked.append(block)
            return
        fresh = [block]
        while fresh:
            block = fresh.pop()
            for name, path in zip(block.names, block.paths, strict=True):
                if name not in block.absent:
                    at = (block.tier, block.group, name)
                    self.copies[at] = max(self.copies[at], 1) if block.reannounced else self.copies[at] + 1
                    self.paths[name] = path
            linked = [child for child in self.parked if child.parent in block.names]
            self.parked = [child for child in self.parked if child.parent not in block.names]
            fresh += linked

    def bring(self, names: list[int], tier: str) -> None:
        for name in [name for name in names if self.known(name)]:
            self.copies[tier, 0, name] += 1

    def remove(self, name: int, tier: str, group: int) -> None:
        if self.copies[tier, group, name] > 0:
            self.copies[tier, group, name] -= 1
            return
        for block in self.parked:
            if (block.tier, block.group) == (tier, group) and name in block.names and name not in block.absent:
                block.absent.add(name)
                return

    def holds(self, path: Path, tiers: tuple[str, ...]) -> bool:
        return any(n > 0 and tier in tiers and self.paths[name] == path for (tier, _, name), n in self.copies.items())

    def depths(self, prompt: Path) -> dict[str, int]:
        found: dict[str, int] = {}
        deepest = 0
        for reach in range(1, len(TIERS) + 1):
            depth = 0
            while depth < len(prompt) and self.holds(prompt[: depth + 1], TIERS[:reach]):
                depth += 1
            if reach == 1 or depth > deepest:
                found[TIERS[reach - 1]] = depth
            deepest = depth
        return found if deepest else {}

    @property
    def blocks(self) -> int:
        return sum(n > 0 for n in self.copies.values())


paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
ranks = st.integers(0, RANKS - 1)
tiers = st.sampled_from(("gpu", "gpu", "host", "disk"))
groups = st.sampled_from((0, 0, 0, 1))
aliases = st.sampled_from((0, 0, 0, 1))
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"), ranks, paths, st.integers(0, 4), tiers, groups, aliases, st.sampled_from((0, 0, 1))
        ),
        st.tuples(st.just("remove"), ranks, st.lists(paths, min_size=1, max_size=3), tiers, groups, aliases),
        st.tuples(st.just("bring"), ranks, st.lists(paths, min_size=1, max_size=2), tiers, aliases),
        st.tuples(st.sampled_from(("clear", "forget")), ranks),
        st.tuples(st.just("sweep"), st.sampled_from((-1.0, 1.0))),
        st.tuples(st.just("ask"), paths),
    ),
    max_size=40,
)


class Both:
    """Does everything twice, and compares."""

    def __init__(self) -> None:
        self.index = BlockIndex(SECRET, clock=lambda: 0.0)
        self.slots = [self.index.open("A", rank, model="m", block_size=SIZE) for rank in range(RANKS)]
        self.model = [ModelRank() for _ in range(RANKS)]

    def store(self, rank: int, path: Path, first: int, tier: str, group: int, alias: int, reannounced: int) -> None:
        first = min(first, len(path) - 1)
        blocks = [path[: depth + 1] for depth in range(first, len(path))]
        names = [engine_hash(block, alias) for block in blocks]
        parent = engine_hash(path[:first], alias) if first else None
        event = Stored(
            names, parent, tokens(path)[first * SIZE :], SIZE, tier=tier, group=group, reannounced=bool(reannounced)
        )
        self.apply(rank, event)
        self.model[rank].store(parent, Parked(parent or 0, names, tier, group, blocks, bool(reannounced)))

    def remove(self, rank: int, removed: list[Path], tier: str, group: int, alias: int) -> None:
        names = [engine_hash(path, alias) for path in removed]
        self.apply(rank, Removed(names, tier=tier, group=group))
        for name in names:
            self.model[rank].remove(name, tier, group)

    def bring(self, rank: int, brought: list[Path], tier: str, alias: int) -> None:
        names = [engine_hash(path, alias) for path in brought]
        self.apply(rank, Stored(names, None, [], 0, tier=tier))
        self.model[rank].bring(names, tier)

    def clear(self, rank: int) -> None:
        self.apply(rank, Cleared())
        self.model[rank] = ModelRank()

    def forget(self, rank: int) -> None:
        self.index.forget(self.slots[rank])
        self.model[rank] = ModelRank()

    def sweep(self, budget_s: float) -> None:
        self.index.sweep(budget_s)

    def ask(self, prompt: Path) -> None:
        keys = chain(root_key(SECRET, "m", None, None), tokens(prompt), SIZE)
        found = {slot.rank: held for slot, held in self.index.match(keys, SIZE)}
        expected = {rank: depths for rank, model in enumerate(self.model) if (depths := model.depths(prompt))}
        assert found == expected

    def apply(self, rank: int, event: KVEvent) -> None:
        self.index.apply(self.slots[rank], event)


@settings(max_examples=2000, deadline=None)
@given(steps)
def test_index_does_what_counting_would_do(steps: list[tuple]) -> None:
    both = Both()
    for name, *arguments in steps:
        getattr(both, name)(*arguments)
    for number in range(32):
        both.ask(tuple(number >> bit & 1 for bit in range(5)))
    assert [slot.blocks for slot in both.slots] == [model.blocks for model in both.model]
    for rank, model in enumerate(both.model):
        for (tier, group, hashed), copies in list(model.copies.items()):
            both.apply(rank, Removed([hashed] * copies, tier=tier, group=group))
    both.index.sweep(1.0)
    stats = both.index.stats()
    assert stats.blocks == 0
    assert bool(stats.bytes) == any(model.parked for model in both.model), "nothing is left but orphans"


def test_the_model_knows_the_tiers() -> None:
    assert ("gpu", *SLOWER[:2]) == TIERS


class General(BlockIndex):
    """Takes the way for events of many blocks with every event."""

    def _store_one(self, slot: Slot, event: Stored) -> bool:
        return False

    def _remove_one(self, slot: Slot, event: Removed) -> bool:
        return False


@pytest.mark.parametrize("capacity_blocks", [None, 5])
@pytest.mark.parametrize("orphans", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_events_of_one_block_do_what_longer_ones_do(capacity_blocks: int | None, orphans: bool, seed: int) -> None:
    """Same index, same counts, same results, by the short way and by the general one."""
    dice = random.Random(seed)
    both = [kind(SECRET, clock=lambda: 0.0) for kind in (BlockIndex, General)]
    slots = [
        [index.open("A", n, model="m", block_size=SIZE, capacity_blocks=capacity_blocks) for n in (0, 1)]
        for index in both
    ]
    for _ in range(400):
        rank, path = dice.choice((0, 0, 1)), tuple(dice.choices((0, 1), k=dice.choice((1, 2, 3))))
        event = _single(dice, path, alias=dice.choice((0, 0, 1)))
        parent = event.parent if isinstance(event, Stored) else None
        if parent is not None and not orphans and slots[1][rank].key_of(parent) is None:
            continue  # while one waits, the short way is not taken
        fast, slow = [index.apply(its[rank], event) for index, its in zip(both, slots, strict=True)]
        assert fast == slow
        assert both[0].stats() == both[1].stats()
        keys = chain(root_key(SECRET, "m", None, None), tokens(path), SIZE)
        fast_held, slow_held = [_by_rank(index.match(keys, SIZE)) for index in both]
        assert fast_held == slow_held


def _single(dice: random.Random, path: Path, alias: int) -> KVEvent:
    name, tier = engine_hash(path, alias), dice.choice(("gpu", "gpu", "gpu", "gpu", "host"))
    if dice.random() < 0.3:
        return Removed([name], tier)
    parent = engine_hash(path[:-1], alias) if path[1:] else None
    media = dice.choice((None, None, None, ((0, "image"),)))
    return Stored([name], parent, tokens(path)[-SIZE:], SIZE, tier, media=media, reannounced=dice.random() < 0.5)


def _by_rank(matches: list[tuple[Slot, dict[str, int]]]) -> dict[int, dict[str, int]]:
    return {slot.rank: depths for slot, depths in matches}
