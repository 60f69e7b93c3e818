"""The ledger's rows: written once each, however often they come, and added to the sums in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import bindparam, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from router.store import partitions
from router.store.rollup import add_to_rollups
from router.store.schema import TOKEN_CLASSES, daily, instance_hours, requests

Row = Mapping[str, Any]

_OF_DATA = ("22", "23")
"""Classes of SQLSTATE: data exceptions, violated constraints."""


class SeenHour(NamedTuple):
    """That an engine was there in an hour. Times are wall clock; `per_hour`: by the configuration of a gateway."""

    hour: int
    instance: str
    currency: str
    seen_from: float
    seen_to: float
    ranks: int
    capacity_tokens: int
    per_hour: Decimal | None


async def add_rows(connection: AsyncConnection, rows: Sequence[Row]) -> int:
    """Inserts those that are not there yet, and returns how many. Rows have all columns of `requests`."""
    by_key = {(row["day"], row["id"]): row for row in rows}
    for day in {day for day, _ in by_key}:
        await partitions.ensure(connection, day)
    inserted = await connection.execute(_insert(connection.dialect.name), list(by_key.values()))
    added = [by_key[day, name] for day, name in inserted]
    if added:
        await add_to_rollups(connection, added)
    return len(added)


@cache
def _insert(dialect: str) -> Any:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(requests).on_conflict_do_nothing().returning(requests.c.day, requests.c.id)


def speaks_against_row(error: Exception) -> bool:
    """Whether a row was refused for what is in it. If not, the database is not as it should be: starting, too busy,
    without the right tables.
    """
    if not isinstance(error, SQLAlchemyError):
        return True
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    if state is not None:
        return str(state)[:2] in _OF_DATA
    told = getattr(getattr(error, "orig", None), "__cause__", None)  # the driver's own error
    return isinstance(error, (DataError, IntegrityError)) or isinstance(told, ValueError)


async def note_seen(connection: AsyncConnection, seen: Sequence[SeenHour]) -> None:
    """What is known of the same hour becomes wider; what it costs is allocated later (`costs.py`)."""
    if not seen:
        return
    insert = (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(instance_hours)
    new, old = insert.excluded, instance_hours.c
    least, most = (func.least, func.greatest) if connection.dialect.name == "postgresql" else (func.min, func.max)
    wider = insert.on_conflict_do_update(
        index_elements=["hour", "instance"],
        set_={
            "seen_from": least(old.seen_from, new.seen_from),
            "seen_to": most(old.seen_to, new.seen_to),
            "ranks": new.ranks,
            "capacity_tokens": new.capacity_tokens,
            "per_hour": new.per_hour,
        },
    )
    nothing = {"cost": Decimal(0), "idle": Decimal(0)}
    await connection.execute(wider, [{**each._asdict(), **nothing} for each in sorted(seen)])


async def tenants_of_rows(connection: AsyncConnection) -> Sequence[str]:
    """Ids of all whose requests there have been; "" among them where the gateway ran open."""
    return (await connection.scalars(select(daily.c.tenant).distinct())).all()


async def erase_end_user(connection: AsyncConnection, pseudonyms: Sequence[str]) -> int:
    """Rows keep their figures and lose the pseudonym. Returns how many there were."""
    found = await connection.execute(update(requests).where(requests.c.end_user.in_(pseudonyms)).values(end_user=None))
    return found.rowcount


# ---------------------------------------------------------------------------------------------------------------------
# Pricing anew

_PRICED = (
    requests.c.day, requests.c.id, requests.c.at, requests.c.model, requests.c.tenant, requests.c.finish,
    requests.c.cached_known, requests.c.predicted_hit_tokens, requests.c.blind_hit_tokens, requests.c.price,
    requests.c.currency, requests.c.cost, requests.c.output_cost, requests.c.cost_without_cache,
    requests.c.cost_cache_blind,
    *(requests.c[f"{name}_tokens"] for name in TOKEN_CLASSES),
)  # fmt: skip


async def rows_to_price(
    connection: AsyncConnection, day: int, *, since: float, until: float, after: str, most: int
) -> Sequence[Row]:
    """What a price of theirs depends on, of the day's rows from `since` until before `until` (wall clock), by id."""
    query = (
        select(*_PRICED)
        .where(requests.c.day == day, requests.c.id > after, requests.c.at >= since, requests.c.at < until)
        .order_by(requests.c.id)
        .limit(most)
    )
    return [dict(row) for row in (await connection.execute(query)).mappings()]


async def set_costs(connection: AsyncConnection, priced: Sequence[Row]) -> None:
    """`priced`: with the key and the columns of money."""
    if not priced:
        return
    names = ("price", "currency", "cost", "output_cost", "cost_without_cache", "cost_cache_blind")
    await connection.execute(
        update(requests)
        .where(requests.c.day == bindparam("of_day"), requests.c.id == bindparam("of_id"))
        .values({name: bindparam(f"new_{name}") for name in names}),
        [{"of_day": row["day"], "of_id": row["id"], **{f"new_{name}": row[name] for name in names}} for row in priced],
    )
