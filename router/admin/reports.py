"""`/admin/v1/reports`: what was used and what it cost.

An administrator bound to a tenant sees that tenant's figures, and neither instances nor what they cost the operator.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response
from msgspec.structs import replace

from router.admin.access import Administrator, Needs
from router.admin.desk import Desk
from router.admin.report_files import MEDIA_TYPES, Format, json_text, report_file
from router.admin.report_formats import as_csv
from router.errors import Forbidden
from router.store import reports
from router.store.reports import DIMENSIONS, FILTERS, Question, asked, month_of

_Values = Annotated[list[str] | None, Query(description="only of these")]
_FORMATS: dict[int | str, dict[str, Any]] = {
    200: {"description": "the report", "content": {media_type: {} for media_type in MEDIA_TYPES.values()}}
}


def reports_router(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter(tags=["reports"])
    read = needs("reports:read")

    @router.get("/cost", response_class=Response, responses=_FORMATS)
    async def cost(
        by: Annotated[str, Query(description=f"comma-separated, of {', '.join(DIMENSIONS)}")] = "tenant,model",
        first: Annotated[datetime.date | None, Query(alias="from", description="first day, UTC")] = None,
        last: Annotated[datetime.date | None, Query(alias="to", description="last day, UTC")] = None,
        tenant: _Values = None,
        project: _Values = None,
        key: _Values = None,
        model: _Values = None,
        instance: _Values = None,
        tag: _Values = None,
        format: Annotated[Format | None, Query(description="by default what Accept asks for, else json")] = None,
        accept: Annotated[str, Header()] = "",
        who: Administrator = read,
    ) -> Response:
        """Tokens, hit rate, cost, what the cache saved, cost per million tokens, own cost and margin: the last 30 days.

        By any of the dimensions; tags go with day and tenant only. `focus`: CSV in the columns of FOCUS 1.2.
        """
        values = (tenant, project, key, model, instance, tag)
        filters = {name: value for name, value in zip(FILTERS, values, strict=True) if value}
        question = _as_seen_by(who, asked(by, first, last, filters, today=_day(desk)))
        chosen = format or _accepted(accept)
        text = await report_file(desk.database, question, chosen)
        return Response(text, media_type=MEDIA_TYPES[chosen])

    @router.get("/statement", response_class=Response, responses=_FORMATS)
    async def statement(
        tenant: str,
        month: Annotated[str, Query(description="e.g. 2026-11")],
        format: Annotated[Literal["json", "csv"], Query()] = "json",
        who: Administrator = read,
    ) -> Response:
        """What a tenant used in a month, by project and model; `closed`: the month is over."""
        report = await reports.statement(desk.database, tenant, month_of(month), own_costs=who.tenant is None)
        if who.tenant not in (None, tenant):
            report = replace(report, lines=[])  # as that of a tenant that is not there
        if format == "csv":
            return Response(as_csv(report), media_type=MEDIA_TYPES["csv"])
        more = {"object": "report.statement", "tenant": tenant, "month": month, "closed": _day(desk) > report.last}
        return Response(json_text(report, **more), media_type=MEDIA_TYPES["json"])

    return router


def _as_seen_by(who: Administrator, question: Question) -> Question:
    if who.tenant is None:
        return question
    if "instance" in question.by or "instance" in question.filters:
        raise Forbidden("Instances are the operator's, and the key belongs to a tenant.")
    theirs = [tenant for tenant in question.filters.get("tenant", [who.tenant]) if tenant == who.tenant]
    return replace(question, filters={**question.filters, "tenant": theirs}, own_costs=False)


def _day(desk: Desk) -> datetime.date:
    return datetime.datetime.fromtimestamp(desk.clock(), datetime.UTC).date()


def _accepted(accept: str) -> Format:
    for format, media_type in MEDIA_TYPES.items():
        if media_type in accept:
            return format
    return "json"
