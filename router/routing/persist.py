"""The index on disk, so that a restart of the gateway does not begin blind: an engine replays minutes, not days.

    line    b"warmroute index 1\\n"
    check   xxh3_64 of the rest, 8 bytes, little-endian
    rest    msgpack of `_File`

Keys are worth something only with the secret they were made with: the file carries its fingerprint, never the secret.
A saved rank is believed only when its engine is still the same process and replays from the very batch where it was
saved; that is for the feed to find out, which then calls `adopt`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from router.routing.index import BlockIndex
from router.routing.slots import Slot

log = logging.getLogger(__name__)

MAGIC = b"warmroute index 1\n"
AT_ONCE = 4096  # blocks copied or restored before the loop gets its turn: far below 1 ms
ATTEMPTS = 3  # a rank that changes while it is copied is copied again


class Position(msgspec.Struct, frozen=True):
    """How far into a rank's stream its slot has come."""

    boot_id: str | None
    last_seq: int


class SavedHandles(msgspec.Struct, frozen=True):
    tier: str
    group: int
    hashes: bytes  # u64s
    keys: bytes  # u64s, as many
    copies: dict[int, int]


class SavedSlot(msgspec.Struct, frozen=True):
    """One rank, as it was at `position`."""

    instance: str
    rank: int
    model: str
    block_size: int
    position: Position
    handles: list[SavedHandles]

    @property
    def blocks(self) -> int:
        return sum(len(handles.hashes) for handles in self.handles) // 8


class _File(msgspec.Struct, frozen=True):
    fingerprint: bytes
    slots: list[SavedSlot]


async def save(
    path: Path, index: BlockIndex, *, secret: bytes, position: Callable[[Slot], Position | None]
) -> list[SavedSlot]:
    """Writes every slot that has a position. Returns what was written; slots that would not stand still are missing.

    The loop copies in slices, a thread does the rest. The file appears whole or not at all, readable by its owner only.
    Raises OSError.
    """
    saved = []
    for slot in index.slots():
        copy = await _copy(slot, position)
        if copy is not None:
            saved.append(copy)
    await asyncio.to_thread(_write, path, _File(fingerprint(secret), saved))
    return saved


def load(path: Path, *, secret: bytes) -> list[SavedSlot]:
    """What a file holds that was written with the same secret. It blocks: call it before the loop runs, or in a thread.

    A file that is missing, broken, of another version or another secret is as good as none; all but the first say so in
    the log.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("index file %s cannot be read, starting without it: %s", path, error.strerror)
        return []
    try:
        file = _decode(data)
    except ValueError as error:  # msgspec's errors are ValueErrors as well
        log.warning("index file %s is not usable, starting without it: %s", path, error)
        return []
    if file.fingerprint != fingerprint(secret):
        log.warning("index file %s belongs to another deployment secret, starting without it", path)
        return []
    return file.slots


async def adopt(index: BlockIndex, slot: Slot, saved: SavedSlot) -> int:
    """Fills an empty slot with what was saved of its rank. Returns the number of blocks.

    The caller has made sure that the engine is the same process and goes on after `saved.position`, and applies no
    event to the slot until this is done. If the slot is forgotten or closed meanwhile, it stays empty.
    """
    assert not slot.blocks, "only an empty slot can be filled"
    assert slot.model == saved.model, "keys of another model match nothing"
    index.set_block_size(slot, saved.block_size)
    generation = slot.generation
    for part in saved.handles:
        hashes, keys = _u64s(part.hashes), _u64s(part.keys)
        for first in range(0, len(hashes), AT_ONCE):
            end = first + AT_ONCE
            index.restore(slot, part.tier, part.group, hashes=hashes[first:end], keys=keys[first:end])
            await asyncio.sleep(0)
            if slot.generation != generation:
                return 0
        index.restore_copies(slot, part.tier, part.group, copies=part.copies)
    return slot.blocks


def fingerprint(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=16, person=b"warmroute index").digest()


async def _copy(slot: Slot, position: Callable[[Slot], Position | None]) -> SavedSlot | None:
    """A copy of one moment: if the slot changed in between, it is made again."""
    for _ in range(ATTEMPTS):
        version, at = slot.version, position(slot)
        if at is None or slot.block_size is None or not slot.tiers:
            return None
        handles = await _copy_handles(slot)
        if slot.version == version:
            return SavedSlot(slot.instance, slot.rank, slot.model, slot.block_size, at, handles)
    return None


async def _copy_handles(slot: Slot) -> list[SavedHandles]:
    saved = []
    since_pause = 0
    for handles in list(slot.all_handles()):
        hashes, keys = array("Q"), array("Q")
        for part in handles.parts:
            hashes.extend(part.keys())
            keys.extend(part.values())
            since_pause += len(part)
            if since_pause > AT_ONCE:
                await asyncio.sleep(0)
                since_pause = 0
        saved.append(
            SavedHandles(handles.holding.tier, handles.group, hashes.tobytes(), keys.tobytes(), dict(handles.copies))
        )
    return saved


def _write(path: Path, file: _File) -> None:
    body = msgspec.msgpack.encode(file)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")  # 0600
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(MAGIC)
            out.write(xxh3_64_intdigest(body).to_bytes(8, "little"))
            out.write(body)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _decode(data: bytes) -> _File:
    """Raises ValueError."""
    if not data.startswith(MAGIC):
        raise ValueError("not an index of this version")
    body = memoryview(data)[len(MAGIC) + 8 :]
    if xxh3_64_intdigest(body) != int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little"):
        raise ValueError("checksum differs")
    file = msgspec.msgpack.decode(body, type=_File)
    for slot in file.slots:
        for handles in slot.handles:
            if len(handles.hashes) % 8 or len(handles.hashes) != len(handles.keys):
                raise ValueError("arrays differ in length")
    return file


def _u64s(data: bytes) -> array[int]:
    out = array("Q")
    out.frombytes(data)
    return out
