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
    for text in (
        "█" * 16 + "░" * 4 + "  80%",
        "127.0.0.1:8101/1",
        "60%",
        "42 ms",
        "1.50 s",
        "hit rate: prompt tokens found",
    ):
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
