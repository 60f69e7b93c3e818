"""What a comparison of policies shows: columns of a table, facts for a program, distributions for pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from router.lab.bounds import HitBounds
from router.lab.compare import Run
from router.lab.fleet_model import EngineSpec
from router.lab.measures import FIXED, LONG_TOKENS, SCALED, Measures, tpot_s, ttft_s
from router.lab.replay import Replayed, Setup
from router.lab.traces import Trace

LENGTH_CLASSES = (
    ("< 2k", 0, 2_048),
    ("2k to 8k", 2_048, 8_192),
    ("8k to 32k", 8_192, LONG_TOKENS),
    ("≥ 32k", LONG_TOKENS, 1 << 62),
)
"""Prompts by their tokens: name, from, to."""

CURVE_POINTS = 400
"""A curve of more would look the same and make the page heavy."""


class Report(msgspec.Struct):
    """reading: how the trace was read (speed, limit, ...), by option."""

    trace: Trace
    reading: Mapping[str, Any]
    setup: Setup
    seed: int
    bounds: HitBounds
    runs: Sequence[Run]


# -- for a table


def seconds(value: float | None) -> str:
    """Three digits or so, without a unit."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float) -> str:
    return f"{share:.1%}"


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def whole(value: int) -> str:
    return f"{value:,}"


class Column(NamedTuple):
    """`field` of Measures. Of neighbours with the same `group` that is said once."""

    group: str
    heading: str
    field: str
    show: Callable[[Any], str]
    better: Literal["low", "high"] | None
    meaning: str

    def cell(self, measures: Measures) -> str:
        return self.show(getattr(measures, self.field))

    def best(self, runs: Sequence[Run]) -> str | None:
        """The cell of the best run as it is shown; None where no run stands out."""
        shown = {self.cell(run.measures) for run in runs}
        values = [value for run in runs if (value := getattr(run.measures, self.field)) is not None]
        if self.better is None or len(shown) < 2 or not values:
            return None
        return self.show(min(values) if self.better == "low" else max(values))


_FIXED = f"TTFT up to {FIXED.ttft_s:g} s and TPOT up to {FIXED.tpot_s * 1e3:g} ms"
_SCALED = (
    f"TTFT up to {SCALED.ttft_s:g} s + {SCALED.solo_factor:g} × its prefill alone and TPOT up to"
    f" {SCALED.tpot_s * 1e3:g} ms"
)
COLUMNS = (
    Column("TTFT s", "mean", "ttft_mean_s", seconds, "low", "from arrival to the first token"),
    Column("TTFT s", "p50", "ttft_p50_s", seconds, "low", "half of the answers had begun by then"),
    Column("TTFT s", "p90", "ttft_p90_s", seconds, "low", "nine in ten had"),
    Column("TTFT s", "p99", "ttft_p99_s", seconds, "low", "99 in a hundred had"),
    Column("TTFT ≥32k", "p90", "ttft_long_p90_s", seconds, "low", "s, of prompts of 32,768 tokens or more"),
    Column("TTFT ≥32k", "max", "ttft_long_max_s", seconds, "low", "s, the slowest of them"),
    Column("TPOT", "ms", "tpot_mean_ms", milliseconds, "low", "time per output token after the first, mean"),
    Column("goodput", "fixed", "goodput", percent, "high", f"share of requests with {_FIXED}"),
    Column("goodput", "scaled", "goodput_scaled", percent, "high", f"share of requests with {_SCALED}"),
    Column("hit", "rate", "hit_rate", percent, "high", "share of input tokens that came from a cache"),
    Column("late", "share", "late", percent, "low", "of the prefill, done only after the last arrival: a backlog"),
    Column("drain", "s", "drain_s", seconds, "low", "from the last arrival to the last end"),
    Column("longest", "wait s", "longest_wait_s", seconds, None, "from arrival until the gateway chose an engine"),
    Column("not", "served", "refused", whole, "low", "requests refused or broken off"),
)


def engines_text(setup: Setup) -> str:
    """As in "4 × llama-3.1-8b-h100 + 2 × llama-3.1-70b-tp4-h100"."""
    counts = Counter(spec.profile.name for spec in setup.engines)
    return " + ".join(f"{count} × {name}" for name, count in counts.items())


def one_line(report: Report) -> str:
    """What was replayed, and how much a cache could have held of it."""
    infinite, pooled = report.bounds
    return (
        f"{len(report.trace.requests):,} requests on {engines_text(report.setup)}; hit rate with"
        f" endless caches {percent(infinite)}, with one LRU cache of all engines' size {percent(pooled)}"
    )


# -- for a program


def summary(report: Report) -> dict[str, Any]:
    """JSON's plain types. `policies` holds one object each, with the fields of Measures."""
    trace, setup = report.trace, report.setup
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace.requests),
            "input_tokens": sum(request.input_tokens for request in trace.requests),
            "output_tokens": sum(request.output_tokens for request in trace.requests),
            "block_size": trace.block_size,
            **report.reading,
        },
        "setup": {
            "engines": [_engine(spec, trace.block_size) for spec in setup.engines],
            "signal_delay_s": setup.signal_delay_s,
            "event_delay_s": setup.event_delay_s,
            "load_delay_s": setup.load_delay_s,
            "event_loss": setup.event_loss,
            "not_streamed": setup.not_streamed,
            "outages": msgspec.to_builtins(setup.outages),
            "seed": report.seed,
        },
        "bounds": report.bounds._asdict(),
        "policies": [msgspec.to_builtins(run.measures) for run in report.runs],
    }


def _engine(spec: EngineSpec, block_size: int) -> dict[str, Any]:
    return {
        "name": spec.profile.name,
        "capacity_tokens": cache_tokens(spec, block_size),
        "max_batched_tokens": chunk_tokens(spec),
    }


def chunk_tokens(spec: EngineSpec) -> int:
    """Most prefill tokens in a step."""
    return spec.profile.max_batched_tokens if spec.max_batched_tokens is None else spec.max_batched_tokens


def cache_tokens(spec: EngineSpec, block_size: int) -> int:
    """What the engine's cache holds, in whole blocks."""
    tokens = spec.profile.capacity_tokens if spec.capacity_tokens is None else spec.capacity_tokens
    return tokens // block_size * block_size


# -- for pictures


def ttfts_by_length(replayed: Replayed) -> list[list[float]]:
    """Seconds in ascending order, for each of LENGTH_CLASSES."""
    found: list[list[float]] = [[] for _ in LENGTH_CLASSES]
    for served in replayed.served:
        ttft = ttft_s(served)
        if ttft is not None and not served.refused:
            found[next(n for n, (_, _, to) in enumerate(LENGTH_CLASSES) if served.input_tokens < to)].append(ttft)
    for ttfts in found:
        ttfts.sort()
    return found


def cumulative_ttft(replayed: Replayed) -> tuple[list[float], list[float]]:
    """(seconds, share of all requests whose first token had come by then). Of those never served it does not come."""
    ttfts = sorted(ttft for served in replayed.served if not served.refused and (ttft := ttft_s(served)) is not None)
    last = len(ttfts) - 1
    steps = min(CURVE_POINTS, last)
    ranks = [round(last * step / steps) for step in range(steps + 1)] if steps > 0 else list(range(last + 1))
    return [ttfts[rank] for rank in ranks], [(rank + 1) / len(replayed.served) for rank in ranks]


def tpots_ms(replayed: Replayed) -> list[float]:
    """Of answers with more than one token, in ascending order."""
    return sorted(
        tpot_s(served) * 1e3
        for served in replayed.served
        if served.first_token_at is not None and not served.refused and served.output_tokens > 1
    )


def queue(replayed: Replayed) -> tuple[list[float], list[int]]:
    """(seconds, requests that had arrived and had no first token): the most at any moment from there to the next point.

    Without those that never got one: when they gave up is not recorded.
    """
    changes = sorted(
        change
        for served in replayed.served
        if served.first_token_at is not None
        for change in ((served.arrived_at, 1), (served.first_token_at, -1))
    )
    if not changes:
        return [], []
    step = changes[-1][0] / CURVE_POINTS or 1.0
    most: list[int] = []
    waiting = 0
    for at, change in changes:
        while len(most) <= at / step:
            most.append(waiting)
        waiting += change
        most[-1] = max(most[-1], waiting)
    return [step * point for point in range(len(most))], most
