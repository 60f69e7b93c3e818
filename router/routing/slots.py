"""What one data-parallel rank holds, as far as its events tell."""

from __future__ import annotations

from collections.abc import Iterator

from router.core import Tier

GPU = Tier.GPU.value
SLOWER = (Tier.HOST.value, Tier.DISK.value, Tier.REMOTE.value)  # fastest first
TIERS = frozenset((GPU, *SLOWER))

SHARDS = 1024
"""A dict that grows is copied at once: 150 ms at 2.8M keys. Split by the key's low bits, each copy is a small one."""
PARTS = 64

Shards = list[dict[int, int]]
"""Key → mask of the slots that hold it, split by the key's low bits."""


class Handles:
    """The engine's names in one tier and one KV-cache group: engine hash → our key.

    The same hash can stand in several groups (vLLM's hybrid models), and removing it in one says nothing of another.
    """

    __slots__ = ("copies", "group", "holding", "parts", "size")

    def __init__(self, holding: Holding, group: int) -> None:
        self.holding = holding
        self.group = group
        self.parts: list[dict[int, int]] = [{} for _ in range(PARTS)]
        self.copies: dict[int, int] = {}  # hash → physical copies, only where there is more than one
        self.size = 0  # hashes over all parts

    def key(self, engine_hash: int) -> int | None:
        return self.parts[engine_hash % PARTS].get(engine_hash)


class Holding:
    """What a slot holds in one tier."""

    __slots__ = ("groups", "shards", "shared", "tier")

    def __init__(self, tier: str, shards: Shards) -> None:
        self.tier = tier
        self.shards = shards
        self.groups: dict[int, Handles] = {}
        self.shared: dict[int, int] = {}  # key → handles that name it, only where there is more than one

    def handles(self, group: int) -> Handles:
        handles = self.groups.get(group)
        if handles is None:
            handles = self.groups[group] = Handles(self, group)
        return handles


class Counts:
    """Blocks since the slot was opened."""

    __slots__ = ("evicted", "ignored", "orphaned", "removed", "stored", "unknown")

    def __init__(self) -> None:
        self.stored = 0
        self.removed = 0
        self.unknown = 0  # removes of blocks we do not have: normal
        self.orphaned = 0  # parked, because nobody knows their parent
        self.ignored = 0  # no key can be derived, or another block size
        self.evicted = 0  # dropped by our own memory bound, not by the engine


class Slot:
    """A handle to what one (instance, rank) holds. Opened, cleared and closed by the index only.

    `bit` stands for the present generation: to forget a rank is to give it another bit.
    """

    __slots__ = (
        "bit",
        "block_size",
        "blocks",
        "counts",
        "generation",
        "gpu_blocks_limit",
        "instance",
        "model",
        "rank",
        "roots",
        "size_votes",
        "stored_at_adoption",
        "tiers",
        "version",
    )

    def __init__(self, instance: str, rank: int, *, model: str, bit: int, block_size: int | None) -> None:
        self.instance = instance
        self.rank = rank
        self.model = model
        self.bit = bit
        self.block_size = block_size
        self.generation = 0
        self.version = 0  # moves with everything that changes the slot
        self.blocks = 0  # over all tiers and groups
        self.gpu_blocks_limit: int | None = None
        self.tiers: dict[str, Holding] = {}
        self.roots: dict[tuple[str | None, str | None], int] = {}
        self.size_votes: dict[int, int] = {}  # other block size → blocks announced since ours was adopted
        self.stored_at_adoption = 0
        self.counts = Counts()

    def __repr__(self) -> str:
        return f"Slot({self.instance}/{self.rank}, model={self.model!r}, blocks={self.blocks})"

    def begin_vote(self) -> None:
        """From here on, the present block size has to win again over others."""
        self.size_votes = {}
        self.stored_at_adoption = self.counts.stored

    def key_of(self, engine_hash: int) -> int | None:
        """Our key of a block in whatever tier and group the rank has named it."""
        for holding in self.tiers.values():
            for handles in holding.groups.values():
                key = handles.key(engine_hash)
                if key is not None:
                    return key
        return None

    def all_handles(self) -> Iterator[Handles]:
        for holding in self.tiers.values():
            yield from holding.groups.values()
