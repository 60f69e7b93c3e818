"""`warmroute report`: what was used and what it cost."""

from __future__ import annotations

import asyncio
import datetime
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from router.admin.report_files import Format, report_file
from router.admin.report_table import cells, headings, texts
from router.cli.db import database_of
from router.cli.figures import terminal
from router.cli.options import ConfigFile, JsonFile, read_config
from router.config import Config
from router.store.migrate import check_version
from router.store.report_lines import Report
from router.store.reports import DIMENSIONS, FILTERS, Question, asked, cost_report

_STANDARD_OUTPUT = Path("-")


def report(
    by: Annotated[str, typer.Option(metavar="NAMES", help=f"By commas, of {', '.join(DIMENSIONS)}.")] = "tenant,model",
    first: Annotated[
        str | None, typer.Option("--from", metavar="DAY", help="E.g. 2026-11-01, UTC. [default: 30 days in all]")
    ] = None,
    last: Annotated[str | None, typer.Option("--to", metavar="DAY", help="The last day. [default: today]")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME=ID", help="E.g. model=small. Repeat for more.")
    ] = None,
    json: JsonFile = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write it as CSV; - is standard output.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page with plots.")] = None,
    focus: Annotated[
        bool, typer.Option("--focus", help="CSV in the columns of FOCUS 1.2; --by does not count.")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Print what was used and what it cost: tokens, hit rate, cost, what the cache saved, margin.

    From the sums in the database, which are exact; the last 30 days by default. Tags are summed by day and tenant only.
    """
    question = asked(
        by, _day(first), _day(last), _filters(only or []), today=datetime.datetime.now(datetime.UTC).date()
    )
    files: dict[Format, Path] = {}
    if json:
        files["json"] = json
    if html:
        files["html"] = html
    if csv or focus:
        files["focus" if focus else "csv"] = csv or _STANDARD_OUTPUT
    found = asyncio.run(_write(read_config(config, None), question, files))
    if _STANDARD_OUTPUT not in files.values():
        _print(found)


async def _write(config: Config, question: Question, files: Mapping[Format, Path]) -> Report:
    database = database_of(config)
    try:
        await check_version(database)
        for format, file in files.items():
            _put(file, await report_file(database, question, format))
        return await cost_report(database, question)
    finally:
        await database.aclose()


def _put(file: Path, text: str) -> None:
    if file == _STANDARD_OUTPUT:
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    else:
        file.write_text(text, encoding="utf-8")


def _print(report: Report) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"{report.first} to {report.last}, UTC", title_justify="left")
    for number, name in enumerate(headings(report)):
        table.add_column(name, justify="left" if number < texts(report) else "right")
    for line in report.lines:
        table.add_row(*map(Text, cells(report, line)))
    if len(report.lines) > 1:
        table.add_section()
        for total in report.totals:
            table.add_row(*map(Text, cells(report, total)), style="bold")
    terminal().print(table if report.lines else "Nothing was used.")


def _day(text: str | None) -> datetime.date | None:
    try:
        return None if text is None else datetime.date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no day like 2026-11-30") from None


def _filters(only: Sequence[str]) -> dict[str, list[str]]:
    filters: dict[str, list[str]] = {}
    for one in only:
        name, equals, value = one.partition("=")
        if not equals or name not in FILTERS:
            raise typer.BadParameter(f"{one!r} is not NAME=ID with a name of {', '.join(FILTERS)}")
        filters.setdefault(name, []).append(value)
    return filters
