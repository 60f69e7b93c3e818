"""Keys: for completions, which belong to a project, and for this API, which have scopes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from router.admin.access import SCOPES, Administrator, Needs
from router.admin.desk import After, Body, Desk, Limit, Moment, shown
from router.admin.examples import A_KEY, A_NEW_KEY, A_PROJECT, answers, creates, lists
from router.admin.tenants import Label, Metadata
from router.errors import BadRequest, Conflict, Forbidden
from router.store import keys as made
from router.store.edits import Edit
from router.store.ids import KEY, new_id
from router.store.schema import keys, projects, tenants

Models = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=1000)]
Seconds = Annotated[float, Field(ge=0, le=30 * 86_400)]


class NewKey(Body):
    name: Label = Field(examples=["search in production"])
    kind: Literal["inference", "admin"] = "inference"
    project: str | None = Field(None, description="of an inference key", examples=[A_PROJECT["id"]])
    tenant: str | None = Field(None, description="of an admin key: the only one it sees")
    scopes: list[str] = Field(default_factory=list, description="of an admin key", max_length=50)
    models: Models | None = Field(None, description="the only ones it may use; null: all", examples=[["llama-3.1-8b"]])
    expires_at: Moment | None = None
    metadata: Metadata = Field(default_factory=dict)


class ChangedKey(Body):
    name: Label | None = None
    models: Models | None = None
    expires_at: Moment | None = None
    metadata: Metadata | None = None


class Rotation(Body):
    grace_s: Seconds = Field(0, description="so long the old key works beside the new one")


def keys_router(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter(tags=["keys"])
    read, write = needs("keys:read"), needs("keys:write")

    @router.post("", **creates(A_NEW_KEY))
    async def create(request: Request, body: NewKey, who: Administrator = write) -> Response:
        """The answer's `key` is the key: it is shown this once, and kept nowhere."""
        tenant = await _tenant_of(desk, body, who)

        async def build(edit: Edit) -> dict[str, Any]:
            return await insert_key(desk, edit, {**body.model_dump(), "tenant": tenant})

        return await desk.create(request, who, build)

    @router.get("", responses=lists(A_KEY))
    async def list_all(
        tenant: str | None = None,
        project: str | None = None,
        kind: Literal["inference", "admin"] | None = None,
        after: After = None,
        limit: Limit = 20,
        who: Administrator = read,
    ) -> dict[str, Any]:
        return await desk.list(keys, who, after=after, limit=limit, tenant=tenant, project=project, kind=kind)

    @router.get("/{key_id}", responses=answers(A_KEY))
    async def get(key_id: str, who: Administrator = read) -> dict[str, Any]:
        return shown(keys, await desk.one(keys, key_id, who))

    @router.patch("/{key_id}", responses=answers(A_KEY))
    async def change(key_id: str, body: ChangedKey, who: Administrator = write) -> dict[str, Any]:
        """`models` and `expires_at` may be set to null."""
        await not_above(desk, key_id, who)
        given = body.given()
        if None in (given.get("name", ""), given.get("metadata", {})):
            raise BadRequest("name and metadata cannot be null.")
        return await desk.change(keys, key_id, who, given)

    @router.delete("/{key_id}", responses=answers(A_KEY))
    async def revoke(key_id: str, who: Administrator = write) -> dict[str, Any]:
        """It is refused everywhere within seconds; what runs goes on."""
        before = await not_above(desk, key_id, who)
        now = desk.clock()
        if before["revoked_at"] is not None and before["revoked_at"] <= now:
            return shown(keys, before)
        return await desk.change(keys, key_id, who, {"revoked_at": now}, action="revoke")

    @router.post("/{key_id}/rotate", **creates(A_NEW_KEY))
    async def rotate(request: Request, key_id: str, body: Rotation, who: Administrator = write) -> Response:
        """A new key in the place of this one, which works for `grace_s` more."""
        await not_above(desk, key_id, who)
        return await desk.create(request, who, lambda edit: replace_key(desk, edit, key_id, body.grace_s))

    return router


async def insert_key(desk: Desk, edit: Edit, values: dict[str, Any]) -> dict[str, Any]:
    """The new row, with its `key`."""
    key = made.new_key(values["kind"])
    secret = {"shown": made.shown(key), "mac": made.key_mac(desk.pepper, key)}
    row = await edit.insert(keys, "key.create", {"id": new_id(KEY), **values, **secret})
    return {**shown(keys, row), "key": key}


async def replace_key(desk: Desk, edit: Edit, key_id: str, grace_s: float = 0) -> dict[str, Any]:
    """The new row, with its `key`; the old one works so much longer. Raises Conflict."""
    before = await edit.read(keys, key_id)
    if before["revoked_at"] is not None:
        raise Conflict("The key is revoked, or replaced already.")
    taken = ("name", "kind", "tenant", "project", "scopes", "models", "expires_at", "metadata")
    answer = await insert_key(desk, edit, {name: before[name] for name in taken})
    await edit.update(keys, "key.rotate", before, {"revoked_at": edit.at + grace_s, "replaced_by": answer["id"]})
    return answer


async def _tenant_of(desk: Desk, body: NewKey, who: Administrator) -> str | None:
    """The tenant of the new key. Raises where the administrator may not make it, or it makes no sense."""
    if body.kind == "admin":
        return await _tenant_of_admin(desk, body, who)
    if body.project is None or body.tenant is not None or body.scopes:
        raise BadRequest("An inference key has a project; tenant and scopes are for admin keys.", param="project")
    project = await desk.one(projects, body.project, who)
    tenant = await desk.one(tenants, project["tenant"], who)
    if project["archived_at"] is not None or tenant["archived_at"] is not None:
        raise Conflict("The project or its tenant is archived.")
    return str(tenant["id"])


async def _tenant_of_admin(desk: Desk, body: NewKey, who: Administrator) -> str | None:
    unknown = set(body.scopes) - SCOPES
    if unknown or not body.scopes:
        raise BadRequest(f"scopes must be some of {', '.join(sorted(SCOPES))}.", param="scopes")
    if body.project is not None or body.models is not None:
        raise BadRequest("An admin key has scopes, and no project and models.", param="project")
    if not all(who.may(scope) for scope in body.scopes):
        raise Forbidden("Nobody can give a key more than they have themselves.", code="missing_scope")
    if not who.of(body.tenant):
        raise Forbidden("The key belongs to a tenant, and so must the new one.", code="tenant_key")
    if body.tenant is not None:
        await desk.one(tenants, body.tenant, who)
    return body.tenant


async def not_above(desk: Desk, key_id: str, who: Administrator) -> dict[str, Any]:
    """Nobody touches a key that may do more than they. Raises UnknownObject, Forbidden."""
    row = await desk.one(keys, key_id, who)
    if not all(who.may(scope) for scope in row["scopes"]):
        raise Forbidden("That key may do more than yours.", code="missing_scope")
    return row
