"""Cost reports over 10 million requests of a month, from the sums by day, on SQLite and on PostgreSQL.

python -m tests.bench.reports

200 keys of 40 tenants use 4 models on 12 engines with prompts of 4 lengths, each every day: 288,000 rows of sums. The
target, a second, is for a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import datetime
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import text

from router.store.database import open_database
from router.store.migrate import upgrade
from router.store.reports import Question, cost_report
from router.store.rollup_queries import SUMS
from router.store.schema import daily
from tests.bench.table import Row, report
from tests.servers import Postgres

TAKES_S = 45
FIRST, LAST = datetime.date(2026, 11, 1), datetime.date(2026, 11, 30)
QUESTIONS = (("tenant", "model"), ("tenant", "project", "key", "model"), ("day", "tenant"), ("instance", "model"))
REQUESTS = 10_000_000
_DAY = 20_758  # 2026-11-01
_DAYS, _KEYS, _MODELS, _ENGINES, _BANDS = 30, 200, 4, 3, 4
_COLUMNS = [column.name for column in daily.primary_key] + list(SUMS)
_SCAN = text("SELECT count(*), sum(requests) FROM daily")


def run() -> dict[str, Any]:
    """Seconds, the best of three, and beside them one pass over the table that adds up one column."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/bench.sqlite"
        asyncio.run(_make_tables(url))
        _fill_sqlite(Path(folder) / "bench.sqlite")
        figures["sqlite"] = asyncio.run(_ask(url))
    server = Postgres()
    try:
        server.start()
        asyncio.run(_fill_postgres(server))
        figures["postgresql"] = asyncio.run(_ask(server.url("bench")))
    finally:
        server.close()
    return figures


def rows(figures: dict[str, Any]) -> Iterable[Row]:
    for database, found in figures.items():
        for question in QUESTIONS:
            by = ",".join(question)
            yield Row(f"{database}: by {by}", found[by], "s", found["scan"], "one pass over the sums", "< 1 s")


async def _ask(url: str) -> dict[str, float]:
    database = open_database(url)
    found: dict[str, float] = {}
    for question in QUESTIONS:
        for _ in range(3):
            began = time.perf_counter()
            answer = await cost_report(database, Question(question, FIRST, LAST))
            took = time.perf_counter() - began
            found[",".join(question)] = round(min(took, found.get(",".join(question), took)), 3)
        assert sum(line.requests for line in answer.lines) >= REQUESTS
    for _ in range(3):
        began = time.perf_counter()
        async with database.read() as connection:
            await connection.execute(_SCAN)
        found["scan"] = round(min(time.perf_counter() - began, found.get("scan", 9.0)), 3)
    await database.aclose()
    return found


def _sums() -> Iterator[tuple[Any, ...]]:
    requests = -(-REQUESTS // (_DAYS * _KEYS * _MODELS * _ENGINES * _BANDS))
    values = tuple(requests * (10**9 if "cost" in name else 1 if name == "requests" else 1_000) for name in SUMS)
    for day in range(_DAY, _DAY + _DAYS):
        for key in range(_KEYS):
            who = (f"ten_{key % 40:016x}", f"proj_{key % 80:016x}", f"key_{key:016x}")
            for model in range(_MODELS):
                for engine in range(_ENGINES):
                    for band in range(_BANDS):
                        yield (day, *who, f"model-{model}", f"gpu-{model}-{engine}", band, "USD", *values)


def _fill_sqlite(file: Path) -> None:
    connection = sqlite3.connect(file)
    marks = ", ".join("?" * len(_COLUMNS))
    names = ", ".join(f'"{name}"' for name in _COLUMNS)
    connection.executemany(f"INSERT INTO daily ({names}) VALUES ({marks})", _sums())
    connection.commit()
    connection.close()


async def _fill_postgres(server: Postgres) -> None:
    connection = await asyncpg.connect(server.url("postgres"))
    await connection.execute("CREATE DATABASE bench")
    await connection.close()
    await _make_tables(server.url("bench"))
    connection = await asyncpg.connect(server.url("bench"))
    await connection.copy_records_to_table("daily", columns=_COLUMNS, records=_sums())
    await connection.execute("VACUUM ANALYZE daily")
    await connection.close()


async def _make_tables(url: str) -> None:
    database = open_database(url)
    await upgrade(database)
    await database.aclose()


if __name__ == "__main__":
    report(__doc__, run, rows)
