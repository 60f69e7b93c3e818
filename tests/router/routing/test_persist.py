from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from router.core import Cleared, Removed, Stored
from router.routing.blocks import chain, root_key
from router.routing.index import BlockIndex
from router.routing.persist import MAGIC, Position, adopt, load, save
from router.routing.slots import Slot

SECRET = b"correct horse battery staple"
SIZE = 4
PROMPT = list(range(1, 18))
AT = Position("boot-1", 41)


@pytest.fixture
def index(clock) -> BlockIndex:
    return BlockIndex(SECRET, clock=clock)


@pytest.fixture
def slot(index: BlockIndex) -> Slot:
    slot = index.open("A", 2, model="m")
    index.apply(slot, Stored([1, 2, 3], None, PROMPT[:12], SIZE, group=1))
    index.apply(slot, Stored([2], 1, PROMPT[4:8], SIZE, group=1))
    index.apply(slot, Stored([4], 3, PROMPT[12:16], SIZE, tier="host"))
    return slot


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index"


def everywhere(slot: Slot) -> Position | None:
    return AT


def held(index: BlockIndex) -> list[tuple[str, int, dict[str, int]]]:
    keys = chain(root_key(SECRET, "m", None, None), PROMPT, SIZE)
    return [(slot.instance, slot.rank, tiers) for slot, tiers in index.match(keys, SIZE)]


async def saved_by(index: BlockIndex, path: Path) -> None:
    await save(path, index, secret=SECRET, position=everywhere)


async def test_a_saved_rank_comes_back_with_tiers_groups_and_copies(
    index: BlockIndex, slot: Slot, path: Path, clock
) -> None:
    await saved_by(index, path)
    [saved] = load(path, secret=SECRET)
    assert (saved.instance, saved.rank, saved.model, saved.block_size, saved.position) == ("A", 2, "m", SIZE, AT)
    assert saved.blocks == 4

    young = BlockIndex(SECRET, clock=clock)
    again = young.open(saved.instance, saved.rank, model=saved.model)
    assert await adopt(young, again, saved) == 4
    assert held(young) == held(index) == [("A", 2, {"gpu": 3, "host": 4})]
    assert young.stats().bytes == index.stats().bytes
    for both, rank in ((index, slot), (young, again)):
        both.apply(rank, Removed([3, 2], group=1))
    assert held(young) == held(index) == [("A", 2, {"gpu": 2})]
    young.apply(again, Removed([2], group=1))
    assert held(young) == [("A", 2, {"gpu": 1})]
    young.apply(again, Stored([5], 1, [9, 9, 9, 9], SIZE, group=1))
    keys = chain(root_key(SECRET, "m", None, None), [*PROMPT[:4], 9, 9, 9, 9], SIZE)
    assert young.match(keys, SIZE) == [(again, {"gpu": 2})]


async def test_ranks_without_a_position_are_not_saved(index: BlockIndex, slot: Slot, path: Path) -> None:
    other = index.open("B", 0, model="m")
    index.apply(other, Stored([1], None, PROMPT[:4], SIZE))
    made = index.open("C", 0, model="m", block_size=SIZE)
    index.hold(made, chain(1, PROMPT, SIZE))
    saved = await save(path, index, secret=SECRET, position=lambda slot: None if slot is other else AT)
    assert [(rank.instance, rank.rank) for rank in saved] == [("A", 2)]
    assert load(path, secret=SECRET) == saved


async def test_the_loop_runs_on_while_a_large_rank_is_saved_and_adopted(index: BlockIndex, path: Path, clock) -> None:
    slot = index.open("A", 0, model="m")
    for n in range(0, 40_000, 500):
        index.apply(slot, Stored(list(range(n, n + 500)), n - 1 if n else None, [n & 0xFF] * 500 * SIZE, SIZE))
    turns = await turns_during(saved_by(index, path))
    assert turns >= 9
    [saved] = load(path, secret=SECRET)
    young = BlockIndex(SECRET, clock=clock)
    again = young.open("A", 0, model="m")
    assert await turns_during(adopt(young, again, saved)) >= 9
    assert again.blocks == slot.blocks == 40_000


async def turns_during(work) -> int:
    turns = 0
    task = asyncio.ensure_future(work)
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    task.result()
    return turns


async def test_a_rank_that_changes_while_it_is_copied_is_copied_again(index: BlockIndex, path: Path) -> None:
    slot = index.open("A", 0, model="m")
    for n in range(0, 10_000, 500):
        index.apply(slot, Stored(list(range(n, n + 500)), n - 1 if n else None, [n & 0xFF] * 500 * SIZE, SIZE))
    seq = 0

    def position(slot: Slot) -> Position:
        return Position("boot-1", seq)

    task = asyncio.ensure_future(save(path, index, secret=SECRET, position=position))
    await asyncio.sleep(0)
    index.apply(slot, Removed([0]))
    seq = 1
    [saved] = await task
    assert saved.position.last_seq == 1
    assert saved.blocks == 9_999


@pytest.mark.parametrize("end", ["forget", "close"])
async def test_a_rank_that_is_given_up_while_it_is_adopted_stays_empty(
    index: BlockIndex, path: Path, clock, end: str
) -> None:
    slot = index.open("A", 0, model="m")
    for n in range(0, 10_000, 500):
        index.apply(slot, Stored(list(range(n, n + 500)), n - 1 if n else None, [n & 0xFF] * 500 * SIZE, SIZE))
    await saved_by(index, path)
    [saved] = load(path, secret=SECRET)
    young = BlockIndex(SECRET, clock=clock)
    again = young.open("A", 0, model="m")
    task = asyncio.ensure_future(adopt(young, again, saved))
    await asyncio.sleep(0)
    assert again.blocks > 0
    getattr(young, end)(again)
    assert await task == 0
    assert again.blocks == 0
    young.sweep(1)
    assert young.stats().bytes == 0


async def test_a_rank_that_never_stands_still_is_left_out(index: BlockIndex, path: Path) -> None:
    slot = index.open("A", 0, model="m")
    for n in range(0, 10_000, 500):
        index.apply(slot, Stored(list(range(n, n + 500)), n - 1 if n else None, [n & 0xFF] * 500 * SIZE, SIZE))
    task = asyncio.ensure_future(save(path, index, secret=SECRET, position=everywhere))
    while not task.done():
        index.apply(slot, Removed([99_999]))
        await asyncio.sleep(0)
    assert task.result() == []


async def test_a_clear_while_copying_is_noticed(index: BlockIndex, path: Path) -> None:
    slot = index.open("A", 0, model="m")
    for n in range(0, 10_000, 500):
        index.apply(slot, Stored(list(range(n, n + 500)), n - 1 if n else None, [n & 0xFF] * 500 * SIZE, SIZE))
    task = asyncio.ensure_future(save(path, index, secret=SECRET, position=everywhere))
    await asyncio.sleep(0)
    index.apply(slot, Cleared())
    assert await task == []


def test_the_file_is_private_and_replaced_as_a_whole(index: BlockIndex, slot: Slot, path: Path) -> None:
    path.write_bytes(b"old")
    path.chmod(0o644)
    asyncio.run(saved_by(index, path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    data = path.read_bytes()
    assert SECRET not in data


def test_a_failed_write_leaves_the_old_file(
    index: BlockIndex, slot: Slot, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        asyncio.run(saved_by(index, path))
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def framed(body: bytes) -> bytes:
    return MAGIC + xxh3_64_intdigest(body).to_bytes(8, "little") + body


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:30],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: data.replace(b"index 1", b"index 0", 1),
        lambda data: framed(b"\x80"),
        lambda data: framed(msgspec.msgpack.encode({"fingerprint": b"", "slots": [{}]})),
        lambda data: framed(data[len(MAGIC) + 8 :].replace(b"\xa6hashes\xc4", b"\xa6hashes\xc6", 1)),
    ],
    ids=["empty", "head only", "cut", "longer", "bit flipped", "old version", "no file", "no slot", "bad types"],
)
def test_a_broken_file_is_ignored_with_one_line(
    index: BlockIndex, slot: Slot, path: Path, caplog: pytest.LogCaptureFixture, spoil
) -> None:
    asyncio.run(saved_by(index, path))
    path.write_bytes(spoil(path.read_bytes()))
    with caplog.at_level(logging.DEBUG):
        assert load(path, secret=SECRET) == []
    assert len(caplog.records) == 1
    assert "is not usable" in caplog.text


def test_arrays_of_different_length_are_refused(
    index: BlockIndex, slot: Slot, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(saved_by(index, path))
    file = msgspec.msgpack.decode(path.read_bytes()[len(MAGIC) + 8 :])
    file["slots"][0]["handles"][0]["keys"] += bytes(8)
    path.write_bytes(framed(msgspec.msgpack.encode(file)))
    assert load(path, secret=SECRET) == []
    assert "arrays differ in length" in caplog.text


def test_keys_of_another_secret_are_worth_nothing(
    index: BlockIndex, slot: Slot, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(saved_by(index, path))
    assert load(path, secret=b"another") == []
    assert len(caplog.records) == 1
    assert "another deployment secret" in caplog.text
    assert SECRET.decode() not in caplog.text


def test_no_file_is_no_news(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(path, secret=SECRET) == []
    assert not caplog.records


def test_a_file_that_cannot_be_read_is_ignored_with_one_line(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir()
    assert load(path, secret=SECRET) == []
    assert len(caplog.records) == 1
