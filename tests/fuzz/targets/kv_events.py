"""An engine's KV events: whatever its bytes decode to, the index can take, and can let go of again."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters._events import decode
from router.core import Cleared, KVEvent, Removed
from router.errors import EngineProtocolError
from router.routing.index import BlockIndex
from router.routing.slots import TIERS
from tests.fuzz.source import Source

WORDS = (
    b"\x90", b"\x91", b"\x92", b"\x93", b"\x80", b"\x81", b"\x82", b"\xc0", b"\xc2", b"\xcb\x3f\xf8\0\0\0\0\0\0",
    b"\x01", b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\0\0\0\0\0\0\0", b"\xc4\x20", b"\xd9\xff",
    b"\xdd\xff\xff\xff\xff", b"\xabBlockStored", b"\xacBlockRemoved", b"\xb0AllBlocksCleared", b"\xa4type",
    b"\xacblock_hashes", b"\xa3GPU", b"\xb1parent_block_hash", b"\xa9token_ids", b"\xaablock_size", b"\xa7lora_id",
    b"\xa6medium", b"\xa9lora_name", b"\xaaextra_keys", b"\xa9group_idx", b"\xb2kv_cache_spec_kind",
    b"\xa8locality", b"\xa6REMOTE", b"\xaacache_salt", b"\xaeevent_type\xa6stored", b"\x91" * 1000,
)  # fmt: skip

_U64 = range(2**64)
_FIELDS = (
    "type", "event_type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "locality", "cache_salt",
)  # fmt: skip
_HASHES = (1, 2, 3, -1, 2**64 - 1, -(2**63), b"\x01" * 32, b"", None, "x")


def target(data: bytes) -> None:
    source = Source(data)
    payload = msgspec.msgpack.encode(_written(source)) if source.flag() else source.rest()
    try:
        batch = decode(7, payload)
    except EngineProtocolError:
        return
    assert batch.seq == 7
    assert batch.rank is None or type(batch.rank) is int
    assert batch.at is None or type(batch.at) is float
    raw = msgspec.msgpack.decode(payload)[1]
    assert batch.skipped + len(batch.events) == len(raw)
    for event in batch.events:
        _check(event)
    if batch.events:
        _check_index(batch.events)


def _check(event: KVEvent) -> None:
    if isinstance(event, Cleared):
        return
    assert event.hashes
    assert all(type(name) is int and name in _U64 for name in event.hashes)
    assert event.tier in TIERS
    assert event.group >= 0
    if isinstance(event, Removed):
        return
    assert event.parent is None or (event.parent in _U64 and event.parent)
    assert event.block_size >= 0
    assert not event.tokens or len(event.tokens) == len(event.hashes) * event.block_size
    assert all(type(token) is int and 0 <= token < 2**32 for token in event.tokens)
    assert isinstance(event.lora, str | None)
    assert isinstance(event.salt, str | None)
    for offset, media in event.media or ():
        assert offset >= 0
        assert isinstance(media, str)


def _check_index(events: list[KVEvent]) -> None:
    index = BlockIndex(b"secret", clock=lambda: 0.0, max_bytes=4096, orphan_bytes=2048)
    slot = index.open("a", 0, model="m")
    for event in events:
        before = slot.blocks
        applied = index.apply(slot, event)
        assert min(applied.stored, applied.removed, applied.unknown, applied.parked, applied.ignored) >= 0
        assert slot.blocks >= 0
        if isinstance(event, Removed):
            assert before - applied.removed <= slot.blocks <= before  # a copy may be one of several, or an orphan
        if isinstance(event, Cleared):
            assert slot.blocks == 0
        assert slot.blocks == sum(handles.size for handles in slot.all_handles())
    index.close(slot)
    assert index.sweep(1.0)
    assert index.stats().bytes == 0
    assert index.stats().orphan_blocks == 0


def _written(source: Source) -> Any:
    events = [_event(source) for _ in range(source.number(5))]
    return [source.pick((1.5, 1700000000000, -1, None, 2**63)), events, source.pick((0, None, "x", 3))]


def _event(source: Source) -> Any:
    if source.number(16) == 0:
        return source.value(binary=True)
    hashes = [source.pick(_HASHES[: source.pick((3, 3, 3, 10))]) for _ in range(source.number(4))]
    size = source.pick((1, 2, 0, None))
    event: dict[str, Any] = {
        "type": source.pick(("BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared", "Other")),
        "block_hashes": hashes,
        "parent_block_hash": source.pick((None, *_HASHES)),
        "token_ids": list(range(len(hashes) * (size or 0))),
        "block_size": size,
        "lora_id": None,
        "medium": source.pick(("GPU", "GPU", "CPU", None, "disk", "TAPE")),
        "lora_name": source.pick((None, None, "adapter")),
        "extra_keys": source.pick((None, None, [["salt"]], [None, [["image", 0]]])),
        "group_idx": source.pick((None, 0, 1)),
    }
    for _ in range(source.number(3)):
        event[source.pick(_FIELDS)] = source.value(binary=True)
    return list(event.values()) if source.flag() else event
