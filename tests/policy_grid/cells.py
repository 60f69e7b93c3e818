"""The cells of the grid: what is replayed on which engines, and who takes part.

Loads are told by what LMetric, pushed at arrival, makes of them on 8 engines: `below` the knee its goodput is about
.95 or more, at the `knee` about .85, and `past` it the queue grows as long as the trace lasts. They scale with the
number of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from router.lab import synthetic
from router.lab.fleet_model import EngineSpec
from router.lab.profiles import PROFILES
from router.lab.replay import Outage, Setup
from router.lab.traces import Trace
from tests.policy_grid.workloads import (
    CONVERSATION,
    SYNTHETIC,
    TOOL_AGENT,
    WEKA,
    Make,
    Segment,
    overload_then_recovery,
    segment,
    sessions,
)

OURS = "kv_aware"
STRONG = (OURS, "kv_aware:push", "lmetric", "lmetric:shortest", "lmetric:room", "llmd", "dynamo", "ramjet")
"""For whole traces, which take long."""
STICKY = (*STRONG, "sglang_cache_aware", "aibrix_prefix")
"""Those that do well where sessions come back, for agentic sessions on few and on many engines."""
ARMS = (
    *STRONG, "least_work", "dynamo:wspt", "sglang_cache_aware", "loadaware", "aibrix_prefix", "chwbl", "session",
    "least_requests", "power_of_two", "random", "round_robin",
)  # fmt: skip
NOT_BASELINES = (OURS, "kv_aware:push")
ELSEWHERE = tuple(arm for arm in ARMS if ":" not in arm and arm != OURS)
"""Rules as other gateways have them: at arrival, on engines that serve first come, first served."""

FLEETS = (8, 4, 16)
"""The middle one first: where time runs out, it is there."""
CHUNKS = (2_048, 8_192)
SEEDS = 3
"""Two would leave an interval of nine standard deviations, inside which nothing can be told."""


class Cell(msgspec.Struct, frozen=True):
    """make: its trace. file: the trace file it needs, without which it is passed over.

    run_s: what a run takes, roughly, on an idle core. against: baselines it must not lose to besides the best of each
    measure. alone: a tenant whose requests are replayed without the others' as well.
    """

    name: str  # family/engines/load/chunk, or special/what
    family: str
    load: str  # in words
    make: Make
    setup: Setup
    arms: Sequence[str]
    seeds: int
    run_s: float
    file: str | None = None
    against: Sequence[str] = ()
    alone: str | None = None


class _Recorded(msgspec.Struct, frozen=True):
    """speeds: below, knee, past, for 8 engines. whole: requests past the knee."""

    family: str
    segments: Segment
    speeds: tuple[float, float, float]
    whole: int | None
    segment_s: float
    whole_s: float


_APART = 20
"""Requests by which a seed of a whole trace begins later than the one before it."""
_CONVERSATIONS = Segment(CONVERSATION, 2_000, first=1_000, apart=4_000)
_RECORDED = (
    _Recorded("conversation", _CONVERSATIONS, (2.5, 3.5, 4.0), None, 0.9, 7.0),
    # 3,993 requests: three parts of 2,000 would overlap.
    _Recorded("synthetic", Segment(SYNTHETIC, 1_331, apart=1_331), (2.5, 3.5, 4.0), None, 0.5, 2.0),
    # 6.68 requests/s as it is; the first 12,000 are half an hour.
    _Recorded(
        "toolagent_like", Segment(TOOL_AGENT, 2_000, first=2_000, apart=8_000), (3.5, 4.25, 4.25), 12_000, 1.0, 8.0
    ),
)
# Sessions a second for 8 engines. The goodput of long prompts has other heights: LMetric's scaled one is .96, .94, .65.
_WEKA_RATES = (0.01, 0.02, 0.04)
_WEKA_SESSIONS = {4: 75, 8: 150, 16: 230}  # a seed's; three times 230 are all there are
_WEKA_SEGMENT_S = {4: 1.7, 8: 3.7, 16: 5.5}


def grid() -> list[Cell]:
    return [*_of_fleet(FLEETS[0]), *_special(), *(cell for engines in FLEETS[1:] for cell in _of_fleet(engines))]


def engines_like(count: int, chunk: int | None = None, *, profile: str = "llama-3.1-8b-h100") -> list[EngineSpec]:
    return [EngineSpec(PROFILES[profile], max_batched_tokens=chunk)] * count


def _of_fleet(engines: int) -> Iterator[Cell]:
    for trace in _RECORDED:
        yield from _recorded(trace, engines)
    yield from _weka(engines)


def _recorded(trace: _Recorded, engines: int) -> Iterator[Cell]:
    below, knee, past = (speed * engines / 8 for speed in trace.speeds)
    file = trace.segments.file
    for load, speed in (("below", below), ("knee", knee)):
        make = segment(trace.segments, speed)
        yield from _by_chunk(trace.family, engines, load, f"{speed:g} ×", make, ARMS, SEEDS, trace.segment_s, file)
    # Nearly the same requests for every seed: past the knee which come first alone moves a mean by a tenth.
    make = segment(Segment(file, trace.whole, apart=_APART), past)
    yield from _by_chunk(trace.family, engines, "past", f"{past:g} ×, whole", make, STRONG, SEEDS, trace.whole_s, file)


def _weka(engines: int) -> Iterator[Cell]:
    below, knee, past = (rate * engines / 8 for rate in _WEKA_RATES)
    count, run_s = _WEKA_SESSIONS[engines], _WEKA_SEGMENT_S[engines]
    arms = ARMS if engines == FLEETS[0] else STICKY
    for load, rate in (("below", below), ("knee", knee)):
        make = sessions(count, rate)
        yield from _by_chunk("weka", engines, load, f"{rate:g} sessions/s", make, arms, SEEDS, run_s, WEKA)
    words = f"{past:g} sessions/s, {SEEDS * count} of them"
    yield from _by_chunk("weka", engines, "past", words, sessions(SEEDS * count, past), STRONG, 1, 3 * run_s, WEKA)


def _by_chunk(
    family: str,
    engines: int,
    load: str,
    words: str,
    make: Make,
    arms: Sequence[str],
    seeds: int,
    run_s: float,
    file: str,
) -> Iterator[Cell]:
    for chunk in CHUNKS:
        name, setup = f"{family}/{engines}/{load}/{chunk}", Setup(engines_like(engines, chunk))
        yield Cell(name, family, words, make, setup, arms, seeds, run_s, file)


def _special() -> Iterator[Cell]:
    yield from _recipes()
    yield from _disturbed()


def _recipes() -> Iterator[Cell]:
    """Rates: near the knee of LMetric, which these recipes put at very different places."""
    requests = 2_000
    for per_s in (32, 40):
        make = _made(partial(synthetic.zero_reuse, requests, per_s))
        yield _special_cell(
            f"zero_reuse_{per_s}", f"{per_s}/s, nothing shared", make, against=("least_work", "lmetric")
        )
    yield _special_cell("one_hot_prefix", "75/s", _made(partial(synthetic.one_hot_prefix, requests, 75)))
    yield _special_cell("many_groups", "22/s, 150 groups", _made(partial(synthetic.many_groups, requests, 22)))
    yield _special_cell("best_of_bursts", "3/s × 8 alike", _made(partial(synthetic.best_of_bursts, 250, 3)))
    for kind, per_s, seconds in (("prefill", 40, 50.0), ("decode", 300, 15.0)):
        make = _made(partial(synthetic.two_tenants, seconds, per_s, prefill_heavy=kind == "prefill"))
        yield _special_cell(f"two_tenants_{kind}", f"{per_s}/s, 10 : 1", make, alone="small")
    make = _made(partial(synthetic.two_tenants, 60.0, 240, prefill_heavy=False))  # half as much again as is borne
    yield _special_cell("two_tenants_overload", "240/s for 60 s, 10 : 1", make, alone="small", arms=STRONG, run_s=4.0)


def _disturbed() -> Iterator[Cell]:
    """Mooncake's conversations when something is not as it should be."""
    knee = _RECORDED[0].speeds[1]
    at_knee, quieter = segment(_CONVERSATIONS, knee), segment(_CONVERSATIONS, 3.0)
    fleet = engines_like(8, 8_192)
    mixed = [*engines_like(4, 8_192), *engines_like(4, 8_192, profile="llama-3.1-8b-h200")]
    recovery = overload_then_recovery(
        msgspec.structs.replace(_CONVERSATIONS, length=3_000), high=8.0, high_s=60.0, low=2.0
    )
    outage = Setup(fleet, outages=[Outage(engine=3, at_s=60.0, back_s=100.0)])
    late = Setup(fleet, signal_delay_s=0.2, event_delay_s=0.2)
    for name, words, make, setup in (
        ("restart", "3 ×, an engine gone for 40 s", quieter, outage),
        ("event_gap", f"{knee:g} ×, 2 % of event batches lost", at_knee, Setup(fleet, event_loss=0.02)),
        ("mixed_gpus", f"{knee:g} ×, 4 H100 and 4 H200", at_knee, Setup(mixed)),
        ("late_signals", f"{knee:g} ×, first tokens, ends and events 200 ms late", at_knee, late),
        ("not_streamed", f"{knee:g} ×, half not streamed", at_knee, Setup(fleet, not_streamed=0.5)),
        ("recovery", "8 × for 60 s, then 2 ×", recovery, Setup(fleet)),
    ):
        yield _special_cell(name, words, make, setup=setup, file=CONVERSATION)


def _special_cell(
    name: str,
    words: str,
    make: Make,
    *,
    setup: Setup | None = None,
    file: str | None = None,
    against: Sequence[str] = (),
    alone: str | None = None,
    arms: Sequence[str] = ARMS,
    run_s: float = 0.9,
) -> Cell:
    setup = Setup(engines_like(8, 8_192)) if setup is None else setup
    return Cell(f"special/{name}", "special", words, make, setup, arms, SEEDS, run_s, file, against, alone)


def _made(recipe: Callable[..., Trace]) -> Make:
    def make(_: Path, seed: int) -> Trace:
        return recipe(seed=seed)

    return make
