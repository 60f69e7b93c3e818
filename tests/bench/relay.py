"""The whole gateway as a process: CPU a request and a chunk, latency it adds, against the engines directly.

python -m tests.bench.relay

The gateway has one core, engines and load share the other. CPU is that of the gateway's process alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from tests.bench.processes import ENGINE_PORTS, EVENTS_PORT, Measured, fake_engines, gateway, load, metric, set_pace
from tests.bench.table import Row, report

TAKES_S = 90
SECONDS = "3"
RUNS = {
    "1 KB c=1": ("plain", "-c", "1", "-t", SECONDS),
    "1 KB c=64": ("plain", "-c", "64", "-t", SECONDS),
    "128 KB next turns c=16": ("turns", "-c", "16", "-t", SECONDS, "--kb", "128"),
    "streams c=64": ("stream", "-c", "64", "-t", SECONDS),
}
ALTERNATIONS = 4
BLOCKS_PER_S = 50_000


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with fake_engines("--delay-ms", "0"):
        direct = {name: load(*arguments, port=ENGINE_PORTS[0]) for name, arguments in RUNS.items()}
        with gateway() as measured:
            load("plain", "-t", "1")
            figures["auto"] = {name: measure(measured, direct[name], arguments) for name, arguments in RUNS.items()}
        with gateway(tokenize="always") as measured:
            load("plain", "-t", "1")
            figures["every tail tokenized"] = {"1 KB c=64": measure(measured, direct["1 KB c=64"], RUNS["1 KB c=64"])}
    figures["events"] = under_events()
    return figures


def measure(measured: Measured, direct: dict[str, Any], arguments: tuple[str, ...]) -> dict[str, Any]:
    before = measured.cpu_s
    through = load(*arguments)
    cpu_s = measured.cpu_s - before
    return {
        "requests_per_s": through["requests_per_s"],
        "direct_requests_per_s": direct["requests_per_s"],
        "of_direct": round(through["requests_per_s"] / direct["requests_per_s"], 3),
        "p50_us": through["p50_us"],
        "direct_p50_us": direct["p50_us"],
        "added_p50_us": round(through["p50_us"] - direct["p50_us"], 1),
        "added_p99_us": round(through["p99_us"] - direct["p99_us"], 1),
        "cpu_us_per_request": round(cpu_s / through["requests"] * 1e6, 1),
        "cpu_us_per_chunk": round(cpu_s / through["chunks"] * 1e6, 2) if through["chunks"] else None,
    }


def under_events() -> dict[str, Any]:
    """Time of a paced chunk from engine to client, in turns alone and with 50,000 blocks a second arriving.

    Engines and load share a core, which publishing takes its part of: the same streams past the gateway say how much.
    Medians of several runs each: a single p99 on a shared machine says little.
    """
    kinds: dict[str, list[dict[str, Any]]] = {"quiet": [], "under_events": []}
    with fake_engines("--delay-ms", "10", "--events-port", str(EVENTS_PORT)), gateway():
        load("stream", "-c", "64", "--rounds", "1", "--stagger-ms", "10")
        for _ in range(ALTERNATIONS):
            for name, runs in kinds.items():
                set_pace(blocks_per_s=BLOCKS_PER_S if name == "under_events" else 0, chunks=200)
                before = metric("warmroute_kv_blocks_stored_total")
                run = load("stream", "-c", "64", "--rounds", "1", "--stagger-ms", "10")
                stored = metric("warmroute_kv_blocks_stored_total") - before
                past = load("stream", "-c", "64", "--rounds", "1", "--stagger-ms", "10", port=ENGINE_PORTS[1])
                runs.append({**run, "blocks_per_s": stored / run["seconds"], "past_p99_us": past["transit_p99_us"]})
    figures: dict[str, Any] = {}
    for name, runs in kinds.items():
        for quantity in ("transit_p50_us", "transit_p99_us", "past_p99_us", "gap_p99_us", "blocks_per_s"):
            figures[f"{name}_{quantity}"] = round(median(run[quantity] for run in runs), 1)
    figures["transit_p99_ratio"] = round(figures["under_events_transit_p99_us"] / figures["quiet_transit_p99_us"], 3)
    return figures


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    for name, row in figures["auto"].items():
        yield from _rows(name, row)
    for name, row in figures["every tail tokenized"].items():
        yield from _rows(f"{name}, every tail tokenized", row)
    events = figures["events"]
    yield Row("blocks a second taken in meanwhile", events["under_events_blocks_per_s"], "/s", BLOCKS_PER_S, "wanted")
    for quantity in ("transit_p50_us", "transit_p99_us"):
        name = f"paced chunk under events, {quantity.replace('_us', '').replace('_', ' ')}"
        target = "≤ 2 ×" if "p99" in quantity else ""
        yield Row(name, events[f"under_events_{quantity}"], "µs", events[f"quiet_{quantity}"], "no events", target)
    name = "paced chunk under events, past the gateway, transit p99"
    yield Row(name, events["under_events_past_p99_us"], "µs", events["quiet_past_p99_us"], "no events")


def _rows(name: str, row: dict[str, Any]) -> Iterator[Row]:
    yield Row(f"{name}: requests", row["requests_per_s"], "/s", row["direct_requests_per_s"], "engine directly")
    if row["cpu_us_per_chunk"] is not None:
        yield Row(f"{name}: CPU a chunk", row["cpu_us_per_chunk"], "µs")
        return
    yield Row(f"{name}: p50", row["p50_us"], "µs", row["direct_p50_us"], "engine directly")
    target = "< 116 µs" if name.startswith("1 KB c=64") else ""
    yield Row(f"{name}: CPU a request", row["cpu_us_per_request"], "µs", target=target)


if __name__ == "__main__":
    report(__doc__, run, rows)
