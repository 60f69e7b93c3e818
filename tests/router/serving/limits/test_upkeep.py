"""What is read from the tables, and what survives a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, update

from router.core import Usage
from router.errors import RateLimited, StoreUnavailable
from router.serving.limits.book import LimitBook
from router.serving.limits.counters import InThisProcess
from router.serving.limits.limiter import Limiter
from router.serving.limits.opening import open_limits
from router.serving.limits.upkeep import Upkeep
from router.store import schema
from router.store.database import Database, open_database
from tests.router.serving.limits.stand import CALLER, MONDAY, Stand, outcome

ROW: dict[str, Any] = {
    "id": "lim_1", "level": "key", "owner": "key_a", "measure": "tokens", "window": "1d", "amount": 1000,
    "weights": {}, "currency": None, "without_redis": "local_share", "created_at": 1.0, "archived_at": None,
    "revision": 1,
}  # fmt: skip
LONG_S = 3600.0


async def insert_limits(database: Database, *rows: dict[str, Any]) -> None:
    async with database.write() as connection:
        await connection.execute(insert(schema.limits), [{**ROW, **row} for row in rows])


class Opened(Stand):
    def __init__(self, limiter: Limiter) -> None:
        super().__init__()
        self.limiter = limiter
        self.book = limiter._book
        self.limiter._clock = lambda: self.now


@asynccontextmanager
async def opened(database: Database, *, refresh_s: float = LONG_S, now: float = MONDAY) -> AsyncIterator[Opened]:
    async with open_limits(database, refresh_s=refresh_s, clock=lambda: now) as limiter:
        stand = Opened(limiter)
        stand.now = now
        yield stand


async def test_a_restart_forgets_no_long_window(database: Database) -> None:
    await insert_limits(database, {}, {"id": "lim_2", "window": "1m"})
    async with opened(database) as stand:
        for _ in range(3):
            stand.end(await stand.begin(100, 100), outcome(Usage(100, 50, 0)))
        await stand.begin(100, 100)  # in flight at the end
    async with opened(database) as stand:
        assert sorted(stand.used()) == [0, 450]
        stand.end(await stand.begin(100, 100), outcome(Usage(100, 50, 0)))
        with pytest.raises(RateLimited):
            await stand.begin(400, 1)
    async with opened(database) as stand:
        assert sorted(stand.used()) == [0, 600]
    async with opened(database, now=MONDAY + 86400) as stand:
        assert stand.used() == [0, 0]


async def test_changes_are_noticed(database: Database) -> None:
    async with opened(database, refresh_s=0.01) as stand:
        assert stand.limiter.hold(CALLER) is None
        await insert_limits(database, {"amount": 100})
        await until(lambda: stand.limiter.hold(CALLER) is not None)
        await stand.begin(100, 0)
        async with database.write() as connection:
            await connection.execute(update(schema.limits).values(amount=200, revision=2))
        await until(lambda: [meter.amount for meter in stand.book] == [200])
        await stand.begin(100, 0)
        async with database.write() as connection:
            await connection.execute(update(schema.limits).values(archived_at=2.0, revision=3))
        await until(lambda: stand.limiter.hold(CALLER) is None)


async def until(condition: Any) -> None:

    for _ in range(1_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


async def test_a_limit_that_is_new_knows_what_was_counted_before(database: Database) -> None:
    await insert_limits(database, {})
    async with database.write() as connection:
        await connection.execute(insert(schema.limit_windows).values(limit="lim_1", window=int(MONDAY), used=900))
    async with opened(database) as stand:
        with pytest.raises(RateLimited):
            await stand.begin(101, 0)
        await stand.begin(100, 0)


async def test_what_cannot_be_written_now_is_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "db" / "w.sqlite"
    database = open_database(f"sqlite:///{file}")
    async with opened(database) as stand:  # there is no such folder
        with pytest.raises(StoreUnavailable):
            stand.limiter.hold(CALLER)
        assert "limits are not read or written now, those that are known stay in force" in caplog.text
        stand.limiter._counters.unwritten["lim_1", int(MONDAY)] = 5  # type: ignore[attr-defined]
        file.parent.mkdir()
        async with database.write() as connection:
            await connection.run_sync(schema.metadata.create_all)
    async with database.read() as connection:
        (row,) = (await connection.execute(schema.limit_windows.select())).all()
    assert tuple(row) == ("lim_1", int(MONDAY), 5)
    await database.aclose()


async def test_nothing_is_lost_by_a_write_that_fails() -> None:
    database = open_database("postgresql://nobody@127.0.0.1:1/nowhere")

    counters = InThisProcess()
    counters.unwritten["lim_1", 0] = 5
    upkeep = Upkeep(database, LimitBook(), counters, refresh_s=LONG_S)
    with pytest.raises(Exception, match="The database cannot be reached"):
        await upkeep.write()
    assert counters.unwritten == {("lim_1", 0): 5}
    await database.aclose()


async def test_old_windows_go(database: Database) -> None:
    await insert_limits(database, {"window": "1h"})
    day = 86400
    async with database.write() as connection:
        for age in (0, 1, 39, 41):
            row = {"limit": "lim_1", "window": int(MONDAY) - age * day, "used": 1}
            await connection.execute(insert(schema.limit_windows).values(row))
    async with open_limits(database, refresh_s=LONG_S, clock=lambda: MONDAY) as limiter:
        await Upkeep(database, limiter._book, limiter._counters, refresh_s=1, clock=lambda: MONDAY).forget()  # type: ignore[arg-type]
    async with database.read() as connection:
        left = (await connection.execute(schema.limit_windows.select())).all()
    assert sorted(int(MONDAY) - row[1] for row in left) == [0, day, 39 * day]
