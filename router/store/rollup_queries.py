"""The sums of a day in SQL: what `add_to_rollups` adds up row by row."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Integer, Select, String, Table, and_, case, cast, func, literal, or_, select, true

from router.store.bands import BANDS, INPUT_CLASSES
from router.store.schema import TOKEN_CLASSES, daily_tags, hourly_tags, requests

WHO = ("tenant", "project", "key", "model", "instance")
ADDED = (
    *(f"{name}_tokens" for name in TOKEN_CLASSES), "best_hit_tokens", "predicted_hit_tokens",
    "blind_hit_tokens", "prefill_ms", "decode_ms", "kv_token_s", "cost", "output_cost", "cost_without_cache",
    "cost_cache_blind",
)  # fmt: skip
"""The columns of a request that are simply added up."""
SUMS = ("requests", "failed", "aborted", "cached_unknown", *ADDED, "own_cost")

HOUR_S, DAY_HOURS = 3600, 24


def sums_of_day(table: Table, day: int, dialect: str) -> Select[Any]:
    """The rows `table` should have for a day: its key, then SUMS."""
    currency = func.coalesce(requests.c.currency, "")
    source: Any = requests
    first = _hour(dialect) if "hour" in table.c else requests.c.day
    if table in (hourly_tags, daily_tags):
        tag = _unfolded_tags(dialect)
        source = requests.join(tag, true())
        instance = [requests.c.instance] if table is hourly_tags else []
        where = [first, requests.c.tenant, cast(tag.c.value, String), *instance, currency]
    else:
        where = [first, *(requests.c[name] for name in WHO), _band(), currency]
    keys = [column.label(f"key_{number}") for number, column in enumerate(where)]
    return (
        select(*keys, *_sums()).select_from(source).where(requests.c.day == day).group_by(*(key.name for key in keys))
    )


def _sums() -> list[Any]:
    aborted = requests.c.finish == "client_gone"
    failed = and_(~aborted, or_(requests.c.finish != "complete", requests.c.status >= 400))
    counted = [func.sum(case((which, 1), else_=0)) for which in (failed, aborted, ~requests.c.cached_known)]
    return [func.count(), *counted, *(func.sum(requests.c[name]) for name in ADDED), literal(0)]


def _band() -> Any:
    prompt = sum((requests.c[f"{name}_tokens"] for name in INPUT_CLASSES), literal(0))
    return case(*((prompt <= longest, number) for number, longest in enumerate(BANDS)), else_=len(BANDS))


def _hour(dialect: str) -> Any:
    """PostgreSQL rounds where it casts; SQLite cuts, and may have no floor()."""
    hours = requests.c.at / HOUR_S
    return cast(func.floor(hours) if dialect == "postgresql" else hours, Integer)


def _unfolded_tags(dialect: str) -> Any:
    unfold = func.json_array_elements_text if dialect == "postgresql" else func.json_each
    return unfold(requests.c.tags).table_valued("value")
