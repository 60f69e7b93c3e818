"""The demo's table: from the rows of the fleet to what people read."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from router.cli import live_table

ROW: dict[str, Any] = {
    "instance": "127.0.0.1:8101",
    "rank": 0,
    "kv_usage": 0.25,
    "running": 3,
    "waiting": 4,
    "capacity_tokens": 1000,
    "block_size": 16,
    "index_blocks": 50,
    "hit_rate": 0.6,
    "ttft_p50_s": 0.042,
    "health": "ready",
}


def test_a_line() -> None:
    assert live_table.line(ROW) == (
        "127.0.0.1:8101  cache 80%  busy 25%  running 3  waiting 4  hit rate 60%  TTFT 42 ms  state ready"
    )


def test_a_table() -> None:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(live_table.table([ROW, {**ROW, "rank": 1, "ttft_p50_s": 1.5}]))
    shown = capture.get()
    for text in ("█" * 16 + "░" * 4 + "  80%", "127.0.0.1:8101/1", "60%", "42 ms", "1.50 s"):
        assert text in shown


@pytest.mark.parametrize(
    ("row", "filled"),
    [({"capacity_tokens": 0}, None), ({"index_blocks": 10_000}, 1.0), ({"index_blocks": 0}, 0.0)],
)
def test_cache_filled(row: dict[str, Any], filled: float | None) -> None:
    assert live_table.cache_filled({**ROW, **row}) == filled


def test_what_is_not_known_yet() -> None:
    row = {**ROW, "hit_rate": None, "ttft_p50_s": None, "capacity_tokens": 0}
    assert "cache –  busy 25%  running 3  waiting 4  hit rate –  TTFT –" in live_table.line(row)


def test_an_engine_that_has_not_joined_shows_its_state() -> None:
    pending = {"instance": "http://a:1", "rank": 0, "health": "pending", "reason": "no answer"}
    assert live_table.line(pending).endswith("running –  waiting –  hit rate –  TTFT –  state pending")
    live_table.table([pending])


def _outcome(instance: str, *, tokens: int, hit: int | None, ttft: float | None) -> dict[str, Any]:
    return {"instance": instance, "rank": 0, "input_tokens": tokens, "delivered_hit_tokens": hit, "ttft_s": ttft}


def test_hit_rate_and_ttft_come_from_the_last_outcomes() -> None:
    outcomes = [
        _outcome("a", tokens=100, hit=80, ttft=0.1),
        _outcome("a", tokens=300, hit=20, ttft=0.3),
        _outcome("a", tokens=999, hit=None, ttft=0.2),  # an answer that told nothing counts for neither side
        _outcome("b", tokens=100, hit=None, ttft=None),
    ]
    a, b, c = live_table.with_recent([{"instance": name, "rank": 0} for name in "abc"], outcomes)
    assert (a["hit_rate"], a["ttft_p50_s"]) == (0.25, 0.2)
    assert (b["hit_rate"], b["ttft_p50_s"]) == (c["hit_rate"], c["ttft_p50_s"]) == (None, None)
