"""Prices, as the tables say them. Whoever bills keeps them in memory (`serving/pricing.py`); here they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from router.store.schema import changes, prices

ANY_MODEL = "*"  # a price of all that have none of their own


class PriceRow(NamedTuple):
    """One version. `per_million`: decimals as text, by token class; times are wall clock."""

    id: str
    model: str
    tenant: str | None
    currency: str
    per_million: Mapping[str, str]
    valid_from: float
    valid_to: float | None


_COLUMNS = (
    prices.c.id, prices.c.model, prices.c.tenant, prices.c.currency, prices.c.per_million, prices.c.valid_from,
    prices.c.valid_to,
)  # fmt: skip


async def prices_in_force(connection: AsyncConnection, at: float) -> dict[str, PriceRow]:
    """Everybody's, by model (or ANY_MODEL) and the wall clock; of several for a model the one that began last."""
    holds = (prices.c.valid_from <= at) & (prices.c.valid_to.is_(None) | (prices.c.valid_to > at))
    query = select(*_COLUMNS).where(prices.c.tenant.is_(None), holds).order_by(prices.c.valid_from)
    rows = [PriceRow(*row) for row in await connection.execute(query)]
    return {row.model: row for row in rows}


async def prices_as_of(connection: AsyncConnection, known: int) -> tuple[int, list[PriceRow]]:
    """The revision of the last change, and the prices that are newer than revision `known`."""
    revision: int = (await connection.execute(select(func.max(changes.c.revision)))).scalar() or 0
    if revision == known:
        return revision, []
    found = await connection.execute(select(*_COLUMNS).where(prices.c.revision > known).order_by(prices.c.created_at))
    return revision, [PriceRow(*row) for row in found]
