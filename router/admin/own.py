"""What a key may see of itself: `/v1/usage`, and the billing routes of one-api. Nothing else is its own."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from router.admin.access import INFERENCE_KEY, presented
from router.admin.desk import Desk
from router.errors import BadRequest, Forbidden, Unauthenticated
from router.store import admin_keys
from router.store.admin_keys import FoundKey
from router.store.keys import key_mac
from router.store.limits import least_money
from router.store.money import plain
from router.store.report_lines import Line
from router.store.reports import Question, cost_report, period_to

_NO_LIMIT = Decimal(100_000_000)  # what one-api says of a key without a budget

Day = Annotated[datetime.date | None, Query(description="e.g. 2026-11-30, UTC")]


def own_router(desk: Desk, today: Callable[[], datetime.date]) -> APIRouter:
    router = APIRouter(tags=["usage"], dependencies=[Depends(INFERENCE_KEY)])

    async def asking(request: Request) -> FoundKey:
        key = presented(request)
        found = key and await admin_keys.find(desk.database, key_mac(desk.pepper, key), now=desk.clock())
        if not found:
            raise Unauthenticated("A key is needed: Authorization: Bearer sk-…")
        if found.kind != "inference" or found.tenant is None:
            raise Forbidden("An admin key has no usage of its own: see /admin/v1/reports/cost.")
        return found

    async def used(key: FoundKey, first: datetime.date | None, last: datetime.date | None, *by: str) -> Sequence[Line]:
        end = last or today()
        begin = first or period_to(end)
        if begin > end:
            raise BadRequest("The first day is after the last.", param="start_date")
        filters = {"tenant": [str(key.tenant)]} if "key" not in by else {"key": [key.id]}
        return (await cost_report(desk.database, Question(by, begin, end, filters, own_costs=False))).lines

    @router.get("/v1/usage")
    async def usage(request: Request, start_date: Day = None, end_date: Day = None) -> dict[str, Any]:
        """What the tenant of this key has used, by day and model: the last 30 days unless said otherwise."""
        lines = await used(await asking(request), start_date, end_date, "day", "model")
        return {"object": "list", "data": [_shown(line) for line in lines]}

    @router.get("/v1/dashboard/billing/subscription")
    @router.get("/dashboard/billing/subscription", include_in_schema=False)
    async def subscription(request: Request) -> dict[str, Any]:
        """The money that this key may spend: the least of the limits that hold for it."""
        key = await asking(request)
        money = await least_money(desk.database, key.id)
        limit = float(_NO_LIMIT if money is None else money)
        return {
            "object": "billing_subscription",
            "has_payment_method": True,
            "soft_limit_usd": limit,
            "hard_limit_usd": limit,
            "system_hard_limit_usd": limit,
            "access_until": 0,
        }

    @router.get("/v1/dashboard/billing/usage")
    @router.get("/dashboard/billing/usage", include_in_schema=False)
    async def billing_usage(request: Request, start_date: Day = None, end_date: Day = None) -> dict[str, Any]:
        """What this key has cost, in hundredths."""
        lines = await used(await asking(request), start_date, end_date, "key")
        return {"object": "list", "total_usage": float(100 * sum((line.cost for line in lines), Decimal(0)))}

    return router


def _shown(line: Line) -> dict[str, Any]:
    return {
        "day": line.where["day"],
        "model": line.where["model"],
        "requests": line.requests,
        "tokens": dict(line.tokens),
        "currency": line.currency or None,
        "cost": plain(line.cost),
        "cost_without_cache": plain(line.cost_without_cache),
    }
