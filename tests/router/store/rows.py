"""Rows of `requests`, made up, and written as the ledger writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from sqlalchemy.dialects import postgresql, sqlite

from router.store.database import Database
from router.store.partitions import ensure
from router.store.rollup import add_to_rollups
from router.store.schema import TOKEN_CLASSES, requests

DAY = 20_787  # 2026-11-30
DAY_S = 86_400


def row(id: str, *, at: float = DAY * DAY_S, **columns: Any) -> dict[str, Any]:
    """A request that asked 100 tokens, 60 of them cached, was answered by 10, and cost 0.5 $.

    Without a cache it would have cost 0.8 $, placed blind to caches 0.7 $.
    """
    tokens = dict.fromkeys((f"{name}_tokens" for name in TOKEN_CLASSES), 0)
    tokens |= {"uncached_input_tokens": 40, "cache_read_tokens": 60, "output_tokens": 10}
    return {
        "id": id, "day": int(at // DAY_S), "at": at, "tenant": "ten_a", "project": "proj_a", "key": "key_a",
        "model": "small", "instance": "gpu-1", "end_user": None, "tags": [], "asked_model": "small",
        "route": "/v1/chat/completions", "stream": True, "status": 200, "finish": "complete", "error": "",
        "attempts": 1, **tokens, "cached_known": True, "estimated": False, "best_hit_tokens": 60,
        "predicted_hit_tokens": 60, "blind_hit_tokens": 20, "queue_s": 0.0, "ttft_s": 0.1, "took_s": 1.0,
        "prefill_ms": 4.0, "decode_ms": 8.0, "kv_token_s": 16.0, "price": "price_1", "currency": "USD",
        "cost": Decimal("0.5"), "output_cost": Decimal("0.2"), "cost_without_cache": Decimal("0.8"),
        "cost_cache_blind": Decimal("0.7"),
        "raw_usage": None, **columns,
    }  # fmt: skip


def engine_hour(hour: int, **columns: Any) -> dict[str, Any]:
    """A row of `instance_hours`: an engine that cost 0.3 $ in an hour, of which nobody used a third."""
    return {
        "hour": hour, "instance": "gpu-1", "currency": "USD", "cost": Decimal("0.3"), "idle": Decimal("0.1"),
        "seen_from": 0.0, "seen_to": 0.0, "ranks": 1, "capacity_tokens": 0, "per_hour": None, **columns,
    }  # fmt: skip


async def write(database: Database, rows: Sequence[Mapping[str, Any]]) -> int:
    """In one transaction; how many were new."""
    once = {(row["day"], row["id"]): row for row in rows}  # a batch may hold a row twice
    insert = sqlite.insert if database.is_sqlite else postgresql.insert
    async with database.write() as connection:
        for day in sorted({row["day"] for row in rows}):
            await ensure(connection, day)
        written = await connection.execute(
            insert(requests).on_conflict_do_nothing().returning(requests.c.day, requests.c.id), list(once.values())
        )
        fresh = [once[day, id] for day, id in written]
        await add_to_rollups(connection, fresh)
    return len(fresh)
