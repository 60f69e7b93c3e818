"""Objects of administrators, one by one and page by page: newest first, by a cursor that stays right while rows come
and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Table, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from router.errors import BadRequest, Conflict
from router.store.database import Database
from router.store.edits import Edit

__all__ = ["Page", "Row", "Table", "list_page", "owner", "read_one", "succeed"]

Row = dict[str, Any]


class Page(NamedTuple):
    rows: list[Row]
    has_more: bool


def owner(table: Table, row: Mapping[str, Any]) -> str | None:
    """The tenant it belongs to; None: nobody's."""
    tenant: str | None = row["id"] if table.name == "tenants" else row.get("tenant")
    return tenant


async def read_one(database: Database, table: Table, object_id: str) -> Row | None:
    async with database.read() as connection:
        found = (await connection.execute(select(table).where(table.c.id == object_id))).mappings().first()
    return None if found is None else dict(found)


async def list_page(
    database: Database,
    table: Table,
    *,
    tenant: str | None,
    equal: Mapping[str, object],
    archived: bool,
    after: str | None,
    limit: int,
) -> Page:
    """At most `limit` rows, those behind the one whose id is `after`.

    tenant: of this one only. equal: columns and the values they must have; None: any. archived: also what is archived.
    Raises BadRequest for an `after` that is none.
    """
    where: list[ColumnElement[bool]] = [table.c[name] == value for name, value in equal.items() if value is not None]
    if tenant is not None:
        where.append((table.c.id if table.name == "tenants" else table.c.tenant) == tenant)
    if not archived and "archived_at" in table.c:
        where.append(table.c.archived_at.is_(None))
    async with database.read() as connection:
        return await _page(connection, table, where, after, limit)


async def _page(
    connection: AsyncConnection, table: Table, where: list[ColumnElement[bool]], after: str | None, limit: int
) -> Page:
    order = (table.c.created_at.desc(), table.c.id.desc())
    query = select(table).where(*where).order_by(*order).limit(limit + 1)
    if after is not None:
        found = (await connection.execute(select(table.c.created_at).where(table.c.id == after, *where))).first()
        if found is None:
            raise BadRequest("The cursor is not the id of such an object.", param="after", code="invalid_cursor")
        earlier = and_(table.c.created_at == found.created_at, table.c.id < after)
        query = query.where(or_(table.c.created_at < found.created_at, earlier))
    rows = [dict(row) for row in (await connection.execute(query)).mappings()]
    return Page(rows[:limit], len(rows) > limit)


async def succeed(edit: Edit, table: Table, same: Mapping[str, object], begins: float) -> float | None:
    """A version of a price or a cost ends where the next one begins: ends the one that holds at `begins`.

    same: what the versions have in common. Returns when the next one begins, None: there is none yet. Raises Conflict.
    """
    query = select(table).where(*(table.c[name].is_not_distinct_from(value) for name, value in same.items()))
    for row in (await edit.connection.execute(query.order_by(table.c.valid_from))).mappings():
        if row["valid_from"] == begins:
            raise Conflict("A version begins at that time already.")
        if row["valid_from"] > begins:
            return float(row["valid_from"])
        if row["valid_to"] is None or row["valid_to"] > begins:
            await edit.update(table, f"{table.name.rstrip('s')}.end", dict(row), {"valid_to": begins})
    return None
