"""What a request counts: tokens by class, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Protocol

from router.core import Outcome

Counts = Mapping[str, int]
"""Tokens by class (`store.schema.TOKEN_CLASSES`): disjoint, so that their sum is all of them."""
CountsOf = Callable[[Outcome], Counts]
Rates = Mapping[str, int]
"""Of a token by class, in 1e-12 of the currency's unit."""

_NOTHING: Counts = {}
_PER_MILLION = 10**6  # 1e-12 of money for a token, where a million cost 1
_BASE = {
    **dict.fromkeys(("uncached_input", "output"), ""),
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


def rates_of(price: Price) -> Rates:
    """Whole numbers, since a price has at most six decimals; of one with more, rounded up."""
    per_million = price.per_million
    return {name: _rate(per_million.get(name, per_million.get(base))) for name, base in _BASE.items()}


def cost_of(counts: Counts, rates: Rates) -> int:
    """In 1e-12 of the currency's unit."""
    return sum([count * rates.get(name, 0) for name, count in counts.items()])


def _rate(per_million: Decimal | None) -> int:
    return 0 if per_million is None else int((per_million * _PER_MILLION).to_integral_value(ROUND_CEILING))
