from __future__ import annotations

import tracemalloc

import pytest

from router.core import Cleared, Removed, Stored
from router.routing.blocks import chain, root_key
from router.routing.index import Applied, BlockIndex
from router.routing.slots import Slot

SECRET = b"test"
MODEL = "m-chat"
SIZE = 4


@pytest.fixture
def index(clock) -> BlockIndex:
    return BlockIndex(SECRET, clock=clock)


@pytest.fixture
def slot(index: BlockIndex) -> Slot:
    return index.open("A", 0, model=MODEL)


def stored(hashes: list[int], parent: int | None, tokens: list[int], size: int = SIZE, **fields) -> Stored:
    return Stored(hashes, parent, tokens, size, **fields)


def keys_of(tokens: list[int], *, salt: str | None = None, lora: str | None = None, size: int = SIZE):
    return chain(root_key(SECRET, MODEL, lora, salt), tokens, size)


def held(
    index: BlockIndex, tokens: list[int], *, salt: str | None = None, size: int = SIZE
) -> dict[str, dict[str, int]]:
    """instance/rank → tier → tokens."""
    return {
        f"{slot.instance}/{slot.rank}": {tier: blocks * size for tier, blocks in tiers.items()}
        for slot, tiers in index.match(keys_of(tokens, salt=salt, size=size), size)
    }


def gpu(index: BlockIndex, tokens: list[int], *, salt: str | None = None) -> int:
    """Tokens that A/0 holds on its GPU."""
    return held(index, tokens, salt=salt).get("A/0", {}).get("gpu", 0)


PROMPT = list(range(1, 18))


# -- prefixes ---------------------------------------------------------------------------------------------------------


def test_depth_is_that_of_the_leading_blocks(index: BlockIndex, slot: Slot) -> None:
    assert index.apply(slot, stored([1, 2], None, PROMPT[:8])) == Applied(stored=2)
    assert gpu(index, PROMPT) == 8
    assert gpu(index, PROMPT[:7]) == 4
    assert gpu(index, [*PROMPT[:4], 99, 99, 99, 99]) == 4
    assert gpu(index, [99, *PROMPT[1:]]) == 0
    assert gpu(index, []) == 0


def test_engine_hashes_are_names_of_one_rank_only(index: BlockIndex, slot: Slot) -> None:
    """Seeds differ between processes: the same content has other hashes, the same hash may be other content."""
    other = index.open("B", 0, model=MODEL)
    index.apply(slot, stored([111], None, PROMPT[:4]))
    index.apply(slot, stored([112], 111, PROMPT[4:8]))
    index.apply(other, stored([901], None, PROMPT[:4]))
    index.apply(other, stored([902], 901, PROMPT[4:8]))
    index.apply(other, Removed([902, 112]))
    assert held(index, PROMPT) == {"A/0": {"gpu": 8}, "B/0": {"gpu": 4}}


def test_salts_and_adapters_and_models_are_roots_of_their_own(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1], None, PROMPT[:4], salt="salt-T1"))
    assert gpu(index, PROMPT, salt="salt-T1") == 4
    assert held(index, PROMPT, salt="salt-T2") == {}
    assert held(index, PROMPT) == {}
    index.apply(slot, stored([2], None, PROMPT[:4], lora="adapter"))
    assert index.match(keys_of(PROMPT, lora="adapter"), SIZE) == [(slot, {"gpu": 1})]
    other_model = index.open("C", 0, model="another")
    index.apply(other_model, stored([1], None, PROMPT[:4], salt="salt-T1"))
    assert held(index, PROMPT, salt="salt-T1") == {"A/0": {"gpu": 4}}


def test_a_block_counts_only_where_it_stands_in_the_chain(index: BlockIndex, slot: Slot) -> None:
    """Prompt 2 followed by prompt 1 is no continuation of prompt 1."""
    other = index.open("B", 0, model=MODEL)
    index.apply(slot, stored([1], None, [1, 2, 3, 4]))
    index.apply(other, stored([2], None, [5, 6, 7, 8]))
    assert held(index, [5, 6, 7, 8, 1, 2, 3, 4]) == {"B/0": {"gpu": 4}}


def test_ranks_are_apart_and_an_unknown_rank_is_one_of_its_own(index: BlockIndex) -> None:
    second = index.open("A", 2, model=MODEL)
    unknown = index.open("A", -1, model=MODEL)
    index.open("A", 3, model=MODEL)
    index.apply(second, stored([1], None, PROMPT[:4]))
    assert held(index, PROMPT) == {"A/2": {"gpu": 4}}
    index.apply(unknown, stored([2], None, PROMPT[:4]))
    assert held(index, PROMPT) == {"A/2": {"gpu": 4}, "A/-1": {"gpu": 4}}


def test_media_belong_to_the_content(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1, 2], None, PROMPT[:8], media=((1, "image-1"),)))
    root = root_key(SECRET, MODEL, None, None)
    assert index.match(chain(root, PROMPT[:8], SIZE, [(1, "image-1")]), SIZE) == [(slot, {"gpu": 2})]
    assert index.match(chain(root, PROMPT[:8], SIZE, [(1, "image-2")]), SIZE) == [(slot, {"gpu": 1})]


def test_long_prompts_over_many_ranks(index: BlockIndex) -> None:
    tokens = [n * 7 % 5000 for n in range(4000)]
    depths = {rank: 100 * rank for rank in range(10)}
    for rank, depth in depths.items():
        slot = index.open("A", rank, model=MODEL)
        if depth:
            index.apply(slot, stored(list(range(depth)), None, tokens[: depth * SIZE]))
    found = {slot.rank: tiers["gpu"] for slot, tiers in index.match(keys_of(tokens), SIZE)}
    assert found == {rank: depth for rank, depth in depths.items() if depth}


# -- copies, removals -------------------------------------------------------------------------------------------------


def test_two_copies_need_two_removals(index: BlockIndex, slot: Slot) -> None:
    for _ in range(3):
        index.apply(slot, stored([1], None, PROMPT[:4]))
    seen = []
    for _ in range(4):
        applied = index.apply(slot, Removed([1]))
        seen.append((gpu(index, PROMPT), applied.removed, applied.unknown))
    assert seen == [(4, 1, 0), (4, 1, 0), (0, 1, 0), (0, 0, 1)]
    assert index.apply(slot, stored([1], None, PROMPT[:4])).stored == 1
    index.apply(slot, Removed([1]))
    assert gpu(index, PROMPT) == 0, "removals below zero must not be owed"


def test_a_block_announced_again_without_a_new_copy_needs_one_removal(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1], None, PROMPT[:4]))
    index.apply(slot, stored([1, 2], None, PROMPT[:8], reannounced=True))
    index.apply(slot, Removed([2, 1]))
    assert held(index, PROMPT) == {}
    assert index.stats().blocks == 0


def test_two_hashes_of_one_block_need_two_removals(index: BlockIndex, slot: Slot) -> None:
    """vLLM 0.33 hashes look-ahead tokens too, SGLang keeps branches per extra key: other names, the same content."""
    index.apply(slot, stored([1, 2], None, PROMPT[:8]))
    index.apply(slot, stored([21], 1, PROMPT[4:8]))
    index.apply(slot, stored([22], 1, PROMPT[4:8]))
    index.apply(slot, Removed([2, 22]))
    assert gpu(index, PROMPT) == 8
    index.apply(slot, Removed([21]))
    assert gpu(index, PROMPT) == 4


def test_each_hash_of_a_removal_is_handled_alone(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1, 2], None, PROMPT[:8]))
    assert index.apply(slot, Removed([77, 2, 78])) == Applied(removed=1, unknown=2)
    assert gpu(index, PROMPT) == 4
    assert index.stats().slots[0].unknown == 2


def test_groups_are_apart(index: BlockIndex, slot: Slot) -> None:
    """All groups of a hybrid model share one hash chain."""
    index.apply(slot, stored([1], None, PROMPT[:4], group=0))
    index.apply(slot, stored([1], None, PROMPT[:4], group=1))
    index.apply(slot, Removed([1], group=0))
    assert gpu(index, PROMPT) == 4
    assert index.apply(slot, Removed([1], group=0)).unknown == 1
    index.apply(slot, Removed([1], group=1))
    assert gpu(index, PROMPT) == 0


def test_one_removal_of_what_was_stored_on_both_tiers_and_twice(index: BlockIndex, slot: Slot) -> None:
    """Removal of absent blocks, tiers and duplicates in four batches.

    In batch 2 the block is announced a second time and removed once. vLLM 0.32 announces physical copies: after the
    first removal it still hits the other one. So the block stays until batch 3 removes that as well.
    """
    a, b, unheard = 1, 2, 999
    overlaps = []
    for batch in (
        [stored([a], None, PROMPT[:4]), stored([a], None, PROMPT[:4], tier="host"), stored([b], a, PROMPT[4:8])],
        [Removed([unheard, b]), Removed([a], tier="host")],
        [stored([a], None, PROMPT[:4]), Removed([a])],
        [Removed([a])],
    ):
        for event in batch:
            index.apply(slot, event)
        overlaps.append(gpu(index, PROMPT))
    assert overlaps == [8, 4, 4, 0]


# -- tiers ------------------------------------------------------------------------------------------------------------


def test_depth_goes_on_in_slower_tiers(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1, 2, 3, 4], None, PROMPT[:16]))
    index.apply(slot, stored([2, 3], 1, PROMPT[4:12], tier="host"))
    index.apply(slot, stored([4], 3, PROMPT[12:16], tier="disk"))
    assert held(index, PROMPT) == {"A/0": {"gpu": 16}}
    index.apply(slot, Removed([2, 4]))  # a hole on the GPU that host memory fills
    assert held(index, PROMPT) == {"A/0": {"gpu": 4, "host": 12, "disk": 16}}
    index.apply(slot, Removed([3], tier="host"))
    assert held(index, PROMPT) == {"A/0": {"gpu": 4, "host": 12, "disk": 16}}, "block 3 is still on the GPU"
    index.apply(slot, Removed([2], tier="host"))
    assert held(index, PROMPT) == {"A/0": {"gpu": 4}}


def test_a_tier_behind_the_gpu_counts_alone(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1, 2], None, PROMPT[:8], tier="remote"))
    other = index.open("B", 0, model=MODEL)
    index.apply(other, stored([1], None, PROMPT[:4]))
    assert held(index, PROMPT) == {"A/0": {"gpu": 0, "remote": 8}, "B/0": {"gpu": 4}}


def test_leaving_the_gpu_says_nothing_of_the_host_copy(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1], None, PROMPT[:4]))
    index.apply(slot, stored([1], None, PROMPT[:4], tier="host"))
    index.apply(slot, Removed([1]))
    assert held(index, PROMPT) == {"A/0": {"gpu": 0, "host": 4}}
    index.apply(slot, Removed([1], tier="host"))
    assert held(index, PROMPT) == {}


def test_a_placeholder_brings_known_blocks_into_another_tier(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1, 2], None, PROMPT[:8], group=1))
    applied = index.apply(slot, Stored([2], None, [], 0, tier="host"))
    assert applied == Applied(stored=1)
    assert index.apply(slot, Stored([1, 55], None, [], 0, tier="host")) == Applied(stored=1, ignored=1)
    index.apply(slot, Removed([2, 1], group=1))
    assert held(index, PROMPT) == {"A/0": {"gpu": 0, "host": 8}}
    assert slot.block_size == SIZE, "a placeholder has no block size"


def test_a_parent_is_known_in_whatever_tier_it_lies(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1], None, PROMPT[:4], tier="host"))
    index.apply(slot, stored([2], 1, PROMPT[4:8]))
    assert held(index, PROMPT) == {"A/0": {"gpu": 0, "host": 8}}


def test_long_prompts_over_tiers(index: BlockIndex, slot: Slot) -> None:
    tokens = [n * 7 % 5000 for n in range(2000)]
    names = list(range(500))
    index.apply(slot, stored(names[:200], None, tokens[:800]))
    index.apply(slot, stored(names[150:400], 149, tokens[600:1600], tier="host"))
    assert held(index, tokens) == {"A/0": {"gpu": 800, "host": 1600}}


# -- what no key can be derived from ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        stored([1, 2], None, PROMPT[:7]),
        stored([1], None, PROMPT[:8]),
        stored([1], None, [-1, 2, 3, 4]),
        stored([1], None, [2**32, 2, 3, 4]),
        stored([1], None, PROMPT[:4], tier="attic"),
        Stored([1, 2], None, [], SIZE),
    ],
    ids=["short", "long", "negative id", "id above u32", "unknown tier", "no ids, hashes unknown"],
)
def test_events_without_keys_are_ignored_and_counted(index: BlockIndex, slot: Slot, event: Stored) -> None:
    assert index.apply(slot, event) == Applied(ignored=len(event.hashes))
    assert index.stats().slots[0].ignored == len(event.hashes)
    assert index.stats().blocks == 0


def test_blocks_of_another_size_are_ignored(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1, 2, 3, 4], None, PROMPT[:16]))
    assert index.apply(slot, stored([5], None, PROMPT[:8], size=8)) == Applied(ignored=1)
    assert gpu(index, PROMPT) == 16
    assert index.match(keys_of(PROMPT, size=8), 8) == []


def test_a_rank_takes_the_size_of_most_of_its_blocks(index: BlockIndex, slot: Slot) -> None:
    """The first event may have been a partial block."""
    index.apply(slot, stored([1], None, PROMPT[:2], size=2))
    assert slot.block_size == 2
    assert index.apply(slot, stored([2], None, PROMPT[:4])).ignored == 1
    assert index.apply(slot, stored([3], None, [9, 9, 9, 9])).stored == 1
    assert slot.block_size == SIZE
    assert index.match(keys_of(PROMPT, size=2), 2) == []
    assert gpu(index, [9, 9, 9, 9]) == 4


def test_events_know_better_than_a_declared_size_and_so_does_a_new_engine(index: BlockIndex) -> None:
    slot = index.open("A", 0, model=MODEL, block_size=16)
    index.apply(slot, stored([1, 2], None, PROMPT[:8]))
    assert gpu(index, PROMPT) == 8
    index.apply(slot, Cleared())
    assert index.apply(slot, stored([1], None, PROMPT[:8], size=8)).ignored == 1, "the same engine"
    index.forget(slot)
    assert index.apply(slot, stored([1], None, PROMPT[:8], size=8)).stored == 1, "a new one"


# -- orphans ----------------------------------------------------------------------------------------------------------


def test_an_orphan_waits_for_its_parent_and_is_never_a_root(index: BlockIndex, slot: Slot) -> None:
    unknown_parent = 70
    assert index.apply(slot, stored([3, 4], unknown_parent, PROMPT[8:16])) == Applied(parked=2)
    index.apply(slot, stored([1], None, PROMPT[:4]))
    assert gpu(index, PROMPT) == 4
    assert gpu(index, PROMPT[8:13]) == 0
    assert index.stats().orphan_blocks == 2
    assert index.apply(slot, stored([unknown_parent], 1, PROMPT[4:8])) == Applied(stored=3)
    assert gpu(index, PROMPT) == 16
    assert gpu(index, PROMPT[8:13]) == 0
    assert index.stats().orphan_blocks == 0


def test_orphans_of_orphans_are_linked_in_one_go(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([4], 3, PROMPT[12:16]))
    index.apply(slot, stored([3], 2, PROMPT[8:12]))
    index.apply(slot, stored([2], 1, PROMPT[4:8]))
    assert held(index, PROMPT) == {}
    index.apply(slot, stored([1], None, PROMPT[:4]))
    assert gpu(index, PROMPT) == 16


def test_an_orphan_that_is_removed_while_it_waits_does_not_come_back(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([2, 3], 1, PROMPT[4:12]))
    assert index.apply(slot, Removed([3])) == Applied(removed=1)
    assert index.apply(slot, Removed([3])) == Applied(unknown=1)
    assert index.apply(slot, Removed([2], tier="host")) == Applied(unknown=1)
    index.apply(slot, stored([1], None, PROMPT[:4]))
    assert gpu(index, PROMPT) == 8


def test_orphans_belong_to_their_rank(index: BlockIndex, slot: Slot) -> None:
    other = index.open("B", 0, model=MODEL)
    index.apply(slot, stored([2], 1, PROMPT[4:8]))
    index.apply(other, stored([1], None, PROMPT[:4]))
    assert held(index, PROMPT) == {"B/0": {"gpu": 4}}


def test_orphans_are_forgotten_with_their_rank(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([2], 1, PROMPT[4:8]))
    index.apply(slot, Cleared())
    index.apply(slot, stored([1], None, PROMPT[:4]))
    assert gpu(index, PROMPT) == 4
    index.sweep(1)
    assert index.stats().orphan_blocks == 0


def test_orphans_age(index: BlockIndex, slot: Slot, clock) -> None:
    index.apply(slot, stored([2], 1, PROMPT[4:8]))
    clock.advance(119)
    index.sweep(1)
    assert index.stats().orphan_blocks == 1
    clock.advance(2)
    index.sweep(1)
    assert (index.stats().orphan_blocks, index.stats().orphans_expired) == (0, 1)
    index.apply(slot, stored([1], None, PROMPT[:4]))
    assert gpu(index, PROMPT) == 4


def test_orphans_are_bounded_and_the_oldest_go_first(clock) -> None:
    index = BlockIndex(SECRET, clock=clock, orphan_bytes=20_000)
    slot = index.open("A", 0, model=MODEL)
    for n in range(1000):
        index.apply(slot, stored([2 * n], 2 * n + 1, [n, n, n, n]))
    stats = index.stats()
    assert 0 < stats.orphan_blocks < 20
    assert stats.bytes <= 20_000
    assert stats.orphans_expired == 1000 - stats.orphan_blocks
    index.apply(slot, stored([2 * 999 + 1], None, PROMPT[:4]))
    assert gpu(index, [*PROMPT[:4], 999, 999, 999, 999]) == 8
    index.apply(slot, stored([1], None, PROMPT[:4]))
    assert gpu(index, [*PROMPT[:4], 0, 0, 0, 0]) == 4


# -- gaps, restarts, clears -------------------------------------------------------------------------------------------


def test_a_replayed_gap_leaves_what_the_engine_has(index: BlockIndex, slot: Slot) -> None:
    a, b, c = 1, 2, 3
    for event in (
        stored([a], None, [1, 2, 3, 4]),
        stored([b], a, [5, 6, 7, 8]),
        Removed([a]),
        stored([c], None, [9, 10, 11, 12]),
    ):
        index.apply(slot, event)
    assert gpu(index, list(range(1, 13))) == 0
    assert gpu(index, [9, 10, 11, 12, 13]) == 4


def test_a_clear_empties_all_tiers_and_groups_of_its_rank(index: BlockIndex, slot: Slot) -> None:
    other = index.open("A", 1, model=MODEL)
    for rank in (slot, other):
        index.apply(rank, stored([1, 2], None, PROMPT[:8]))
        index.apply(rank, stored([1, 2], None, PROMPT[:8], tier="host", group=1))
    assert index.apply(slot, Cleared()) == Applied(removed=4)
    assert held(index, PROMPT) == {"A/1": {"gpu": 8}}
    assert index.apply(slot, Removed([1])) == Applied(unknown=1), "a handle of before the clear"
    assert index.apply(slot, stored([2], 1, PROMPT[4:8])) == Applied(parked=1)


def test_a_restarted_engine_begins_empty(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1], None, PROMPT[:4]))
    assert index.forget(slot) is slot
    assert held(index, PROMPT) == {}
    index.apply(slot, stored([26], None, [50, 51, 52, 53]))
    assert gpu(index, PROMPT) == 0
    assert gpu(index, [50, 51, 52, 53]) == 4


def test_what_was_forgotten_is_swept_out_and_its_bit_used_again(index: BlockIndex, slot: Slot) -> None:
    other = index.open("B", 0, model=MODEL)
    index.apply(other, stored([1], None, PROMPT[:4]))
    bits = set()
    for _ in range(10):
        index.apply(slot, stored([1, 2], None, PROMPT[:8]))
        index.apply(slot, stored([2], None, PROMPT[4:8], tier="host"))
        index.forget(slot)
        bits.add(slot.bit)
        assert index.stats().retired_generations == 1
        assert held(index, PROMPT) == {"B/0": {"gpu": 4}}
        assert index.sweep(1)
        assert index.stats().retired_generations == 0
        assert held(index, PROMPT) == {"B/0": {"gpu": 4}}
    assert len(bits) <= 3
    index.forget(other)
    assert index.sweep(1)
    assert index.stats().bytes == 0


def test_sweeping_keeps_to_its_budget(clock) -> None:
    def ticking() -> float:
        clock.advance(0.001)
        return clock()

    index = BlockIndex(SECRET, clock=ticking)
    slot = index.open("A", 0, model=MODEL)
    index.apply(slot, stored([1], None, PROMPT[:4]))
    index.forget(slot)
    calls = 1
    while not index.sweep(0.1):
        calls += 1
    assert calls > 10


def test_a_bit_retired_during_a_pass_waits_for_the_next(index: BlockIndex, slot: Slot) -> None:
    other = index.open("B", 0, model=MODEL)
    for rank in (slot, other):
        index.apply(rank, stored([1], None, PROMPT[:4]))
    index.forget(slot)
    index.sweep(-1)  # one step
    index.sweep(-1)
    retired = other.bit
    index.forget(other)
    newcomers = [index.open("C", rank, model=MODEL) for rank in range(3)]
    while index.stats().retired_generations == 2:
        index.sweep(-1)
    newcomers += [index.open("D", rank, model=MODEL) for rank in range(3)]
    assert retired not in {newcomer.bit for newcomer in newcomers}
    assert held(index, PROMPT) == {}
    assert index.sweep(1)
    assert index.stats().bytes == 0


def test_a_closed_slot_is_found_no_more(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1], None, PROMPT[:4]))
    index.close(slot)
    assert held(index, PROMPT) == {}
    assert index.slots() == ()
    assert index.sweep(1)
    assert index.stats().bytes == 0


def test_ranks_that_come_and_go_do_not_widen_the_masks(index: BlockIndex, slot: Slot) -> None:
    for n in range(300):
        passing = index.open(f"pod-{n}", 0, model=MODEL)
        if n % 2:
            index.apply(passing, stored([1], None, PROMPT[:4]))
            index.apply(passing, stored([1], None, PROMPT[:4], tier="host"))
        assert passing.bit <= 1 << 2
        index.close(passing)
        index.sweep(1)


def test_a_closed_slot_takes_nothing(index: BlockIndex, slot: Slot) -> None:
    index.close(slot)
    with pytest.raises(AssertionError, match="closed"):
        index.apply(slot, stored([1], None, PROMPT[:4]))


# -- router-made entries ----------------------------------------------------------------------------------------------


def test_held_keys_are_a_set(index: BlockIndex) -> None:
    slot = index.open("A", 0, model=MODEL, block_size=SIZE)
    keys = keys_of(PROMPT)
    index.hold(slot, keys)
    index.hold(slot, keys[:2])
    assert gpu(index, PROMPT) == 16
    index.drop(slot, keys[2:])
    index.drop(slot, keys[3:])
    assert gpu(index, PROMPT) == 8
    assert index.stats().blocks == 2
    index.drop(slot, keys)
    assert (index.stats().blocks, index.stats().bytes) == (0, 0)


# -- memory -----------------------------------------------------------------------------------------------------------


def churn(index: BlockIndex, slot: Slot, cycles: range, *, remove: bool, parent: int | None = None) -> None:
    for n in cycles:
        names = [1_000_000 + n * 32 + i for i in range(32)]
        index.apply(slot, stored(names, parent, [n & 0xFFFF, n >> 16, 7, 7] * 32))
        if remove:
            index.apply(slot, Removed(names))


def shared_prefix(index: BlockIndex, slot: Slot) -> list[int]:
    tokens = list(range(64 * SIZE))
    index.apply(slot, stored(list(range(64)), None, tokens))
    return tokens


def test_memory_is_that_of_live_blocks(index: BlockIndex, slot: Slot) -> None:
    tokens = shared_prefix(index, slot)
    tracemalloc.start()
    try:
        churn(index, slot, range(300), remove=True, parent=63)
        early = tracemalloc.get_traced_memory()[0]
        churn(index, slot, range(300, 3000), remove=True, parent=63)
        late = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert late < early * 1.1 + 50_000
    assert index.stats().blocks == 64
    assert gpu(index, tokens) == 64 * SIZE


def test_lost_removals_end_at_the_bound(clock) -> None:
    index = BlockIndex(SECRET, clock=clock, max_bytes=1_000_000)
    slot = index.open("A", 0, model=MODEL)
    small = index.open("B", 0, model=MODEL)
    index.apply(small, stored([1, 2], None, PROMPT[:8]))
    for first in range(0, 1000, 50):
        churn(index, slot, range(first, first + 50), remove=False)
        assert index.stats().bytes <= 1_000_000
    stats = index.stats()
    assert stats.evicted > 20_000
    assert stats.slots[0].evicted == stats.evicted
    assert held(index, PROMPT) == {"B/0": {"gpu": 8}}, "the largest slot pays"
    assert slot.key_of(1_000_000 + 999 * 32) is not None, "the oldest go first"
    assert slot.key_of(1_000_000) is None


def test_a_prefix_that_other_ranks_hold_too_outlives_lost_removals(clock) -> None:
    index = BlockIndex(SECRET, clock=clock, max_bytes=1_000_000)
    slot, other = index.open("A", 0, model=MODEL), index.open("B", 0, model=MODEL)
    tokens = shared_prefix(index, slot)
    shared_prefix(index, other)
    churn(index, slot, range(1000), remove=False, parent=63)
    assert index.stats().evicted > 20_000
    assert gpu(index, tokens) == 64 * SIZE
    assert index.stats().slots[0].orphaned == 0


def test_shared_blocks_go_when_there_is_nothing_else(clock) -> None:
    index = BlockIndex(SECRET, clock=clock, max_bytes=200_000)
    for rank in range(2):
        churn(index, index.open("A", rank, model=MODEL), range(100), remove=False)
        assert index.stats().bytes <= 200_000


def test_orphans_count_towards_the_bound_and_go_first(clock) -> None:
    index = BlockIndex(SECRET, clock=clock, max_bytes=200_000)
    slot = index.open("A", 0, model=MODEL)
    tokens = shared_prefix(index, slot)
    churn(index, slot, range(100), remove=False, parent=999)
    assert index.stats().bytes <= 200_000
    assert index.stats().orphans_expired > 0
    assert index.stats().evicted == 0
    assert gpu(index, tokens) == 64 * SIZE


def test_a_rank_is_not_believed_to_hold_more_than_fits(clock) -> None:
    index = BlockIndex(SECRET, clock=clock)
    slot = index.open("A", 0, model=MODEL, capacity_blocks=1000)
    churn(index, slot, range(200), remove=False)
    assert 1000 <= slot.blocks <= 1250
    assert index.stats().evicted == 200 * 32 - slot.blocks


def test_capacity_is_one_of_tokens(clock) -> None:
    """Declared as 250 blocks of 16; the engine's blocks turn out to hold 4."""
    index = BlockIndex(SECRET, clock=clock)
    slot = index.open("A", 0, model=MODEL, block_size=16, capacity_blocks=250)
    churn(index, slot, range(200), remove=False)
    assert slot.block_size == 4
    assert 1000 <= slot.blocks <= 1250


def test_evicted_copies_leave_nothing_behind(clock) -> None:
    index = BlockIndex(SECRET, clock=clock)
    slot = index.open("A", 0, model=MODEL, capacity_blocks=100)
    for n in range(400):
        for _ in range(3):
            index.apply(slot, stored([n], None, [n, n, n, n]))
    for n in range(400):
        for _ in range(3):
            index.apply(slot, Removed([n]))
    assert (slot.blocks, index.stats().bytes) == (0, 0)


def test_a_forgotten_index_makes_room_before_live_blocks_go(clock) -> None:
    index = BlockIndex(SECRET, clock=clock, max_bytes=1_000_000)
    gone = index.open("A", 0, model=MODEL)
    shared_prefix(index, gone)
    churn(index, gone, range(100), remove=False)
    index.forget(gone)
    live = index.open("B", 0, model=MODEL)
    shared_prefix(index, live)
    churn(index, live, range(100), remove=False)
    assert index.stats().evicted == 0
    assert index.stats().bytes <= 1_000_000


def test_roots_of_many_tenants_are_not_all_remembered(index: BlockIndex, slot: Slot) -> None:
    for n in range(3000):
        index.apply(slot, stored([n], None, PROMPT[:4], salt=str(n)))
    assert len(slot.roots) <= 1024
    assert gpu(index, PROMPT, salt="0") == gpu(index, PROMPT, salt="2999") == 4


def test_stats_tell_blocks_by_tier(index: BlockIndex, slot: Slot) -> None:
    index.apply(slot, stored([1, 2], None, PROMPT[:8]))
    index.apply(slot, Stored([2], None, [], 0, tier="host"))
    stats = index.stats()
    assert stats.slots[0].blocks_by_tier == {"gpu": 2, "host": 1}
    assert (stats.slots[0].instance, stats.slots[0].rank, stats.slots[0].block_size) == ("A", 0, SIZE)
    assert 0 < stats.bytes < stats.max_bytes
