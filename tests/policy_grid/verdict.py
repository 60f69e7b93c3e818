"""Whether kv_aware keeps its promises in a cell.

It is not worse than the best baseline of each measure by more than 2 %, beyond what the interval of the seeds leaves
open; and its long prompts do not pay for that: their TTFT is at most 20 % above LMetric's. Where a tenant sends ten
times as much as another, that one's p90 TTFT is at most 15 % above what it is alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf, sqrt
from statistics import fmean, stdev
from typing import Literal

import msgspec

from router.lab.measures import Measures
from tests.policy_grid.cells import NOT_BASELINES, OURS, Cell
from tests.policy_grid.state import Key, Run

LONG_BASELINE = "lmetric"
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1."""

Status = Literal["broken", "open", "kept", "unfinished"]
STATUSES: tuple[Status, ...] = ("broken", "open", "kept", "unfinished")
"""open: worse than promised in the mean, but the seeds differ so much that it may be chance."""


class Promise(msgspec.Struct, frozen=True):
    """field: of Measures, or of Run. allowed: by how much it may be worse, as a share of the other's."""

    name: str
    field: str
    better: Literal["low", "high"]
    allowed: float
    interval: bool = True  # whether the differences between seeds are taken into account

    def values(self, runs: Iterable[Measures]) -> list[float | None]:
        return [getattr(measures, self.field) for measures in runs]


MAIN = (
    Promise("mean TTFT", "ttft_mean_s", "low", 0.02),
    Promise("goodput", "goodput", "high", 0.02),
    Promise("scaled goodput", "goodput_scaled", "high", 0.02),
)
LONG = (
    Promise("p90 TTFT ≥ 32k", "ttft_long_p90_s", "low", 0.2, interval=False),
    Promise("max TTFT ≥ 32k", "ttft_long_max_s", "low", 0.2, interval=False),
)
BESIDE = Promise("p90 TTFT of the small tenant", "tenant_p90_s", "low", 0.15, interval=False)


class Comparison(msgspec.Struct, frozen=True):
    """Means over the seeds.

    worse: ours against theirs, as a share of theirs, negative where ours is better. half: of its 95 % interval, 0 with
    a single seed. starves: theirs breaks the promise on long prompts itself.
    """

    promise: Promise
    against: str
    ours: float | None
    theirs: float | None
    worse: float
    half: float
    starves: bool = False

    @property
    def over(self) -> float:
        """By how much the promise is broken for certain; not above 0 where it is not."""
        return self.worse - self.promise.allowed - (self.half if self.promise.interval else 0.0)

    @property
    def status(self) -> Status:
        return "broken" if self.over > 0 else "open" if self.worse > self.promise.allowed else "kept"


class Verdict(msgspec.Struct, frozen=True):
    """comparisons: one for each promise that there was something to measure by."""

    cell: Cell
    status: Status
    comparisons: Sequence[Comparison] = ()

    @property
    def faults(self) -> list[Comparison]:
        """The worst first."""
        found = [comparison for comparison in self.comparisons if comparison.status != "kept"]
        return sorted(found, key=lambda fault: fault.over, reverse=True)

    @property
    def over(self) -> float:
        return max((fault.over for fault in self.faults), default=-inf)


def judge(cell: Cell, runs: Mapping[Key, Run], *, baselines: Collection[str] | None = None) -> Verdict:
    """`baselines`: only these of the cell's arms count; None: all but our own."""
    by_arm = {arm: measures for arm in cell.arms if (measures := of_arm(cell, arm, runs)) is not None}
    if len(by_arm) < len(cell.arms):
        return Verdict(cell, "unfinished")
    counted = [arm for arm in cell.arms if arm not in NOT_BASELINES and (baselines is None or arm in baselines)]
    comparisons = []
    for promise in MAIN:
        against = [best(promise, counted, by_arm), *cell.against]
        comparisons += [compare(promise, by_arm, arm) for arm in dict.fromkeys(against) if arm is not None]
    comparisons += _long(by_arm, OURS)
    if cell.alone is not None:
        comparisons.append(_beside(cell, cell.alone, runs))
    found = {comparison.status for comparison in comparisons}
    return Verdict(cell, next(status for status in STATUSES if status in found or status == "kept"), comparisons)


def _beside(cell: Cell, tenant: str, runs: Mapping[Key, Run]) -> Comparison:
    """What the others' load does to a tenant."""
    told = [runs[Key(cell.name, OURS, seed)].tenant_p90_s for seed in range(cell.seeds)]
    ours, alone = _mean(one[tenant] for one in told), _mean(one[f"{tenant} alone"] for one in told)
    worse = ours / alone - 1.0 if ours is not None and alone else 0.0
    return Comparison(BESIDE, f"{tenant} alone", ours, alone, worse, 0.0)


def of_arm(cell: Cell, arm: str, runs: Mapping[Key, Run]) -> list[Measures] | None:
    """By seed; None where a seed is missing."""
    keys = [Key(cell.name, arm, seed) for seed in range(cell.seeds)]
    return [runs[key].measures for key in keys] if all(key in runs for key in keys) else None


def mean_of_arm(promise: Promise, cell: Cell, arm: str, runs: Mapping[Key, Run]) -> float | None:
    """Over the seeds; None where one is missing or there is nothing to measure by."""
    return _mean(promise.values(of_arm(cell, arm, runs) or ()))


def best(promise: Promise, arms: Iterable[str], by_arm: Mapping[str, Sequence[Measures]]) -> str | None:
    """By the mean over the seeds; None where no arm has anything to measure by."""
    means = {arm: mean for arm in arms if (mean := _mean(promise.values(by_arm[arm]))) is not None}
    if not means:
        return None
    return (min if promise.better == "low" else max)(means, key=lambda arm: means[arm])


def compare(promise: Promise, by_arm: Mapping[str, Sequence[Measures]], against: str) -> Comparison:
    """kv_aware with another."""
    starves = any(comparison.status == "broken" for comparison in _long(by_arm, against))
    return msgspec.structs.replace(_compare(promise, by_arm, OURS, against), starves=starves)


def _long(by_arm: Mapping[str, Sequence[Measures]], arm: str) -> list[Comparison]:
    """What its long prompts pay; nothing where there are none."""
    measurable = [promise for promise in LONG if _mean(promise.values(by_arm[LONG_BASELINE])) is not None]
    return [_compare(promise, by_arm, arm, LONG_BASELINE) for promise in measurable]


def _compare(promise: Promise, by_arm: Mapping[str, Sequence[Measures]], arm: str, against: str) -> Comparison:
    """Seed by seed, since a hard segment is hard for all."""
    ours, theirs = promise.values(by_arm[arm]), promise.values(by_arm[against])
    pairs = [(our, their) for our, their in zip(ours, theirs, strict=True) if our is not None and their is not None]
    if not pairs:
        return Comparison(promise, against, _mean(ours), _mean(theirs), inf if _mean(ours) is None else 0.0, 0.0)
    our_mean, their_mean = fmean(our for our, _ in pairs), fmean(their for _, their in pairs)
    sign = 1.0 if promise.better == "low" else -1.0
    if not their_mean:  # nothing is worse than a goodput of 0
        return Comparison(promise, against, our_mean, their_mean, 0.0, 0.0)
    shares = [sign * (our - their) / their_mean for our, their in pairs]
    return Comparison(promise, against, our_mean, their_mean, fmean(shares), half_interval(shares))


def half_interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean, by Student's t, a little wide for more than ten values.

    0 for a single one, of which nothing is known.
    """
    if len(values) < 2:
        return 0.0
    return _T_95[min(len(values), 10) - 2] * stdev(values) / sqrt(len(values))


def worst_first(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those that are not kept: broken ones, then open ones."""
    faulty = [verdict for verdict in verdicts if verdict.status in ("broken", "open")]
    return sorted(faulty, key=lambda verdict: (STATUSES.index(verdict.status), -verdict.over))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
