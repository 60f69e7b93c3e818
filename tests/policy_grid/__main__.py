"""All policies on all workloads, in virtual time, and whether kv_aware keeps what it promises in each cell.

    python -m tests.policy_grid --traces FOLDER [--only SUBSTRING] [--jobs 2] [--hours 1] [--state FILE] [--tag TEXT]
                                [--json FILE] [--page FILE] [--plot FILE]

About 40 minutes on two idle cores. FOLDER has mooncake_conversation, mooncake_synthetic, toolagent_like and
weka_agentic, each as .jsonl or .jsonl.gz; cells whose trace is not there are passed over.

--only    cells whose name has this in it, such as "conversation/8/" or "special"; may be given more than once
--hours   no run begins after that; what is left is done by the next call with the same --state
--state   finished runs, a line each: what is in there is not run again, unless code has changed
--tag     names the version of the code that runs are kept under; by default a hash of it
--json    every figure of every run, and the verdicts
--page    the same as tables of Markdown
--plot    and as a picture, SVG

Ends with 1 where a promise is broken or a run has failed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from router import plugins
from router.errors import ConfigError
from router.lab.arms import parse_arm
from tests.policy_grid import state, words
from tests.policy_grid.cells import ARMS, Cell, grid
from tests.policy_grid.page import page, tenant_p90_s
from tests.policy_grid.plot import plot
from tests.policy_grid.run import Batch, BatchEnd, Job, pending, run_all
from tests.policy_grid.state import Key, Run
from tests.policy_grid.verdict import Verdict, judge, worst_first
from tests.policy_grid.workloads import trace_file

REPLAYED_WITH = ("router", "policies", "tests.policy_grid.cells", "tests.policy_grid.workloads")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.traces.is_dir():
        parser.error(f"--traces: {options.traces} is not a folder")
    try:
        for arm in ARMS:
            plugins.load(plugins.POLICIES, parse_arm(arm).policy)
    except ConfigError as error:
        parser.error(str(error))
    cells = _cells(options.only, options.traces)
    if not cells:
        parser.error(f"no cell to run: of {', '.join(cell.name for cell in grid())}")
    tag = options.tag or state.code_tag(REPLAYED_WITH)
    try:
        runs = _kept(options.state, tag)
        failed = _run(cells, runs, options, tag)
        verdicts = [judge(cell, runs) for cell in cells]
        _write(options, verdicts, runs, tag)
    except OSError as error:
        parser.error(str(error))
    _print(verdicts, failed)
    return 1 if failed or any(verdict.status == "broken" for verdict in verdicts) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.policy_grid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--jobs", type=processes, default=2)
    parser.add_argument("--hours", type=hours, default=1.0)
    parser.add_argument("--tag")
    for name in ("--state", "--json", "--page", "--plot"):
        parser.add_argument(name, type=Path)
    return parser


def processes(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def hours(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def _cells(only: Sequence[str], folder: Path) -> list[Cell]:
    found = []
    missing = set()
    for cell in grid():
        if only and not any(part in cell.name for part in only):
            continue
        if cell.file is None or trace_file(folder, cell.file):
            found.append(cell)
        else:
            missing.add(cell.file)
    for name in sorted(missing):
        print(f"{folder}: no {name}.jsonl or {name}.jsonl.gz; cells with it are passed over")
    return found


def _kept(file: Path | None, tag: str) -> dict[Key, Run]:
    if file is None:
        return {}
    kept = state.read(file, tag)
    state.end_last_line(file)
    print(f"{file}: {len(kept.runs)} finished runs of code {tag}, {kept.other_tags} of other code")
    if kept.unreadable:
        print(f"{file}: {kept.unreadable} lines that cannot be read are left alone")
    return kept.runs


def _run(cells: Sequence[Cell], runs: dict[Key, Run], options: argparse.Namespace, tag: str) -> list[str]:
    """Adds to `runs`. Returns what failed."""
    batches = pending(cells, runs)
    left = sum(len(batch.arms) for batch in batches)
    about = sum(batch.takes_s for batch in batches) / options.jobs / 60
    print(
        f"{len(cells)} cells, {left:,} runs to do in {options.jobs} processes: about {about:.0f} minutes if the cores"
        f" are idle; stops after {options.hours * 60:.0f}",
        flush=True,
    )
    if not batches:
        return []
    progress = _Progress(batches, runs)
    job = Job(options.traces, tag, options.state)
    stopped = run_all(batches, job, jobs=options.jobs, until=time.time() + options.hours * 3600, ended=progress.ended)
    if stopped:
        print(f"stopped: {stopped}; {left - progress.done:,} runs are left")
    return progress.failed


class _Progress:
    """A line for each batch that has ended."""

    def __init__(self, batches: Sequence[Batch], runs: dict[Key, Run]) -> None:
        self.done = 0
        self.failed: list[str] = []
        self._batches = batches
        self._runs = runs
        self._began = time.monotonic()
        self._all_s = sum(batch.takes_s for batch in batches)
        self._done_s = 0.0

    def ended(self, end: BatchEnd) -> None:
        batch = self._batches[end.number]
        self.failed += end.failed
        for line in end.failed:
            print("FAILED", line, flush=True)
        if not end.runs:
            return
        self._runs.update((run.key, run) for run in end.runs)
        self.done += len(end.runs)
        self._done_s += batch.cell.run_s * len(end.runs)
        took_s = time.monotonic() - self._began
        left_s = took_s / self._done_s * (self._all_s - self._done_s)
        print(
            f"{self._done_s / self._all_s:4.0%} {batch.cell.name} seed {batch.seed}: {len(end.runs)} runs;"
            f" {took_s / 60:.0f} min so far, about {left_s / 60:.0f} left",
            flush=True,
        )


def _print(verdicts: Sequence[Verdict], failed: Sequence[str]) -> None:
    print()
    for verdict in verdicts:
        print(words.line(verdict))
    faulty = worst_first(verdicts)
    print("\nnot kept, the worst first:" if faulty else "\neverything promised is kept, of what was run")
    for verdict in faulty:
        print(f"  {words.line(verdict)}")
    print(words.counts(verdicts))
    for line in failed:
        print("FAILED", line)


def _write(options: argparse.Namespace, verdicts: Sequence[Verdict], runs: Mapping[Key, Run], tag: str) -> None:
    """Raises OSError."""
    if options.page:
        options.page.write_text(page(verdicts, runs, tag))
    if options.plot:
        options.plot.write_text(plot(verdicts, runs))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(_facts(verdicts, runs, tag)), indent=1))


def _facts(verdicts: Sequence[Verdict], runs: Mapping[Key, Run], tag: str) -> dict[str, Any]:
    return {"tag": tag, "cells": [_cell_facts(verdict, runs) for verdict in verdicts]}


def _cell_facts(verdict: Verdict, runs: Mapping[Key, Run]) -> dict[str, Any]:
    cell = verdict.cell
    keys = [Key(cell.name, arm, seed) for arm in cell.arms for seed in range(cell.seeds)]
    return {
        "cell": cell.name,
        "family": cell.family,
        "load": cell.load,
        "verdict": verdict.status,
        "comparisons": [
            {
                "promise": one.promise.name,
                "status": one.status,
                "against": one.against,
                "starves": one.starves,
                "ours": one.ours,
                "theirs": one.theirs,
                "worse": one.worse,
                "half_interval": one.half,
            }
            for one in verdict.comparisons
        ],
        "tenant_p90_s": {arm: tenant_p90_s(cell, arm, runs) for arm in cell.arms} if cell.alone else {},
        "runs": [runs[key] for key in keys if key in runs],
    }


if __name__ == "__main__":
    sys.exit(main())
