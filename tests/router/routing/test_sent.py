from __future__ import annotations

from array import array

import pytest

from router.routing.blocks import chain
from router.routing.index import BlockIndex
from router.routing.sent import SentIndex
from router.routing.slots import Slot

SIZE = 16


@pytest.fixture
def index(clock) -> BlockIndex:
    return BlockIndex(b"test", clock=clock)


@pytest.fixture
def sent(index: BlockIndex, clock) -> SentIndex:
    return SentIndex(index, clock=clock)


@pytest.fixture
def slot(sent: SentIndex) -> Slot:
    """Room for 100 blocks, of which 80 are counted on."""
    return sent.open("A", 0, model="m", block_size=SIZE, capacity_tokens=100 * SIZE)


def prompt(root: int, blocks: int) -> array[int]:
    return chain(root, list(range(blocks * SIZE)), SIZE)


def depth(index: BlockIndex, keys: array[int]) -> int:
    return next((held["gpu"] for _, held in index.match(keys, SIZE)), 0)


def test_what_was_sent_is_held(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    keys = prompt(1, 50)
    assert depth(index, keys) == 0
    sent.sent(slot, keys[:40])
    assert depth(index, keys) == 40
    sent.sent(slot, keys)
    assert depth(index, keys) == 50
    assert sent.blocks(slot) == slot.blocks == 50


def test_four_fifths_of_the_capacity_are_counted_on(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    sent.sent(slot, prompt(1, 200))
    assert depth(index, prompt(1, 200)) == 80
    assert sent.blocks(slot) == slot.blocks == 80


def test_the_least_recently_used_prompt_loses_its_tail_first(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    old, used = prompt(1, 30), prompt(2, 30)
    sent.sent(slot, old)
    sent.sent(slot, used)
    sent.sent(slot, old)
    sent.sent(slot, prompt(3, 40))  # 20 too many
    assert [depth(index, keys) for keys in (old, used, prompt(3, 40))] == [30, 10, 40]


def test_a_prefix_outlives_its_continuations(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    system = prompt(1, 20)
    for n in range(50):
        sent.sent(slot, array("Q", [*system, *chain(system[-1], [n] * 10 * SIZE, SIZE)]))
    assert depth(index, system) == 20
    assert depth(index, array("Q", [*system, *chain(system[-1], [0] * 10 * SIZE, SIZE)])) == 20
    assert sent.blocks(slot) == slot.blocks == 80


def test_a_count_below_the_prediction_drops_what_follows_it(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    keys = prompt(1, 40)
    sent.sent(slot, keys)
    sent.correct(slot, keys, predicted_tokens=30 * SIZE, reported_tokens=10 * SIZE + 7)
    assert depth(index, keys) == 10
    assert sent.blocks(slot) == slot.blocks == 10


def test_a_count_above_the_prediction_extends(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    keys = prompt(1, 40)
    sent.correct(slot, keys, predicted_tokens=0, reported_tokens=25 * SIZE)
    assert depth(index, keys) == 25


@pytest.mark.parametrize("reported_tokens", [30 * SIZE, 30 * SIZE - 0, 30 * SIZE + 0])
def test_a_count_as_predicted_changes_nothing(
    index: BlockIndex, sent: SentIndex, slot: Slot, reported_tokens: int
) -> None:
    keys = prompt(1, 40)
    sent.sent(slot, keys)
    sent.correct(slot, keys, predicted_tokens=30 * SIZE, reported_tokens=reported_tokens)
    assert depth(index, keys) == 40


def test_the_last_token_that_is_always_computed_is_no_miss(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    keys = prompt(1, 40)
    sent.sent(slot, keys)
    sent.correct(slot, keys, predicted_tokens=30 * SIZE + 15, reported_tokens=30 * SIZE)
    assert depth(index, keys) == 40


def test_where_the_capacity_is_unknown_belief_ends_after_two_minutes(index: BlockIndex, sent: SentIndex, clock) -> None:
    slot = sent.open("B", 0, model="m", block_size=SIZE)
    sent.sent(slot, prompt(1, 10))
    clock.advance(100)
    sent.sent(slot, prompt(2, 10))
    clock.advance(21)
    assert sent.expire()
    assert (depth(index, prompt(1, 10)), depth(index, prompt(2, 10))) == (0, 10)
    clock.advance(100)
    assert sent.expire()
    assert (sent.blocks(slot), slot.blocks) == (0, 0)


def test_known_capacity_has_no_clock(index: BlockIndex, sent: SentIndex, slot: Slot, clock) -> None:
    sent.sent(slot, prompt(1, 10))
    clock.advance(10_000)
    assert sent.expire()
    assert depth(index, prompt(1, 10)) == 10


def test_expiry_goes_in_slices(index: BlockIndex, sent: SentIndex, clock) -> None:
    slot = sent.open("B", 0, model="m", block_size=SIZE)
    sent.sent(slot, prompt(1, 3000))
    clock.advance(121)
    left = []
    while not sent.expire():
        left.append(sent.blocks(slot))
    assert left == [1976, 952]
    assert sent.blocks(slot) == 0


def test_unknown_capacity_is_bounded_all_the_same(index: BlockIndex, clock) -> None:
    sent = SentIndex(index, clock=clock, max_blocks=64)
    for capacity in (None, 10**9):
        slot = sent.open("B", 0, model="m", block_size=SIZE, capacity_tokens=capacity)
        for root in range(20):
            sent.sent(slot, prompt(root, 10))
        assert sent.blocks(slot) == slot.blocks == 64


def test_a_cleared_rank_begins_anew(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    sent.sent(slot, prompt(1, 10))
    sent.clear(slot)
    assert depth(index, prompt(1, 10)) == 0
    assert sent.blocks(slot) == slot.blocks == 0
    sent.sent(slot, prompt(1, 5))
    assert depth(index, prompt(1, 10)) == 5


def test_a_closed_rank_leaves_nothing(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    sent.sent(slot, prompt(1, 10))
    sent.close(slot)
    assert index.match(prompt(1, 10), SIZE) == []
    index.sweep(1)
    assert index.stats().bytes == 0


def test_ranks_are_apart(index: BlockIndex, sent: SentIndex, slot: Slot) -> None:
    other = sent.open("A", 1, model="m", block_size=SIZE, capacity_tokens=100 * SIZE)
    sent.sent(other, prompt(1, 10))
    assert index.match(prompt(1, 10), SIZE) == [(other, {"gpu": 10})]
