"""OpenAI's routes of an organization's usage and costs (platform.openai.com, "Usage"), over the daily sums.

Below /admin/v1, which a tool takes as its base URL. Buckets are days UTC; `project_id` and `api_key_id` are our ids.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from router.admin.access import Administrator, Needs
from router.admin.desk import Desk
from router.errors import BadRequest
from router.store.report_lines import Line
from router.store.reports import Question, cost_report

_DAY_S = 86_400
_YEAR_3000 = 32_503_680_000
_DIMENSIONS = {"project_id": "project", "api_key_id": "key", "model": "model", "line_item": "model"}

Time = Annotated[int, Query(ge=0, lt=_YEAR_3000, description="seconds since 1970; the day it is in")]
End = Annotated[int | None, Query(ge=1, lt=_YEAR_3000, description="not included; by default now")]
Width = Annotated[Literal["1d"], Query()]
Buckets = Annotated[int, Query(ge=1, le=31)]
Page = Annotated[int | None, Query(ge=0, lt=_YEAR_3000, description="next_page of the answer before")]
Ids = Annotated[list[str] | None, Query(description="only of these")]
UsageBy = Annotated[list[Literal["project_id", "api_key_id", "model"]] | None, Query()]
CostsBy = Annotated[list[Literal["project_id", "api_key_id", "line_item"]] | None, Query()]


def organization_router(desk: Desk, needs: Needs) -> APIRouter:
    router = APIRouter(tags=["usage"])
    read = needs("reports:read")

    async def pages(
        who: Administrator,
        days: _Days,
        group_by: Sequence[str],
        filters: Mapping[str, list[str] | None],
        result: _Result,
    ) -> dict[str, Any]:
        by = tuple(dict.fromkeys(_DIMENSIONS[name] for name in group_by))
        found = {name: values for name, values in filters.items() if values}
        if who.tenant is not None:
            found["tenant"] = [who.tenant]
        question = Question(("day", *by), days.first, days.last, found, own_costs=False)
        return days.page((await cost_report(desk.database, question)).lines, result)

    @router.get("/organization/usage/completions", include_in_schema=False)
    @router.get("/usage")
    async def usage(
        start_time: Time,
        end_time: End = None,
        bucket_width: Width = "1d",
        group_by: UsageBy = None,
        project_ids: Ids = None,
        api_key_ids: Ids = None,
        models: Ids = None,
        limit: Buckets = 7,
        page: Page = None,
        who: Administrator = read,
    ) -> dict[str, Any]:
        """Tokens and requests by day, as OpenAI's `/organization/usage/completions`; it is here by that name too."""
        days = _Days.of(start_time, end_time, page, limit, now=desk.clock())
        filters = {"project": project_ids, "key": api_key_ids, "model": models}
        return await pages(who, days, group_by or (), filters, _usage)

    @router.get("/organization/costs", include_in_schema=False)
    @router.get("/costs")
    async def costs(
        start_time: Time,
        end_time: End = None,
        bucket_width: Width = "1d",
        group_by: CostsBy = None,
        project_ids: Ids = None,
        api_key_ids: Ids = None,
        limit: Buckets = 7,
        page: Page = None,
        who: Administrator = read,
    ) -> dict[str, Any]:
        """Cost by list price, by day, as OpenAI's `/organization/costs`; a `line_item` is a model. Exact: reports."""
        days = _Days.of(start_time, end_time, page, limit, now=desk.clock())
        return await pages(who, days, group_by or (), {"project": project_ids, "key": api_key_ids}, _costs)

    return router


_Result = Callable[[Sequence[Line]], Iterable[dict[str, Any]]]
"""The results of the lines that are alike but for their currency."""


class _Days:
    """Those of one page, and whether more follow."""

    def __init__(self, first: int, last: int, end: int) -> None:
        """Days since 1970; `end`: the last one that is asked for."""
        self._first, self._last, self._end = first, last, end
        self.first, self.last = (datetime.date(1970, 1, 1) + datetime.timedelta(day) for day in (first, last))

    @classmethod
    def of(cls, start: int, end: int | None, page: int | None, buckets: int, *, now: float) -> _Days:
        last = (int(now) if end is None else end - 1) // _DAY_S
        first = max(start, page or 0) // _DAY_S
        if first > last:
            raise BadRequest("The period ends before it begins.", param="end_time")
        return cls(first, min(last, first + buckets - 1), last)

    def page(self, lines: Iterable[Line], result: _Result) -> dict[str, Any]:
        by_day = {day: list(found) for day, found in groupby(lines, key=lambda line: line.where["day"])}
        buckets = []
        for day in range(self._first, self._last + 1):
            named = (datetime.date(1970, 1, 1) + datetime.timedelta(day)).isoformat()
            alike: dict[tuple[str, ...], list[Line]] = {}
            for line in by_day.get(named, ()):
                alike.setdefault(tuple(line.where.values()), []).append(line)
            results = [made for found in alike.values() for made in result(found)]
            start = day * _DAY_S
            buckets.append({"object": "bucket", "start_time": start, "end_time": start + _DAY_S, "results": results})
        more = self._last < self._end
        following = str((self._last + 1) * _DAY_S) if more else None
        return {"object": "page", "data": buckets, "has_more": more, "next_page": following}


def _usage(lines: Sequence[Line]) -> Iterable[dict[str, Any]]:
    where = lines[0].where
    yield {
        "object": "organization.usage.completions.result",
        "input_tokens": sum(line.input_tokens for line in lines),
        "output_tokens": sum(line.output_tokens for line in lines),
        "input_cached_tokens": sum(line.tokens["cache_read"] for line in lines),
        "num_model_requests": sum(line.requests for line in lines),
        "project_id": where.get("project"),
        "user_id": None,
        "api_key_id": where.get("key"),
        "model": where.get("model"),
        "batch": None,
    }


def _costs(lines: Sequence[Line]) -> Iterable[dict[str, Any]]:
    for line in lines:
        yield {
            "object": "organization.costs.result",
            "amount": {"value": float(line.cost), "currency": line.currency.lower()},
            "line_item": line.where.get("model"),
            "project_id": line.where.get("project"),
            "api_key_id": line.where.get("key"),
        }
