"""Limits as gateways read them, and what a gateway without Redis keeps of long windows (`limit_windows`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

import msgspec
from sqlalchemy import delete, func, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from router.store.database import Database
from router.store.money import PARTS
from router.store.schema import keys, limit_windows, limits

Measure = Literal["requests", "tokens", "parallel", "money"]
WithoutRedis = Literal["local_share", "refuse", "allow"]
Counted = tuple[str, int]
"""A limit's id, and the first second of a window."""

_ROWS_AT_ONCE = 200


class Limit(msgspec.Struct, frozen=True):
    """A row. Only its amount and `without_redis` ever change, and that it is archived.

    window: as `windows.py` reads it; "" for parallel. amount: requests, weighted tokens, requests at once, or 1e-12 of
    the currency's unit.
    weights: of token classes; a class that is not named has 1.
    """

    id: str
    level: Literal["tenant", "project", "key"]
    owner: str
    measure: Measure
    window: str
    amount: int
    weights: Mapping[str, float] = {}
    currency: str | None = None
    without_redis: WithoutRedis = "local_share"
    is_archived: bool = False
    revision: int = 0


async def limits_since(database: Database, revision: int) -> list[Limit]:
    """Those that were changed after `revision`, archived ones too. Raises StoreUnavailable."""
    async with database.read() as connection:
        found = await connection.execute(select(limits).where(limits.c.revision > revision))
        return [_limit(row) for row in found.mappings()]


async def least_money(database: Database, key_id: str) -> Decimal | None:
    """Of the budgets that hold for a key, its own, its project's and its tenant's. None: there is none."""
    owner = select(keys.c.id, keys.c.project, keys.c.tenant).where(keys.c.id == key_id)
    async with database.read() as connection:
        owners = [name for row in await connection.execute(owner) for name in row]
        budgets = (limits.c.measure == "money", limits.c.owner.in_(owners), limits.c.archived_at.is_(None))
        least = (await connection.execute(select(func.min(limits.c.amount)).where(*budgets))).scalar()
    return None if least is None else Decimal(int(least)) / PARTS


async def used_in(database: Database, windows: Sequence[Counted]) -> dict[Counted, int]:
    """What was counted there, where anything was. Raises StoreUnavailable."""
    used: dict[Counted, int] = {}
    where = tuple_(limit_windows.c.limit, limit_windows.c.window)
    async with database.read() as connection:
        for first in range(0, len(windows), _ROWS_AT_ONCE):
            asked = select(limit_windows).where(where.in_(windows[first : first + _ROWS_AT_ONCE]))
            for limit, window, amount in await connection.execute(asked):
                used[limit, window] = amount
    return used


async def add_used(database: Database, more: Mapping[Counted, int]) -> None:
    """All of it or nothing. Raises StoreUnavailable."""
    insert = (sqlite if database.is_sqlite else postgresql).insert(limit_windows)
    sums = insert.on_conflict_do_update(
        index_elements=[limit_windows.c.limit, limit_windows.c.window],
        set_={"used": limit_windows.c.used + insert.excluded.used},
    )
    rows = [{"limit": limit, "window": window, "used": used} for (limit, window), used in sorted(more.items())]
    async with database.write() as connection:
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            await connection.execute(sums, rows[first : first + _ROWS_AT_ONCE])


async def forget_windows(database: Database, before: Mapping[str, int]) -> None:
    """By limit, those that began earlier. Raises StoreUnavailable."""
    async with database.write() as connection:
        for limit, window in before.items():
            old = (limit_windows.c.limit == limit) & (limit_windows.c.window < window)
            await connection.execute(delete(limit_windows).where(old))


def _limit(row: Any) -> Limit:
    return Limit(
        id=row["id"],
        level=row["level"],
        owner=row["owner"],
        measure=row["measure"],
        window=row["window"],
        amount=row["amount"],
        weights=row["weights"],
        currency=row["currency"],
        without_redis=row["without_redis"],
        is_archived=row["archived_at"] is not None,
        revision=row["revision"],
    )
