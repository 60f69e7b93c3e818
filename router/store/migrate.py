"""The tables made and changed: `migrations/`, run by Alembic on a connection of ours, all steps or none.

Two that upgrade at once wait for each other: by an advisory lock on PostgreSQL, by BEGIN IMMEDIATE on SQLite.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from router.errors import ConfigError
from router.store.database import Database, open_database

logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells of each connection that it looks at

_DEFAULT_FILE = "warmroute.sqlite"
_LOCK = 0x7761726D726F7574  # "warmrout": of pg_advisory_xact_lock


async def upgrade(database: Database, revision: str = "head") -> None:
    """Takes all steps up to there; none is fine. Raises ConfigError where the database is not known to this program."""
    await _run(database, command.upgrade, revision)


async def downgrade(database: Database, revision: str) -> None:
    """Takes steps back; "base" leaves nothing, no row either. Raises ConfigError."""
    await _run(database, command.downgrade, revision)


async def current(database: Database) -> str | None:
    """The revision the database is at; None: it holds nothing of ours."""
    async with database.read() as connection:
        return await connection.run_sync(_revision)


def head() -> str | None:
    """The revision this program needs."""
    return ScriptDirectory(_folder()).get_current_head()


async def check_version(database: Database) -> None:
    """Raises ConfigError, which says what to run, where the database is behind this program or ahead of it."""
    found, needed = await current(database), head()
    if found == needed:
        return
    known = {script.revision for script in ScriptDirectory(_folder()).walk_revisions()}
    if found is None or found in known:
        has = "has no tables yet" if found is None else f"is at revision {found}, this version needs {needed}"
        raise ConfigError([f"store.url: the database {has}: run `warmroute db upgrade -c FILE`"])
    raise ConfigError(
        [
            f"store.url: the database is at revision {found}, which this version does not know: it was upgraded by a"
            f" newer one. Run that version, or have it run `warmroute db downgrade {needed}`"
        ]
    )


async def open_store(url: str | None, state_dir: Path) -> Database:
    """The database of the configuration, at the right version. Raises ConfigError, or StoreUnavailable.

    url: None is SQLite in state_dir, which is made here where it is missing; no other database is ever changed.
    """
    database = open_database(store_url(url, state_dir))
    try:
        if url is None:
            _make_private(state_dir / _DEFAULT_FILE)
            if await current(database) is None:
                await upgrade(database)
        await check_version(database)
    except BaseException:
        await database.aclose()
        raise
    return database


def store_url(url: str | None, state_dir: Path) -> str:
    return url or f"sqlite:///{state_dir / _DEFAULT_FILE}"


def alembic_config(connection: Connection) -> AlembicConfig:
    config = AlembicConfig()
    config.set_main_option("script_location", _folder().replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _folder() -> str:
    found = importlib.util.find_spec("migrations")
    assert found is not None
    assert found.origin is not None
    return str(Path(found.origin).parent)


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


async def _run(database: Database, step: Callable[[AlembicConfig, str], None], revision: str) -> None:
    def run(connection: Connection) -> None:
        try:
            step(alembic_config(connection), revision)
        except CommandError as error:
            raise ConfigError([f"store.url: {error}"]) from error

    async with database.write() as connection:
        await _lock(connection)
        await connection.run_sync(run)


async def _lock(connection: AsyncConnection) -> None:
    if connection.dialect.name == "postgresql":
        await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})


def _make_private(file: Path) -> None:
    """SQLite would make it readable to others; its -wal and -shm take the mode of the file."""
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
