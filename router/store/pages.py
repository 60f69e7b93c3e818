"""Rows a page at a time: newest first, by a cursor that stays right while rows come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Table, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from router.errors import BadRequest


class Page(NamedTuple):
    rows: list[dict[str, Any]]
    has_more: bool


async def page(
    connection: AsyncConnection,
    table: Table,
    *,
    where: Sequence[ColumnElement[bool]] = (),
    after: str | None = None,
    limit: int = 20,
) -> Page:
    """At most `limit` rows, those behind the one whose id is `after`. Raises BadRequest for an `after` that is none."""
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
