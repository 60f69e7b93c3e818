from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from router.store.database import Database, open_database
from tests.servers import Postgres


@pytest.fixture
async def bare_postgres_url(postgres: Postgres) -> AsyncIterator[str]:
    """A database without a table. Takes a quarter of a second: for tests of tables, not of rows."""
    connection = await asyncpg.connect(postgres.url("postgres"))
    await connection.execute("CREATE DATABASE bare")
    yield postgres.url("bare")
    await connection.execute("DROP DATABASE bare WITH (FORCE)")
    await connection.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def bare_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'bare.sqlite'}"
    url: str = request.getfixturevalue("bare_postgres_url")
    return url


@pytest.fixture
async def bare(bare_url: str) -> AsyncIterator[Database]:
    """The test runs on both, without a table."""
    database = open_database(bare_url)
    yield database
    await database.aclose()


@pytest.fixture
async def on_postgres(postgres_url: str) -> AsyncIterator[Database]:
    """With all tables and nothing in them, for what only PostgreSQL has."""
    database = open_database(postgres_url)
    yield database
    await database.aclose()
