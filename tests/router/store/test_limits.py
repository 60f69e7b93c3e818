from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select, update

from router.store import schema
from router.store.database import Database
from router.store.limits import Limit, add_used, forget_windows, limits_since, used_in

ROW: dict[str, Any] = {
    "id": "lim_1", "level": "key", "owner": "key_1", "measure": "tokens", "window": "1m", "amount": 9_000_000 * 10**12,
    "weights": {"cache_read": 0.1}, "currency": None, "without_redis": "refuse", "created_at": 1.0, "archived_at": None,
    "revision": 3,
}  # fmt: skip


async def test_limits_are_read_as_they_change(database: Database) -> None:
    async with database.write() as connection:
        await connection.execute(insert(schema.limits), [ROW, {**ROW, "id": "lim_2", "revision": 4}])
    first, second = sorted(await limits_since(database, 0), key=lambda limit: limit.id)
    assert first == Limit(
        "lim_1", "key", "key_1", "tokens", "1m", 9_000_000 * 10**12, {"cache_read": 0.1}, None, "refuse", False, 3
    )
    assert (await limits_since(database, 3), await limits_since(database, 4)) == ([second], [])
    async with database.write() as connection:
        await connection.execute(
            update(schema.limits).where(schema.limits.c.id == "lim_1").values(archived_at=2.0, revision=5)
        )
    (archived,) = await limits_since(database, 4)
    assert (archived.id, archived.is_archived) == ("lim_1", True)


async def test_what_was_used_adds_up(database: Database) -> None:
    many = {(f"lim_{number}", 3600): number for number in range(1, 450)}
    await add_used(database, many)
    await add_used(database, {("lim_1", 3600): 10**17, ("lim_1", 7200): 5})
    used = await used_in(database, [("lim_1", 3600), ("lim_1", 7200), ("lim_2", 7200), ("lim_449", 3600)])
    assert used == {("lim_1", 3600): 10**17 + 1, ("lim_1", 7200): 5, ("lim_449", 3600): 449}
    assert await used_in(database, list(many)) == {**many, ("lim_1", 3600): 10**17 + 1}


async def test_windows_that_are_long_over_are_forgotten(database: Database) -> None:
    await add_used(database, {("lim_1", 0): 1, ("lim_1", 3600): 2, ("lim_2", 0): 3})
    await forget_windows(database, {"lim_1": 3600})
    async with database.read() as connection:
        left = (await connection.execute(select(schema.limit_windows))).all()
    assert sorted(map(tuple, left)) == [("lim_1", 3600, 2), ("lim_2", 0, 3)]
