"""The whole gateway as a process: CPU a request and a chunk, latency it adds, against the engines directly."""

from __future__ import annotations

import json
from typing import Any

from tests.bench.processes import ENGINE_PORTS, EVENTS_PORT, Measured, fake_engines, gateway, load, set_pace

SECONDS = "3"


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


RUNS = {
    "1 KB c=1": ("plain", "-c", "1", "-t", SECONDS),
    "1 KB c=64": ("plain", "-c", "64", "-t", SECONDS),
    "128 KB next turns c=16": ("turns", "-c", "16", "-t", SECONDS, "--kb", "128"),
    "streams c=64": ("stream", "-c", "64", "-t", SECONDS),
}


def measure(measured: Measured, direct: dict[str, Any], arguments: tuple[str, ...]) -> dict[str, Any]:
    before = measured.cpu_s
    through = load(*arguments)
    cpu_s = measured.cpu_s - before
    row = {
        "requests_per_s": through["requests_per_s"],
        "of_direct": round(through["requests_per_s"] / direct["requests_per_s"], 3),
        "added_p50_us": round(through["p50_us"] - direct["p50_us"], 1),
        "added_p99_us": round(through["p99_us"] - direct["p99_us"], 1),
        "cpu_us_per_request": round(cpu_s / through["requests"] * 1e6, 1),
    }
    if through["chunks"]:
        row["cpu_us_per_chunk"] = round(cpu_s / through["chunks"] * 1e6, 2)
    return row


def under_events() -> dict[str, Any]:
    """p99 of paced traffic alone, and with 50,000 blocks a second arriving."""
    figures: dict[str, Any] = {}
    pace = ("--delay-ms", "10", "--events-port", str(EVENTS_PORT))
    with fake_engines(*pace), gateway():
        for name, rate in (("quiet", 0), ("50k blocks/s", 50_000), ("quiet again", 0)):
            set_pace(blocks_per_s=rate, chunks=200)
            load("stream", "-c", "64", "--rounds", "1", "--stagger-ms", "10")
            run = load("stream", "-c", "64", "--rounds", "1", "--stagger-ms", "10")
            figures[name] = {"transit_p50_us": run["transit_p50_us"], "transit_p99_us": run["transit_p99_us"]}
    quiet = (figures["quiet"]["transit_p99_us"] + figures["quiet again"]["transit_p99_us"]) / 2
    figures["p99_ratio"] = round(figures["50k blocks/s"]["transit_p99_us"] / quiet, 3)
    return figures


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
