"""A report in the form somebody asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson
from msgspec.structs import replace

from router.admin import focus
from router.admin.report_formats import as_csv, as_json
from router.store.database import Database
from router.store.report_lines import Report
from router.store.reports import Question, cost_report, over_time

Format = Literal["json", "csv", "html", "focus"]
MEDIA_TYPES: Mapping[Format, str] = {
    "json": "application/json", "csv": "text/csv", "html": "text/html", "focus": "text/csv",
}  # fmt: skip


async def report_file(database: Database, question: Question, format: Format) -> str:
    """Its text. Raises BadRequest, StoreUnavailable."""
    if format == "focus":
        return focus.as_focus(await cost_report(database, replace(question, by=focus.BY)))
    report = await cost_report(database, question)
    if format == "html":
        from router.admin.report_page import page

        return page(report, await over_time(database, question))
    return as_csv(report) if format == "csv" else json_text(report)


def json_text(report: Report, **more: Any) -> str:
    return orjson.dumps({**as_json(report), **more}, option=orjson.OPT_INDENT_2).decode()
