"""The pictures of a comparison, as plotly figures in plain data.

Colours are written as `var(--name)`; the page puts in what its style sheet says, for light and for dark. A policy has the
same colour in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from router.lab.measures import FIXED, SCALED, quantile
from router.lab.report import (
    LENGTH_CLASSES,
    Report,
    cumulative_ttft,
    percent,
    queue,
    tpots_ms,
    ttfts_by_length,
)

SERIES_COLOURS = 8
_DASHES = ("solid", "dash", "dot")
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))

_AXIS = {
    "gridcolor": "var(--grid)",
    "linecolor": "var(--axis)",
    "zerolinecolor": "var(--axis)",
    "tickfont": {"color": "var(--muted)"},
    "title": {"font": {"color": "var(--muted)", "size": 12}, "standoff": 8},
    "automargin": True,
}
_TEMPLATE = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--ink)"},
        "margin": {"l": 56, "r": 24, "t": 8, "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        "hoverlabel": {
            "bgcolor": "var(--page)",
            "bordercolor": "var(--axis)",
            "font": {"color": "var(--ink)"},
            "namelength": -1,
        },
        "bargap": 0.3,
        "bargroupgap": 0.08,
        "xaxis": {**_AXIS, "showgrid": False, "showline": True, "zeroline": False},
        "yaxis": {**_AXIS, "zeroline": False},
    }
}


class Figure(NamedTuple):
    """note: how to read it. data, layout: plotly's. height in pixels."""

    title: str
    note: str
    data: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    height: int


def figures(report: Report) -> list[Figure]:
    return [
        _ttft_by_length(report),
        _ttft_distribution(report),
        _tpot(report),
        _goodput(report),
        _hit_rate(report),
        _evenness(report),
        _queue(report),
    ]


def _names(report: Report) -> list[str]:
    return [run.measures.policy for run in report.runs]


def _colour(number: int) -> str:
    return f"var(--series-{number % SERIES_COLOURS + 1})"


def _line(number: int) -> dict[str, Any]:
    return {"color": _colour(number), "width": 2, "dash": _DASHES[number // SERIES_COLOURS % len(_DASHES)]}


def _layout(**own: Any) -> dict[str, Any]:
    return {"template": _TEMPLATE, **own}


def _panel_titles(titles: Sequence[str]) -> list[dict[str, Any]]:
    """Above panels that share their y axis: one x axis each."""
    return [
        {
            "text": title,
            "xref": f"x{number or ''} domain".replace("x1 ", "x ") if number > 1 else "x domain",
            "yref": "paper",
            "x": 0,
            "y": 1,
            "xanchor": "left",
            "yanchor": "bottom",
            "showarrow": False,
            "font": {"color": "var(--muted)"},
        }
        for number, title in enumerate(titles, 1)
    ]


def _panel(number: int) -> str:
    """The name of the x axis of panel `number`, from 0."""
    return f"x{number + 1}" if number else "x"


def _ttft_by_length(report: Report) -> Figure:
    measures: list[tuple[str, Callable[[Sequence[float]], float | None]]] = [("mean", _mean)]
    measures += [(name, lambda values, q=q: quantile(values, q)) for name, q in _QUANTILES]
    ...
