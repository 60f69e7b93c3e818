"""The grid as a picture: how every arm of every cell compares with kv_aware, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from math import log10

import msgspec

from tests.policy_grid.cells import NOT_BASELINES, OURS, Cell
from tests.policy_grid.state import Key, Run
from tests.policy_grid.verdict import MAIN, Promise, Verdict, mean_of_arm

ROW, TOP, LEFT, PANEL, GAP = 15, 64, 205, 230, 46
"""Pixels: of a row, above the first, left of the panels, of a panel, and between two."""
COLOURS = {"lmetric": "#0072b2", "lmetric:room": "#e69f00", "dynamo:wspt": "#cc79a7"}
OTHERS = "#9a9a9a"
STATUS = {"broken": "#c0392b", "open": "#8a6d00", "kept": "#2d7d46", "unfinished": "#777777"}


class Panel(msgspec.Struct, frozen=True):
    """`place`: 0..1 across for (theirs, ours); 0.5 is as good as ours, and more is better for us."""

    promise: Promise
    title: str
    ticks: Sequence[tuple[str, float]]
    place: Callable[[float, float], float]


def _times(theirs: float, ours: float) -> float:
    """Logarithmic, from a quarter of ours to a hundred times it."""
    ratio = min(100.0, max(0.25, theirs / ours)) if ours else 1.0
    return 0.25 + 0.375 * log10(ratio) if ratio >= 1 else 0.25 * (1 - log10(ratio) / log10(0.25))


def _points(theirs: float, ours: float) -> float:
    """From 20 points more to 60 points less."""
    return (0.2 + min(0.6, max(-0.2, ours - theirs))) / 0.8


_RATIOS = (("¼ ×", 0.25), ("as kv_aware", 1.0), ("10 ×", 10.0), ("100 ×", 100.0))
_DIFFERENCES = (("+20", -0.2), ("as kv_aware", 0.0), ("-20", 0.2), ("-40", 0.4), ("-60", 0.6))
PANELS = (
    Panel(MAIN[0], "mean TTFT", [(name, _times(ratio, 1.0)) for name, ratio in _RATIOS], _times),
    Panel(MAIN[1], "goodput, points", [(name, _points(0.0, less)) for name, less in _DIFFERENCES], _points),
    Panel(MAIN[2], "scaled goodput, points", [(name, _points(0.0, less)) for name, less in _DIFFERENCES], _points),
)


def plot(verdicts: Sequence[Verdict], runs: Mapping[Key, Run]) -> str:
    """One row a cell, one dot an arm; what is left of the line is better than kv_aware."""
    finished = [verdict for verdict in verdicts if verdict.status != "unfinished"]
    height = TOP + ROW * len(finished) + 12
    width = LEFT + len(PANELS) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(),
    ]
    for number, panel in enumerate(PANELS):
        parts += _frame(panel, LEFT + number * (PANEL + GAP), height - 12)
    for row, verdict in enumerate(finished):
        y = _middle(row) + 3.5
        colour, name = STATUS[verdict.status], escape(verdict.cell.name)
        parts.append(f'<text x="{LEFT - 10}" y="{y}" text-anchor="end" fill="{colour}">{name}</text>')
    cells = [verdict.cell for verdict in finished]
    for arm, colour in ((None, OTHERS), *COLOURS.items()):  # those with a name last, so that nothing hides them
        dots = "".join(_dots(cells, arm, runs))
        width_px = 4.4 if arm is None else 6.8
        parts.append(f'<path d="{dots}" stroke="{colour}" stroke-width="{width_px}" stroke-linecap="round"/>')
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> Iterator[str]:
    x = 10
    for name, colour in (*COLOURS.items(), ("other rules", OTHERS)):
        yield f'<circle cx="{x}" cy="12" r="4" fill="{colour}"/><text x="{x + 8}" y="15.5">{escape(name)}</text>'
        x += 40 + 6 * len(name)
    for status in ("kept", "open", "broken"):
        yield f'<text x="{x}" y="15.5" fill="{STATUS[status]}">{status}</text>'
        x += 44
    yield f'<text x="{x + 10}" y="15.5" fill="#555555">left of the line: better than kv_aware</text>'


def _frame(panel: Panel, x: float, bottom: float) -> Iterator[str]:
    yield f'<text x="{x + PANEL / 2}" y="36" text-anchor="middle" font-weight="bold">{panel.title}</text>'
    for name, place in panel.ticks:
        at = x + PANEL * place
        strong = name == "as kv_aware"
        yield f'<text x="{at}" y="{TOP - 8}" text-anchor="middle" fill="#555555">{name}</text>'
        yield (
            f'<line x1="{at}" x2="{at}" y1="{TOP - 4}" y2="{bottom}" stroke="{"#000000" if strong else "#dddddd"}"'
            f' stroke-width="{1.2 if strong else 0.8}"/>'
        )


def _dots(cells: Sequence[Cell], named: str | None, runs: Mapping[Key, Run]) -> Iterator[str]:
    """Of one arm, or of all that have no name in the legend."""
    for row, cell in enumerate(cells):
        arms = [arm for arm in cell.arms if arm not in NOT_BASELINES and (arm if arm in COLOURS else None) == named]
        for number, panel in enumerate(PANELS):
            ours = mean_of_arm(panel.promise, cell, OURS, runs)
            for arm in arms:
                theirs = mean_of_arm(panel.promise, cell, arm, runs)
                if ours is not None and theirs is not None:
                    at = LEFT + number * (PANEL + GAP) + PANEL * panel.place(theirs, ours)
                    yield f"M{at:.1f} {_middle(row):.1f}h0"


def _middle(row: int) -> float:
    return TOP + ROW * row + ROW / 2
