"""LiteLLM's routes for keys and teams (docs.litellm.ai, "Virtual keys"), over our keys and tenants.

A team is a tenant, and its keys belong to its project `default`. Budgets and rates become limits. What is asked for and
not kept here is refused by name rather than dropped: a limit that nobody holds is worse than an error.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import Field

from router.admin.access import Administrator, Needs
from router.admin.api_keys import Models, insert_key, not_above, replace_key
from router.admin.desk import Body, Desk
from router.admin.tenants import Label
from router.core import Live
from router.errors import BadRequest, Conflict, Forbidden, UnknownObject
from router.store import admin_keys
from router.store.edits import Edit
from router.store.ids import LIMIT, PROJECT, TENANT, new_id
from router.store.keys import key_mac
from router.store.money import PARTS
from router.store.prices import ANY_MODEL, PriceRow, prices_in_force
from router.store.schema import keys, limits, projects, tenants

_DURATION = re.compile(r"([1-9]\d{0,4})(s|m|h|d|mo)\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "mo": 30 * 86_400}
_LONGEST_S = 36_500 * 86_400
_DEFAULT = "default"
_MOST = 1000  # rows of a list: these routes know no pages

_COSTS = {
    "input_cost_per_token": "uncached_input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cache_read",
    "cache_creation_input_token_cost": "cache_write",
    "output_cost_per_reasoning_token": "reasoning",
}

Money = Annotated[Decimal, Field(ge=0, le=9_000_000, decimal_places=12)]
Count = Annotated[int, Field(ge=0, le=10**12)]


class _Bounds(Body):
    max_budget: Money | None = None
    budget_duration: str | None = Field(None, description="30s, 30m, 30h, 30d, 1mo")
    rpm_limit: Count | None = None
    tpm_limit: Count | None = None
    max_parallel_requests: Count | None = None


class Generate(_Bounds):
    key_alias: Label = "key"
    team_id: str | None = Field(None, description="by default the team `default`, which is made if it is not there")
    models: Models = Field(default_factory=list, description="none: all")
    duration: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)


class Regenerate(Body):
    key: str


class DeleteKeys(Body):
    keys: list[str] = Field(max_length=100)


class NewTeam(_Bounds):
    team_alias: Label
    metadata: dict[str, str] = Field(default_factory=dict)


class DeleteTeams(Body):
    team_ids: list[str] = Field(max_length=100)


def litellm_router(desk: Desk, needs: Needs, live: Live | None) -> APIRouter:
    router = APIRouter(tags=["litellm"])
    _keys(router, desk, needs)
    _teams(router, desk, needs)

    @router.get("/v1/model/info", include_in_schema=False, dependencies=[needs("fleet:read", all_tenants=True)])
    @router.get("/model/info", dependencies=[needs("fleet:read", all_tenants=True)])
    async def models() -> dict[str, Any]:
        """The models that are served, with what everybody pays for them now."""
        names = [] if live is None else [row["id"] for row in await live.models()]
        async with desk.database.read() as connection:
            prices = await prices_in_force(connection, desk.clock())
        return {"data": [_as_model(name, prices.get(name) or prices.get(ANY_MODEL)) for name in names]}

    return router


def _as_model(name: str, price: PriceRow | None) -> dict[str, Any]:
    """Of prices in other currencies than the dollar it says nothing: LiteLLM knows no other."""
    told = price.per_million if price is not None and price.currency == "USD" else {}
    info = {field: float(Decimal(told[of]) / 10**6) for field, of in _COSTS.items() if of in told}
    return {"model_name": name, "litellm_params": {"model": name}, "model_info": info}


def _keys(router: APIRouter, desk: Desk, needs: Needs) -> None:
    read, write = needs("keys:read"), needs("keys:write")

    @router.post("/key/generate")
    async def generate(body: Generate, who: Administrator = write) -> dict[str, Any]:
        team_id = body.team_id or who.tenant
        team = None if team_id is None else await desk.one(tenants, team_id, who)
        if team is not None and team["archived_at"] is not None:
            raise Conflict("The team is deleted.")
        expires = None if body.duration is None else desk.clock() + _seconds(body.duration, "duration")
        async with desk.edit(who) as edit:
            project = await _default_project(edit, team or await _default_team(edit, who))
            made = await insert_key(desk, edit, _key_of(body, project, expires))
            await _bound(edit, "key", made["id"], body)
        return _as_key(made) | {"key": made["key"]}

    @router.get("/key/info")
    async def info(key: str, who: Administrator = read) -> dict[str, Any]:
        row = await _known(desk, key, who)
        return {"key": row["id"], "info": _as_key(row)}

    @router.get("/key/list")
    async def list_keys(team_id: str | None = None, who: Administrator = read) -> dict[str, Any]:
        found = await desk.list(keys, who, after=None, limit=_MOST, tenant=team_id, kind="inference")
        return {"keys": [row["id"] for row in found["data"]], "total_count": len(found["data"])}

    @router.post("/key/regenerate")
    async def regenerate(body: Regenerate, who: Administrator = write) -> dict[str, Any]:
        """The old one works no more from now on."""
        before = await not_above(desk, (await _known(desk, body.key, who))["id"], who)
        async with desk.edit(who) as edit:
            made = await replace_key(desk, edit, before["id"])
        return _as_key(made) | {"key": made["key"]}

    @router.post("/key/delete")
    async def delete_keys(body: DeleteKeys, who: Administrator = write) -> dict[str, Any]:
        rows = [await not_above(desk, (await _known(desk, key, who))["id"], who) for key in body.keys]
        async with desk.edit(who) as edit:
            for row in rows:
                await edit.update(keys, "key.revoke", row, {"revoked_at": edit.at})
        return {"deleted_keys": [row["id"] for row in rows]}


def _teams(router: APIRouter, desk: Desk, needs: Needs) -> None:
    read, write = needs("tenants:read"), needs("tenants:write", all_tenants=True)

    @router.post("/team/new")
    async def new_team(body: NewTeam, who: Administrator = write) -> dict[str, Any]:
        async with desk.edit(who) as edit:
            team = await edit.insert(tenants, "tenant.create", _tenant_of(body.team_alias, body.metadata))
            await _bound(edit, "tenant", team["id"], body)
        return _as_team(team)

    @router.get("/team/info")
    async def team_info(team_id: Annotated[str, Query()], who: Administrator = read) -> dict[str, Any]:
        team = await desk.one(tenants, team_id, who)
        found = await desk.list(keys, who, after=None, limit=_MOST, tenant=team_id)
        return {"team_id": team["id"], "team_info": _as_team(team), "keys": [_as_key(row) for row in found["data"]]}

    @router.get("/team/list")
    async def list_teams(who: Administrator = read) -> list[dict[str, Any]]:
        found = await desk.list(tenants, who, after=None, limit=_MOST, archived=False)
        return [_as_team(row) for row in found["data"]]

    @router.post("/team/delete")
    async def delete_teams(body: DeleteTeams, who: Administrator = write) -> dict[str, Any]:
        return {"deleted_teams": [(await desk.archive(tenants, team, who))["id"] for team in body.team_ids]}


async def _known(desk: Desk, key: str, who: Administrator) -> dict[str, Any]:
    """By its id, or by the key itself."""
    if key.startswith("sk-"):
        found = await admin_keys.find(desk.database, key_mac(desk.pepper, key), now=desk.clock())
        if found is None:
            raise UnknownObject("There is no such key.")
        key = found.id
    return await desk.one(keys, key, who)


async def _default_team(edit: Edit, who: Administrator) -> dict[str, Any]:
    found = await edit.find(tenants, name=_DEFAULT)
    if found is None and not who.may("tenants:write"):
        raise Forbidden("There is no team yet. To make one needs the scope tenants:write.", code="missing_scope")
    return found or await edit.insert(tenants, "tenant.create", _tenant_of(_DEFAULT, {}))


async def _default_project(edit: Edit, team: dict[str, Any]) -> dict[str, Any]:
    found = await edit.find(projects, tenant=team["id"], name=_DEFAULT)
    new = {"id": new_id(PROJECT), "tenant": team["id"], "name": _DEFAULT, "metadata": {}}
    return found or await edit.insert(projects, "project.create", new)


def _tenant_of(name: str, metadata: dict[str, str]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"isolation": "tenant", "priority": 0, "steers": False, "instance_labels": {}}
    return {"id": new_id(TENANT), "name": name, "metadata": metadata, **chosen}


def _key_of(body: Generate, project: dict[str, Any], expires: float | None) -> dict[str, Any]:
    belongs: dict[str, Any] = {"tenant": project["tenant"], "project": project["id"], "kind": "inference", "scopes": []}
    said: dict[str, Any] = {
        "name": body.key_alias,
        "models": body.models or None,
        "expires_at": expires,
        "metadata": body.metadata,
    }
    return belongs | said


async def _bound(edit: Edit, level: str, owner: str, body: _Bounds) -> None:
    """Budgets and rates as limits. A budget without a duration is for ever, which is here a window of 100 years."""
    if body.budget_duration is not None and body.max_budget is None:
        raise BadRequest("budget_duration goes with max_budget.", param="budget_duration")
    window = "36500d" if body.budget_duration is None else _window(body.budget_duration)
    wanted: list[tuple[str, str, int | None, str | None]] = [
        ("requests", "1m", body.rpm_limit, None),
        ("tokens", "1m", body.tpm_limit, None),
        ("parallel", "", body.max_parallel_requests, None),
        ("money", window, None if body.max_budget is None else int(body.max_budget * PARTS), "USD"),
    ]
    for measure, duration, amount, currency in wanted:
        if amount is not None:
            row: dict[str, Any] = {
                "id": new_id(LIMIT),
                "level": level,
                "owner": owner,
                "measure": measure,
                "window": duration,
            }
            row |= {"amount": amount, "weights": {}, "currency": currency, "without_redis": "local_share"}
            await edit.insert(limits, "limit.create", row)


def _seconds(duration: str, param: str) -> int:
    match = _DURATION.match(duration)
    if match is None:
        raise BadRequest(f"{param} must be such as 30s, 30m, 30h, 30d or 1mo.", param=param)
    seconds = int(match[1]) * _SECONDS[match[2]]
    if seconds > _LONGEST_S:
        raise BadRequest(f"{param} must be 100 years at most.", param=param)
    return seconds


def _window(duration: str) -> str:
    _seconds(duration, "budget_duration")
    if not duration.endswith("mo"):
        return duration
    return "month" if duration == "1mo" else f"{int(duration[:-2]) * 30}d"


def _as_key(row: dict[str, Any]) -> dict[str, Any]:
    expires = row["expires_at"]
    return {
        "token": row["id"],
        "key_name": f"{row['shown']}...",
        "key_alias": row["name"],
        "team_id": row["tenant"],
        "models": row["models"] or [],
        "expires": None if expires is None else datetime.fromtimestamp(expires, UTC).isoformat(),
        "blocked": row["revoked_at"] is not None,
        "metadata": row["metadata"],
    }


def _as_team(row: dict[str, Any]) -> dict[str, Any]:
    return {"team_id": row["id"], "team_alias": row["name"], "metadata": row["metadata"]}
