"""Limits, prices, and what instances cost: rules with a validity. Only a limit's amount is ever changed in place."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, StringConstraints

from router.admin.access import Administrator, Needs
from router.admin.desk import After, Archived, Body, Desk, Limit, Moment, shown
from router.admin.examples import A_COST, A_LIMIT, A_PRICE, A_TENANT, answers, creates, lists
from router.admin.tenants import without_none
from router.errors import BadRequest, Conflict, Forbidden, UnknownObject
from router.store.edits import Edit
from router.store.ids import COST, LIMIT, PRICE, new_id
from router.store.money import PARTS, plain
from router.store.records import Table, succeed
from router.store.schema import TOKEN_CLASSES, instance_costs, keys, limits, prices, projects, tenants
from router.store.windows import read_window

_LEVELS: dict[str, Table] = {"tenant": tenants, "project": projects, "key": keys}

Currency = Annotated[str, StringConstraints(pattern=r"^[A-Z]{3}$")]
Price = Annotated[Decimal, Field(ge=0, le=1_000_000, decimal_places=6)]
_MOST_MONEY = 9_000_000  # what 64 bits hold of 1e-12
Money = Annotated[Decimal, Field(ge=0, le=_MOST_MONEY, decimal_places=12)]
Amount = Annotated[Decimal, Field(ge=0, le=10**15, decimal_places=12)]
ClassName = Literal[TOKEN_CLASSES]  # type: ignore[valid-type]


class NewLimit(Body):
    level: Literal["tenant", "project", "key"] = Field(examples=["tenant"])
    owner: str = Field(description="the id of the tenant, project or key", examples=[A_TENANT["id"]])
    measure: Literal["requests", "tokens", "parallel", "money"] = Field(examples=["tokens"])
    window: str = Field("", description="60s, 1m, 1h, 1d, 30d … or month; none for parallel", examples=["1m"])
    amount: Amount = Field(examples=[100_000])
    weights: dict[ClassName, Annotated[float, Field(ge=0, le=100)]] = Field(
        default_factory=dict, description="of token classes, 1 by default", examples=[{"cache_read": 0.1}]
    )
    currency: Currency | None = Field(None, description="of money")
    without_redis: Literal["local_share", "refuse", "allow"] = "local_share"


class ChangedLimit(Body):
    amount: Amount | None = None
    without_redis: Literal["local_share", "refuse", "allow"] | None = None


class NewPrice(Body):
    model: str = Field(
        max_length=200,
        description='its public name; "*": every model without a price of its own',
        examples=["llama-3.1-8b"],
    )
    tenant: str | None = Field(None, description="for this tenant only")
    currency: Currency = "USD"
    per_million: dict[ClassName, Price] = Field(
        description="of a million tokens, by class; a class that is missing costs what its base does",
        examples=[{"uncached_input": "0.20", "cache_read": "0.02", "output": "0.60"}],
    )
    valid_from: Moment | None = Field(None, description="seconds since 1970; by default now")


class NewCost(Body):
    instance: str = Field(max_length=200, description="the id of an engine", examples=["10.0.0.5:8000"])
    per_hour: Money = Field(examples=["2.49"])
    currency: Currency = "USD"
    valid_from: Moment | None = Field(None, description="seconds since 1970; by default now")


def limits_router(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter(tags=["limits"])
    read, write = needs("limits:read"), needs("limits:write")

    @router.post("", **creates(A_LIMIT))
    async def create(request: Request, body: NewLimit, who: Administrator = write) -> Response:
        """All limits of a key, its project and its tenant hold at once."""
        _check_limit(body)
        await _owned(desk, body.level, body.owner, who)

        async def build(edit: Edit) -> dict[str, Any]:
            row = body.model_dump() | {"id": new_id(LIMIT), "amount": _stored(body.measure, body.amount)}
            return _shown_limit(await edit.insert(limits, "limit.create", row))

        return await desk.create(request, who, build)

    @router.get("", responses=lists(A_LIMIT))
    async def list_all(
        owner: str, after: After = None, limit: Limit = 20, archived: Archived = False, who: Administrator = read
    ) -> dict[str, Any]:
        """Those of one tenant, project or key."""
        await _owned(desk, _level_of(owner), owner, who, writes=False)
        everywhere = Administrator(who.actor, who.scopes)  # whose it is has just been seen
        found = await desk.list(limits, everywhere, after=after, limit=limit, archived=archived, owner=owner)
        return found | {"data": [_readable(row) for row in found["data"]]}

    @router.get("/{limit_id}", responses=answers(A_LIMIT))
    async def get(limit_id: str, who: Administrator = read) -> dict[str, Any]:
        return _shown_limit(await _limit(desk, limit_id, who, writes=False))

    @router.patch("/{limit_id}", responses=answers(A_LIMIT))
    async def change(limit_id: str, body: ChangedLimit, who: Administrator = write) -> dict[str, Any]:
        """What is used of the window stays used."""
        before = await _limit(desk, limit_id, who)
        given = without_none(body)
        if body.amount is not None:
            _check_amount(before["measure"], body.amount)
            given["amount"] = _stored(before["measure"], body.amount)
        if before["archived_at"] is not None:
            raise Conflict("It is archived.")
        async with desk.edit(who) as edit:
            return _shown_limit(await edit.update(limits, "limit.update", before, given))

    @router.delete("/{limit_id}", responses=answers(A_LIMIT))
    async def archive(limit_id: str, who: Administrator = write) -> dict[str, Any]:
        before = await _limit(desk, limit_id, who)
        if before["archived_at"] is not None:
            return _shown_limit(before)
        async with desk.edit(who) as edit:
            return _shown_limit(await edit.update(limits, "limit.archive", before, {"archived_at": edit.at}))

    return router


def prices_router(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter(tags=["prices"])
    read, write = needs("prices:read"), needs("prices:write", all_tenants=True)

    @router.post("", **creates(A_PRICE))
    async def create(request: Request, body: NewPrice, who: Administrator = write) -> Response:
        """A new version: the one before is valid up to where this one begins. What was billed stays as it was."""
        if body.tenant is not None:
            await desk.one(tenants, body.tenant, who)

        async def build(edit: Edit) -> dict[str, Any]:
            same = {"model": body.model, "currency": body.currency, "tenant": body.tenant}
            begins = edit.at if body.valid_from is None else body.valid_from
            ends = await succeed(edit, prices, same, begins)
            per_million = {name: str(price) for name, price in body.per_million.items()}
            row = body.model_dump() | {"id": new_id(PRICE), "per_million": per_million}
            return shown(
                prices, await edit.insert(prices, "price.create", row | {"valid_from": begins, "valid_to": ends})
            )

        return await desk.create(request, who, build)

    @router.get("", responses=lists(A_PRICE))
    async def list_all(
        model: str | None = None,
        tenant: str | None = None,
        after: After = None,
        limit: Limit = 20,
        who: Administrator = read,
    ) -> dict[str, Any]:
        """All versions, newest first."""
        return await desk.list(prices, who, after=after, limit=limit, model=model, tenant=tenant)

    @router.get("/{price_id}", responses=answers(A_PRICE))
    async def get(price_id: str, who: Administrator = read) -> dict[str, Any]:
        return shown(prices, await desk.one(prices, price_id, who))

    return router


def costs_router(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter(tags=["prices"])
    read, write = needs("prices:read", all_tenants=True), needs("prices:write", all_tenants=True)

    @router.post("", **creates(A_COST))
    async def create(request: Request, body: NewCost, who: Administrator = write) -> Response:
        """What an hour of an instance costs from now on; it comes before engines[].price_per_hour."""

        async def build(edit: Edit) -> dict[str, Any]:
            begins = edit.at if body.valid_from is None else body.valid_from
            ends = await succeed(edit, instance_costs, {"instance": body.instance}, begins)
            row = body.model_dump() | {"id": new_id(COST), "valid_from": begins, "valid_to": ends}
            return _in_text(shown(instance_costs, await edit.insert(instance_costs, "instance_cost.create", row)))

        return await desk.create(request, who, build)

    @router.get("", responses=lists(A_COST))
    async def list_all(
        instance: str | None = None, after: After = None, limit: Limit = 20, who: Administrator = read
    ) -> dict[str, Any]:
        found = await desk.list(instance_costs, who, after=after, limit=limit, instance=instance)
        return found | {"data": [_in_text(row) for row in found["data"]]}

    return router


def _check_limit(body: NewLimit) -> None:
    if (body.measure == "parallel") != (body.window == "") or not _is_window(body.window):
        raise BadRequest("window must be such as 60s, 1m, 1h, 1d or month, and nothing for parallel.", param="window")
    if (body.measure == "money") != (body.currency is not None):
        raise BadRequest("currency is for money, and must be there.", param="currency")
    _check_amount(body.measure, body.amount)
    if body.weights and body.measure != "tokens":
        raise BadRequest("weights are for tokens.", param="weights")


def _check_amount(measure: str, amount: Decimal) -> None:
    if measure == "money":
        if amount > _MOST_MONEY:
            raise BadRequest(f"amount of money must be at most {_MOST_MONEY}.", param="amount")
    elif amount != int(amount):
        raise BadRequest("amount must be a whole number, except of money.", param="amount")


def _is_window(text: str) -> bool:
    try:
        return text == "" or bool(read_window(text))
    except ValueError:
        return False


async def _limit(desk: Desk, limit_id: str, who: Administrator, *, writes: bool = True) -> dict[str, Any]:
    row = await desk.one(limits, limit_id, Administrator(who.actor, who.scopes))
    try:
        await _owned(desk, row["level"], row["owner"], who, writes=writes)
    except UnknownObject:
        raise UnknownObject(f"There is no limit {limit_id[:80]!r}.") from None  # whose it is would be told else
    return row


async def _owned(desk: Desk, level: str, owner: str, who: Administrator, *, writes: bool = True) -> None:
    """Raises UnknownObject; Forbidden for a tenant that would lift its own limit."""
    await desk.one(_LEVELS[level], owner, who)
    if writes and who.tenant is not None and level == "tenant":
        raise Forbidden("A tenant's own administrator may limit its projects and keys.", code="tenant_key")


def _level_of(owner: str) -> str:
    for level, prefix in (("tenant", "ten_"), ("project", "proj_"), ("key", "key_")):
        if owner.startswith(prefix):
            return level
    raise BadRequest("owner must be the id of a tenant, project or key.", param="owner")


def _stored(measure: str, amount: Decimal) -> int:
    return int(amount * PARTS) if measure == "money" else int(amount)


def _shown_limit(row: dict[str, Any]) -> dict[str, Any]:
    return _readable(shown(limits, row))


def _readable(limit: dict[str, Any]) -> dict[str, Any]:
    """Money as text, not as parts."""
    if limit["measure"] != "money":
        return limit
    return limit | {"amount": plain(Decimal(limit["amount"]) / PARTS)}


def _in_text(cost: dict[str, Any]) -> dict[str, Any]:
    return cost | {"per_hour": plain(cost["per_hour"])}
