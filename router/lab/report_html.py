"""A comparison as one page that needs nothing else."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from router import plots
from router.lab.report import COLUMNS, Report, chunk_tokens, engines_text, one_line, percent
from router.lab.report_figures import SERIES_COLOURS, colour, figures

_TEMPLATE = Path(__file__).with_name("report_page.html")


def page(report: Report) -> str:
    """HTML, about 5 MB."""
    return plots.page(
        _TEMPLATE,
        figures(report),
        report=report,
        one_line=one_line(report),
        groups=[(group, len(list(columns))) for group, columns in groupby(column.group for column in COLUMNS)],
        columns=COLUMNS,
        best={column.field: column.best(report.runs) for column in COLUMNS},
        colour=colour,
        colours=SERIES_COLOURS,
        setting=_setting(report),
    )


def _setting(report: Report) -> list[tuple[str, str]]:
    """What has to be known to run it again, by name."""
    setup = report.setup
    told = [("engines", engines_text(setup)), ("seed", str(report.seed))]
    told += [(name, str(value)) for name, value in report.reading.items() if value is not None]
    told += [
        ("chunk", ", ".join(dict.fromkeys(f"{chunk_tokens(spec):,} tokens" for spec in setup.engines))),
        ("first tokens and ends known after", f"{setup.signal_delay_s * 1e3:g} ms"),
        ("KV events known after", f"{setup.event_delay_s * 1e3:g} ms; lost: {percent(setup.event_loss)}"),
        ("load known after", f"{setup.load_delay_s * 1e3:g} ms"),
        ("not streamed", percent(setup.not_streamed)),
    ]
    told += [("outage", f"engine {one.engine}, {one.at_s:g} s to {one.back_s:g} s") for one in setup.outages]
    return told
