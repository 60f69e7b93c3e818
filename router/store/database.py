"""One database, open: SQLite in a file, or PostgreSQL.

SQLite: WAL, so that readers never wait for the writer; writers line up by BEGIN IMMEDIATE and a busy timeout instead of
finding the database locked half-way.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from router.errors import StoreUnavailable

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
_BUSY_S = 10
_AGAIN_S = 0.02
_CONNECT_S = 5
_WRITES = "warmroute_writes"
_NOT_THERE = ("08", "28", "3D", "53", "57")
"""Classes of SQLSTATE: no connection, no such user, no such database, no room, shutting down or starting."""


class Database:
    """`read` and `write` raise StoreUnavailable where the database cannot be reached, or is too busy."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """What is seen inside is of one moment."""
        with _translated():
            async with self.engine.connect() as connection:
                if not self.is_sqlite:  # by default each statement there has a moment of its own
                    await connection.execution_options(isolation_level="REPEATABLE READ")
                yield connection

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: committed at the end, rolled back by an exception."""
        with _translated():
            async with self.engine.connect() as connection:
                connection = await connection.execution_options(**{_WRITES: True})
                async with connection.begin():
                    yield connection

    async def aclose(self) -> None:
        await self.engine.dispose()


def open_database(url: str, *, pool_size: int = 5) -> Database:
    """url: sqlite:///PATH, or postgresql://USER:PASSWORD@HOST:PORT/NAME. Connects to nothing yet. Raises ValueError."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ValueError("is no URL") from None  # which is not shown: it may hold a password
    driver = _DRIVERS.get(parsed.drivername.partition("+")[0])
    if driver is None:
        raise ValueError(f"must begin with sqlite:/// or postgresql:// (not {parsed.drivername}://)")
    parsed = parsed.set(drivername=driver)
    if driver.startswith("sqlite"):
        engine = create_async_engine(parsed, connect_args={"timeout": _BUSY_S})
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
    else:
        engine = create_async_engine(
            parsed, pool_size=pool_size, max_overflow=0, pool_timeout=_BUSY_S, connect_args={"timeout": _CONNECT_S}
        )
    return Database(engine)


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver's own BEGIN would come too late, and deferred
    cursor = connection.cursor()
    _write_ahead(cursor)
    for pragma in ("synchronous=NORMAL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _write_ahead(cursor: Any) -> None:
    """Does nothing to a file that is in this mode already, as it is from the first time on. The switch itself waits for
    nobody, whatever the busy timeout is: of several processes that open a new file at once, all but one are refused."""
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() >= until:
                raise
            await_only(asyncio.sleep(_AGAIN_S))


def _begin_sqlite(connection: Any) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _translated() -> Iterator[None]:
    """Our own error for what is no mistake in a query."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout, OSError) as error:
        raise _unavailable(error) from error
    except DBAPIError as error:
        if error.connection_invalidated or str(getattr(error.orig, "sqlstate", None))[:2] in _NOT_THERE:
            raise _unavailable(error) from error
        raise


def _unavailable(error: Exception) -> StoreUnavailable:
    """The detail is what the driver says, without the query."""
    detail = str(error.orig if isinstance(error, DBAPIError) else error)
    return StoreUnavailable("The database cannot be reached now; try again.", detail=detail)
