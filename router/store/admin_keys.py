"""Keys of administrators, looked up for each request: there are few of both."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import select

from router.store.database import Database
from router.store.schema import keys, projects, tenants


class FoundKey(NamedTuple):
    id: str
    kind: str
    scopes: list[str]
    tenant: str | None


async def find(database: Database, mac: bytes, *, now: float) -> FoundKey | None:
    """A key that works: neither expired nor revoked, and neither its project nor its tenant is archived."""
    query = (
        select(keys.c.id, keys.c.kind, keys.c.scopes, keys.c.tenant)
        .outerjoin_from(keys, tenants, keys.c.tenant == tenants.c.id)
        .outerjoin(projects, keys.c.project == projects.c.id)
        .where(
            keys.c.mac == mac,
            keys.c.expires_at.is_(None) | (keys.c.expires_at > now),
            keys.c.revoked_at.is_(None) | (keys.c.revoked_at > now),
            tenants.c.archived_at.is_(None),
            projects.c.archived_at.is_(None),
        )
    )
    async with database.read() as connection:
        found: Any = (await connection.execute(query)).first()
    return None if found is None else FoundKey(*found)


async def exist(database: Database) -> bool:
    """Whether there has ever been an admin key: one that was revoked opens nothing, to nobody."""
    query = select(keys.c.id).where(keys.c.kind == "admin").limit(1)
    async with database.read() as connection:
        return (await connection.execute(query)).first() is not None


async def has_tenant(database: Database, tenant: str) -> bool:
    """One that is not archived."""
    query = select(tenants.c.id).where(tenants.c.id == tenant, tenants.c.archived_at.is_(None))
    async with database.read() as connection:
        return (await connection.execute(query)).first() is not None
