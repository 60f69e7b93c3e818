"""Changes by administrators: each one a transaction with a revision and an audit row.

The revision is stamped on every row that is written, so that gateways find what is new; taking it locks the one row of
`changes`, so that edits follow each other, and neither revisions nor audit numbers ever have gaps or come out of order.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import Table, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from router.errors import Conflict
from router.store import audit
from router.store.database import Database
from router.store.schema import changes

Row = Mapping[str, Any]
T = TypeVar("T")

_HIDDEN = frozenset(("mac", "revision"))  # of no use in the audit log, or of too much


class Edit:
    """What one administrator changes at once."""

    def __init__(self, connection: AsyncConnection, *, actor: str, secret: bytes, revision: int, at: float) -> None:
        self.connection = connection
        self.actor = actor
        self.revision = revision
        self.at = at
        self._secret = secret

    async def insert(self, table: Table, action: str, values: Row) -> dict[str, Any]:
        """The row as it was written. Raises Conflict where there is such a one already."""
        row = {**values, "created_at": self.at, **self._revised(table)}
        try:
            await self.connection.execute(insert(table).values(row))
        except IntegrityError as error:
            raise Conflict("There is one of this name already, or what it belongs to does not exist.") from error
        await self.note(action, row["id"], tenant=_tenant(table, row), before=None, after=row)
        return await self.read(table, row["id"])

    async def find(self, table: Table, **equal: object) -> dict[str, Any] | None:
        """The row that has these values and is not archived, if there is one."""
        where = [table.c[name] == value for name, value in {**equal, "archived_at": None}.items()]
        found = (await self.connection.execute(select(table).where(*where))).mappings().first()
        return None if found is None else dict(found)

    async def update(self, table: Table, action: str, before: Row, values: Row) -> dict[str, Any]:
        """The row after it. Nothing is written or noted where nothing is different.

        before: as it was seen; what others have changed since is read again.
        """
        before = await self.read(table, before["id"])
        different = {name: value for name, value in values.items() if before[name] != value}
        if not different:
            return before
        row = {**different, **self._revised(table)}
        try:
            await self.connection.execute(update(table).where(table.c.id == before["id"]).values(row))
        except IntegrityError as error:
            raise Conflict("There is one of this name already.") from error
        was = {name: before[name] for name in different}
        await self.note(action, before["id"], tenant=_tenant(table, before), before=was, after=different)
        return await self.read(table, before["id"])

    async def note(
        self, action: str, about: str, *, tenant: str | None = None, before: Row | None = None, after: Row | None = None
    ) -> None:
        """An audit row. What is secret of a row is left out."""
        await audit.append(
            self.connection,
            self._secret,
            at=self.at,
            actor=self.actor,
            action=action,
            object=about,
            tenant=tenant,
            before=_public(before),
            after=_public(after),
        )

    def _revised(self, table: Table) -> Row:
        return {"revision": self.revision} if "revision" in table.c else {}

    async def read(self, table: Table, row_id: str) -> dict[str, Any]:
        """As it is while nobody else changes anything."""
        found = await self.connection.execute(select(table).where(table.c.id == row_id))
        return dict(found.mappings().one())


@asynccontextmanager
async def edit(
    database: Database, *, actor: str, secret: bytes, clock: Callable[[], float] = time.time
) -> AsyncIterator[Edit]:
    """`secret`: what the audit log is chained with. Raises StoreUnavailable."""
    async with database.write() as connection:
        revision = await _next_revision(connection)
        yield Edit(connection, actor=actor, secret=secret, revision=revision, at=clock())


async def revision_of(connection: AsyncConnection) -> int:
    """Of the last change; 0: there was none."""
    return (await connection.execute(select(changes.c.revision))).scalar() or 0


async def _next_revision(connection: AsyncConnection) -> int:
    taken = await connection.execute(
        update(changes).values(revision=changes.c.revision + 1).returning(changes.c.revision)
    )
    revision = taken.scalar()
    if revision is not None:
        return int(revision)
    await connection.execute(insert(changes).values(id=1, revision=1))
    return 1


def _tenant(table: Table, row: Row) -> str | None:
    tenant: str | None = row["id"] if table.name == "tenants" else row.get("tenant")
    return tenant


def _public(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {name: value for name, value in row.items() if name not in _HIDDEN}
