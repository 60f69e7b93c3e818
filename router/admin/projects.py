"""Projects: a tenant's business lines. Keys for completions belong to one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from router.admin.access import Administrator, Needs
from router.admin.desk import After, Archived, Body, Desk, Limit, shown
from router.admin.examples import A_PROJECT, A_TENANT, answers, creates, lists
from router.admin.tenants import Label, Metadata, without_none
from router.errors import Conflict
from router.store.edits import Edit
from router.store.ids import PROJECT, new_id
from router.store.schema import projects, tenants


class NewProject(Body):
    tenant: str = Field(examples=[A_TENANT["id"]])
    name: Label = Field(examples=["search"])
    metadata: Metadata = Field(default_factory=dict)


class ChangedProject(Body):
    name: Label | None = None
    metadata: Metadata | None = None


def projects_router(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter(tags=["projects"])
    read, write = needs("tenants:read"), needs("tenants:write")

    @router.post("", **creates(A_PROJECT))
    async def create(request: Request, body: NewProject, who: Administrator = write) -> Response:
        tenant = await desk.one(tenants, body.tenant, who)
        if tenant["archived_at"] is not None:
            raise Conflict("The tenant is archived.")

        async def build(edit: Edit) -> dict[str, Any]:
            row = await edit.insert(projects, "project.create", {"id": new_id(PROJECT), **body.model_dump()})
            return shown(projects, row)

        return await desk.create(request, who, build)

    @router.get("", responses=lists(A_PROJECT))
    async def list_all(
        tenant: str | None = None,
        after: After = None,
        limit: Limit = 20,
        archived: Archived = False,
        who: Administrator = read,
    ) -> dict[str, Any]:
        return await desk.list(projects, who, after=after, limit=limit, archived=archived, tenant=tenant)

    @router.get("/{project_id}", responses=answers(A_PROJECT))
    async def get(project_id: str, who: Administrator = read) -> dict[str, Any]:
        return shown(projects, await desk.one(projects, project_id, who))

    @router.patch("/{project_id}", responses=answers(A_PROJECT))
    async def change(project_id: str, body: ChangedProject, who: Administrator = write) -> dict[str, Any]:
        return await desk.change(projects, project_id, who, without_none(body))

    @router.delete("/{project_id}", responses=answers(A_PROJECT))
    async def archive(project_id: str, who: Administrator = write) -> dict[str, Any]:
        """Its keys work no more."""
        return await desk.archive(projects, project_id, who)

    return router
