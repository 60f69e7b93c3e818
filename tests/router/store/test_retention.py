from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import func, select

from router.store import retention
from router.store.database import Database
from router.store.partitions import days_before
from router.store.schema import daily, requests
from tests.router.store.rows import DAY, DAY_S, row, write


async def _days(database: Database) -> list[tuple[int, int]]:
    query = select(requests.c.day, func.count()).group_by(requests.c.day).order_by(requests.c.day)
    async with database.read() as connection:
        return [(day, count) for day, count in await connection.execute(query)]


async def test_old_rows_go_and_their_sums_stay(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "STEP_ROWS", 2)
    old = [row(f"old_{number}", at=(DAY - 9 + number % 2) * DAY_S) for number in range(5)]
    kept = [row(f"kept_{number}", at=(DAY - 7 + number) * DAY_S) for number in range(3)]
    await write(database, old + kept)
    await retention.apply(database, today=DAY, retention_days=7)
    assert await _days(database) == [(DAY - 7, 1), (DAY - 6, 1), (DAY - 5, 1)]
    async with database.read() as connection:
        assert await connection.scalar(select(func.sum(daily.c.requests))) == 8
    await retention.apply(database, today=DAY, retention_days=7)  # nothing more to do


async def test_a_day_that_is_being_read_stays_for_now(on_postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_LOCK_WAIT", "10ms")
    await write(on_postgres, [row("old", at=(DAY - 9) * DAY_S), row("older", at=(DAY - 10) * DAY_S)])
    async with on_postgres.write() as reading:
        await reading.exec_driver_sql("SELECT * FROM requests")
        await retention.apply(on_postgres, today=DAY, retention_days=7)
        assert len(await _days(on_postgres)) == 2
    await retention.apply(on_postgres, today=DAY, retention_days=7)
    async with on_postgres.read() as connection:
        assert await days_before(connection, DAY + 9) == [DAY, DAY + 1, DAY + 2, DAY + 3]


async def test_it_goes_on_after_a_failure(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_AGAIN_S", 0.0)
    await write(database, [row("old", at=(DAY - 9) * DAY_S)])
    days = iter([float("nan")])  # the first time it fails
    keeping = asyncio.create_task(
        retention.keep(database, retention_days=7, clock=lambda: next(days, float(DAY * DAY_S)))
    )
    while await _days(database):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
