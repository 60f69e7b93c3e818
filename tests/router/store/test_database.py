from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from router.errors import StoreUnavailable
from router.store import schema
from router.store.database import Database, open_database
from tests.servers import Postgres


async def _add_tenant(database: Database, tenant: str) -> None:
    async with database.write() as connection:
        await connection.execute(
            insert(schema.tenants).values(
                id=tenant, name=tenant, isolation="tenant", priority=0, steers=False, instance_labels={}, metadata={},
                created_at=0.0, revision=1,
            )
        )  # fmt: skip


async def _tenants(database: Database) -> list[str]:
    async with database.read() as connection:
        return list(await connection.scalars(select(schema.tenants.c.id)))


@pytest.mark.parametrize("time", ["first", "second"])
async def test_each_test_begins_with_nothing(database: Database, time: str) -> None:
    assert await _tenants(database) == []
    await _add_tenant(database, "ten_1")
    assert await _tenants(database) == ["ten_1"]


async def test_what_fails_half_way_is_not_there(database: Database) -> None:
    async def write_twice() -> None:
        row = insert(schema.limit_windows).values(limit="lim_1", window=0, used=1)
        async with database.write() as connection:
            await connection.execute(row)
            await connection.execute(row)

    with pytest.raises(IntegrityError):
        await write_twice()
    async with database.read() as connection:
        assert (await connection.execute(select(schema.limit_windows))).all() == []


async def test_postgresql_that_goes_and_comes_back(postgres: Postgres, on_postgres: Database) -> None:
    await _add_tenant(on_postgres, "ten_1")
    postgres.stop()
    with pytest.raises(StoreUnavailable):
        await _tenants(on_postgres)
    postgres.start()
    assert await _tenants(on_postgres) == ["ten_1"]


@pytest.mark.parametrize("place", ["warmroute@127.0.0.1:{port}/nosuch", "nobody@127.0.0.1:{port}/warmroute"])
async def test_a_database_that_does_not_let_us_in_is_unavailable(place: str, postgres: Postgres) -> None:
    database = open_database("postgresql://" + place.format(port=postgres.port))
    with pytest.raises(StoreUnavailable) as refused:
        await _tenants(database)
    assert refused.value.detail.endswith("does not exist")
    await database.aclose()


@pytest.mark.parametrize("url", ["mysql://user:secret@host/name", "secret"])
def test_what_is_no_url_of_ours_is_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match=r"^(must begin with|is no URL)") as refused:
        open_database(url)
    assert "secret" not in str(refused.value)


async def test_a_new_file_that_another_process_is_writing_is_waited_for(tmp_path: Path) -> None:
    """The switch to WAL is refused at once then, whatever the busy timeout is."""
    file = tmp_path / "new.sqlite"
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("CREATE TABLE others (x)")
    other.execute("BEGIN IMMEDIATE")
    asyncio.get_running_loop().call_later(0.05, other.execute, "COMMIT")
    database = open_database(f"sqlite:///{file}")
    async with database.read() as connection:
        assert (await connection.exec_driver_sql("PRAGMA journal_mode")).scalar() == "wal"
    await database.aclose()
    other.close()
