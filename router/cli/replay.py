"""`warmroute replay`: what would another policy do with this load, or two more GPUs?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from router.cli.figures import terminal, write_json
from router.cli.options import JsonFile, read_load
from router.cli.replay_engines import (
    DEFAULT_COUNT,
    DEFAULT_ENGINE,
    engine_specs,
    known_engines,
    parse_outage,
)
from router.errors import ConfigError
from router.lab.arms import MODES, Arm, parse_arm
from router.lab.bounds import hit_bounds
from router.lab.compare import Run, compare
from router.lab.profiles import PROFILES
from router.lab.replay import Setup
from router.lab.report import COLUMNS, Report, cache_tokens, one_line, summary
from router.lab.traces import Trace

DEFAULT_POLICIES = ("kv_aware", "lmetric", "least_work")
_SETUP = Setup(engines=())
_MOST_DELAY_MS = 60_000.0
_ANY_WIDTH = 10_000  # columns


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines, plain or .gz: see examples/replay.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--policy",
            metavar="POLICY[:MODE]",
            help=f"Repeat to compare. [default: {', '.join(DEFAULT_POLICIES)}] MODE says when and in which order"
            f" requests reach the engines: {', '.join(MODES)}.",
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[COUNTx]NAME",
            help=f"Repeat for a mixed fleet. [default: {DEFAULT_ENGINE}] Known: {', '.join(PROFILES)}.",
        ),
    ] = None,
    engines: Annotated[
        int | None, typer.Option(min=1, help=f"How many, where one is named. [default: {DEFAULT_COUNT}]")
    ] = None,
    engine_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML or JSON with engines of your own, by name.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Most tokens an engine computes in a step; the engine's own by default.")
    ] = None,
    speed: Annotated[float, typer.Option(help="4 is four times the recorded load.")] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only so many requests (sessions, where it has them).")
    ] = None,
    sessions_per_s: Annotated[
        float | None, typer.Option(help="How many sessions begin in a second, for traces without arrival times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides all that is drawn. The same seed gives the same figures.")] = 0,
    not_streamed: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Of requests whose first token nobody sees.")
    ] = _SETUP.not_streamed,
    signal_delay_ms: Annotated[
        float, typer.Option(min=0, max=_MOST_DELAY_MS, help="From a first token or an end until the gateway knows.")
    ] = _SETUP.signal_delay_s * 1e3,
    event_delay_ms: Annotated[
        float, typer.Option(min=0, max=_MOST_DELAY_MS, help="The same for KV events.")
    ] = _SETUP.event_delay_s * 1e3,
    load_delay_ms: Annotated[
        float, typer.Option(min=0, max=_MOST_DELAY_MS, help="The same for the load that engines report.")
    ] = _SETUP.load_delay_s * 1e3,
    event_loss: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Of batches of KV events that never arrive.")
    ] = _SETUP.event_loss,
    outage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENGINE:AT:BACK",
            help="An engine, from 0, that dies and comes back empty, in seconds. Repeat for more.",
        ),
    ] = None,
    json: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with pictures there; it needs no network.")
    ] = None,
) -> None:
    """Replay a recorded load through policies, on simulated engines.

    Policies, index and waiting room are the gateway's own; engines and clock are simulated, so an hour takes seconds.
    Prints a line of figures for each policy, the best in bold.
    """
    arms = _arms(policy or DEFAULT_POLICIES)
    specs = engine_specs(engine or (), engines, known_engines(engine_file), chunk=chunk)
    setup = Setup(
        engines=specs,
        signal_delay_s=signal_delay_ms / 1e3,
        event_delay_s=event_delay_ms / 1e3,
        load_delay_s=load_delay_ms / 1e3,
        event_loss=event_loss,
        not_streamed=not_streamed,
        outages=[parse_outage(text, len(specs)) for text in outage or ()],
    )
    _check_targets(json, html)
    loaded = read_load(trace, speed=speed, limit=limit, sessions_per_s=sessions_per_s, seed=seed)
    report = Report(
        trace=loaded,
        reading={"speed": speed, "limit": limit, "sessions_per_s": sessions_per_s},
        setup=setup,
        seed=seed,
        bounds=hit_bounds(loaded, capacity_tokens=_all_caches(setup, loaded)),
        runs=_compare(loaded, arms, setup, seed),
    )
    _put_out(report, json, html)


def show(report: Report, console: Console) -> None:
    """A line a policy; where that is wider than the terminal, a column a policy."""
    table = _table(report, across=True)
    if Measurement.get(console, console.options.update(width=_ANY_WIDTH), table).maximum > console.width:
        table = _table(report, across=False)
    console.print(table)
    console.print()
    console.print(Text(one_line(report)))


def _table(report: Report, *, across: bool) -> Table:
    best = {column: column.best(report.runs) for column in COLUMNS}
    between = "\n" if across else " "
    rows = [[Text("policy"), *(Text(f"{column.group}{between}{column.heading}") for column in COLUMNS)]]
    for run in report.runs:
        cells = [(column.cell(run.measures), best[column]) for column in COLUMNS]
        rows.append([Text(run.measures.policy), *(Text(cell, "bold" if cell == top else "") for cell, top in cells)])
    headings, *lines = rows if across else zip(*rows, strict=True)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def _arms(texts: Sequence[str]) -> list[Arm]:
    try:
        return [parse_arm(text) for text in dict.fromkeys(texts)]
    except ValueError as error:
        raise ConfigError([str(error)]) from None


def _all_caches(setup: Setup, trace: Trace) -> int:
    """Tokens that all engines hold together. Raises ConfigError where one holds not even a block."""
    each = [(cache_tokens(spec, trace.block_size), spec.profile.name) for spec in setup.engines]
    for tokens, name in each:
        if not tokens:
            raise ConfigError([f"engine {name!r} can't hold a block of this trace, {trace.block_size} tokens"])
    return sum(tokens for tokens, _ in each)


def _compare(trace: Trace, arms: Sequence[Arm], setup: Setup, seed: int) -> list[Run]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        requests = len(trace.requests)
        task = bar.add_task(arms[0].name, total=requests * len(arms))

        def progress(arm: Arm, ended: int) -> None:
            bar.update(task, description=arm.name, completed=arms.index(arm) * requests + ended)

        return compare(trace, arms, setup, seed=seed, progress=progress)


def _check_targets(*files: Path | None) -> None:
    """Before the work is done, not after it."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise ConfigError([f"{file}: there is no folder {file.parent}"])
        if file is not None and file.is_dir():
            raise ConfigError([f"{file}: is a folder"])


def _put_out(report: Report, json: Path | None, html: Path | None) -> None:
    try:
        if json:
            write_json(json, summary(report))
        if html:
            from router.lab.report_html import page  # only who asks for it waits for its imports

            html.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{error.filename}: {error.strerror}"]) from None
    if str(json) != "-":
        show(report, terminal())
