"""The grid as a page of Markdown: for each family of cells what was promised, then every arm's figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from router.lab.measures import FIXED, SCALED
from router.lab.report import percent, seconds
from tests.policy_grid import words
from tests.policy_grid.cells import ARMS, ELSEWHERE, Cell
from tests.policy_grid.state import Key, Run
from tests.policy_grid.verdict import LONG, MAIN, Promise, Verdict, judge, mean_of_arm, worst_first

_INTRODUCTION = f"""\
Each cell is a trace replayed in virtual time through the gateway's own placement, on simulated engines with the step
times of Llama 3.1 8B on H100. All arms of a cell replay the same requests. `kv_aware` chooses in the waiting room as
the gateway does, the others at arrival unless their name says otherwise: `:room` in the same waiting room, `:wspt` held
until an engine has room and then the shortest first, `:shortest` on engines that run the shortest prefill first,
`:push` at arrival.

Goodput: requests with TTFT up to {FIXED.ttft_s:g} s and TPOT up to {FIXED.tpot_s * 1e3:g} ms. Scaled goodput: TTFT up
to {SCALED.ttft_s:g} s + {SCALED.solo_factor:g} × the prompt's own prefill, and TPOT up to {SCALED.tpot_s * 1e3:g} ms.

Promised: in mean TTFT, goodput and scaled goodput `kv_aware` is at most 2 % worse than the best baseline of each; p90
and maximum of the TTFT of prompts from 32,768 tokens on are at most 20 % above LMetric's. *broken*: beyond the 95 %
interval of the differences between seeds as well; *open*: in the mean, but within the interval. Positive differences
are worse. A cell with one seed has no interval. Where one tenant sends ten times as much as another, that one's p90
TTFT is at most 15 % above what it is alone. Of a baseline marked with † long prompts wait themselves more than 20 %
longer than LMetric's.
"""


def page(verdicts: Sequence[Verdict], runs: Mapping[Key, Run], tag: str) -> str:
    elsewhere = words.counts(judge(verdict.cell, runs, baselines=ELSEWHERE) for verdict in verdicts)
    parts = ["# Policies side by side", _INTRODUCTION, f"Code {tag}. {words.counts(verdicts)}.", ""]
    parts += [f"Against rules as other gateways have them, without `:room`, `:wspt` and `:shortest`: {elsewhere}.", ""]
    parts += ["## Promises not kept, the worst first", ""]
    parts += [f"- **{v.status}** {v.cell.name}: {'; '.join(map(words.fault, v.faults))}" for v in worst_first(verdicts)]
    families = dict.fromkeys(verdict.cell.family for verdict in verdicts)
    for family in families:
        of_family = [verdict for verdict in verdicts if verdict.cell.family == family]
        parts += ["", f"## {family}", "", *_promises(of_family), ""]
        for promise in MAIN:
            parts += [f"### {family}: {promise.name}", "", *_arms(promise, of_family, runs), ""]
        parts += _tenants([verdict.cell for verdict in of_family], runs)
    return "\n".join(parts).rstrip() + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(head)
    yield _row(["---", *["---:"] * (len(head) - 1)])
    yield from map(_row, rows)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _promises(verdicts: Sequence[Verdict]) -> Iterator[str]:
    def row(verdict: Verdict) -> list[str]:
        shown = [verdict.cell.name, verdict.cell.load, verdict.status]
        for promise in (*MAIN, *LONG):
            of_promise = [one for one in verdict.comparisons if one.promise == promise]
            if not of_promise:
                shown.append("–")
                continue
            one = max(of_promise, key=lambda comparison: comparison.over)
            ours, theirs = words.value(promise, one.ours), words.value(promise, one.theirs)
            against = f"{one.against} †" if one.starves else one.against
            shown.append(f"{ours} / {theirs} {against} ({words.difference(one)})")
        return shown

    names = [promise.name for promise in (*MAIN, *LONG)]
    return table(["cell", "load", "verdict", *(f"{name}: ours / theirs" for name in names)], map(row, verdicts))


def _arms(promise: Promise, verdicts: Sequence[Verdict], runs: Mapping[Key, Run]) -> Iterator[str]:
    """Means over the seeds; the best of all arms is bold."""
    cells = [verdict.cell for verdict in verdicts]
    arms = [arm for arm in ARMS if any(arm in cell.arms for cell in cells)]

    def row(cell: Cell) -> list[str]:
        means = {arm: mean_of_arm(promise, cell, arm, runs) for arm in arms}
        known = [mean for mean in means.values() if mean is not None]
        best = (min if promise.better == "low" else max)(known, default=None)
        return [cell.name, *(_shown(promise, means[arm], best) for arm in arms)]

    return table(["cell", *arms], map(row, cells))


def _shown(promise: Promise, mean: float | None, best: float | None) -> str:
    if mean is None:
        return "–"
    shown = percent(mean) if promise.better == "high" else seconds(mean)
    return f"**{shown}**" if mean == best else shown


def _tenants(cells: Sequence[Cell], runs: Mapping[Key, Run]) -> Iterator[str]:
    """What one tenant's load does to another."""
    cells = [cell for cell in cells if cell.alone is not None]
    if not cells:
        return
    yield from (
        "### p90 TTFT by tenant, s",
        "",
        "Mean over the seeds; alone: the same requests without the others'.",
        "",
    )
    rows = []
    for cell in cells:
        for arm in cell.arms:
            p90s = tenant_p90_s(cell, arm, runs)
            rows.append([cell.name, arm, *(seconds(p90s.get(who)) for who in ("large", "small", "small alone"))])
    yield from table(["cell", "arm", "large", "small", "small alone"], rows)


def tenant_p90_s(cell: Cell, arm: str, runs: Mapping[Key, Run]) -> dict[str, float]:
    """Mean over the seeds that have run."""
    found: dict[str, list[float]] = {}
    for seed in range(cell.seeds):
        run = runs.get(Key(cell.name, arm, seed))
        for who, p90 in ({} if run is None else run.tenant_p90_s).items():
            if p90 is not None:
                found.setdefault(who, []).append(p90)
    return {who: fmean(p90s) for who, p90s in found.items()}
