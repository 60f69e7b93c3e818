"""What tokens cost: disjoint classes times the price that held at the time.

    cost = Σ tokens of a class × its price for a million        exactly: whole numbers of 1e-12, no floating point

A class without a price of its own costs what its base does: everything read or written or seen as the uncached input,
thoughts and media as the output, both times of cache writes as a cache write. The bases themselves are free if the
price does not name them.

`without_cache` is what the same request would have cost had nothing been cached: neither read at a lower price nor
written at a higher one.

Where an engine does not say what it had cached, a prompt is billed as if nothing was (`ledger.unknown_cached:
full_price`), or as if it had reused what the index predicted (`predicted`). The row says that it is not known, and its
count of cached tokens stays 0: a prediction is never a fact.

`cache_blind` is what it would have cost, to be expected, by a policy that does not look at caches (round robin,
random): so many fewer tokens read from the cache as the mean of the candidates' hits was below the chosen one's. The
caches are taken as they were; what they would have become under such a policy, only a replay tells.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from math import inf
from typing import Literal, NamedTuple

import msgspec

from router.core import Usage
from router.store.database import Database
from router.store.money import PARTS
from router.store.prices import ANY_MODEL, PriceRow, prices_as_of
from router.store.schema import TOKEN_CLASSES

UnknownCached = Literal["full_price", "predicted"]

_PARTS_PER_TOKEN = PARTS // 10**6  # prices are for a million tokens

_BASES = {
    "cache_read": "uncached_input",
    "cache_write": "uncached_input",
    "cache_write_5m": "cache_write",
    "cache_write_1h": "cache_write",
    "media_input": "uncached_input",
    "reasoning": "output",
    "media_output": "output",
}


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens by class, in the order of TOKEN_CLASSES. Each token is in one of them: `of` is how they are made.

    Raises ValueError for a count below zero.
    """

    uncached_input: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    cache_write: int = 0
    output: int = 0
    reasoning: int = 0
    media_input: int = 0
    media_output: int = 0

    def __post_init__(self) -> None:
        if min(self.counts) < 0:
            raise ValueError(f"a class of less than no tokens: {self}")

    @property
    def counts(self) -> tuple[int, ...]:
        return msgspec.structs.astuple(self)

    @property
    def input(self) -> int:
        written = self.cache_write_5m + self.cache_write_1h + self.cache_write
        return self.uncached_input + self.cache_read + written + self.media_input

    @staticmethod
    def of(usage: Usage) -> Tokens:
        read = usage.cached_tokens or 0
        w5m, w1h, written = usage.cache_write_5m_tokens, usage.cache_write_1h_tokens, usage.cache_write_tokens
        seen, thought, shown = usage.media_input_tokens, usage.reasoning_tokens, usage.media_output_tokens
        uncached = usage.input_tokens - read - w5m - w1h - written - seen
        return Tokens(uncached, read, w5m, w1h, written, usage.output_tokens - thought - shown, thought, seen, shown)

    def as_if_read(self, tokens: int) -> Tokens:
        """The same, had so many more of the input (fewer, if negative) been read from the cache, if it has them."""
        read = max(-self.cache_read, min(tokens, self.uncached_input))
        return msgspec.structs.replace(
            self, uncached_input=self.uncached_input - read, cache_read=self.cache_read + read
        )

    def only_output(self) -> Tokens:
        return Tokens(output=self.output, reasoning=self.reasoning, media_output=self.media_output)

    def without_cache(self) -> Tokens:
        return Tokens(
            uncached_input=self.input - self.media_input,
            output=self.output,
            reasoning=self.reasoning,
            media_input=self.media_input,
            media_output=self.media_output,
        )


class Price(msgspec.Struct, frozen=True):
    """One version. `parts`: of 1e-12 for a token, by class; times are wall clock."""

    id: str
    model: str
    tenant: str | None
    currency: str
    parts: tuple[int, ...]
    valid_from: float
    valid_to: float = inf

    @property
    def per_million(self) -> Mapping[str, Decimal]:
        """Of every class."""
        return _per_million(self.parts)

    def cost(self, tokens: Tokens) -> Decimal:
        """Exactly."""
        parts = sum(count * price for count, price in zip(tokens.counts, self.parts, strict=True) if count)
        return Decimal(parts) / PARTS


@lru_cache(1000)
def _per_million(parts: tuple[int, ...]) -> Mapping[str, Decimal]:
    return {name: Decimal(part) / _PARTS_PER_TOKEN for name, part in zip(TOKEN_CLASSES, parts, strict=True)}


class PriceBook:
    """All versions, in memory. Made anew when one has changed."""

    def __init__(self, prices: Iterable[Price] = ()) -> None:
        self._versions: dict[tuple[str | None, str], _Versions] = {}
        for price in sorted(prices, key=lambda price: price.valid_from):
            versions = self._versions.setdefault((price.tenant, price.model), _Versions([], []))
            versions.begin.append(price.valid_from)
            versions.prices.append(price)

    def price_at(self, model: str, tenant: str, at: float) -> Price | None:
        """A tenant's own price goes before everybody's, and a model's own before that of `*`.

        Of several versions that hold at the time, the one that began last.
        """
        for whose in (tenant, None) if tenant else (None,):
            for which in (model, ANY_MODEL):
                versions = self._versions.get((whose, which))
                if versions is not None and (price := versions.at(at)) is not None:
                    return price
        return None


class _Versions(NamedTuple):
    begin: list[float]
    prices: list[Price]

    def at(self, at: float) -> Price | None:
        for index in range(bisect_right(self.begin, at) - 1, -1, -1):
            if at < self.prices[index].valid_to:
                return self.prices[index]
        return None


class Prices:
    """`book` as the database has it, for whoever calls `refresh` again and again. A price that is no price is left out.

    strange   ids of those
    """

    def __init__(self) -> None:
        self.book = PriceBook()
        self.strange: set[str] = set()
        self._known: dict[str, Price] = {}
        self._revision = -1

    def now(self, model: str, tenant: str) -> Price | None:
        return self.book.price_at(model, tenant, time.time())

    @property
    def known(self) -> bool:
        """They have been read."""
        return self._revision >= 0

    async def refresh(self, database: Database) -> None:
        """Raises StoreUnavailable."""
        async with database.read() as connection:
            revision, rows = await prices_as_of(connection, self._revision)
            if revision < self._revision:  # it has gone back in time
                self._known.clear()
                revision, rows = await prices_as_of(connection, -1)
        self.take(rows)
        self._revision = revision

    def take(self, rows: Iterable[PriceRow]) -> None:
        """What is new, or has changed."""
        rows = list(rows)
        for row in rows:
            try:
                parts = parts_per_token(row.per_million)
            except ValueError:
                self.strange.add(row.id)
                continue
            ends = inf if row.valid_to is None else row.valid_to
            self._known[row.id] = Price(row.id, row.model, row.tenant, row.currency, parts, row.valid_from, ends)
        if rows:
            self.book = PriceBook(self._known.values())


class Hits(NamedTuple):
    """Tokens of a prompt that lay in a cache, as the index knew. `delivered_known`: the engine said what it read.

    predicted  where the request went
    blind      the mean of all places it could have gone to
    """

    delivered_known: bool
    predicted: int
    blind: int


class Bill(NamedTuple):
    """What a request costs, and by which price; None: there is none for its model. `output`: its part of the cost."""

    price: Price | None
    cost: Decimal
    output: Decimal
    without_cache: Decimal
    cache_blind: Decimal


FREE = Bill(None, *[Decimal(0)] * 4)


def bill(price: Price | None, tokens: Tokens, hits: Hits, unknown_cached: UnknownCached = "full_price") -> Bill:
    if price is None:
        return FREE
    billed = tokens
    if not hits.delivered_known and unknown_cached == "predicted":
        billed = tokens.as_if_read(hits.predicted)
    cost = price.cost(billed)
    if hits.blind == hits.predicted or (billed is tokens and not hits.delivered_known):
        blind_cost = cost
    else:
        blind_cost = price.cost(billed.as_if_read(hits.blind - hits.predicted))
    return Bill(price, cost, price.cost(tokens.only_output()), price.cost(tokens.without_cache()), blind_cost)


def parts_per_token(per_million: Mapping[str, str]) -> tuple[int, ...]:
    """Decimals as text, by class → whole numbers of 1e-12 for a token, in the order of TOKEN_CLASSES.

    Raises ValueError for a class that there is not, and for a price that is no whole number so: one that is negative,
    or has more than six decimals.
    """
    if strange := per_million.keys() - set(TOKEN_CLASSES):
        raise ValueError(f"no class of tokens: {', '.join(sorted(strange))}")
    named = {name: _parts(name, text) for name, text in per_million.items()}

    def parts_of(name: str) -> int:
        return named[name] if name in named else parts_of(_BASES[name]) if name in _BASES else 0

    return tuple(map(parts_of, TOKEN_CLASSES))


def _parts(name: str, text: str) -> int:
    try:
        parts = Decimal(text) * _PARTS_PER_TOKEN
    except InvalidOperation:
        parts = Decimal(-1)
    if not parts.is_finite() or parts < 0 or parts != parts.to_integral_value():
        raise ValueError(f"{name}: {text!r} is no price for a million tokens: a decimal with at most six places")
    return int(parts)
