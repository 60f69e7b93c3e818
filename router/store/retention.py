"""Rows of requests go after some days; their sums stay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sqlalchemy import delete, select, text, tuple_
from sqlalchemy.exc import DBAPIError

from router.store.database import Database
from router.store.partitions import days_before, ensure_ahead, partition_name
from router.store.schema import requests

_log = logging.getLogger("warmroute")

_DAY_S = 86_400
_EVERY_S = 3_600.0
_AGAIN_S = 60.0
STEP_ROWS = 500
"""SQLite: deleted in one transaction, some milliseconds."""
_PAUSE_S = 0.02
_LOCK_WAIT = "1s"
_LOCK_NOT_AVAILABLE = "55P03"


async def keep(database: Database, *, retention_days: int, clock: Callable[[], float] = time.time) -> None:
    """`apply`, every hour until it is cancelled."""
    while True:
        try:
            await apply(database, today=int(clock() // _DAY_S), retention_days=retention_days)
            again_s = _EVERY_S
        except Exception as error:
            _log.error("old rows could not be taken away: %s", type(error.__cause__ or error).__name__)
            again_s = _AGAIN_S
        await asyncio.sleep(again_s)


async def apply(database: Database, *, today: int, retention_days: int) -> None:
    """Makes the days ahead, and takes away the rows of days before `today - retention_days`. Once a day, or more often.

    Raises StoreUnavailable; what was taken away until then is gone.
    """
    async with database.write() as connection:
        await ensure_ahead(connection, today)
    oldest_kept = today - retention_days
    if database.is_sqlite:
        while await _delete_some(database, oldest_kept):  # noqa: ASYNC110 (nothing is waited for)
            await asyncio.sleep(_PAUSE_S)  # the ledger's turn
    else:
        await _drop_days(database, oldest_kept)


async def _delete_some(database: Database, oldest_kept: int) -> bool:
    some = select(requests.c.day, requests.c.id).where(requests.c.day < oldest_kept).limit(STEP_ROWS)
    async with database.write() as connection:
        deleted = await connection.execute(delete(requests).where(tuple_(requests.c.day, requests.c.id).in_(some)))
    return deleted.rowcount == STEP_ROWS


async def _drop_days(database: Database, oldest_kept: int) -> None:
    """A day that somebody reads right now stays until the next time: whoever comes after us would wait too."""
    async with database.read() as connection:
        days = await days_before(connection, oldest_kept)
    for day in days:
        try:
            async with database.write() as connection:
                await connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_WAIT}'"))
                await connection.execute(text(f"DROP TABLE {partition_name(day)}"))
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
