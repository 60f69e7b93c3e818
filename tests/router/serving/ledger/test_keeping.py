from __future__ import annotations

import asyncio
import multiprocessing
import threading
from pathlib import Path

from sqlalchemy import func, select

from router.serving.ledger.keeping import run_writer
from router.serving.ledger.writer import WriterSettings
from router.store.database import Database, open_database
from router.store.schema import requests
from tests.router.store.rows import DAY, DAY_S, row, write


async def _count(database: Database) -> int:
    async with database.read() as connection:
        return await connection.scalar(select(func.count()).select_from(requests)) or 0


async def test_the_writer_takes_old_rows_away(sqlite_url: str, tmp_path: Path) -> None:
    database = open_database(sqlite_url)
    await write(database, [row("old", at=(DAY - 9000) * DAY_S), row("ahead", at=(DAY + 9000) * DAY_S)])
    here, there = multiprocessing.Pipe()
    (tmp_path / "ledger").mkdir()
    settings = WriterSettings(folder=tmp_path / "ledger", retention_days=90)
    writer = threading.Thread(target=run_writer, args=(settings, sqlite_url, there))
    writer.start()
    while await _count(database) > 1:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    here.send(None)
    await asyncio.to_thread(writer.join)
    here.close()
    await database.aclose()
