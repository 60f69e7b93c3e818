"""Who changed what, and whether the log of it is whole."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from router.admin.access import Administrator, Needs
from router.admin.desk import Body, Desk, Limit, listing
from router.store import audit as log

Before = Annotated[int | None, Query(ge=1, lt=2**63, description="the last id of the page before")]


class KeptHead(Body):
    number: int = Field(ge=0, lt=2**63)
    mac: str = Field(pattern=r"^[0-9a-f]{64}$")


def audit_router(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter(tags=["audit"])
    read, read_all = needs("audit:read"), needs("audit:read", all_tenants=True)

    @router.get("")
    async def list_all(
        after: Before = None,
        limit: Limit = 20,
        action: str | None = None,
        object: str | None = None,
        who: Administrator = read,
    ) -> dict[str, Any]:
        """Newest first."""
        async with desk.database.read() as connection:
            found = await log.page(
                connection, tenant=who.tenant, action=action, object=object, before=after, limit=limit + 1
            )
        rows = [_shown(row) for row in found]
        return listing(rows[:limit], has_more=len(rows) > limit)

    @router.get("/head")
    async def head(who: Administrator = read_all) -> dict[str, Any]:
        """To be kept elsewhere: against it, what is cut off the end of the log shows."""
        async with desk.database.read() as connection:
            return (await log.head(connection))._asdict()

    @router.post("/verify")
    async def verify(body: KeptHead | None = None, who: Administrator = read_all) -> dict[str, Any]:
        """Whether each row is as it was written and none is missing; since a head that was kept, if one is given."""
        kept = None if body is None else log.Head(body.number, body.mac)
        async with desk.database.read() as connection:
            verdict = await log.verify(connection, desk.audit_secret, kept=kept)
        return {"whole": not verdict.broken, "broken": verdict.broken or None, "head": verdict.head._asdict()}

    return router


def _shown(row: Any) -> dict[str, Any]:
    fields = {name: value for name, value in row.items() if name not in ("number", "mac", "object")}
    return {"id": row["number"], "object": "audit", "about": row["object"], **fields}
