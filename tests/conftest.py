"""What holds for every test, and the servers and databases any test may ask for."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from router.store.database import Database, open_database
from tests.certificates import Authority
from tests.databases import PostgresDatabase, SqliteFiles
from tests.servers import NoServer, Postgres, Redis, Server

# The same examples every time: a suite that fails now and then tells nothing about the change at hand. To look further,
# run with --hypothesis-profile=default and more examples.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("steady")


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one more than there are cores, as many tests wait; above eight the longest test sets the time."""
    return min(os.cpu_count() or 1, 7) + 1


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of the tests need look at it, nor those of the gateways."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ca")


@pytest.fixture(scope="session")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other-ca"), "other-ca")


REQUIRED = "WARMROUTE_TESTS_REQUIRE_SERVERS"
"""Set where a test that cannot have its server is a failure: in CI."""

Kind = TypeVar("Kind", bound=Server)


def _started(kind: type[Kind]) -> Iterator[Kind]:
    try:
        server = kind()
    except NoServer as missing:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{missing} ({REQUIRED} is set)")
        pytest.skip(str(missing))
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A test that stops it starts it again before it ends."""
    yield from _started(Postgres)


@pytest.fixture(scope="session")
def redis() -> Iterator[Redis]:
    """A test that stops it starts it again before it ends."""
    yield from _started(Redis)


@pytest.fixture
def redis_url(redis: Redis) -> str:
    """A Redis with nothing in it."""
    redis.ask("FLUSHALL")
    return redis.url


@pytest.fixture(scope="session")
def _sqlite_files(tmp_path_factory: pytest.TempPathFactory) -> SqliteFiles:
    return SqliteFiles(tmp_path_factory.mktemp("databases"))


@pytest.fixture(scope="session")
def _postgres_database(postgres: Postgres) -> PostgresDatabase:
    return PostgresDatabase(postgres)


@pytest.fixture
def sqlite_url(_sqlite_files: SqliteFiles, tmp_path: Path) -> str:
    """Of a database with all our tables and nothing in them."""
    return _sqlite_files.new(tmp_path / "warmroute.sqlite")


@pytest.fixture
async def postgres_url(_postgres_database: PostgresDatabase) -> str:
    """Of a database with all our tables and nothing in them."""
    return await _postgres_database.empty()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The test runs on both."""
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """The test runs on SQLite and on PostgreSQL."""
    database = open_database(database_url)
    yield database
    await database.aclose()
