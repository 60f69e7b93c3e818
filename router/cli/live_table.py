"""The fleet as the demo shows it: a table that a newcomer understands, or plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

BAR_CELLS = 20

LEGEND = (
    "cache: how full the KV cache is of prefixes to come back to.  busy: the part of it that running requests hold.\n"
    "hit rate: prompt tokens found there instead of being computed.  TTFT: median time to the first token."
)


Row = Mapping[str, Any]


def with_recent(rows: Iterable[Row], outcomes: Iterable[Row]) -> list[Row]:
    """The rows of `core.Live.fleet` with `hit_rate` and `ttft_p50_s` out of the last outcomes, where there are any."""
    by_rank: dict[tuple[str, int], list[Row]] = {}
    for outcome in outcomes:
        by_rank.setdefault((outcome["instance"], outcome["rank"]), []).append(outcome)
    return [{**row, **_recent(by_rank.get((row["instance"], row["rank"]), []))} for row in rows]


def _recent(outcomes: Sequence[Row]) -> dict[str, float | None]:
    told = [outcome for outcome in outcomes if outcome["delivered_hit_tokens"] is not None]
    tokens = sum(outcome["input_tokens"] for outcome in told)
    first_tokens = [outcome["ttft_s"] for outcome in outcomes if outcome["ttft_s"] is not None]
    return {
        "hit_rate": sum(outcome["delivered_hit_tokens"] for outcome in told) / tokens if tokens else None,
        "ttft_p50_s": median(first_tokens) if first_tokens else None,
    }


def table(rows: Iterable[Row]) -> Table:
    """One line a rank; an engine that has not joined yet shows its state only."""
    shown = Table()
    shown.add_column("engine")
    shown.add_column("cache", width=BAR_CELLS + 5)
    for heading in ("busy", "running", "waiting", "hit rate", "TTFT"):
        shown.add_column(heading, justify="right")
    shown.add_column("state")
    for row in rows:
        shown.add_row(Text(_name(row)), _bar(cache_filled(row)), *_cells(row).values(), Text(row["health"]))
    return shown


def line(row: Row) -> str:
    """The same in one line of text."""
    cells = {"cache": _percent(cache_filled(row)), **_cells(row), "state": row["health"]}
    return "  ".join((_name(row), *(f"{heading} {cell}" for heading, cell in cells.items())))


def _cells(row: Row) -> dict[str, str]:
    return {
        "busy": _percent(row.get("kv_usage")),
        "running": str(row.get("running", "–")),
        "waiting": str(row.get("waiting", "–")),
        "hit rate": _percent(row.get("hit_rate")),
        "TTFT": _seconds(row.get("ttft_p50_s")),
    }


def cache_filled(row: Row) -> float | None:
    """0..1: what the index believes the rank holds, of what it can hold."""
    if not row.get("capacity_tokens"):
        return None
    held: float = row["index_blocks"] * row["block_size"] / row["capacity_tokens"]
    return min(1.0, held)


def _name(row: Row) -> str:
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
