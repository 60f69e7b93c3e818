"""A report as one page that needs nothing else: no server, no network, plotly's script within."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jinja2
import orjson

from router.admin.report_figures import figures
from router.admin.report_table import cells, headings, summary, texts
from router.store.report_lines import Report

_TEMPLATE = Path(__file__).with_name("report_page.html")
_MOST_LINES = 500


def page(report: Report, over_time: Report) -> str:
    """HTML, about 5 MB. over_time: the same by day and the first dimension."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped] # only who asks for a page pays for it

    drawn = figures(report, over_time)
    data = [{"data": figure.data, "layout": figure.layout} for figure in drawn]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        headings=headings(report),
        texts=texts(report),
        cells=partial(cells, report),
        summary=summary,
        most=_MOST_LINES,
        figures=drawn,
        plotly=get_plotlyjs(),
        # "<" only as an escape: a name must not end the script
        data=orjson.dumps(data).decode().replace("<", "\\u003c"),
    )
