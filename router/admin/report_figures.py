"""The pictures of a report.

They show the currency most was spent in. What is beyond the SHOWN dearest is one grey part, "others".
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from router.admin.report_table import place
from router.plots import AXIS, LAYOUT, Figure, axis_title
from router.store.report_lines import Line, Report

SHOWN = 7
_OTHERS = "others"

_LAYOUT = {
    **LAYOUT,
    "margin": {"l": 56, "r": 24, "t": 8, "b": 36},
    "legend": {"orientation": "h", "y": -0.18, "traceorder": "normal"},
    "bargap": 0.25,
    "barmode": "stack",
}

_DAY_MS = 86_400_000
_BAR_MS = 0.75 * _DAY_MS  # a lone bar has no neighbour to be measured by


def figures(report: Report, over_time: Report) -> list[Figure]:
    if not report.lines:
        return []
    currency = max(report.totals, key=lambda total: total.cost).currency
    lines = [line for line in report.lines if line.currency == currency]
    daily = [line for line in over_time.lines if line.currency == currency]
    by = over_time.by[1] if len(over_time.by) > 1 else None
    unit = currency or "no price"
    days = _days(report)
    drawn = [
        figure._replace(layout={**figure.layout, "xaxis": {**figure.layout["xaxis"], **days}})
        for figure in (_cost_by_day(daily, by, unit), _tokens_by_day(daily), _hit_rate_by_day(daily))
    ]
    return [*drawn, _with_and_without_cache(report, lines, unit)] if report.by else drawn


def _cost_by_day(daily: Sequence[Line], by: str | None, unit: str) -> Figure:
    named = {_name(line, by): Decimal(0) for line in daily}
    for line in daily:
        named[_name(line, by)] += line.cost
    dearest = sorted(named, key=lambda name: -named[name])[:SHOWN]
    rest = [_OTHERS] if len(named) > SHOWN else []
    data = []
    for number, name in enumerate([*dearest, *rest]):
        colour = "var(--rest)" if name is _OTHERS else f"var(--series-{number + 1})"
        part = [
            line for line in daily if (_name(line, by) not in dearest if name is _OTHERS else _name(line, by) == name)
        ]
        data.append(
            _day_bars(name, colour, *_per_day(part, lambda lines: float(sum(line.cost for line in lines))), "%{y:,.4f}")
        )
    return Figure(
        f"Cost by day, {unit}", "By list price, the cache's price for what came from it.", data, _layout(y=unit)
    )


def _tokens_by_day(daily: Sequence[Line]) -> Figure:
    kinds: list[tuple[str, str, Callable[[Line], int]]] = [
        ("input, from a cache", "var(--series-3)", lambda line: line.tokens["cache_read"]),
        ("input, computed", "var(--series-1)", lambda line: line.input_tokens - line.tokens["cache_read"]),
        ("output", "var(--series-2)", lambda line: line.output_tokens),
    ]
    data = [_day_bars(name, colour, *_per_day(daily, partial(_sum, count)), "%{y:,}") for name, colour, count in kinds]
    return Figure("Tokens by day", "Each token is in one of the parts.", data, _layout(y="tokens"))


def _hit_rate_by_day(daily: Sequence[Line]) -> Figure:
    def rate(of: Callable[[Line], int]) -> Callable[[Sequence[Line]], float | None]:
        def of_lines(lines: Sequence[Line]) -> float | None:
            prompts = sum(line.input_tokens for line in lines)
            return sum(map(of, lines)) / prompts if prompts else None

        return of_lines

    kinds: list[tuple[str, str, str, Callable[[Line], int]]] = [
        ("delivered", "var(--series-3)", "solid", lambda line: line.tokens["cache_read"]),
        ("predicted where it went", "var(--series-1)", "dot", lambda line: line.predicted_hit_tokens),
        ("to be expected blind to caches", "var(--series-2)", "dot", lambda line: line.blind_hit_tokens),
        ("best that was anywhere", "var(--muted)", "dot", lambda line: line.best_hit_tokens),
    ]
    data = []
    for name, colour, dash, of in kinds:
        days, rates = _per_day(daily, rate(of))
        line = {"color": colour, "dash": dash, "width": 2}
        data.append({"type": "scatter", "mode": "lines+markers", "name": name, "x": days, "y": rates, "line": line,
                     "marker": {"size": 5}, "hovertemplate": "%{y:.1%}"})  # fmt: skip
    return Figure(
        "Hit rate by day",
        "Share of the prompt tokens that came from a cache. What an engine does not tell counts as none. Round robin, "
        "or any policy that does not look at caches, could expect the mean of what all engines held.",
        data,
        _layout(y="", tickformat=".0%", rangemode="tozero"),
    )


def _with_and_without_cache(report: Report, lines: Sequence[Line], unit: str) -> Figure:
    dearest = sorted(lines, key=lambda line: -line.cost)[: SHOWN * 2]
    names = [" · ".join(place(line, name) for name in report.by) for line in dearest]
    costs = [float(line.cost) for line in dearest]
    placement = [float(line.saved_by_placement) for line in dearest]
    anyway = [float(line.saved - line.saved_by_placement) for line in dearest]
    data = [
        {**_bars("cost", "var(--series-1)", costs, names, "%{x:,.4f}"), "orientation": "h"},
        {**_bars("saved, wherever it had gone", "var(--series-3)", anyway, names, "%{x:,.4f}"), "orientation": "h"},
        {**_bars("saved by placement", "var(--series-2)", placement, names, "%{x:,.4f}"), "orientation": "h"},
    ]
    layout = _layout(y="")
    layout["hovermode"] = "y unified"
    layout["yaxis"] |= {
        "ticks": "outside",
        "tickcolor": "rgba(0,0,0,0)",
        "autorange": "reversed",
        "tickfont": {"color": "var(--ink)"},
        "showgrid": False,
    }
    layout["xaxis"] |= {"showgrid": True, "title": {"text": unit}, "type": "linear"}
    layout["legend"] = {**layout["legend"], "y": 1.02, "yanchor": "bottom"}
    layout["margin"] = {**layout["margin"], "t": 36, "b": 48}
    note = f"The dearest lines, {unit}. All parts together are what it would have cost without a cache."
    return Figure("What the cache saved", note, data, layout, 110 + 30 * len(dearest))


def _sum(count: Callable[[Line], int], lines: Iterable[Line]) -> int:
    return sum(map(count, lines))


def _name(line: Line, by: str | None) -> str:
    return place(line, by) if by else "all"


def _per_day(lines: Iterable[Line], value: Callable[[Sequence[Line]], Any]) -> tuple[list[str], list[Any]]:
    days: dict[str, list[Line]] = {}
    for line in lines:
        days.setdefault(line.where["day"], []).append(line)
    return sorted(days), [value(days[day]) for day in sorted(days)]


def _bars(name: str, colour: str, x: Sequence[Any], y: Sequence[Any], hover: str) -> dict[str, Any]:
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour}, "hovertemplate": hover}


def _day_bars(name: str, colour: str, days: Sequence[str], y: Sequence[Any], hover: str) -> dict[str, Any]:
    return {**_bars(name, colour, days, y, hover), "width": _BAR_MS}


def _days(report: Report) -> dict[str, Any]:
    """An axis of all its days, also of those on which nothing was used."""
    ends = [f"{report.first - datetime.timedelta(days=1)} 12:00", f"{report.last} 12:00"]
    axis: dict[str, Any] = {
        "type": "date",
        "range": ends,
        "tickformat": "%-d %b",
        "minallowed": ends[0],
        "maxallowed": ends[1],
    }
    if report.last - report.first < datetime.timedelta(days=14):
        axis |= {"tick0": report.first.isoformat(), "dtick": _DAY_MS}  # else a day would be named more than once
    return axis


def _layout(*, y: str, **axis: Any) -> dict[str, Any]:
    return {
        **_LAYOUT,
        "hovermode": "x unified",
        "xaxis": {**AXIS, "showgrid": False, "showline": True},
        "yaxis": {**AXIS, "title": axis_title(y), **axis},
    }
