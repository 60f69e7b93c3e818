"""Empty databases for tests: SQLite as a copy of a file, PostgreSQL as one database that is emptied.

A new PostgreSQL database takes 250 ms, emptying one 10.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import asyncpg

from router.store import schema
from router.store.database import open_database
from router.store.migrate import upgrade
from tests.servers import Postgres

_NAME = "warmroute"


class SqliteFiles:
    def __init__(self, folder: Path) -> None:
        self._empty = folder / "empty.sqlite"
        asyncio.run(_make_tables(f"sqlite:///{self._empty}"))

    def new(self, path: Path) -> str:
        """The URL of a database there, with our tables and nothing in them."""
        shutil.copyfile(self._empty, path)
        return f"sqlite:///{path}"


class PostgresDatabase:
    def __init__(self, server: Postgres) -> None:
        self.url = server.url(_NAME)
        self._server = server
        asyncio.run(self._make())

    async def empty(self) -> str:
        """Its URL; whatever a test before has left is gone, open transactions too."""
        connection = await asyncpg.connect(self.url)
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        partitions = await connection.fetch("SELECT inhrelid::regclass::text AS name FROM pg_inherits JOIN pg_class"
                                            " ON oid = inhrelid AND relkind = 'r'")  # fmt: skip
        if partitions:
            await connection.execute(f"DROP TABLE {', '.join(partition['name'] for partition in partitions)}")
        tables = [table for table in reversed(schema.metadata.sorted_tables) if table is not schema.changes]
        await connection.execute(";".join(f'DELETE FROM "{table.name}"' for table in tables))
        await connection.execute("UPDATE changes SET revision = 0")
        await connection.close()
        return self.url

    async def _make(self) -> None:
        connection = await asyncpg.connect(self._server.url("postgres"))
        await connection.execute(f"CREATE DATABASE {_NAME}")
        await connection.close()
        await _make_tables(self.url)


async def _make_tables(url: str) -> None:
    database = open_database(url)
    await upgrade(database)
    await database.aclose()
