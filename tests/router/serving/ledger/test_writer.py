"""Into the database, each once, whatever becomes of the database meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from router.core import Usage
from router.serving.ledger.records import Seen
from router.serving.ledger.spool import SUFFIX, Spool
from router.serving.ledger.writer import Writer, WriterSettings
from router.store.database import Database, open_database
from router.store.ledger import erase_end_user
from router.store.schema import daily, hourly, instance_hours, prices, requests
from tests.router.serving.ledger.made import AT, DAY, HOUR, end, mark
from tests.servers import Postgres

MIB = 1 << 20


@contextlib.asynccontextmanager
async def writing(folder: Path, database: Database, *, clock: float = AT) -> AsyncIterator[Writer]:
    writer = Writer(WriterSettings(folder=folder), database, clock=lambda: clock)
    work = asyncio.ensure_future(writer.run())
    try:
        yield writer
    finally:
        writer.stop()
        await work


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came about")


async def read(database: Database, query: Any) -> list[dict[str, Any]]:
    async with database.read() as connection:
        return [dict(row) for row in (await connection.execute(query)).mappings()]


def some(spool: Spool, first: int, last: int) -> None:
    for n in range(first, last):
        spool.append(mark(f"r{n}"))
        spool.append(end(f"r{n}"))


async def test_rows_are_written_once_and_summed_once(tmp_path: Path, database: Database) -> None:
    """Even those that another writer has written, and died before it said so."""
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=MIB)
    async with database.write() as connection:
        await connection.execute(
            insert(prices).values(
                id="p",
                model="*",
                currency="USD",
                per_million={"output": "1"},
                valid_from=0.0,
                created_at=0.0,
                revision=0,
            )
        )
    some(spool, 0, 450)
    async with writing(folder, database) as writer:
        await until(lambda: writer.written == 450)
    (folder / "position").unlink()
    some(spool, 450, 460)
    async with writing(folder, database) as writer:
        await until(lambda: writer.written == 10)
    assert len(await read(database, select(requests))) == 460
    for table in (hourly, daily):
        (sums,) = await read(database, select(table))
        assert (sums["requests"], sums["cache_read_tokens"]) == (460, 460 * 900)
        assert sums["cost"] == Decimal("0.00002") * 460


async def test_a_run_that_is_over_is_written_and_gone(tmp_path: Path, database: Database) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=MIB)
    some(spool, 0, 3)
    spool.append(mark("lost"))
    spool.close()
    async with writing(folder, database) as writer:
        await until(lambda: writer.written == 4)
    rows = await read(database, select(requests.c.id, requests.c.finish).order_by(requests.c.id))
    assert [tuple(row.values()) for row in rows] == [
        ("lost", "unknown"), ("r0", "complete"), ("r1", "complete"), ("r2", "complete"),
    ]  # fmt: skip
    assert list(folder.glob(f"*{SUFFIX}")) == []


async def test_what_came_while_postgresql_was_away(tmp_path: Path, postgres: Postgres, postgres_url: str) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=MIB)
    database = open_database(postgres_url)
    some(spool, 0, 10)
    async with writing(folder, database) as writer:
        await until(lambda: writer.written == 10)
        try:
            postgres.stop()
            some(spool, 10, 300)
            await until(lambda: bool(writer.away))
        finally:
            await asyncio.to_thread(postgres.start)
        await until(lambda: writer.written == 300)
        assert writer.away == ""
    assert (await read(database, select(func.count()).select_from(requests)))[0] == {"count_1": 300}
    (sums,) = await read(database, select(daily))
    assert sums["requests"] == 300
    await database.aclose()


async def test_a_row_that_the_database_refuses_keeps_no_other_out(tmp_path: Path, database: Database) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=MIB)
    some(spool, 0, 5)
    spool.append(end("bad", best_hit_tokens=2**63))
    spool.append(end("worse", at=float("nan")))
    some(spool, 5, 8)
    async with writing(folder, database) as writer:
        await until(lambda: writer.written == 8)
    assert len(await read(database, select(requests))) == 8
    assert writer.refused == 2
    assert json.loads((folder / "refused.jsonl").read_text())["id"] == "bad"


async def test_hours_are_allocated_to_who_used_the_engine(tmp_path: Path, database: Database) -> None:
    """There for half an hour, at 2 an hour: the work of one request, of another, and the rest is idle."""
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=MIB)
    for minute in range(31):
        at = AT + 60 * minute
        spool.append(Seen(max(AT, at - 60), at, "A", "2", 1, 0))
    for key, tokens in (("key_1", 1000), ("key_2", 3000)):
        usage = Usage(tokens, 0, 0)
        spool.append(mark(key, key=key))
        spool.append(end(key, key=key, usage=usage, at=AT + 5))
    async with writing(folder, database, clock=AT + 1900) as writer:
        await until(lambda: writer.written == 2)
    (hour,) = await read(database, select(instance_hours))
    assert (hour["hour"], hour["cost"], hour["seen_to"]) == (HOUR, Decimal(1), AT + 1800)
    by_key = {row["key"]: row for row in await read(database, select(hourly))}
    assert by_key["key_2"]["own_cost"] == pytest.approx(3 * by_key["key_1"]["own_cost"])
    assert by_key["key_1"]["own_cost"] == pytest.approx(Decimal(100) / 3_600_000, rel=Decimal("1e-6"))
    assert sum(row["own_cost"] for row in by_key.values()) + hour["idle"] == hour["cost"]
    days = await read(database, select(daily))
    assert sum(row["own_cost"] for row in days) + hour["idle"] == hour["cost"]
    assert {row["day"] for row in days} == {DAY}


async def test_an_end_user_is_forgotten(tmp_path: Path, database: Database) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=MIB)
    for n, user in enumerate(("abc", "abc", "def")):
        spool.append(end(f"r{n}", end_user=user))
    async with writing(folder, database) as writer:
        await until(lambda: writer.written == 3)
    async with database.write() as connection:
        assert await erase_end_user(connection, ["abc"]) == 2
    rows = await read(database, select(requests.c.end_user, requests.c.output_tokens).order_by(requests.c.id))
    assert [tuple(row.values()) for row in rows] == [(None, 20), (None, 20), ("def", 20)]


async def test_a_writer_that_is_stopped_while_others_write_loses_nothing(
    tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database can be read, and not written: what was read of the spool is not taken for written at the end."""
    monkeypatch.setattr("router.store.database._BUSY_S", 0)
    folder = tmp_path / "spool"
    some(Spool(folder, max_bytes=MIB), 0, 10)
    database = open_database(sqlite_url)
    async with database.write(), writing(folder, database) as writer:
        await until(lambda: bool(writer.away))
    assert writer.written == 0
    async with writing(folder, database) as after:
        await until(lambda: after.written == 10)
    await database.aclose()
