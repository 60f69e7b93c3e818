"""The pictures of a comparison: plotly's figures as plain data.

Colours are written as `var(--name)`; the page puts in what its style sheet has, for light and for dark. All that shows
a policy bears its name, and its colour, which is the same in all pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.lab.measures import FIXED, SCALED, Measures, quantile
from router.lab.report import LENGTH_CLASSES, Report, cumulative_ttft, percent, queue, tpots_ms, ttfts_by_length
from router.plots import AXIS, LAYOUT, Figure, axis_title

SERIES_COLOURS = 8
_DASHES = ("solid", "dash", "dot")  # colours begin anew after the last; lines and bars look different then
_PATTERNS = ("", "/", "x")
_STATISTICS = ("mean", "p50", "p90", "p99")

_AXIS = {**AXIS, "title": axis_title()}
_TEMPLATE = {
    "layout": {
        **LAYOUT,
        "margin": {"l": 56, "r": 24, "t": 8, "b": 44},
        "showlegend": False,
        "bargap": 0.3,
        "bargroupgap": 0.1,
        "xaxis": {**_AXIS, "showgrid": False, "showline": True, "zeroline": False},
        "yaxis": {**_AXIS, "zeroline": False},
    }
}
_SHARES = {"tickformat": ".1~%"}
_LOG_SECONDS = {
    "type": "log",
    "title": {"text": "TTFT, s"},
    "tickvals": [m * 10**e for e in range(-3, 5) for m in (1, 2, 5)],
}
_POLICIES = {
    "autorange": "reversed",
    "showgrid": False,
    "tickfont": {"color": "var(--ink)"},
    "ticks": "outside",  # unseen: they keep names and bars apart
    "ticklen": 6,
    "tickcolor": "rgba(0,0,0,0)",
}


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


def colour(number: int) -> str:
    """Of the policy at that position."""
    return f"var(--series-{number % SERIES_COLOURS + 1})"


def _ttft_by_length(report: Report) -> Figure:
    lengths = [name for name, _, _ in LENGTH_CLASSES]
    axis = {"categoryorder": "array", "categoryarray": lengths}
    data = []
    for number, run in enumerate(report.runs):
        statistics = [_statistics(ttfts) for ttfts in ttfts_by_length(run.replayed)]
        for panel, _ in enumerate(_STATISTICS):
            values = [of_class[panel] for of_class in statistics]
            data.append(_curve(number, run.measures, lengths, values, panel=panel, points=True))
    return Figure(
        "TTFT by prompt length",
        "Seconds from arrival to the first token, by the tokens of the prompt. Logarithmic.",
        data,
        _layout(**_panels(_STATISTICS, [axis] * len(_STATISTICS)), yaxis=_LOG_SECONDS),
    )


def _ttft_distribution(report: Report) -> Figure:
    curves = [cumulative_ttft(run.replayed) for run in report.runs]
    limit = {"x0": FIXED.ttft_s, "x1": FIXED.ttft_s, "y0": 0, "y1": 1, "type": "line", "line": _RULE}
    return Figure(
        "TTFT, cumulative",
        f"Share of all requests whose first token had come so long after their arrival. Dotted: {FIXED.ttft_s:g} s.",
        [_curve(number, run.measures, *curves[number]) for number, run in enumerate(report.runs)],
        _layout(
            xaxis=_LOG_SECONDS,
            yaxis={**_SHARES, "range": [0, 1.01], "title": {"text": "requests"}},
            shapes=[limit],
        ),
    )


def _tpot(report: Report) -> Figure:
    return Figure(
        "TPOT",
        f"Milliseconds per output token after the first. The objective is {FIXED.tpot_s * 1e3:g} ms.",
        [
            _columns(number, run.measures, _STATISTICS, _statistics(tpots_ms(run.replayed)), "%{y:.1f} ms")
            for number, run in enumerate(report.runs)
        ],
        _layout(yaxis={"title": {"text": "TPOT, ms"}, "rangemode": "tozero"}),
    )


def _goodput(report: Report) -> Figure:
    fixed = f"TTFT ≤ {FIXED.ttft_s:g} s, TPOT ≤ {FIXED.tpot_s * 1e3:g} ms"
    scaled = f"TTFT ≤ {SCALED.ttft_s:g} s + {SCALED.solo_factor:g} × alone, TPOT ≤ {SCALED.tpot_s * 1e3:g} ms"
    kinds = (f"requests<br>{fixed}", f"tokens<br>{fixed}", f"requests<br>{scaled}")
    data = []
    for number, run in enumerate(report.runs):
        shares = (run.measures.goodput, run.measures.goodput_tokens, run.measures.goodput_scaled)
        data.append(_columns(number, run.measures, kinds, shares, "%{y:.1%}"))
    return Figure(
        "Goodput",
        "Share of what was asked for that was served within the objective: of all requests, and of all their input and"
        " output tokens, where long prompts weigh more. Alone: the prefill of the whole prompt on an idle engine.",
        data,
        _layout(yaxis={**_SHARES, "range": [0, 1]}),
    )


def _hit_rate(report: Report) -> Figure:
    data = []
    for number, run in enumerate(report.runs):
        data.append(_bar(number, run.measures, run.measures.hit_rate))
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": run.measures.policy,
                "x": [run.measures.best_hit_rate],
                "y": [run.measures.policy],
                "marker": {"symbol": "line-ns", "size": 16, "line": {"width": 2, "color": "var(--ink)"}},
                "hovertemplate": "%{x:.1%} held by the best engine",
            }
        )
    infinite, pooled = report.bounds
    most = max(infinite, *(max(run.measures.hit_rate, run.measures.best_hit_rate) for run in report.runs), 0.01)
    bounds = ((pooled, "one LRU cache of all engines' size", 0), (infinite, "endless caches", 16))
    return Figure(
        "Hit rate",
        "Share of input tokens that came from a cache. Tick: what the best engine for each request held when it was"
        " placed. Dotted: one LRU cache as large as all engines' together, and caches that never evict.",
        data,
        _layout(
            xaxis={**_SHARES, "range": [0, most * 1.1]},
            yaxis=_POLICIES,
            margin={"t": 44},
            shapes=[
                {"type": "line", "x0": share, "x1": share, "yref": "paper", "y0": 0, "y1": 1, "line": _RULE}
                for share, _, _ in bounds
            ],
            annotations=[
                _label(
                    f"{name}: {percent(share)}",
                    x=share,
                    yshift=above,
                    xanchor="left" if share < most / 2 else "right",
                )
                for share, name, above in bounds
            ],
        ),
        _height(report, 90),
    )


def _evenness(report: Report) -> Figure:
    panels = ("second copies, of the blocks held", "busiest engine, above the mean", "not served, of all requests")
    data, most = [], [0.01] * len(panels)
    for number, run in enumerate(report.runs):
        measures = run.measures
        shares = (measures.duplicate_share, measures.imbalance - 1, measures.refused / measures.requests)
        data += [_bar(number, measures, share, panel=panel) for panel, share in enumerate(shares)]
        most = list(map(max, most, shares))
    axes = [{**_SHARES, "range": [0, 1.25 * share], "nticks": 5} for share in most]  # room for the figure behind a bar
    return Figure(
        "Duplicates, imbalance, refusals",
        "Blocks in the caches beyond the first copy of each, averaged over the run; how much longer than the average"
        " engine the busiest one computed; requests refused or broken off.",
        data,
        _layout(**_panels(panels, axes), yaxis=_POLICIES),
        _height(report, 80),
    )


def _queue(report: Report) -> Figure:
    return Figure(
        "Queue over time",
        "Requests that had arrived and not had their first token, wherever they waited. Without those never served.",
        [_curve(number, run.measures, *queue(run.replayed)) for number, run in enumerate(report.runs)],
        _layout(
            xaxis={"title": {"text": "time, s"}, "rangemode": "tozero"},
            yaxis={"title": {"text": "requests"}, "rangemode": "tozero"},
        ),
    )


# -- parts

_RULE = {"color": "var(--muted)", "width": 1, "dash": "dot"}


def _layout(**own: Any) -> dict[str, Any]:
    return {"template": _TEMPLATE, **own}


def _height(report: Report, around: int) -> int:
    return around + 34 * len(report.runs)


def _axis(panel: int) -> str:
    return f"x{panel + 1}" if panel else "x"


def _panels(titles: Sequence[str], axes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Layout of panels side by side, each with its x axis, that share their y axis."""
    names = [_axis(panel) for panel in range(len(titles))]
    return {
        "margin": {"t": 28},
        "grid": {"rows": 1, "columns": len(titles), "subplots": [[f"{name}y" for name in names]], "xgap": 0.08},
        **{f"xaxis{name[1:]}": axis for name, axis in zip(names, axes, strict=True)},
        "annotations": [
            _label(title, x=0, xref=f"{name} domain", xanchor="left") for title, name in zip(titles, names, strict=True)
        ],
    }


def _label(text: str, **place: Any) -> dict[str, Any]:
    """Small print on the upper edge."""
    font = {"color": "var(--muted)"}
    return {"text": text, "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False, "font": font, **place}


def _round(number: int) -> int:
    """How often all colours are used up before that policy, as far as there are ways to tell the rounds apart."""
    return number // SERIES_COLOURS % len(_DASHES)


def _fill(number: int) -> dict[str, Any]:
    return {"color": colour(number), "pattern": {"shape": _PATTERNS[_round(number)]}}


def _curve(
    number: int, measures: Measures, x: Sequence[Any], y: Sequence[Any], *, panel: int = 0, points: bool = False
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if points else "lines",
        "name": measures.policy,
        "x": x,
        "y": y,
        "xaxis": _axis(panel),
        "line": {"color": colour(number), "width": 2, "dash": _DASHES[_round(number)]},
        "marker": {"size": 7},
    }


def _columns(number: int, measures: Measures, x: Sequence[str], y: Sequence[float | None], text: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": measures.policy,
        "x": x,
        "y": y,
        "marker": _fill(number),
        "hovertemplate": text,
    }


def _bar(number: int, measures: Measures, share: float, *, panel: int = 0) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": measures.policy,
        "x": [share],
        "y": [measures.policy],
        "xaxis": _axis(panel),
        "marker": _fill(number),
        "text": [percent(share)],
        "textposition": "outside",
        "cliponaxis": False,
        "hoverinfo": "none",
    }


def _statistics(ordered: Sequence[float]) -> list[float | None]:
    """As _STATISTICS names them."""
    mean = sum(ordered) / len(ordered) if ordered else None
    return [mean, *(quantile(ordered, q) for q in (0.5, 0.9, 0.99))]
