"""What tokens cost, in the unit of limits of money: 1e-12 of the currency's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.core import Outcome
from router.serving.pricing import Price
from router.store.schema import TOKEN_CLASSES

Counts = Mapping[str, int]
"""Tokens by class (`TOKEN_CLASSES`): disjoint, so that their sum is all of them."""
CountsOf = Callable[[Outcome], Counts]
PriceOf = Callable[[str, str], Price | None]
"""By model and tenant, the price that is valid now. None: there is none, and it costs nothing."""

_PLACES = {name: place for place, name in enumerate(TOKEN_CLASSES)}


def no_price(model: str, tenant: str) -> Price | None:
    return None


def cost_of(counts: Counts, price: Price) -> int:
    """Exactly: a price is a whole number of these units for a token."""
    parts = price.parts
    return sum([count * parts[_PLACES[name]] for name, count in counts.items()])
