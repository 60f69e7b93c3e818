"""Pictures on a page that needs nothing else: no server, no network, plotly's script within.

A page extends `page.html`, which has the style, a place for each figure, and the script that draws them. Colours in
figures are `var(--name)`: the page puts in what its style sheet has, for light and for dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import orjson

AXIS = {
    "gridcolor": "var(--grid)",
    "linecolor": "var(--axis)",
    "zerolinecolor": "var(--axis)",
    "tickfont": {"color": "var(--muted)"},
    "automargin": True,
}
LAYOUT = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--ink)"},
    "hoverlabel": {
        "bgcolor": "var(--page)",
        "bordercolor": "var(--axis)",
        "font": {"color": "var(--ink)"},
        "namelength": -1,
    },
}


class Figure(NamedTuple):
    """note: how to read it. data, layout: plotly's. height: pixels."""

    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 340


def axis_title(text: str | None = None) -> dict[str, Any]:
    """How an axis is named; by default how, and not what."""
    style = {"font": {"color": "var(--muted)", "size": 12}, "standoff": 8}
    return style if text is None else {"text": text, **style}


def page(template: Path, figures: Sequence[Figure], **told: Any) -> str:
    """HTML, about 5 MB. `template`: a file that extends `page.html`; `told`: what it is told besides the figures."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped] # only who asks for a page pays for it

    data = [{"data": figure.data, "layout": figure.layout} for figure in figures]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template.name).render(
        figures=figures,
        plotly=get_plotlyjs(),
        # "<" only as an escape: a name must not end the script
        data=orjson.dumps(data).decode().replace("<", "\\u003c"),
        **told,
    )
