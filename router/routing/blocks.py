"""Our own names for blocks of tokens: chained 64-bit keys.

    root  = xxh3_64( field(secret) ‖ field(model) ‖ field(lora) ‖ field(salt) )
    key_0 = xxh3_64( ids of block 0 [‖ media ids that fall in it], seed = root )
    key_i = xxh3_64( ids of block i [‖ media ids that fall in it], seed = key_{i-1} )

`ids` are the token ids as u32, little-endian. `field` is 00 for None, else 01 ‖ length (u32, little-endian) ‖ UTF-8.
A media id is written as length (u32, little-endian) ‖ UTF-8.

Two prompts share a key only where everything before it is equal too: model, adapter, isolation salt and every token. An
engine's own hashes are never compared with these, nor with another engine's: their seed may be random per process (vLLM
before 0.29) and their algorithm differs by version. xxh3 is no security boundary; the deployment's secret keeps keys
from being computed by outsiders, the salt keeps tenants apart, and a match is never more than a hint.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

from xxhash import xxh3_64_intdigest

Media = Sequence[tuple[int, str]]
"""(block offset in the tokens at hand, media id), in the order in which the engine names them."""

_U32 = Struct("<I")


def root_key(secret: bytes, model: str, lora: str | None, salt: str | None) -> int:
    """The key before the first block. Fields are length-prefixed, so that no two lists of fields read alike."""
    return xxh3_64_intdigest(_field(secret) + _field(_utf8(model)) + _optional(lora) + _optional(salt))


def chain(parent: int, tokens: Sequence[int], size: int, media: Media | None = None) -> array[int]:
    """The keys of all whole blocks of `tokens`, as an array('Q'). A rest shorter than `size` tokens has no key.

    `parent` is the key of the block before, or a root. Raises OverflowError for an id that is no u32.
    """
    return array("Q", chain_list(parent, tokens, size, media))


def chain_list(parent: int, tokens: Sequence[int], size: int, media: Media | None = None) -> list[int]:
    """`chain` for callers that go on with the ints themselves."""
    ids = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if media:
        return _chain_with_media(parent, ids, size, media)
    whole = len(ids) - len(ids) % size
    if whole == size:
        return [xxh3_64_intdigest(memoryview(ids)[:size], parent)]
    key = parent
    return [key := xxh3_64_intdigest(block, key) for (block,) in _blocks(size).iter_unpack(memoryview(ids)[:whole])]


def _chain_with_media(key: int, ids: array[int], size: int, media: Media) -> list[int]:
    inside: dict[int, bytes] = {}
    for offset, media_id in media:
        name = _utf8(media_id)
        inside[offset] = inside.get(offset, b"") + _U32.pack(len(name)) + name
    view = memoryview(ids).cast("B")
    width = 4 * size
    return [
        key := xxh3_64_intdigest(bytes(view[i * width : (i + 1) * width]) + inside.get(i, b""), key)
        for i in range(len(ids) // size)
    ]


@lru_cache(maxsize=64)  # block sizes in use are few, but come from outside
def _blocks(size: int) -> Struct:
    return Struct(f"{4 * size}s")


def _optional(text: str | None) -> bytes:
    return b"\0" if text is None else _field(_utf8(text))


def _field(data: bytes) -> bytes:
    return b"\1" + _U32.pack(len(data)) + data


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a client may name a model with a lone surrogate
