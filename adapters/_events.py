"""KV event batches: from the bytes on the wire to the nouns of `router.core`.

One decoder for vLLM 0.9 to 0.33, SGLang 0.4.6 to 0.5.23 and the producers that copy their format (llm-d-inference-sim,
Dynamo's mocker, Mooncake's store). A batch is a msgpack array `[time, events, rank?]`. An event is an array whose first
item is its tag (vLLM up to 0.23, SGLang up to 0.5.19) or a map with the key `type` (later). Decoding is generic and
never against a schema: fields come and go with every release, and one unknown field must not cost the stream.

An event that cannot be understood, or that must not earn credit, is left out and counted in `EventBatch.skipped`.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from router.core import Cleared, EventBatch, KVEvent, Removed, Stored
from router.errors import EngineProtocolError

_U64 = 2**64 - 1
_MILLISECONDS_FROM = 1e11  # as seconds this would be the year 5138: Mooncake's store writes integer milliseconds

_unpack = msgspec.msgpack.Decoder().decode
_BAD_MSGPACK = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
_BAD_EVENT = (TypeError, ValueError, LookupError, AttributeError, OverflowError)

# The positional form; what newer versions append is at the end, so that zip() copes with shorter and longer events.
_STORED_FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_REMOVED_FIELDS = ("type", "block_hashes", "medium", "group_idx", "locality")

# Other kinds (sliding window, mamba …) keep only parts of a prefix: their blocks say nothing about its depth.
_WHOLE_PREFIX_KINDS = frozenset((None, "full_attention", "mla_attention", "sink_full_attention"))

_TIERS: dict[object, str] = {
    None: "gpu",
    "GPU": "gpu",
    "DEVICE": "gpu",
    "CPU": "host",
    "CPU_PINNED": "host",
    "HOST": "host",
    "HOST_PINNED": "host",
    "STORAGE": "disk",
    "DISK": "disk",
    "FS": "disk",
    "OBJ": "remote",
    "EXTERNAL": "remote",
    "REMOTE": "remote",
}


def decode(seq: int, payload: bytes) -> EventBatch:
    """The batch `payload` holds. Raises `EngineProtocolError` when it is not a batch at all."""
    try:
        batch = _unpack(payload)
    except _BAD_MSGPACK:
        raise EngineProtocolError("a KV event batch is not msgpack") from None
    if type(batch) is not list or len(batch) < 2 or type(batch[1]) is not list:
        raise EngineProtocolError("a KV event batch is not [time, events, rank]")
    events: list[KVEvent] = []
    skipped = 0
    for raw in batch[1]:
        try:
            events.append(_event(raw))
        except _BAD_EVENT:  # includes _Unusable
            skipped += 1
    rank = batch[2] if len(batch) > 2 and type(batch[2]) is int else None
    return EventBatch(seq, events, rank, _seconds(batch[0]), skipped)


class _Unusable(ValueError):
    """An event to leave out: it is not understood, or its blocks must not be matched."""


def _event(raw: Any) -> KVEvent:
    if type(raw) is dict:
        tag = raw.get("type") or raw.get("event_type")  # Mooncake writes both, or only the second
        if tag == "BlockStored" or tag == "stored":
            return _stored(raw)
        if tag == "BlockRemoved" or tag == "removed":
            return _removed(raw)
    else:
        tag = raw[0]
        if tag == "BlockStored":
            return _stored(dict(zip(_STORED_FIELDS, raw, strict=False)))
        if tag == "BlockRemoved":
            return _removed(dict(zip(_REMOVED_FIELDS, raw, strict=False)))
    if tag == "AllBlocksCleared":
        return Cleared()
    raise _Unusable


def _stored(fields: dict[str, Any]) -> Stored:
    get = fields.get
    if get("kv_cache_spec_kind") not in _WHOLE_PREFIX_KINDS:
        raise _Unusable
    hashes = _hashes(fields["block_hashes"])
    parent = get("parent_block_hash")
    if parent is not None:
        parent = (
            parent & _U64 if type(parent) is int else _hash(parent)
        ) or None  # llm-d-inference-sim writes 0 for "no parent"
    block_size = _count(get("block_size"))
    tokens = _tokens(get("token_ids"), len(hashes) * block_size)
    group = _count(get("group_idx"))
    if get("lora_name") is get("lora_id") is get("cache_salt") is None and not any(get("extra_keys") or ()):
        return Stored(hashes, parent, tokens, block_size, _tier(fields), None, None, group)
    lora, salt, media = _identity(fields, root=parent is None)
    return Stored(hashes, parent, tokens, block_size, _tier(fields), lora, salt, group, media)


def _removed(fields: dict[str, Any]) -> Removed:
    return Removed(_hashes(fields["block_hashes"]), _tier(fields), _count(fields.get("group_idx")))


def _count(raw: Any) -> int:
    if raw is None:
        return 0
    if type(raw) is not int or raw < 0:
        raise _Unusable
    return raw


def _hashes(raw: Any) -> list[int]:
    """Engine hashes as u64. SGLang's are signed; vLLM's are unsigned, or whole digests of which the end is the u64."""
    if not raw or type(raw) is not list:
        raise _Unusable
    if len(raw) == 1:
        only = raw[0]
        return [only & _U64 if type(only) is int else _hash(only)]
    try:
        return [value & _U64 for value in raw]
    except TypeError:
        return [_hash(value) for value in raw]


def _hash(raw: int | bytes) -> int:
    if type(raw) is int:
        return raw & _U64
    if type(raw) is bytes and raw:
        return int.from_bytes(raw[-8:], "big")
    raise _Unusable


def _tokens(raw: Any, expected: int) -> list[int]:
    """Dense token ids, or none: an announcement of known hashes in another tier carries no tokens.

    With EAGLE SGLang sends `[token, next token]` pairs. Raises unless there are `expected` ids, all of them u32.
    """
    if not raw:
        return []
    if type(raw) is not list:
        raise _Unusable
    ids: list[int] = [pair[0] for pair in raw] if type(raw[0]) is list else raw
    if len(ids) != expected:
        raise _Unusable  # sliding-window and mamba groups list only their real blocks
    array("I", ids)  # one pass in C: TypeError or OverflowError unless every id is a u32
    return ids


def _tier(fields: dict[str, Any]) -> str:
    medium = fields.get("medium")
    if medium == "GPU" and "locality" not in fields:
        return "gpu"
    tier = _TIERS.get(medium) or _TIERS[str.upper(medium)]  # type: ignore[arg-type]  # TypeError if it is no text
    locality = fields.get("locality")
    return tier if locality is None or str.upper(locality) != "REMOTE" else "remote"


_Media = tuple[tuple[int, str], ...]


def _identity(fields: dict[str, Any], *, root: bool) -> tuple[str | None, str | None, _Media | None]:
    """LoRA name, salt and media ids: what makes equal tokens different blocks."""
    get = fields.get
    lora = get("lora_name")
    if lora is None:
        if get("lora_id") is not None:
            raise _Unusable  # before vLLM 0.14: an adapter without a name, which must not pass for the base model
    elif type(lora) is not str:
        raise _Unusable
    extra_keys = get("extra_keys")
    if extra_keys is not None:  # vLLM
        return lora, *_extra_keys(extra_keys, lora, root=root)
    salt = get("cache_salt")  # SGLang
    if salt is not None and type(salt) is not str:
        raise _Unusable
    return lora, salt, None


def _extra_keys(blocks: list[list[Any] | None], lora: str | None, *, root: bool) -> tuple[str | None, _Media | None]:
    """The salt and the media ids in vLLM's extra keys, one entry a block.

    They are untagged in the events of every version, in the order LoRA name, `[media id, offset]` pairs, salt (only on
    the first block of a chain), digest of prompt embeddings. What is none of these, such as the digest, enters the
    engine's hash in a way we cannot repeat, so that the event must not be matched.
    """
    salt: str | None = None
    media: list[tuple[int, str]] = []
    for offset, keys in enumerate(blocks):
        if not keys:
            continue
        for key in keys[1:] if lora is not None and keys[0] == lora else keys:
            if type(key) is str and root and offset == 0 and salt is None:
                salt = key
            elif type(key) is list and len(key) == 2 and type(key[0]) is str and type(key[1]) is int:
                media.append((offset, key[0]))
            else:
                raise _Unusable
    return salt, tuple(media) or None


def _seconds(time: Any) -> float | None:
    if type(time) is not float and type(time) is not int:
        return None
    return time / 1000 if time > _MILLISECONDS_FROM else float(time)
