"""How much of the engines' KV memory each domain of isolation fills, and a bound on it for cold prompts.

Caches keep what was computed last, so of a cache of C tokens a domain holds about its share of the last C tokens that
were computed there. Kept per rank as a sum that fades by e^(-n/C) with every n tokens computed, whoever's they are: no
clock, and one addition a request.

A domain that fills more than `most` of a model's memory has flushed others' caches to get there. From then on its cold
prompts, which find nothing anywhere, go to so many of the ranks only (rendezvous hashing: always the same ones); what
is cached goes where it is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, exp

from xxhash import xxh3_64_intdigest

from router.core import Candidate
from router.routing.fleet import Rank

_DOMAINS = 1_024  # of a rank; the one with the least goes
_ASSUMED_CAPACITY = 500_000  # tokens, of a rank that does not tell
_COLD = 0.1  # of a prompt that is cached at most
_CACHES_MAX = 100.0  # after so many nothing is left: e^-100
_UNIT_MAX = 1e100


class _OfRank:
    """sums: of each domain, in units that grow as much as all of them fade: so adding to one need not touch the others.

    unit: what a token computed now counts.
    """

    __slots__ = ("sums", "unit")

    def __init__(self) -> None:
        self.unit = 1.0
        self.sums: dict[str, float] = {}

    def fade(self, caches: float) -> None:
        """So many times the cache has been computed."""
        if caches > _CACHES_MAX:
            self.sums.clear()
            return
        self.unit *= exp(caches)
        if self.unit > _UNIT_MAX:
            self.sums = {domain: tokens / self.unit for domain, tokens in self.sums.items()}
            self.unit = 1.0


class Footprints:
    """`most`: the share of a model's KV memory above which a domain's cold prompts are bound; None: never."""

    def __init__(self, *, most: float | None = None) -> None:
        self.most = most
        self._ranks: dict[str, _OfRank] = {}

    def __bool__(self) -> bool:
        """Whether some domain fills anything."""
        return bool(self._ranks)

    def note(self, domain: str, rank: Rank, tokens: int) -> None:
        """`tokens` are about to be computed there."""
        of_rank = self._ranks.get(rank.id)
        if of_rank is None:
            of_rank = self._ranks[rank.id] = _OfRank()
        of_rank.fade(tokens / _capacity(rank))
        sums = of_rank.sums
        if domain not in sums and len(sums) >= _DOMAINS:
            del sums[min(sums, key=sums.__getitem__)]
        sums[domain] = sums.get(domain, 0.0) + tokens * of_rank.unit

    def forget(self, rank_id: str) -> None:
        """Its cache is gone."""
        self._ranks.pop(rank_id, None)

    def share(self, domain: str, ranks: Sequence[Rank]) -> float:
        """Of the KV memory of these ranks, 0..1."""
        held = capacity = 0.0
        for rank in ranks:
            capacity += _capacity(rank)
            of_rank = self._ranks.get(rank.id)
            if of_rank is not None:
                held += min(of_rank.sums.get(domain, 0.0) / of_rank.unit, _capacity(rank))
        return held / capacity if capacity else 0.0

    def tokens(self, ranks: Sequence[Rank]) -> dict[str, int]:
        """By domain: tokens that lie in the caches of these ranks, as far as can be told."""
        found: dict[str, float] = {}
        for rank in ranks:
            of_rank = self._ranks.get(rank.id)
            if of_rank is not None:
                unit, most = of_rank.unit, _capacity(rank)
                for domain, tokens in of_rank.sums.items():
                    found[domain] = found.get(domain, 0.0) + min(tokens / unit, most)
        return {domain: round(tokens) for domain, tokens in found.items()}

    def allowed(
        self, domain: str, prompt_tokens: int, ranks: Sequence[Rank], candidates: Sequence[Candidate]
    ) -> Sequence[int] | None:
        """The indices of the ranks a prompt may go to. None: to all."""
        if self.most is None or len(ranks) < 2 or not domain:
            return None
        if max([candidate.hit_tokens for candidate in candidates]) > _COLD * prompt_tokens:
            return None
        if self.share(domain, ranks) <= self.most:
            return None
        by_chance = sorted(range(len(ranks)), key=lambda i: xxh3_64_intdigest(f"{domain}\0{ranks[i].id}".encode()))
        return sorted(by_chance[: max(1, ceil(self.most * len(ranks)))])


def _capacity(rank: Rank) -> int:
    return rank.capacity_tokens or _ASSUMED_CAPACITY
