"""Next turns of known 128 KB conversations: requests a second, and CPU each.

python -m tests.bench.turns [--sglang-router PYTHON]

What a gateway for chat does all day: a long conversation it has seen, and a last message that nobody has sent before.
Sixteen conversations of 20 messages; 16 connections; nothing is computed behind. PYTHON is that of a virtual
environment that holds the package sglang-router; its `cache_aware` policy then gets the same load in the same run.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
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

TAKES_S = 20
ROUNDS = 2
LOAD = ("turns", "-c", "16", "-t", "3", "--kb", "128")
PEER = "sglang-router cache_aware"
PEER_PORT = PORT + 50


def run(sglang_router: str | None = None) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with fake_engines("--delay-ms", "0"):
        figures["direct"] = load(*LOAD, port=ENGINE_PORTS[0])
        with gateway() as measured:
            figures["warmroute"] = _measured(measured, PORT)
        if sglang_router:
            with peer(sglang_router) as measured:
                figures[PEER] = _measured(measured, PEER_PORT)
    return figures


def _measured(measured: Measured, port: int) -> dict[str, Any]:
    """The better of some rounds, after one in which the conversations become known."""
    load(*LOAD[:3], "-t", "2", *LOAD[5:], port=port)
    rounds = []
    for _ in range(ROUNDS):
        before = measured.cpu_s
        figures = load(*LOAD, port=port)
        rounds.append(
            {**figures, "cpu_us_per_request": round((measured.cpu_s - before) / figures["requests"] * 1e6, 1)}
        )
    return min(rounds, key=lambda figures: figures["cpu_us_per_request"])


@contextlib.contextmanager
def peer(python: str) -> Iterator[Measured]:
    """sglang-router before the fake engines, as its command line starts it."""
    urls = [f"http://127.0.0.1:{port}" for port in ENGINE_PORTS]
    addresses = ["--host", "127.0.0.1", "--port", str(PEER_PORT), "--prometheus-port", str(PEER_PORT + 1)]
    command = ["sglang_router.launch_router", *addresses, "--policy", "cache_aware", "--log-level", "warn"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running(
            [*command, "--worker-urls", *urls], core=GATEWAY_CORE, log=Path(folder) / "log", python=python
        ) as measured,
    ):
        wait_for(f"http://127.0.0.1:{PEER_PORT}/readiness", measured)
        yield measured


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    direct, ours, other = figures["direct"], figures["warmroute"], figures.get(PEER)
    for name, row in (("warmroute", ours), (PEER, other)):
        if row:
            for quantity, unit in (("requests_per_s", "/s"), ("p50_us", "µs"), ("p99_us", "µs")):
                yield Row(
                    f"{name}: {quantity.partition('_')[0]}", row[quantity], unit, direct[quantity], "engine directly"
                )
            yield Row(f"{name}: CPU a request", row["cpu_us_per_request"], "µs")
    if other:
        yield Row("warmroute: requests", ours["requests_per_s"], "/s", other["requests_per_s"], PEER, "≥ 1 ×")
        yield Row("warmroute: CPU a request", ours["cpu_us_per_request"], "µs", other["cpu_us_per_request"], PEER)


if __name__ == "__main__":
    report(__doc__, run, rows)
