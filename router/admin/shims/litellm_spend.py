"""LiteLLM's routes for what was spent (docs.litellm.ai, "Spend tracking"), from the sums of the ledger.

Money is a number there, and of one currency: what costs in others, or has no price, is left out (USD counts).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from router.admin.access import Administrator, Needs
from router.admin.desk import Desk
from router.store.report_lines import Line
from router.store.reports import Question, cost_report

_CURRENCY = "USD"
_DAYS = 30

Day = Annotated[datetime.date | None, Query(description="e.g. 2026-11-30, UTC")]


def spend_router(desk: Desk, needs: Needs, today: Callable[[], datetime.date]) -> APIRouter:
    router = APIRouter(tags=["litellm"])
    read = needs("reports:read")

    async def lines(who: Administrator, first: Day, last: Day, *by: str, **only: str | None) -> list[Line]:
        filters = {name: [value] for name, value in only.items() if value is not None}
        if who.tenant is not None:
            if only.get("tenant") not in (None, who.tenant):
                return []
            filters["tenant"] = [who.tenant]
        end = last or today()
        begin = first or end - datetime.timedelta(days=_DAYS - 1)
        report = await cost_report(desk.database, Question(by, begin, end, filters, own_costs=False))
        return [line for line in report.lines if line.currency == _CURRENCY]

    @router.get("/global/spend/report")
    async def report(
        start_date: Day = None,
        end_date: Day = None,
        group_by: Literal["team", "api_key"] = "team",
        team_id: str | None = None,
        who: Administrator = read,
    ) -> list[dict[str, Any]]:
        """By day, and by team or key."""
        of = "tenant" if group_by == "team" else "key"
        found = await lines(who, start_date, end_date, "day", of, tenant=team_id)
        return [
            {
                "group_by_day": day,
                "teams" if group_by == "team" else "api_keys": [
                    {
                        "team_name" if group_by == "team" else "api_key": line.names.get(of, line.where[of]),
                        "total_spend": float(line.cost),
                    }
                    for line in those
                ],
            }
            for day, those in _by_day(found)
        ]

    @router.get("/spend/logs")
    async def logs(
        start_date: Day = None, end_date: Day = None, api_key: str | None = None, who: Administrator = read
    ) -> list[dict[str, Any]]:
        """Sums by day and model. `api_key`: the id of one key. Single requests are not listed."""
        found = await lines(who, start_date, end_date, "day", "model", key=api_key)
        return [
            {
                "startTime": day,
                "spend": float(sum((line.cost for line in those), Decimal(0))),
                "models": {line.where["model"]: float(line.cost) for line in those},
            }
            for day, those in _by_day(found)
        ]

    @router.get("/spend/tags")
    async def tags(start_date: Day = None, end_date: Day = None, who: Administrator = read) -> list[dict[str, Any]]:
        """By tag; a request with several counts under each."""
        found = await lines(who, start_date, end_date, "tag")
        return [
            {
                "individual_request_tag": line.where["tag"],
                "log_count": line.requests,
                "total_spend": float(line.cost),
            }
            for line in found
        ]

    return router


def _by_day(lines: list[Line]) -> list[tuple[str, list[Line]]]:
    days: dict[str, list[Line]] = {}
    for line in lines:
        days.setdefault(line.where["day"], []).append(line)
    return sorted(days.items())
