"""How a benchmark shows its figures: one table, each figure beside its baseline from the same run."""

from __future__ import annotations

import argparse
import inspect
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tests.bench.processes import end_cleanly_when_told

PIPE_WIDTH = 160
"""Columns where there is no terminal: a table folded at 80 is hard to read in a log."""


class Row(NamedTuple):
    """`baseline` has the same unit and comes from the same run; `against` says what it is."""

    name: str
    value: float | None
    unit: str
    baseline: float | None = None
    against: str = ""
    target: str = ""

    @property
    def ratio(self) -> float | None:
        return self.value / self.baseline if self.value is not None and self.baseline else None


Rows = Callable[[dict[str, Any]], Iterable[Row]]


def report(doc: str | None, run: Callable[..., dict[str, Any]], rows: Rows) -> None:
    """The command line of one benchmark. Each parameter of `run` is an option; `--json FILE` keeps the figures."""
    title = (doc or "").strip().splitlines()[0]
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", type=Path)
    for name, parameter in inspect.signature(run).parameters.items():
        kind = type(parameter.default) if parameter.default is not None else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=parameter.default)
    options = vars(parser.parse_args())
    file: Path | None = options.pop("json")
    end_cleanly_when_told()
    load_before = os.getloadavg()[0]
    figures = run(**options)
    output = console()
    output.print(f"[bold]{title}[/bold]  (load average before: {load_before:.2f})", soft_wrap=True)
    output.print(table(rows(figures)))
    if file:
        file.write_text(json.dumps({"load_average_before": round(load_before, 2), "figures": figures}, indent=1) + "\n")


def table(rows: Iterable[Row]) -> Table:
    made = Table()
    made.add_column("figure")
    for heading in ("value", "baseline", "ratio"):
        made.add_column(heading, justify="right")
    made.add_column("baseline is")
    made.add_column("target")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3g} ×" if row.ratio >= 0.01 else f"1/{1 / row.ratio:,.0f}"
        value, baseline = _number(row.value, row.unit), _number(row.baseline, row.unit) if row.baseline else ""
        made.add_row(row.name, value, baseline, ratio, row.against, row.target)
    return made


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(width=max(found.width, PIPE_WIDTH), highlight=False)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    digits = (
        0 if abs(value) >= 1000 or value == int(value) else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 5
    )
    return f"{value:,.{digits}f} {unit}".rstrip()
