from __future__ import annotations

import asyncio

from router.store.database import Database
from router.store.partitions import days_before, ensure, ensure_ahead

DAY = 20_787  # 2026-11-30


async def test_a_day_is_made_once_though_several_ask_at_once(on_postgres: Database) -> None:
    database = on_postgres

    async def one() -> None:
        async with database.write() as connection:
            await ensure(connection, DAY)

    await asyncio.gather(*(one() for _ in range(4)))
    async with database.read() as connection:
        assert await days_before(connection, DAY + 1) == [DAY]
        assert await days_before(connection, DAY) == []


async def test_days_ahead_on_both(database: Database) -> None:
    async with database.write() as connection:
        await ensure_ahead(connection, DAY)
    if not database.is_sqlite:
        async with database.read() as connection:
            assert await days_before(connection, DAY + 9) == [DAY, DAY + 1, DAY + 2, DAY + 3]


async def test_making_a_day_waits_for_no_reader_and_no_writer(on_postgres: Database) -> None:
    async with on_postgres.write() as making:
        await ensure(making, DAY)
        async with on_postgres.write() as other:
            await other.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
            await other.exec_driver_sql("LOCK TABLE requests IN ROW EXCLUSIVE MODE")  # as an INSERT does
            assert (await other.exec_driver_sql("SELECT 1 FROM requests")).all() == []
