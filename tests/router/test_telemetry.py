from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.core import Outcome, Usage
from router.http.client import PoolStats
from router.http.proxies import Client
from router.telemetry import RECENT_OUTCOMES, Telemetry, log_access

OUTCOME = Outcome(
    request_id="r-1",
    model="m",
    tenant="",
    instance="e-0",
    rank=0,
    status=200,
    finish="complete",
    usage=Usage(input_tokens=120, output_tokens=11, cached_tokens=112),
    input_tokens=120,
    best_hit_tokens=112,
    predicted_hit_tokens=96,
    delivered_hit_tokens=112,
    delivered_source="usage",
    started_at=1.0,
    queue_s=0.0002,
    ttft_s=0.04,
    took_s=0.24,
    stream=True,
)


def changed(**fields: Any) -> Outcome:
    return msgspec.structs.replace(OUTCOME, **fields)


async def samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = (await telemetry.page()).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_an_outcome_is_counted() -> None:
    telemetry = Telemetry()
    telemetry.observe(OUTCOME)
    telemetry.observe(changed(usage=None, delivered_hit_tokens=None, delivered_source="none", attempts=2, ttft_s=None))
    page = await samples(telemetry)
    where = (("instance", "e-0"), ("model", "m"))
    assert page["warmroute_requests_total", (("finish", "complete"), ("model", "m"), ("status", "200"))] == 2
    assert page["warmroute_input_tokens_total", where] == 240
    assert page["warmroute_input_tokens_told_total", where] == 120
    assert page["warmroute_output_tokens_total", where] == 11
    assert page["warmroute_best_hit_tokens_total", where] == 224
    assert page["warmroute_predicted_hit_tokens_total", where] == 192
    assert page["warmroute_delivered_hit_tokens_total", where] == 112
    assert page["warmroute_retries_total", (("model", "m"),)] == 1
    assert page["warmroute_delivered_source_total", (("model", "m"), ("source", "none"))] == 1
    assert page["warmroute_prompt_source_total", (("model", "m"), ("source", "exact"))] == 2
    assert page["warmroute_ttft_seconds_count", (("model", "m"),)] == 1
    assert page["warmroute_tpot_seconds_sum", (("model", "m"),)] == pytest.approx(0.02)
    assert page["warmroute_request_duration_seconds_sum", (("model", "m"),)] == pytest.approx(0.48)


async def test_buckets_are_cumulative_and_bounds_inclusive() -> None:
    telemetry = Telemetry()
    for ttft_s in (0.05, 0.051, 1e9):
        telemetry.observe(changed(ttft_s=ttft_s))
    page = await samples(telemetry)

    def bucket(le: str) -> float:
        return page["warmroute_ttft_seconds_bucket", (("le", le), ("model", "m"))]

    assert (bucket("0.025"), bucket("0.05"), bucket("0.1"), bucket("80"), bucket("+Inf")) == (0, 1, 2, 2, 3)


async def test_a_request_that_was_never_placed_counts_no_tokens() -> None:
    telemetry = Telemetry()
    telemetry.observe(changed(instance=None, model="unknown", status=404, error="model_not_found"))
    page = await samples(telemetry)
    assert page["warmroute_errors_total", (("error", "model_not_found"), ("model", "unknown"))] == 1
    assert not [name for name, _ in page if name.startswith("warmroute_input_tokens")]


async def test_outcomes_of_more_kinds_than_are_kept_still_count() -> None:
    telemetry = Telemetry()
    for number in range(2500):
        telemetry.observe(changed(instance=f"e-{number}", error="" if number % 2 else "engine_timeout"))
        telemetry.observe(OUTCOME)
    assert len(telemetry._series) <= 2000
    page = await samples(telemetry)
    assert page["warmroute_requests_total", (("finish", "complete"), ("model", "m"), ("status", "200"))] == 5000
    assert page["warmroute_errors_total", (("error", "engine_timeout"), ("model", "m"))] == 1250
    assert page["warmroute_request_duration_seconds_count", (("model", "m"),)] == 5000
    assert page["warmroute_input_tokens_total", (("instance", "e-0"), ("model", "m"))] == 2501 * 120


async def test_series_stay_bounded() -> None:
    telemetry = Telemetry()
    for number in range(5000):
        telemetry.observe(changed(model=f"m{number}"))
    page = await samples(telemetry)
    series = [key for key in page if key[0] == "warmroute_requests_total"]
    assert len(series) == 2001
    other = page["warmroute_requests_total", (("finish", "other"), ("model", "other"), ("status", "other"))]
    assert other == 3000


async def test_ranks_and_feed_are_asked_when_the_page_is_written() -> None:
    row = {"instance": "e-0", "rank": 1, "model": "m", "kv_usage": 0.5, "running": 3, "confidence": 0.9, "notes": ["x"]}
    telemetry = Telemetry(fleet=lambda: [row], feed=lambda: {"gaps": 2, "blocks_stored": 7})
    page = await samples(telemetry)
    where = (("instance", "e-0"), ("model", "m"), ("rank", "1"))
    assert page["warmroute_rank_kv_usage", where] == 0.5
    assert page["warmroute_rank_running", where] == 3
    assert page["warmroute_rank_confidence", where] == 0.9
    assert ("warmroute_rank_waiting", where) not in page
    assert page["warmroute_kv_gaps_total", ()] == 2
    assert page["warmroute_kv_blocks_stored_total", ()] == 7


async def test_decisions_and_lag() -> None:
    telemetry = Telemetry()
    telemetry.decided(15.0)
    sampler = asyncio.create_task(telemetry.sample_lag())
    await asyncio.sleep(0.3)
    sampler.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sampler
    page = await samples(telemetry)
    assert page["warmroute_decision_seconds_bucket", (("le", "2e-05"),)] == 1
    assert page["warmroute_decision_seconds_bucket", (("le", "1e-05"),)] == 0
    assert page["warmroute_loop_lag_seconds_count", ()] == 1
    assert ("warmroute_loop_lag_max_seconds", ()) in page


async def test_shadows_are_told_of_by_policy() -> None:
    figures = {
        "lmetric": {"agreed": 7, "differed": 3, "errors": 0, "regret": 41.5},
        "llmd": {"agreed": 0, "differed": 0, "errors": 2, "regret": 0.0},
    }
    page = await samples(Telemetry(shadows=lambda: figures))
    assert page["warmroute_shadow_decisions_total", (("agrees", "yes"), ("policy", "lmetric"))] == 7
    assert page["warmroute_shadow_decisions_total", (("agrees", "no"), ("policy", "lmetric"))] == 3
    assert page["warmroute_shadow_regret_total", (("policy", "lmetric"),)] == 41.5
    assert page["warmroute_shadow_errors_total", (("policy", "llmd"),)] == 2
    assert not [name for name, _ in await samples(Telemetry()) if "shadow" in name]


def test_the_last_outcomes_are_kept_newest_first() -> None:
    telemetry = Telemetry()
    for number in range(RECENT_OUTCOMES + 5):
        telemetry.observe(changed(request_id=f"r-{number}"))
    recent = telemetry.recent()
    assert len(recent) == RECENT_OUTCOMES
    assert recent[0]["request_id"] == f"r-{RECENT_OUTCOMES + 4}"
    assert [found["request_id"] for found in telemetry.recent("r-7")] == ["r-7"]
    assert telemetry.recent("r-0") == []


def test_the_access_log_is_a_json_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "warmroute.access"):
        log_access(OUTCOME, Client("203.0.113.9", "https"))
    line = json.loads(caplog.messages[0])
    assert line["request_id"] == "r-1"
    assert line["output_tokens"] == 11
    assert (line["client"], line["scheme"]) == ("203.0.113.9", "https")


async def test_connections_and_refusals_are_counted() -> None:
    stats = PoolStats()
    stats.opened, stats.reused, stats.retried, stats.unreachable = 3, 40, 2, 1
    page = await samples(Telemetry(connections=lambda: {"e-0": stats}, refused=lambda: {413: 5, 400: 1}))
    for event, count in (("opened", 3), ("reused", 40), ("retried", 2), ("unreachable", 1)):
        assert page["warmroute_engine_connections_total", (("event", event), ("instance", "e-0"))] == count
    assert page["warmroute_http_refused_total", (("status", "413"),)] == 5
    assert page["warmroute_http_refused_total", (("status", "400"),)] == 1
