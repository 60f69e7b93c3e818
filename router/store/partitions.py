"""The days of `requests` on PostgreSQL: a table each, so that old ones go at once and leave no holes.

On SQLite the day is the first part of the key, and there is nothing to do.
"""

from __future__ import annotations

import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

AHEAD_DAYS = 3
_EPOCH = datetime.date(1970, 1, 1)
_LOCK = 0x7061727469746E73  # of pg_advisory_xact_lock

_PARTITIONS = "pg_inherits JOIN pg_class ON oid = inhrelid WHERE inhparent = 'requests'::regclass"


def partition_name(day: int) -> str:
    """E.g. requests_20261130; day: days since 1970-01-01 UTC."""
    return f"requests_{_EPOCH + datetime.timedelta(days=day):%Y%m%d}"


async def ensure(connection: AsyncConnection, day: int) -> None:
    """Before the first row of a day is written, in the same transaction. Costs one look where it is there.

    Made apart and attached, which waits neither for those who read `requests` nor for those who write it; a partition
    created in its place would wait for all of them.
    """
    if connection.dialect.name != "postgresql" or await _exists(connection, day):
        return
    await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    if await _exists(connection, day):
        return
    name = partition_name(day)
    await connection.execute(text(f"CREATE TABLE {name} (LIKE requests INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"))
    await connection.execute(
        text(f"ALTER TABLE requests ATTACH PARTITION {name} FOR VALUES FROM ({day}) TO ({day + 1})")
    )


async def ensure_ahead(connection: AsyncConnection, today: int) -> None:
    """So that midnight is nothing special."""
    for day in range(today, today + AHEAD_DAYS + 1):
        await ensure(connection, day)


async def days_before(connection: AsyncConnection, day: int) -> list[int]:
    """The days older than that whose partition is there, oldest first (PostgreSQL)."""
    names = await connection.scalars(text(f"SELECT relname FROM {_PARTITIONS} AND relname ~ '^requests_[0-9]{{8}}$'"))
    days = sorted((datetime.date.fromisoformat(name.removeprefix("requests_")) - _EPOCH).days for name in names)
    return [found for found in days if found < day]


async def _exists(connection: AsyncConnection, day: int) -> bool:
    query = text(f"SELECT 1 FROM {_PARTITIONS} AND relname = :name")  # to_regclass may answer from before a lock
    return await connection.scalar(query, {"name": partition_name(day)}) is not None
