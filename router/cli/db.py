"""`warmroute db`: the tables of the database, made and changed by hand and by nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from router.cli.options import ConfigFile, read_config
from router.config import Config
from router.errors import ConfigError
from router.state import store_url
from router.store import migrate
from router.store.database import Database, open_database

db = typer.Typer(
    help="The tables of the database: made, changed, looked at. Never done at a start, but for SQLite in state_dir.",
    no_args_is_help=True,
)

Answer = TypeVar("Answer")


@db.command()
def upgrade(config: ConfigFile = None) -> None:
    """Bring the database to this version: all steps or none. Two at once wait for each other."""
    _run(config, migrate.upgrade)
    print(f"ok: the database is at revision {migrate.head()}")


@db.command()
def downgrade(
    revision: Annotated[str, typer.Argument(metavar="REVISION", help="E.g. 0001; base: all tables go.")],
    config: ConfigFile = None,
) -> None:
    """Take steps back, before an older version is run. What newer tables and columns hold is lost."""
    _run(config, lambda database: migrate.downgrade(database, revision))
    print(f"ok: the database is at revision {_run(config, migrate.current)}")


@db.command()
def current(config: ConfigFile = None) -> None:
    """Print the revision the database is at, and the one this version needs."""
    print(f"database: {_run(config, migrate.current)}\nthis version: {migrate.head()}")


@db.command()
def check(config: ConfigFile = None) -> None:
    """Whether this version can run on the database; exit code 1 and what to do if it cannot."""
    try:
        _run(config, migrate.check_version)
    except ConfigError as error:
        print(error.message)
        raise typer.Exit(1) from None
    print("ok")


def database_of(config: Config) -> Database:
    """Open, whatever its version. Raises ConfigError."""
    if config.store.url is None:
        config.make_state_dir()
    try:
        return open_database(store_url(config, config.state_dir))
    except ValueError as error:
        raise ConfigError([f"store.url: {error}"]) from None


def _run(file: ConfigFile, work: Callable[[Database], Awaitable[Answer]]) -> Answer:
    found = read_config(file, None)

    async def whole() -> Answer:
        database = database_of(found)
        try:
            return await work(database)
        finally:
            await database.aclose()

    return asyncio.run(whole())
