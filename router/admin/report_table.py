"""A report for people: its columns, rounded, with names instead of ids."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from router.store.report_lines import Line, Report

FIGURES = (
    "requests", "input tokens", "output tokens", "hit rate", "cost", "saved by cache", "by placement",
    "per 1M input", "per 1M output",
)  # fmt: skip
OWN_FIGURES = ("own cost", "margin")


def headings(report: Report) -> list[str]:
    return [*report.by, "currency", *FIGURES, *(OWN_FIGURES if report.own_currency else ())]


def texts(report: Report) -> int:
    """How many of the columns are no figures."""
    return len(report.by) + 1


def cells(report: Report, line: Line) -> list[str]:
    """As `headings`; a total has no place."""
    own = (amount(line.own_cost), amount(line.margin)) if report.own_currency else ()
    return [*(place(line, name) for name in report.by), line.currency or "no price", *_figures(line), *own]


def place(line: Line, dimension: str) -> str:
    """A name where there is one, else the id."""
    return line.names.get(dimension) or line.where.get(dimension, "") or "–"


def summary(line: Line) -> Sequence[tuple[str, str]]:
    """The figures of a total, by name."""
    currency = line.currency or "no price"
    named = [
        (f"{name}, {currency}" if name == "cost" else name, value)
        for name, value in zip(FIGURES, _figures(line), strict=True)
    ]
    return [*named, ("margin", amount(line.margin))] if line.margin is not None else named


def amount(value: Decimal | None) -> str:
    """Two decimals, and up to six for what is below one."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 1:
        return f"{value:,.2f}"
    return f"{value:.{min(6, 2 - value.adjusted())}f}"


def _figures(line: Line) -> list[str]:
    return [
        f"{line.requests:,}",
        f"{line.input_tokens:,}",
        f"{line.output_tokens:,}",
        "–" if line.hit_rate is None else f"{line.hit_rate:.1%}",
        amount(line.cost),
        amount(line.saved),
        amount(line.saved_by_placement),
        amount(line.per_million_input),
        amount(line.per_million_output),
    ]
