"""A report as one page that needs nothing else."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from router import plots
from router.admin.report_figures import figures
from router.admin.report_table import cells, headings, summary, texts
from router.store.report_lines import Report

_TEMPLATE = Path(__file__).with_name("report_page.html")
_MOST_LINES = 500


def page(report: Report, over_time: Report) -> str:
    """HTML, about 5 MB. over_time: the same by day and the first dimension."""
    return plots.page(
        _TEMPLATE,
        figures(report, over_time),
        report=report,
        headings=headings(report),
        texts=texts(report),
        cells=partial(cells, report),
        summary=summary,
        most=_MOST_LINES,
    )
