"""Copies of blocks over several caches, counted in the index itself."""

from __future__ import annotations

from router.core import Removed, Stored
from router.routing.copies import count_copies
from router.routing.index import BlockIndex
from router.routing.sent import SentIndex
from router.routing.slots import Slot

SIZE = 4


def _index() -> BlockIndex:
    return BlockIndex(b"secret", clock=lambda: 0.0)


def _store(index: BlockIndex, slot: Slot, first_token: int, blocks: int, *, salt: str | None = None) -> list[int]:
    """A prompt of so many blocks; the engine's names are its own."""
    names = [hash((slot.instance, first_token, salt, n)) & (1 << 64) - 1 for n in range(blocks)]
    tokens = list(range(first_token, first_token + blocks * SIZE))
    index.apply(slot, Stored(names, None, tokens, SIZE, salt=salt))
    return names


def test_copies_beyond_the_first_and_blocks_on_several() -> None:
    index = _index()
    a, b, c = (index.open(name, 0, model="m", block_size=SIZE) for name in "abc")
    for slot in (a, b, c):
        _store(index, slot, 0, 10)  # on all three
    for slot in (a, b):
        _store(index, slot, 1_000, 5)  # on two
    _store(index, a, 2_000, 20)  # on one
    copies = count_copies((a, b, c))
    assert (copies.held, copies.distinct, copies.shared) == (60, 35, 15)
    assert copies.duplicate_share == 25 / 60
    assert copies.shared_share == 15 / 35
    assert copies.shared_of == {a: 15, b: 15, c: 10}


def test_only_the_slots_asked_for_and_only_what_they_hold_now() -> None:
    index = _index()
    a, b, c = (index.open(name, 0, model="m", block_size=SIZE) for name in "abc")
    for slot in (a, b, c):
        names = _store(index, slot, 0, 10)
    index.apply(c, Removed(names[5:]))
    index.forget(b)  # its bit still stands in the masks until it is swept out
    copies = count_copies((a, c))
    assert (copies.held, copies.distinct, copies.shared) == (15, 10, 5)
    assert count_copies((a, b)).duplicate_share == 0
    assert count_copies((b,)).held == 0


def test_what_can_not_be_shared_is_not() -> None:
    index = _index()
    a, b = (index.open(name, 0, model="m", block_size=SIZE) for name in "ab")
    other_model = index.open("c", 0, model="other", block_size=SIZE)
    _store(index, a, 0, 3)
    _store(index, b, 0, 3, salt="tenant")
    _store(index, other_model, 0, 3)
    copies = count_copies((a, b, other_model))
    assert (copies.held, copies.distinct, copies.shared) == (9, 9, 0)


def test_what_was_only_sent_somewhere_is_not_counted() -> None:
    index = _index()
    sent = SentIndex(index, clock=lambda: 0.0)
    assumed = sent.open("a", 0, model="m", block_size=64)
    sent.sent(assumed, [1, 2, 3])
    copies = count_copies((assumed,))
    assert (copies.held, copies.duplicate_share, copies.shared_share) == (0, 0.0, 0.0)
