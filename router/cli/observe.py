"""`warmroute observe`: what do the engines' caches do now, and what would placing requests by them gain?"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.cli.figures import terminal, write_json
from router.cli.observation import Observed, Seen
from router.cli.observation import observe as observe_engines
from router.cli.options import ConfigFile, Engines, JsonFile, read_config, read_load
from router.cli.replay_engines import DEFAULT_ENGINE
from router.config import Config
from router.errors import ConfigError, EngineError
from router.lab.arms import parse_arm
from router.lab.bounds import HitBounds, hit_bounds
from router.lab.compare import compare
from router.lab.fleet_model import EngineSpec
from router.lab.measures import Measures
from router.lab.profiles import PROFILES, Profile
from router.lab.replay import Setup
from router.lab.report import cache_tokens
from router.lab.traces import Trace
from router.routing.fleet import Health

ARMS = ("round_robin", "least_requests", "kv_aware:room")
"""Two that most load balancers know, and what the gateway does."""
_NAMES = {"kv_aware:room": "kv_aware, waiting room"}


class Simulated(msgspec.Struct):
    """A load on engines like those that were watched, under each of `ARMS`."""

    load: str
    requests: int
    profile: str
    capacity_tokens: list[int]  # of each engine
    bounds: HitBounds
    runs: list[Measures]


def observe(
    config: ConfigFile = None,
    engine: Engines = None,
    load: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A trace (`warmroute trace export`) to simulate on a fleet of this size."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to watch; ctrl-c ends it sooner.")] = 30.0,
    model: Annotated[str | None, typer.Option(help="Only the engines of this public model.")] = None,
    profile: Annotated[
        str, typer.Option(help=f"How fast simulated engines are, with --load: {', '.join(PROFILES)}.")
    ] = DEFAULT_ENGINE,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many requests of the load.")] = None,
    json: JsonFile = None,
) -> None:
    """Watch engines without being in the path.

    Listens to their KV events and reads their counters, and sends them nothing else: what their caches hold, how much
    of it lies on several of them, what share of prompt tokens comes from the cache. With --load it also simulates what
    placement by cache would have gained on as many engines.
    """
    found = read_config(config, engine)
    if profile not in PROFILES:
        raise ConfigError([f"--profile {profile}: known are {', '.join(PROFILES)}"])
    trace = read_load(load, limit=limit) if load else None
    observed = asyncio.run(_watch(found, seconds, model, one_model=trace is not None))
    simulated = _simulate(trace, observed, PROFILES[profile]) if trace else None
    if json:
        write_json(json, {"measured": msgspec.to_builtins(observed), "simulated": msgspec.to_builtins(simulated)})
    if str(json) != "-":
        show(observed, simulated, terminal())


async def _watch(config: Config, seconds: float, model: str | None, *, one_model: bool) -> Observed:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        print(f"watching for {seconds:g} s", file=sys.stderr)
        return await observe_engines(config, seconds, stop, model=model, one_model=one_model)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# --- what is simulated


def _simulate(trace: Trace, observed: Observed, profile: Profile) -> Simulated:
    ready = [seen for seen in observed.ranks if seen.health == Health.READY]
    if not ready:
        raise EngineError("no engine is ready, so there is no fleet to simulate")
    specs = [EngineSpec(profile, capacity_tokens=seen.capacity_tokens) for seen in ready]
    caches = [cache_tokens(spec, trace.block_size) for spec in specs]
    if not all(caches):
        raise ConfigError([f"an engine of {min(caches):,} tokens can't hold a block of {trace.name}"])
    print(f"simulating {len(trace.requests):,} requests under {len(ARMS)} rules", file=sys.stderr)
    runs = compare(trace, [parse_arm(arm) for arm in ARMS], Setup(engines=specs))
    return Simulated(
        trace.name,
        len(trace.requests),
        profile.name,
        caches,
        hit_bounds(trace, capacity_tokens=sum(caches)),
        [run.measures for run in runs],
    )


# --- what is shown


def show(observed: Observed, simulated: Simulated | None, console: Console) -> None:
    """The measured part, then the simulated one; each says which it is."""
    console.print(_engines(observed))
    for line in _measured(observed):
        console.print(Text(line))
    if simulated is not None:
        console.print()
        console.print(_rules(simulated))
        for line in _gains(simulated):
            console.print(Text(line))


def _engines(observed: Observed) -> Table:
    title = f"measured in {observed.seconds:g} s: the engines' own events and counters"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("engine", no_wrap=True)
    for heading in (
        "known\nblocks",
        "cache\nfilled",
        "\npinned",
        "held else-\nwhere too",
        "stored\nblocks/s",
        "removed\nblocks/s",
        "prompt\ntokens/s",
        "hit\nrate",
        "since its\nstart",
        "\nrunning",
        "\nwaiting",
    ):
        table.add_column(heading, justify="right")
    table.add_column("state")
    for seen in observed.ranks:
        table.add_row(Text(_name(seen)), *_cells(seen), Text(_state(seen)))
    return table


def _name(seen: Seen) -> str:
    return f"{seen.instance}/{seen.rank}" if seen.rank else seen.instance


def _cells(seen: Seen) -> tuple[str, ...]:
    return (
        _number(seen.blocks),
        _percent(seen.filled),
        _percent(seen.pinned),
        _percent(seen.elsewhere),
        _number(seen.stored_per_s),
        _number(seen.removed_per_s),
        _number(seen.prompt_tokens_per_s),
        _percent(seen.hit_rate),
        _percent(seen.hit_rate_ever),
        f"{seen.running:.1f}",
        f"{seen.waiting:.1f}",
    )


def _state(seen: Seen) -> str:
    if seen.blocks is None:
        return f"{seen.health}, publishes no KV events"
    return f"{seen.health}: {seen.reason}" if seen.reason else seen.health


def _measured(observed: Observed) -> Iterator[str]:
    for url, reason in observed.left_out.items():
        yield f"left out: {url}: {reason}"
    if not observed.blocks:
        yield "No KV block is known: no engine has published an event since it started, or in what it still replays."
        return
    yield (
        f"{observed.blocks:,} blocks are known, {observed.distinct_blocks:,} different ones."
        f" {observed.duplicate_share:.0%} of what is held is a further copy of a block another engine has;"
        f" {observed.shared_share:.0%} of the different blocks lie on several engines."
    )
    yield (
        "The copies are the most that placement by cache could free for other prefixes; what many ask for at once is"
        " rightly held twice."
        " Known is what events told: an engine replays only its last ones, so what it stored earlier is missing."
    )


def _rules(simulated: Simulated) -> Table:
    title = (
        f"simulated: {simulated.requests:,} requests of {simulated.load} on {len(simulated.capacity_tokens)} engines"
        f" as fast as {simulated.profile}"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("placed by", no_wrap=True)
    for heading in ("hit rate", "TTFT mean", "TTFT p90", "not served"):
        table.add_column(heading, justify="right")
    for run in simulated.runs:
        table.add_row(_NAMES.get(run.policy, run.policy), *_figures(run))
    return table


def _figures(run: Measures) -> tuple[str, ...]:
    return f"{run.hit_rate:.1%}", _time(run.ttft_mean_s), _time(run.ttft_p90_s), f"{run.refused:,}"


def _gains(simulated: Simulated) -> Iterator[str]:
    *others, ours = simulated.runs
    for other in others:
        yield (
            f"Over {other.policy}: hit rate {other.hit_rate:.1%} → {ours.hit_rate:.1%},"
            f" mean TTFT {_time(other.ttft_mean_s)} → {_time(ours.ttft_mean_s)}."
        )
    infinite, pooled = simulated.bounds
    yield (
        f"At best {infinite:.1%} could be hit with endless caches, {pooled:.1%} with one LRU cache as large as all."
        f" Engines hold {_capacities(simulated)} tokens, by their own word where they tell; their speed is the"
        " profile's, not measured here: compare these lines with each other, not with your TTFT."
    )


def _capacities(simulated: Simulated) -> str:
    return " or ".join(f"{tokens:,}" for tokens in sorted(set(simulated.capacity_tokens)))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
