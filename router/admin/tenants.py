"""Tenants: whose caches, limits and bills are their own."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, StringConstraints

from router.admin.access import Administrator, Needs
from router.admin.desk import After, Archived, Body, Desk, Limit, shown
from router.admin.examples import A_TENANT, answers, creates, lists
from router.errors import Forbidden
from router.store.edits import Edit
from router.store.ids import TENANT, new_id
from router.store.schema import tenants

Label = Annotated[str, StringConstraints(min_length=1, max_length=200, strip_whitespace=True)]
Isolation = Annotated[str, StringConstraints(pattern=r"^(tenant|key|shared|group:[\w.-]{1,60})$")]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=500)]], Field(max_length=16)
]


class NewTenant(Body):
    name: Label = Field(examples=["acme"])
    isolation: Isolation = Field("tenant", description="whose caches it shares: tenant, key, shared or group:NAME")
    priority: int = Field(0, ge=-1000, le=1000, description="of its requests, and the highest they may ask for")
    steers: bool = Field(False, description="may set the fields that steer an engine")
    instance_labels: Metadata = Field(default_factory=dict, description="of the engines it must be placed on")
    metadata: Metadata = Field(default_factory=dict)


class ChangedTenant(Body):
    name: Label | None = None
    isolation: Isolation | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)
    steers: bool | None = None
    instance_labels: Metadata | None = None
    metadata: Metadata | None = None


def tenants_router(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter(tags=["tenants"])
    read, write = needs("tenants:read"), needs("tenants:write")
    write_all = needs("tenants:write", all_tenants=True)

    @router.post("", **creates(A_TENANT))
    async def create(request: Request, body: NewTenant, who: Administrator = write_all) -> Response:
        """A new tenant: it has no project and no key yet."""

        async def build(edit: Edit) -> dict[str, Any]:
            row = await edit.insert(tenants, "tenant.create", {"id": new_id(TENANT), **body.model_dump()})
            return shown(tenants, row)

        return await desk.create(request, who, build)

    @router.get("", responses=lists(A_TENANT))
    async def list_all(
        after: After = None, limit: Limit = 20, archived: Archived = False, who: Administrator = read
    ) -> dict[str, Any]:
        """Newest first."""
        return await desk.list(tenants, who, after=after, limit=limit, archived=archived)

    @router.get("/{tenant_id}", responses=answers(A_TENANT))
    async def get(tenant_id: str, who: Administrator = read) -> dict[str, Any]:
        return shown(tenants, await desk.one(tenants, tenant_id, who))

    @router.patch("/{tenant_id}", responses=answers(A_TENANT))
    async def change(tenant_id: str, body: ChangedTenant, who: Administrator = write) -> dict[str, Any]:
        """A new isolation is a cold cache. A tenant's own administrator may change its name and metadata only."""
        given = without_none(body)
        if who.tenant is not None and given.keys() - {"name", "metadata"}:
            raise Forbidden("A tenant's own administrator may change its name and metadata only.", code="tenant_key")
        return await desk.change(tenants, tenant_id, who, given)

    @router.delete("/{tenant_id}", responses=answers(A_TENANT))
    async def archive(tenant_id: str, who: Administrator = write_all) -> dict[str, Any]:
        """Its keys work no more; its books stay."""
        return await desk.archive(tenants, tenant_id, who)

    return router


def without_none(body: Body) -> dict[str, Any]:
    """For what cannot be emptied: null counts as not given."""
    return {name: value for name, value in body.given().items() if value is not None}
