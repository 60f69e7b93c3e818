"""What a request counts: tokens by class, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Protocol

from router.core import Outcome

Counts = Mapping[str, int]
"""Tokens by class (`store.schema.TOKEN_CLASSES`): disjoint, so that their sum is all of them."""
CountsOf = Callable[[Outcome], Counts]

_NOTHING: Counts = {}
_PER_MILLION = 10**6  # 1e-12 units of money in a price of 1 for a million tokens, per token
_BASE = {
    **dict.fromkeys(("cache_read", "cache_write_5m", "cache_write_1h", "cache_write", "media_input"), "uncached_input"),
    **dict.fromkeys(("reasoning", "media_output"), "output"),
}
"""A class without a price costs what its base does."""


class Price(Protocol):
    """A row of `prices`."""

    @property
    def currency(self) -> str: ...
    @property
    def per_million(self) -> Mapping[str, Decimal]:
        """Token class → money for a million tokens."""
        ...


class PriceOf(Protocol):
    def __call__(self, model: str, tenant: str) -> Price | None:
        """The price that is valid now; None: there is none, and it costs nothing."""
        ...


def no_price(model: str, tenant: str) -> Price | None:
    return None


def counts_of(outcome: Outcome) -> Counts:
    """Of a request that has ended, what its caller is charged.

    One that failed is free. One that its client left is charged for its prompt as soon as it was given to an engine,
    and for what was sent, by the engine's count where there is one, else one token an event.
    """
    if outcome.instance is None or outcome.finish == "upstream_failed":
        return _NOTHING
    usage = outcome.usage
    if usage is None:
        if outcome.finish == "complete" and outcome.status >= 400:
            return _NOTHING
        return {"uncached_input": outcome.input_tokens, "output": outcome.events}
    cached = usage.cached_tokens or 0
    counted = usage.input_tokens or outcome.input_tokens
    return {"uncached_input": max(0, counted - cached), "cache_read": cached, "output": usage.output_tokens}


def cost_of(counts: Counts, price: Price) -> int:
    """In 1e-12 of the unit of its currency."""
    return sum([count * rate for name, count in counts.items() if (rate := _rate(price, name))])


def _rate(price: Price, name: str) -> int:
    """Of one token: a price has at most six decimals, so it is a whole number."""
    per_million = price.per_million
    found = per_million.get(name)
    if found is None:
        found = per_million.get(_BASE.get(name, ""))
        if found is None:
            return 0
    return int((found * _PER_MILLION).to_integral_value(ROUND_CEILING))
