"""The fleet as the demo shows it: a table that a newcomer understands, or plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

BAR_CELLS = 20

LEGEND = (
    "cache: how full the KV cache is of prefixes to come back to.  busy: the part of it that running requests hold.\n"
    "hit rate: prompt tokens found there instead of being computed.  TTFT: median time to the first token."
)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a rank, from the rows of `core.Live.fleet`."""
    shown = Table(caption=LEGEND, caption_justify="left")
    shown.add_column("engine")
    shown.add_column("cache", width=BAR_CELLS + 5)
    for heading in ("busy", "running", "waiting", "hit rate", "TTFT"):
        shown.add_column(heading, justify="right")
    shown.add_column("state")
    for row in rows:
        filled = cache_filled(row)
        shown.add_row(
            Text(_name(row)),
            _bar(filled),
            _percent(row["kv_usage"]),
            str(row["running"]),
            str(row["waiting"]),
            _percent(row.get("hit_rate")),
            _seconds(row.get("ttft_p50_s")),
            Text(row["health"]),
        )
    return shown


def line(row: Mapping[str, Any]) -> str:
    """The same in one line of text."""
    parts = {
        "cache": _percent(cache_filled(row)),
        "busy": _percent(row["kv_usage"]),
        "running": row["running"],
        "waiting": row["waiting"],
        "hit rate": _percent(row.get("hit_rate")),
        "TTFT": _seconds(row.get("ttft_p50_s")),
        "state": row["health"],
    }
    return "  ".join((_name(row), *(f"{name} {value}" for name, value in parts.items())))


def cache_filled(row: Mapping[str, Any]) -> float | None:
    """0..1: what the index believes the rank holds, of what it can hold."""
    if not row["capacity_tokens"]:
        return None
    held: float = row["index_blocks"] * row["block_size"] / row["capacity_tokens"]
    return min(1.0, held)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['instance']}/{row['rank']}" if row["rank"] else str(row["instance"])


def _bar(share: float | None) -> Text:
    if share is None:
        return Text("–")
    cells = round(share * BAR_CELLS)
    return Text.assemble(("█" * cells, "cyan"), ("░" * (BAR_CELLS - cells), "dim"), f" {share:4.0%}")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
