"""A report: lines of exact sums, and what follows from them."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import groupby

import msgspec

from router.store.bands import BAND_NAMES, INPUT_CLASSES
from router.store.schema import TOKEN_CLASSES

_MILLION = 10**6
_ORDERED = ("day", "hour", "band")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """where: dimension -> id, name, day. names: what people call those ids. tokens: by class, each token in one.

    cost: by list price. output_cost: its part for what was generated. cost_cache_blind: to be expected of a policy that
    does not look at caches. own_cost: what the instances cost for it, in the
    report's own_currency; None: not known. has_margin: the two are in one currency.
    """

    where: Mapping[str, str]
    names: Mapping[str, str]
    currency: str
    requests: int
    failed: int
    aborted: int
    cached_unknown: int
    best_hit_tokens: int
    predicted_hit_tokens: int
    blind_hit_tokens: int
    tokens: Mapping[str, int]
    cost: Decimal
    output_cost: Decimal
    cost_without_cache: Decimal
    cost_cache_blind: Decimal
    own_cost: Decimal | None
    has_margin: bool

    @property
    def input_tokens(self) -> int:
        return sum(self.tokens[name] for name in INPUT_CLASSES)

    @property
    def output_tokens(self) -> int:
        return sum(self.tokens.values()) - self.input_tokens

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that came from a cache; those of engines that do not say count as missed."""
        return self.tokens["cache_read"] / self.input_tokens if self.input_tokens else None

    @property
    def saved(self) -> Decimal:
        """Negative where writing a cache cost more than reading it saved."""
        return self.cost_without_cache - self.cost

    @property
    def saved_by_placement(self) -> Decimal:
        """Of what was saved, the part that a policy blind to caches could not have expected to save."""
        return self.cost_cache_blind - self.cost

    @property
    def per_million_input(self) -> Decimal | None:
        return _per_million(self.cost - self.output_cost, self.input_tokens)

    @property
    def per_million_output(self) -> Decimal | None:
        return _per_million(self.output_cost, self.output_tokens)

    @property
    def margin(self) -> Decimal | None:
        return self.cost - self.own_cost if self.has_margin and self.own_cost is not None else None


class Report(msgspec.Struct, frozen=True):
    """first, last: days UTC, both included. own_currency: of own costs; None: nobody said what instances cost."""

    first: datetime.date
    last: datetime.date
    by: tuple[str, ...]
    filters: Mapping[str, Sequence[str]]
    own_currency: str | None
    lines: Sequence[Line]

    @property
    def totals(self) -> list[Line]:
        """A line for each currency: what cannot be added is not."""
        ordered = sorted(self.lines, key=lambda line: line.currency)
        return [_total(list(lines)) for _, lines in groupby(ordered, key=lambda line: line.currency)]


def in_order(lines: Iterable[Line]) -> list[Line]:
    """By time and by prompt length where they are asked for; else, and then, the dearest first."""

    def place(line: Line) -> tuple[object, ...]:
        ordered = [(name, value) for name, value in line.where.items() if name in _ORDERED]
        own = [BAND_NAMES.index(value) if name == "band" else value for name, value in ordered]
        return (*own, -line.cost, *line.where.values())

    return sorted(lines, key=place)


def _total(lines: Sequence[Line]) -> Line:
    own = [line.own_cost for line in lines if line.own_cost is not None]
    return Line(
        where={},
        names={},
        currency=lines[0].currency,
        requests=sum(line.requests for line in lines),
        failed=sum(line.failed for line in lines),
        aborted=sum(line.aborted for line in lines),
        cached_unknown=sum(line.cached_unknown for line in lines),
        best_hit_tokens=sum(line.best_hit_tokens for line in lines),
        predicted_hit_tokens=sum(line.predicted_hit_tokens for line in lines),
        blind_hit_tokens=sum(line.blind_hit_tokens for line in lines),
        tokens={name: sum(line.tokens[name] for line in lines) for name in TOKEN_CLASSES},
        cost=sum((line.cost for line in lines), Decimal(0)),
        output_cost=sum((line.output_cost for line in lines), Decimal(0)),
        cost_without_cache=sum((line.cost_without_cache for line in lines), Decimal(0)),
        cost_cache_blind=sum((line.cost_cache_blind for line in lines), Decimal(0)),
        own_cost=sum(own, Decimal(0)) if own else None,
        has_margin=lines[0].has_margin,
    )


def _per_million(cost: Decimal, tokens: int) -> Decimal | None:
    return (cost * _MILLION / tokens).quantize(Decimal("0.000001")) if tokens else None
