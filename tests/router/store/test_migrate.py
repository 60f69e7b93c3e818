from __future__ import annotations

import asyncio
import os
import stat
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Inspector, inspect, select, text, update
from sqlalchemy.exc import DBAPIError

from router.errors import ConfigError, StoreUnavailable
from router.store import schema
from router.store.database import Database, open_database
from router.store.migrate import check_version, current, downgrade, head, open_store, upgrade
from tests.router.store.rows import row, write

_ALEMBIC = "alembic_version"


def _described(connection: Connection) -> dict[str, Any]:
    """All there is to a schema, in words that can be compared."""
    inspector: Inspector = inspect(connection)
    return {
        name: {
            "columns": sorted((c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(name)),
            "key": inspector.get_pk_constraint(name)["constrained_columns"],
            "references": sorted(
                (f["name"], f["constrained_columns"], f["referred_table"]) for f in inspector.get_foreign_keys(name)
            ),
            "unique": sorted((u["name"] or "", u["column_names"]) for u in inspector.get_unique_constraints(name)),
            "indexes": sorted((i["name"] or "", i["column_names"], i["unique"]) for i in inspector.get_indexes(name)),
        }
        for name in inspector.get_table_names()
        if name != _ALEMBIC
    }


async def _schema(database: Database) -> dict[str, Any]:
    async with database.read() as connection:
        return await connection.run_sync(_described)


async def test_the_steps_make_the_tables_of_the_schema(bare: Database) -> None:
    await upgrade(bare)
    made = await _schema(bare)
    await downgrade(bare, "base")
    assert await _schema(bare) == {}
    async with bare.write() as connection:
        await connection.run_sync(schema.metadata.create_all)
    assert made == await _schema(bare)


async def test_down_to_nothing_and_up_again(bare: Database) -> None:
    await upgrade(bare)
    await downgrade(bare, "base")
    assert await current(bare) is None
    await upgrade(bare)
    assert await current(bare) == head()
    async with bare.read() as connection:
        assert (await connection.execute(select(schema.changes))).all() == [(1, 0)]


async def test_requests_of_before_cost_what_they_cost_whatever_the_policy(bare: Database) -> None:
    await upgrade(bare)
    await write(bare, [row("1"), row("2", cost=Decimal("0.25"))])
    await downgrade(bare, "0001")
    await upgrade(bare)
    async with bare.read() as connection:
        found = await connection.execute(
            select(schema.requests.c.cost_cache_blind, schema.requests.c.blind_hit_tokens).order_by(
                schema.requests.c.id
            )
        )
        assert found.all() == [(Decimal("0.5"), 60), (Decimal("0.25"), 60)]
        assert await connection.scalar(select(schema.daily.c.cost_cache_blind)) == Decimal("0.75")


async def test_two_that_upgrade_at_once(bare_url: str) -> None:
    databases = [open_database(bare_url) for _ in range(3)]
    await asyncio.gather(*(upgrade(database) for database in databases))
    assert [await current(database) for database in databases] == [head()] * 3
    for database in databases:
        await database.aclose()


async def test_a_step_that_fails_leaves_the_database_as_it_was(bare: Database) -> None:
    async with bare.write() as connection:
        await connection.execute(text("CREATE TABLE tenants (id INTEGER)"))  # in the way, but not of the first table
    with pytest.raises((StoreUnavailable, DBAPIError)):
        await upgrade(bare)
    assert list(await _schema(bare)) == ["tenants"]


async def test_requests_are_partitioned_on_postgresql(on_postgres: Database) -> None:
    async with on_postgres.read() as connection:
        kind = await connection.scalar(text("SELECT relkind::text FROM pg_class WHERE relname = 'requests'"))
    assert kind == "p"


async def test_the_right_version_passes(database: Database) -> None:
    await check_version(database)


async def test_a_database_without_tables_says_what_to_run(bare: Database) -> None:
    with pytest.raises(ConfigError, match="has no tables yet: run `warmroute db upgrade -c FILE`"):
        await check_version(bare)


async def test_a_database_of_a_newer_version_says_so(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(text(f"UPDATE {_ALEMBIC} SET version_num = '9999'"))
    try:
        with pytest.raises(ConfigError, match="revision 9999, which this version does not know"):
            await check_version(database)
        with pytest.raises(ConfigError, match="9999"):
            await upgrade(database)
    finally:
        async with database.write() as connection:
            await connection.execute(text(f"UPDATE {_ALEMBIC} SET version_num = '{head()}'"))


async def test_the_default_file_makes_itself_and_is_private(tmp_path: Path) -> None:
    stores = await asyncio.gather(open_store(None, tmp_path), open_store(None, tmp_path))  # gateway and admin process
    async with stores[0].write() as connection:
        await connection.execute(update(schema.changes).values(revision=7))
    for store in stores:
        async with store.read() as connection:
            assert await connection.scalar(select(schema.changes.c.revision)) == 7
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(tmp_path)}
    assert modes == dict.fromkeys(("warmroute.sqlite", "warmroute.sqlite-wal", "warmroute.sqlite-shm"), 0o600)
    for store in stores:
        await store.aclose()


async def test_a_named_database_is_never_made_by_a_start(bare_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="warmroute db upgrade"):
        await open_store(bare_url, tmp_path)
