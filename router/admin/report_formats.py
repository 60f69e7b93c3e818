"""A report as JSON and as CSV. Money is written as decimal text: a float would not be exact."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from router.store.report_lines import Line, Report

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def as_json(report: Report) -> dict[str, Any]:
    """Lines with their dimensions and figures, and the total of each currency."""
    return {
        "object": "report.cost",
        "from": report.first.isoformat(),
        "to": report.last.isoformat(),
        "by": list(report.by),
        "filters": {name: list(values) for name, values in report.filters.items()},
        "own_currency": report.own_currency,
        "lines": [{**_place(line), **_figures(line), "tokens": dict(line.tokens)} for line in report.lines],
        "totals": [{**_place(total), **_figures(total), "tokens": dict(total.tokens)} for total in report.totals],
    }


def as_csv(report: Report) -> str:
    """A row for each line; no totals, which would be counted twice by who sums them up."""
    return csv_text({**_place(line), **_figures(line), **_classes(line)} for line in report.lines)


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """With the names of the first row as its head; empty where there is no row."""
    text = io.StringIO()
    writer = None
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(text, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue()


def money(value: Decimal | None) -> str | None:
    """All its decimals, and no more zeros than needed."""
    return None if value is None else f"{value.normalize():f}"


def _place(line: Line) -> dict[str, str]:
    place = {}
    for dimension, value in line.where.items():
        place[dimension] = value
        if dimension in line.names:
            place[f"{dimension}_name"] = line.names[dimension]
    return {**place, "currency": line.currency}


def _figures(line: Line) -> dict[str, Any]:
    return {
        "requests": line.requests,
        "failed": line.failed,
        "aborted": line.aborted,
        "cached_unknown": line.cached_unknown,
        "input_tokens": line.input_tokens,
        "output_tokens": line.output_tokens,
        "hit_rate": line.hit_rate,
        "best_hit_tokens": line.best_hit_tokens,
        "predicted_hit_tokens": line.predicted_hit_tokens,
        "blind_hit_tokens": line.blind_hit_tokens,
        "cost": money(line.cost),
        "cost_without_cache": money(line.cost_without_cache),
        "cost_cache_blind": money(line.cost_cache_blind),
        "saved": money(line.saved),
        "saved_by_placement": money(line.saved_by_placement),
        "per_million_input": money(line.per_million_input),
        "per_million_output": money(line.per_million_output),
        "own_cost": money(line.own_cost),
        "margin": money(line.margin),
    }


def _classes(line: Line) -> dict[str, int]:
    return {f"tokens_{name}": count for name, count in line.tokens.items()}


def _cell(value: Any) -> Any:
    """Clients choose tags, and a spreadsheet must not take one for a formula. Figures may be negative."""
    if isinstance(value, str) and value.startswith(_FORMULA) and not _is_number(value):
        return f"'{value}"
    return value


def _is_number(text: str) -> bool:
    return text[1:].replace(".", "", 1).isdigit()
