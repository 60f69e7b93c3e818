"""Verdicts in words, for a terminal and for a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from router.lab.report import percent, seconds
from tests.policy_grid.verdict import STATUSES, Comparison, Promise, Verdict


def value(promise: Promise, number: float | None) -> str:
    if number is None:
        return "–"
    return percent(number) if promise.better == "high" else f"{seconds(number)} s"


def difference(comparison: Comparison) -> str:
    """As in "+3.1 ± 1.2 %": how much worse."""
    if comparison.half:
        return f"{100 * comparison.worse:+.1f} ± {100 * comparison.half:.1f} %"
    return f"{100 * comparison.worse:+.1f} %"


def fault(comparison: Comparison) -> str:
    """One broken promise, or one that may be."""
    promise = comparison.promise
    ours, theirs = value(promise, comparison.ours), value(promise, comparison.theirs)
    marked = f"{theirs} (its own long prompts wait)" if comparison.starves else theirs
    words = f"{promise.name} {ours}, {comparison.against} {marked}: {difference(comparison)} worse"
    return words if comparison.status == "broken" else f"{words} (perhaps)"


def line(verdict: Verdict) -> str:
    """The verdict on a cell and, if it has any, its faults, the worst first."""
    found = "; ".join(fault(comparison) for comparison in verdict.faults)
    return f"{verdict.status:10} {verdict.cell.name} ({verdict.cell.load})" + (f": {found}" if found else "")


def counts(verdicts: Iterable[Verdict]) -> str:
    """As in "3 broken, 2 open, 40 kept, 0 unfinished"."""
    found = Counter(verdict.status for verdict in verdicts)
    return ", ".join(f"{found[status]} {status}" for status in STATUSES)
