"""Tenants, projects and keys written straight into the tables, as an administrator's edits leave them."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Table, insert, select, update

from router.store.database import Database
from router.store.ids import KEY, PROJECT, TENANT, new_id
from router.store.keys import Kind, key_mac, new_key, shown
from router.store.schema import changes, keys, projects, tenants

PEPPER = "p" * 32
"""As `auth.pepper`."""


class Accounts:
    """Each call is one edit, with the next revision."""

    def __init__(self, database: Database, pepper: bytes = PEPPER.encode()) -> None:
        self.database = database
        self._pepper = pepper
        self._ids: dict[str, str] = {}  # of keys

    async def tenant(self, name: str, **columns: Any) -> str:
        row = {
            **{"id": new_id(TENANT), "name": name, "isolation": "tenant", "priority": 0, "steers": False},
            **{"instance_labels": {}, "metadata": {}, "created_at": time.time()},
        }
        return await self._insert(tenants, row | columns)

    async def project(self, tenant: str, name: str = "main") -> str:
        row = {"id": new_id(PROJECT), "tenant": tenant, "name": name, "metadata": {}, "created_at": time.time()}
        return await self._insert(projects, row)

    async def key(self, project: str | None, *, kind: Kind = "inference", **columns: Any) -> str:
        """The key itself."""
        key = new_key(kind)
        row = {
            **{"id": new_id(KEY), "kind": kind, "project": project, "tenant": await self._tenant_of(project)},
            **{"name": "k", "shown": shown(key), "mac": key_mac(self._pepper, key), "models": None, "scopes": []},
            **{"metadata": {}, "created_at": time.time()},
        }
        self._ids[key] = await self._insert(keys, row | columns)
        return key

    async def new(self, name: str = "acme", *, tenant: dict[str, Any] | None = None, **columns: Any) -> str:
        """A key of a tenant's only project."""
        return await self.key(await self.project(await self.tenant(name, **(tenant or {}))), **columns)

    def id_of(self, key: str) -> str:
        return self._ids[key]

    async def change_key(self, key: str, **columns: Any) -> None:
        await self.change(keys, self._ids[key], **columns)

    async def revoke(self, key: str, at: float | None = None) -> None:
        await self.change_key(key, revoked_at=time.time() if at is None else at)

    async def change(self, table: Table, row_id: str, **columns: Any) -> None:
        async with self.database.write() as connection:
            columns["revision"] = await self._next(connection)
            await connection.execute(update(table).where(table.c.id == row_id).values(columns))

    async def _insert(self, table: Table, row: dict[str, Any]) -> str:
        async with self.database.write() as connection:
            row["revision"] = await self._next(connection)
            await connection.execute(insert(table).values(row))
        return str(row["id"])

    async def _tenant_of(self, project: str | None) -> str | None:
        if project is None:
            return None
        async with self.database.read() as connection:
            return str(await connection.scalar(select(projects.c.tenant).where(projects.c.id == project)))

    @staticmethod
    async def _next(connection: Any) -> int:
        revision: int = await connection.scalar(
            update(changes).values(revision=changes.c.revision + 1).returning(changes.c.revision)
        )
        return revision
