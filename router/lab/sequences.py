"""One sequence, as the engine model sees it: lengths and the names of its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest


def root_hash(lora: str | None, salt: str | None) -> int:
    """Where a block chain starts. Adapter and salt are length-prefixed, so that no two pairs share a root."""
    adapter, cache_salt = (lora or "").encode(), (salt or "").encode()
    return xxh3_64_intdigest(b"sim-engine %d %b %d %b" % (len(adapter), adapter, len(cache_salt), cache_salt))


def block_hashes(tokens: Sequence[int], block_size: int, root: int) -> list[int]:
    """One u64 for each whole block: xxh3_64 of its ids as u32, seeded with the hash of the block before it."""
    packed = memoryview(array("I", tokens)).cast("B")
    width = block_size * 4
    hashes = []
    for start in range(0, len(packed) - width + 1, width):
        root = xxh3_64_intdigest(packed[start : start + width], root)
        hashes.append(root)
    return hashes


class EngineRequest:
    """One sequence. `hashes` names its blocks, of the prompt and of as much of the answer as is known beforehand.

    Blocks past the end of `hashes` are held and given back, but never cached. `tokens` (of the same blocks) only
    matter for the events.
    """

    __slots__ = (
        "admission",
        "blocks",
        "cached_tokens",
        "computed",
        "due",
        "ends",
        "hashes",
        "id",
        "lora",
        "output_tokens",
        "produced",
        "prompt_tokens",
        "salt",
        "start",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        prompt_tokens: int,
        *,
        output_tokens: int,
        hashes: Sequence[int],
        tokens: Sequence[int] = (),
        lora: str | None = None,
        salt: str | None = None,
    ) -> None:
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.hashes = hashes
        self.tokens = tokens
        self.lora = lora
        self.salt = salt
        self.cached_tokens: int | None = None  # prompt tokens found in the cache; None until admitted
        # From here on: the engine model's own notes.
        self.blocks: list[int] = []
        self.computed = 0  # while it waits or is partial
        self.produced = 0  # while it waits or is partial
        self.admission = 0
        self.start = 0  # while it decodes: its context at step t is t - start
        self.due = 0  # the step at which it next fills or needs a block
        self.ends = 0  # the step that produces its last token

    @classmethod
    def from_tokens(
        cls,
        id: str,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        block_size: int,
        lora: str | None = None,
        salt: str | None = None,
    ) -> EngineRequest:
        """A request whose answer is already decided, token by token."""
        tokens = [*prompt, *output]
        return cls(
            id,
            len(prompt),
            output_tokens=len(output),
            hashes=block_hashes(tokens, block_size, root_hash(lora, salt)),
            tokens=tokens,
            lora=lora,
            salt=salt,
        )

    @classmethod
    def from_hashes(
        cls, id: str, prompt_tokens: int, *, output_tokens: int, hashes: Sequence[int], block_size: int
    ) -> EngineRequest:
        """A request of a trace: the last hash may name a partial block, which is never cached."""
        return cls(id, prompt_tokens, output_tokens=output_tokens, hashes=hashes[: prompt_tokens // block_size])
