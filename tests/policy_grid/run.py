"""Runs what is left of the grid, in several processes, until it is done or time is up."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import msgspec

from router.lab.arms import parse_arm
from router.lab.compare import compare
from router.lab.measures import quantile, ttft_s
from router.lab.replay import Replayed
from router.lab.traces import Trace
from tests.policy_grid import state
from tests.policy_grid.cells import Cell
from tests.policy_grid.state import Key, Run
from tests.policy_grid.workloads import only_tenant


class Batch(msgspec.Struct, frozen=True):
    """Runs on the same trace, which is read or made once for all of them."""

    cell: Cell
    seed: int
    arms: Sequence[str]

    @property
    def takes_s(self) -> float:
        return self.cell.run_s * len(self.arms)


class BatchEnd(msgspec.Struct):
    """number: among the batches. failed: one line for each run that ended in an error."""

    number: int
    runs: list[Run]
    failed: list[str]


class Job(msgspec.Struct, frozen=True):
    """state: where finished runs are kept as soon as they are; None: nowhere."""

    folder: Path
    tag: str
    state: Path | None


def pending(cells: Sequence[Cell], done: Mapping[Key, Run]) -> list[Batch]:
    """In the order of the cells."""
    batches = []
    for cell in cells:
        for seed in range(cell.seeds):
            arms = [arm for arm in cell.arms if Key(cell.name, arm, seed) not in done]
            if arms:
                batches.append(Batch(cell, seed, arms))
    return batches


def run_all(
    batches: Sequence[Batch], job: Job, *, jobs: int, until: float, ended: Callable[[BatchEnd], None]
) -> str | None:
    """Calls `ended` for each batch that has run, in part or whole. Returns why it stopped early, None if it did not.

    until: time.time() from which on no run begins. SIGINT and SIGTERM bring that time about.
    """
    context = get_context("fork")  # all processes have the code that is loaded, whatever is edited meanwhile
    stop: Synchronized[float] = context.Value("d", until)
    told: list[str] = []

    def tell(number: int, _: object) -> None:
        told.append(signal.Signals(number).name)
        stop.value = 0.0

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    _BATCHES[:] = batches
    try:
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(stop,)) as pool:
            for future in as_completed([pool.submit(_run_batch, number, job) for number in range(len(batches))]):
                ended(future.result())
    except BrokenProcessPool:
        return "a worker process was killed: out of memory?"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        return told[0]
    return "time is up" if time.time() >= until else None


# -- in a worker

_BATCHES: list[Batch] = []  # makers of traces are closures, which processes inherit but cannot be sent
_stop: list[Synchronized[float]] = []


def _begin(stop: Synchronized[float]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _stop[:] = [stop]


def _run_batch(number: int, job: Job) -> BatchEnd:
    batch, end = _BATCHES[number], BatchEnd(number, [], [])
    trace = None
    for arm in batch.arms:
        if time.time() >= _stop[0].value:
            break
        try:
            if trace is None:
                trace = batch.cell.make(job.folder, batch.seed)
            run = run_one(batch.cell, trace, arm, batch.seed, job.tag)
        except Exception as error:  # one policy that fails must not cost an hour of the others' results
            end.failed.append(f"{batch.cell.name}, {arm}, seed {batch.seed}: {type(error).__name__}: {error}")
            continue
        end.runs.append(run)
        if job.state is not None:
            state.append(job.state, run)
    return end


def run_one(cell: Cell, trace: Trace, arm: str, seed: int, tag: str) -> Run:
    began = time.process_time()
    run = compare(trace, [parse_arm(arm)], cell.setup, seed=seed)[0]
    tenants: dict[str, float | None] = {}
    if cell.alone is not None:
        tenants = _tenant_p90_s(run.replayed)
        alone = compare(only_tenant(trace, cell.alone), [parse_arm(arm)], cell.setup, seed=seed)[0]
        tenants[f"{cell.alone} alone"] = _tenant_p90_s(alone.replayed)[cell.alone]
    return Run(cell.name, arm, seed, tag, round(time.process_time() - began, 2), run.measures, tenants)


def _tenant_p90_s(replayed: Replayed) -> dict[str, float | None]:
    ttfts: dict[str, list[float]] = {}
    for served in replayed.served:
        of_tenant = ttfts.setdefault(served.tenant, [])
        ttft = ttft_s(served)
        if ttft is not None:
            of_tenant.append(ttft)
    return {tenant: quantile(sorted(of_tenant), 0.9) for tenant, of_tenant in sorted(ttfts.items())}
