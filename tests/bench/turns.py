"""Next turns of known 128 KB conversations: requests a second, and CPU each.

python -m tests.bench.turns [--sglang-router PYTHON]

What a gateway for chat does all day: a long conversation it has seen, and a last message that nobody has sent before.
Sixteen conversations of 20 messages; 16 connections; nothing is computed behind. PYTHON is that of a virtual
environment that holds the package sglang-router; its `cache_aware` policy then gets the same load in the same run.
Figures are medians of rounds in turns. A gateway has one core for all it is made of: with ours the ledger's writer too.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.processes import (
    ENGINE_PORTS,
    GATEWAY_CORE,
    PORT,
    Measured,
    fake_engines,
    gateway,
    load,
    running,
    wait_for,
)
from tests.bench.table import Row, report

TAKES_S = 75
ROUNDS = 5
LOAD = ("turns", "-c", "16", "-t", "2", "--kb", "128")
BARE = "warmroute without ledger"
PEER = "sglang-router cache_aware"
_QUANTITIES = ("requests_per_s", "p50_us", "p99_us", "cpu_us_per_request")
PORTS = {"warmroute": PORT, BARE: PORT + 20, PEER: PORT + 50}


def run(sglang_router: str | None = None) -> dict[str, Any]:
    """All stand side by side and get the load in turns: what else the machine does then falls on each alike."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_engines("--delay-ms", "0"))
        arms = {
            "warmroute": stack.enter_context(gateway()),
            BARE: stack.enter_context(gateway(settings={"ledger": {"enabled": False}}, port=PORTS[BARE])),
        }
        if sglang_router:
            arms[PEER] = stack.enter_context(peer(sglang_router))
        for name in arms:
            load(*LOAD, port=PORTS[name])  # the conversations become known
        rounds = [_round(arms) for _ in range(ROUNDS)]
        figures = {name: _median([figures[name] for figures in rounds]) for name in arms}
        figures["direct"] = load(*LOAD, port=ENGINE_PORTS[0])
    figures["requests_per_s by round"] = {name: [found[name]["requests_per_s"] for found in rounds] for name in arms}
    return figures


def _round(arms: Mapping[str, Measured]) -> dict[str, dict[str, float]]:
    found = {}
    for name, measured in arms.items():
        before = measured.cpu_s
        figures = load(*LOAD, port=PORTS[name])
        cpu_s = measured.cpu_s - before
        found[name] = {**figures, "cpu_us_per_request": round(cpu_s / figures["requests"] * 1e6, 1)}
    return found


def _median(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median([figures[name] for figures in rounds]) for name in _QUANTITIES}


@contextlib.contextmanager
def peer(python: str) -> Iterator[Measured]:
    """sglang-router before the fake engines, as its command line starts it."""
    urls = [f"http://127.0.0.1:{port}" for port in ENGINE_PORTS]
    addresses = ["--host", "127.0.0.1", "--port", str(PORTS[PEER]), "--prometheus-port", str(PORTS[PEER] + 1)]
    command = ["sglang_router.launch_router", *addresses, "--policy", "cache_aware", "--log-level", "warn"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(
            [*command, "--worker-urls", *urls], core=GATEWAY_CORE, log=Path(folder) / "log", python=python
        ) as measured,
    ):
        wait_for(f"http://127.0.0.1:{PORTS[PEER]}/readiness", measured)
        yield measured


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    direct, other = figures["direct"], figures.get(PEER)
    for name in [name for name in PORTS if name in figures]:
        row = figures[name]
        for quantity in ("requests_per_s", "p50_us", "p99_us"):
            unit = "/s" if quantity == "requests_per_s" else "µs"
            label = f"{name}: {quantity.partition('_')[0]}"
            yield Row(label, row[quantity], unit, direct[quantity], "engine directly")
        yield Row(f"{name}: CPU a request", row["cpu_us_per_request"], "µs")
    if other:
        for name in ("warmroute", BARE):
            ours = figures[name]
            yield Row(f"{name}: requests", ours["requests_per_s"], "/s", other["requests_per_s"], PEER, "≥ 1 ×")
            yield Row(f"{name}: CPU a request", ours["cpu_us_per_request"], "µs", other["cpu_us_per_request"], PEER)


if __name__ == "__main__":
    report(__doc__, run, rows)
