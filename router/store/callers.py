"""Whom requests are from, as the tables say it. Gateways keep it in memory (`serving/callers.py`); here it is read.

An archived tenant or project ends all its keys. So a key is read anew when it, its project or its tenant has changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Any, NamedTuple

from sqlalchemy import Select, func, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from router.store.database import Database
from router.store.schema import changes, keys, projects, tenants

_AT_ONCE = 50  # rows: what a gateway takes up in less than a millisecond


class TenantRow(NamedTuple):
    id: str
    name: str
    isolation: str  # tenant | key | shared | group:NAME
    priority: int
    steers: bool
    labels: Mapping[str, str]
    until: float  # wall clock


class KeyRow(NamedTuple):
    """until: when it, its project or its tenant ends, wall clock; a key that was replaced or revoked may end later."""

    id: str
    mac: bytes
    tenant: str
    project: str
    models: tuple[str, ...] | None
    until: float


class Snapshot:
    """Identity at one moment. `after`: what has changed since that revision; None: all there is.

    Of all there is, keys that have ended are left out.
    """

    def __init__(self, connection: AsyncConnection, revision: int) -> None:
        self._connection = connection
        self.revision = revision

    async def tenants(self, after: int | None = None) -> AsyncIterator[list[TenantRow]]:
        query = select(*_TENANT)
        if after is not None:
            query = query.where(tenants.c.revision > after)
        async for rows in self._partitions(query):
            yield [TenantRow._make((*facts, _earliest((archived_at,)))) for *facts, archived_at in rows]

    async def keys(self, after: int | None = None, *, now: float = 0.0) -> AsyncIterator[list[KeyRow]]:
        """`now`: wall clock."""
        if after is None:
            ends = (keys.c.expires_at, keys.c.revoked_at, projects.c.archived_at, tenants.c.archived_at)
            query: Any = _KEYS.where(*(or_(end.is_(None), end > now) for end in ends))
        else:
            query = _changed(after)
        async for rows in self._partitions(query):
            yield [
                KeyRow(key, mac, tenant, project, None if models is None else tuple(models), _earliest(ends))
                for key, mac, tenant, project, models, *ends in rows
            ]

    async def _partitions(self, query: Any) -> AsyncIterator[Any]:
        async with self._connection.stream(query) as result:
            async for rows in result.partitions(_AT_ONCE):
                yield rows


@asynccontextmanager
async def snapshot(database: Database) -> AsyncIterator[Snapshot]:
    """Raises StoreUnavailable."""
    async with database.read() as connection:
        yield Snapshot(connection, await _revision(connection))


async def revision(database: Database) -> int:
    """Of the last change to identity and rules; 0: there was none. Raises StoreUnavailable."""
    async with database.read() as connection:
        return await _revision(connection)


async def _revision(connection: AsyncConnection) -> int:
    return (await connection.scalar(select(func.max(changes.c.revision)))) or 0


_TENANT = (
    tenants.c.id,
    tenants.c.name,
    tenants.c.isolation,
    tenants.c.priority,
    tenants.c.steers,
    tenants.c.instance_labels,
    tenants.c.archived_at,
)
_KEYS: Select[Any] = (
    select(
        keys.c.id,
        keys.c.mac,
        tenants.c.id.label("tenant"),
        projects.c.id.label("project"),
        keys.c.models,
        keys.c.expires_at,
        keys.c.revoked_at,
        projects.c.archived_at.label("project_archived_at"),
        tenants.c.archived_at.label("tenant_archived_at"),
    )
    .join(projects, keys.c.project == projects.c.id)
    .join(tenants, projects.c.tenant == tenants.c.id)
    .where(keys.c.kind == "inference")
)


def _changed(after: int) -> Any:
    """Three parts, each with an index to go by; a key may come twice."""
    of_tenants = select(tenants.c.id).where(tenants.c.revision > after)
    of_projects = select(projects.c.id).where(projects.c.revision > after)
    within_tenants = select(projects.c.id).where(projects.c.tenant.in_(of_tenants))
    return union_all(
        _KEYS.where(keys.c.revision > after),
        _KEYS.where(keys.c.project.in_(of_projects)),
        _KEYS.where(keys.c.project.in_(within_tenants)),
    )


def _earliest(ends: Iterable[float | None]) -> float:
    return min((end for end in ends if end is not None), default=inf)
