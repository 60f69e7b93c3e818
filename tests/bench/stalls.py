"""Work that comes in lumps: does it hold up streams? The gap between chunks of 64 paced streams, quiet and disturbed.

python -m tests.bench.stalls

Disturbed: the metrics pages of 200 more engines, 90 KB each, are polled once a second; our own page is scraped once a
second; and a prompt of 100,000 tokens of which nothing is known arrives each second. The streams' engines send a chunk
every 10 ms. Streams, engines and load share one core, the gateway has the other: what they see without a gateway is
printed as "directly".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

from tests.bench.processes import ENGINE_PORTS, engine, fake_engines, gateway, load, metric
from tests.bench.table import Row, report

TAKES_S = 75
RUNS = 3
CHUNKS = 300
OVERLOADED_S = 3 * CHUNKS * 0.01
POLLED_PORTS = range(9200, 9400)
COLD_PORT = 9400
METRICS_BYTES = 90_000
COLD_KB = 280  # 100,000 tokens of the demo tokenizer
STREAMS = ("stream", "-c", "64", "--rounds", "1", "--stagger-ms", "10")
COLD = ("cold", "-c", "1", "-t", "3", "--kb", str(COLD_KB), "--every-s", "1", "--model", "cold")
LAG = "warmroute_loop_lag_max_seconds"


def run() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    pace = ("--delay-ms", "10", "--chunks", str(CHUNKS))
    polled = fake_engines("--metrics-bytes", str(METRICS_BYTES), ports=(*POLLED_PORTS, COLD_PORT))
    with fake_engines(*pace), polled:
        figures["directly"] = _medians([load(*STREAMS, port=ENGINE_PORTS[0]) for _ in range(2)])
        with gateway():
            figures["quiet"] = _observed([])
        with _among_200():
            figures["200 engines polled"] = _observed([])
            figures["and our page scraped"] = _observed([_scrape_each_second])
            figures["and cold prompts"] = _observed([_scrape_each_second, _cold_prompts])
    return figures


def _among_200() -> contextlib.AbstractContextManager[Any]:
    """The gateway before the streams' engines, 200 of another model, and one that takes the cold prompts."""
    others = [{"url": f"http://127.0.0.1:{port}", "kind": "vllm", "model": "other"} for port in POLLED_PORTS]
    cold = {"url": f"http://127.0.0.1:{COLD_PORT}", "kind": "vllm", "model": "cold", "block_size": 16}
    engines = [*map(engine, range(len(ENGINE_PORTS))), *({**e, "events": "off"} for e in (*others, cold))]
    reading = {"cold": {"tokenizer": "demo", "parity": "off"}, "other": {"tokenizer": "none"}}
    return gateway(engines=[{"model": "fake", **e} for e in engines], further_models=reading)


def _observed(disturbances: list[Callable[[threading.Event], float]]) -> dict[str, float]:
    """Medians over some runs, and how late the gateway's own loop was at worst."""
    load("stream", "-c", "64", "-t", "1", may_fail=True)
    metric(LAG)  # begins anew
    runs, lags = [], []
    for _ in range(RUNS):
        ended = threading.Event()
        with ThreadPoolExecutor(4) as threads:
            told: list[Future[float]] = [threads.submit(disturb, ended) for disturb in disturbances]
            try:
                runs.append(load(*STREAMS, may_fail=True))
            finally:
                ended.set()
            lags += [future.result() for future in told]
        lags.append(metric(LAG))
        if runs[-1]["seconds"] > OVERLOADED_S:
            break  # more of the same would take minutes
    return {**_medians(runs), "loop_lag_max_ms": round(max(lags) * 1e3, 2)}


def _scrape_each_second(ended: threading.Event) -> float:
    """Returns the worst lag that a page told: each page begins anew."""
    worst = 0.0
    while not ended.wait(1):
        worst = max(worst, metric(LAG))
    return worst


def _cold_prompts(ended: threading.Event) -> float:
    while not ended.is_set():
        load(*COLD, may_fail=True)
    return 0.0


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    """`failed`: streams, over all runs."""
    whole = [run for run in runs if run["chunks"]]
    medians = {
        f"{name}_ms": round(median(run[f"{name}_us"] for run in whole) / 1e3, 3) if whole else float("inf")
        for name in ("gap_p50", "gap_p99", "transit_p99")
    }
    return {**medians, "failed": sum(run["errors"] for run in runs)}


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    quiet, worst = figures["quiet"], figures["and cold prompts"]
    for name, row in figures.items():
        against, label = (quiet, "quiet") if row is not quiet else (figures["directly"], "directly")
        for quantity in ("gap_p99", "transit_p99"):
            key = f"{quantity}_ms"
            yield Row(f"{name}: {quantity.replace('_', ' ')}", row[key], "ms", against[key], label)
        if "loop_lag_max_ms" in row:
            yield Row(f"{name}: {LAG}", row["loop_lag_max_ms"], "ms", quiet["loop_lag_max_ms"], "quiet")
        if row["failed"]:
            yield Row(f"{name}: failed streams", row["failed"], "", target="0")
    yield Row(
        "gap p99, disturbed less quiet", round(worst["gap_p99_ms"] - quiet["gap_p99_ms"], 2), "ms", target="≤ 5 ms"
    )


if __name__ == "__main__":
    report(__doc__, run, rows)
