"""Benchmarks are run by hand; here only that each is still there to be run."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path

import pytest

from adapters._events import decode
from router.core import Removed, Stored
from router.lab.traces import Trace, TraceRequest
from tests.bench import agreement
from tests.bench.__main__ import BENCHMARKS, BY_NAME, takes_s
from tests.bench.fake_engine import batches, metrics_page
from tests.bench.load import cold_bodies
from tests.bench.table import Row, console, table

PARTS = {"__init__", "__main__", "counted_gateway", "fake_engine", "load", "peer", "processes", "table"}
MOST_S = 540


@pytest.mark.parametrize("name", [*BENCHMARKS, *BY_NAME])
def test_a_benchmark_declares_what_it_needs_to_run(name: str) -> None:
    module = import_module(f"tests.bench.{name}")

    assert all(p.default is not p.empty for p in inspect.signature(module.run).parameters.values())
    assert list(inspect.signature(module.rows).parameters) == ["figures"]
    assert f"python -m tests.bench.{name}" in module.__doc__
    assert takes_s(name) > 0


def test_every_file_is_a_benchmark_or_a_part_of_one() -> None:
    files = {file.stem for file in (Path(__file__).parent / "bench").glob("*.py")}

    assert files == PARTS | set(BENCHMARKS) | set(BY_NAME)


def test_all_of_them_together_are_short_enough_to_be_run() -> None:
    assert sum(map(takes_s, BENCHMARKS)) <= MOST_S


def test_a_ratio_needs_a_baseline_that_is_not_zero() -> None:
    assert Row("a", 3.0, "ms", 2.0).ratio == 1.5
    assert Row("a", 3.0, "ms").ratio is None
    assert Row("a", 3.0, "ms", 0.0).ratio is None
    assert Row("a", None, "ms", 2.0).ratio is None


def test_a_table_shows_value_baseline_ratio_and_target() -> None:
    output = console()
    with output.capture() as captured:
        output.print(table([Row("place", 73.6, "µs", 0.64, "bare pick", "≤ 100 µs"), Row("gone", None, "/s")]))

    for part in ("place", "73.6 µs", "0.64 µs", "115 ×", "bare pick", "≤ 100 µs", "gone", "–"):
        assert part in captured.get()


def test_no_two_cold_prompts_share_a_kilobyte() -> None:
    body = cold_bodies(8, "m")
    one, other = body(), body()

    assert len(one) == len(other)
    shared = {one[i : i + 1100] for i in range(len(one) - 1100)} & {other[i : i + 1100] for i in range(len(one) - 1100)}
    assert not shared


def test_event_batches_can_be_sent_round_and_round() -> None:
    held: set[int] = set()
    for payload in batches(8, blocks=2, lifetime=3) * 3:
        for event in decode(0, payload).events:
            if isinstance(event, Stored):
                assert held.isdisjoint(event.hashes)
                held.update(event.hashes)
            elif isinstance(event, Removed):
                held.difference_update(event.hashes)
    assert len(held) == 6


def test_a_metrics_page_has_the_size_asked_for() -> None:
    assert 90_000 <= len(metrics_page(90_000)) < 95_000


def test_prompts_share_as_many_tokens_as_their_blocks_say() -> None:
    known = [TraceRequest("a", 0.0, 40, 5, [1, 2, 3]), TraceRequest("b", 1.0, 48, 6, [1, 2, 4])]

    one, other = map(json.loads, agreement.bodies(Trace("t", 16, known)))

    assert (len(one["prompt"]), len(other["prompt"])) == (40, 48)
    assert one["prompt"][:32] == other["prompt"][:32]
    assert one["prompt"][32:] != other["prompt"][32:40]
    assert (one["max_tokens"], other["max_tokens"]) == (5, 6)


def test_a_segment_keeps_its_order_and_offers_the_load_asked_for() -> None:
    whole = agreement.conversations()
    chosen = agreement.segment(whole, engines=2, seconds=30.0)
    twice = agreement.segment(whole, engines=4, seconds=30.0)
    arrivals = [request.at for request in chosen.requests]

    assert [request.id for request in chosen.requests] == [r.id for r in whole.requests[: len(arrivals)]]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert 30.0 <= arrivals[-1] < 32.0
    assert len(twice.requests) > 1.5 * len(arrivals)


def test_a_short_trace_offers_its_load_in_less_time() -> None:
    short = Trace(
        "t", 16, [TraceRequest("a", 0.0, 10_000, 5, range(625)), TraceRequest("b", 9.0, 10_000, 5, range(625))]
    )

    assert 0 < agreement.segment(short, engines=1, seconds=60.0).requests[-1].at < 2.0
