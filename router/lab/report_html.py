"""A comparison as one page that needs nothing else: no server, no network, plotly's script within."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import jinja2
import orjson

from router.lab.report import COLUMNS, Report, chunk_tokens, engines_text, one_line, percent
from router.lab.report_figures import SERIES_COLOURS, colour, figures

_TEMPLATE = Path(__file__).with_name("report_page.html")


def page(report: Report) -> str:
    """HTML, about 5 MB."""
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped] # only who asks for a page pays for it

    drawn = figures(report)
    data = [{"data": figure.data, "layout": figure.layout} for figure in drawn]
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        one_line=one_line(report),
        groups=[(group, len(list(columns))) for group, columns in groupby(column.group for column in COLUMNS)],
        columns=COLUMNS,
        best={column.field: column.best(report.runs) for column in COLUMNS},
        figures=drawn,
        colour=colour,
        colours=SERIES_COLOURS,
        setting=_setting(report),
        plotly=get_plotlyjs(),
        # "<" only as an escape: a name must not end the script
        data=orjson.dumps(data).decode().replace("<", "\\u003c"),
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
