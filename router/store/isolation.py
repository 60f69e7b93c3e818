"""What the database knows of isolation: which engines honour salts, and who shares a cache with whom."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import delete, insert, select

from router.store.database import Database
from router.store.schema import isolation_proofs, keys, projects, tenants


class ProofRow(NamedTuple):
    """boot: of the engine's process. at: wall clock."""

    instance: str
    model: str
    boot: str
    verified: bool
    method: str
    detail: str
    at: float


class TenantRule(NamedTuple):
    """isolation: tenant | key | shared | group:NAME. keys: ids of those that are not revoked."""

    id: str
    name: str
    isolation: str
    labels: dict[str, str]
    keys: tuple[str, ...]


class ProofStore:
    """The last proof of each engine and model. Both raise StoreUnavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self) -> list[ProofRow]:
        async with self._database.read() as connection:
            return [ProofRow(*row) for row in await connection.execute(select(isolation_proofs))]

    async def write(self, row: ProofRow) -> None:
        """In place of the one of an earlier process."""
        table = isolation_proofs
        async with self._database.write() as connection:
            await connection.execute(delete(table).where(table.c.instance == row.instance, table.c.model == row.model))
            await connection.execute(insert(table), row._asdict())


async def tenant_rules(database: Database) -> list[TenantRule]:
    """Of all tenants that are not archived, by name. Keys are told where each has a domain of its own."""
    async with database.read() as connection:
        of: dict[str, list[str]] = {}
        own = (
            select(projects.c.tenant, keys.c.id)
            .join(projects, keys.c.project == projects.c.id)
            .join(tenants, projects.c.tenant == tenants.c.id)
            .where(tenants.c.isolation == "key", keys.c.kind == "inference", keys.c.revoked_at.is_(None))
        )
        for tenant, key in await connection.execute(own):
            of.setdefault(tenant, []).append(key)
        wanted = select(tenants.c.id, tenants.c.name, tenants.c.isolation, tenants.c.instance_labels)
        rows = await connection.execute(wanted.where(tenants.c.archived_at.is_(None)).order_by(tenants.c.name))
        return [
            TenantRule(tenant, name, isolation, labels, tuple(sorted(of.get(tenant, ()))))
            for tenant, name, isolation, labels in rows
        ]
