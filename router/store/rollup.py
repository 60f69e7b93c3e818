"""Sums by hour, by day and by tag, exact at every moment.

`add_to_rollups` runs inside the transaction that inserts the rows, with those rows that were really inserted. A batch
that is written again inserts nothing and so adds nothing; one that fails takes its sums with it. Hence each row is in
the sums exactly once, however late it comes and however often it is replayed.

`rebuild` makes a day's sums anew from its rows. Both hold one lock on PostgreSQL until they commit, shared by those who
add, alone for who rebuilds: a batch is either seen by the rebuilding or added after it. SQLite has one writer anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Table, delete, func, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from router.store.bands import INPUT_CLASSES, band
from router.store.rollup_queries import ADDED, DAY_HOURS, HOUR_S, SUMS, WHO, sums_of_day
from router.store.schema import daily, daily_tags, hourly, hourly_tags, requests

_LOCK = 0x726F6C6C2D757073  # of pg_advisory_xact_lock

Row = Mapping[str, Any]


class RowsAreGone(ValueError):
    """A day whose sums cannot be made from its rows any more."""


async def add_to_rollups(connection: AsyncConnection, rows: Iterable[Row]) -> None:
    """Adds rows of `requests`, by the names of its columns: those the transaction has inserted, each once."""
    by_hour, by_day, by_hour_tag, by_day_tag = _Sums(), _Sums(), _Sums(), _Sums()
    for row in rows:
        sums = _sums_of(row)
        prompt = sum(row[f"{name}_tokens"] for name in INPUT_CLASSES)
        currency = row["currency"] or ""
        where = (*(row[name] for name in WHO), band(prompt), currency)
        hour = int(row["at"]) // HOUR_S
        by_hour.add((hour, *where), sums)
        by_day.add((row["day"], *where), sums)
        for tag in row["tags"]:
            by_hour_tag.add((hour, row["tenant"], tag, row["instance"], currency), sums)
            by_day_tag.add((row["day"], row["tenant"], tag, currency), sums)
    await lock(connection, shared=True)
    tables = ((hourly, by_hour), (daily, by_day), (hourly_tags, by_hour_tag), (daily_tags, by_day_tag))
    for table, found in tables:
        if found:
            await connection.execute(_upsert(table, connection.dialect.name), found.rows(table))


async def rebuild(connection: AsyncConnection, day: int) -> None:
    """Makes the sums of a day (since 1970-01-01 UTC) anew from its rows.

    Own costs are 0 afterwards: allocate those of its hours again. Raises RowsAreGone, and changes nothing, where
    retention has taken rows that the sums still have.
    """
    await lock(connection, shared=False)
    summed = await connection.scalar(select(func.sum(daily.c.requests)).where(daily.c.day == day))
    there = await connection.scalar(select(func.count()).select_from(requests).where(requests.c.day == day))
    if (summed or 0) > (there or 0):
        raise RowsAreGone(f"rows of day {day} are gone: its sums cannot be made anew")
    for table in (hourly, daily, hourly_tags, daily_tags):
        await connection.execute(delete(table).where(_of_day(table, day)))
        columns = [*_keys(table), *SUMS]
        await connection.execute(table.insert().from_select(columns, sums_of_day(table, day, connection.dialect.name)))


def _of_day(table: Table, day: int) -> ColumnElement[bool]:
    return table.c.day == day if "day" in table.c else table.c.hour.between(day * DAY_HOURS, (day + 1) * DAY_HOURS - 1)


def _sums_of(row: Row) -> list[Any]:
    aborted = row["finish"] == "client_gone"
    failed = not aborted and (row["finish"] != "complete" or row["status"] >= 400)
    return [1, int(failed), int(aborted), int(not row["cached_known"]), *(row[name] for name in ADDED), 0]


class _Sums(dict[tuple[Any, ...], list[Any]]):
    def add(self, where: tuple[Any, ...], sums: Sequence[Any]) -> None:
        held = self.get(where)
        self[where] = list(sums) if held is None else [one + more for one, more in zip(held, sums, strict=True)]

    def rows(self, table: Table) -> list[dict[str, Any]]:
        """In the order of the key: two writers that took rows in different orders would wait for each other."""
        names = [*_keys(table), *SUMS]
        return [dict(zip(names, (*where, *self[where]), strict=True)) for where in sorted(self)]


def _keys(table: Table) -> list[str]:
    return [column.name for column in table.primary_key]


@cache
def _upsert(table: Table, dialect: str) -> Any:
    insert = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(table)
    return insert.on_conflict_do_update(
        index_elements=list(table.primary_key), set_={name: table.c[name] + insert.excluded[name] for name in SUMS}
    )


async def lock(connection: AsyncConnection, *, shared: bool) -> None:
    if connection.dialect.name == "postgresql":
        function = "pg_advisory_xact_lock_shared" if shared else "pg_advisory_xact_lock"
        await connection.execute(text(f"SELECT {function}(:lock)"), {"lock": _LOCK})
