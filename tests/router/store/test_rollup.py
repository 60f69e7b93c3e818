from __future__ import annotations

import asyncio
import random
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Table, delete, func, select, update

from router.store.database import Database
from router.store.rollup import RowsAreGone, add_to_rollups, rebuild
from router.store.schema import daily, daily_tags, hourly, hourly_tags, requests
from tests.router.store.rows import DAY, DAY_S, row, write

NINE = DAY * DAY_S + 9 * 3600


async def _all(database: Database, table: Table) -> list[dict[str, Any]]:
    async with database.read() as connection:
        found = await connection.execute(select(table).order_by(*table.primary_key))
        return [dict(line) for line in found.mappings()]


async def _sums(database: Database) -> dict[str, list[dict[str, Any]]]:
    return {table.name: await _all(database, table) for table in (hourly, daily, hourly_tags, daily_tags)}


async def _rebuild(database: Database, *days: int) -> None:
    async with database.write() as connection:
        for day in days or (DAY,):
            await rebuild(connection, day)


def _some_rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Of all kinds: two days, all bands, prices known and not, failed, left; work in quarters, exact in a double."""
    dice = random.Random(seed)
    return [
        row(
            f"req_{seed}_{number}",
            at=(DAY + dice.randrange(2)) * DAY_S + dice.randrange(DAY_S) + dice.choice([0.0, 0.25, 0.999]),
            tenant=dice.choice(["ten_a", "ten_b"]),
            key=dice.choice(["key_a", "key_b", "key_c"]),
            model=dice.choice(["small", "großes"]),
            instance=dice.choice(["gpu-1", "gpu-2", ""]),
            tags=dice.sample(["nightly", "süß", "team:a"], dice.randrange(3)),
            uncached_input_tokens=dice.choice([0, 964, 965, 4036, 16_324, 300_000]),
            media_input_tokens=dice.choice([0, 7]),
            status=dice.choice([200, 200, 429, 502]),
            finish=dice.choice(["complete", "client_gone", "upstream_failed", "unknown"]),
            cached_known=dice.random() < 0.7,
            currency=dice.choice(["USD", "EUR", None]),
            cost=Decimal(dice.randrange(10**9)) / 10**12,
            prefill_ms=dice.randrange(1000) / 4,
        )
        for number in range(count)
    ]


async def test_a_request_is_in_the_sums_of_its_hour_its_day_and_its_tags(database: Database) -> None:
    await write(database, [row("1", at=NINE + 1, tags=["nightly"]), row("2", at=NINE + 3599.9)])
    await write(database, [row("3", at=NINE + 3600, status=502, finish="upstream_failed", cached_known=False)])
    sums = await _sums(database)
    assert [(line["hour"], line["requests"], line["failed"], line["cost"]) for line in sums["hourly"]] == [
        (DAY * 24 + 9, 2, 0, Decimal("1.0")),
        (DAY * 24 + 10, 1, 1, Decimal("0.5")),
    ]
    (day,) = sums["daily"]
    assert (day["day"], day["band"], day["currency"]) == (DAY, 0, "USD")
    assert (day["requests"], day["failed"], day["aborted"], day["cached_unknown"]) == (3, 1, 0, 1)
    assert (day["uncached_input_tokens"], day["cache_read_tokens"], day["output_tokens"]) == (120, 180, 30)
    assert (day["prefill_ms"], day["decode_ms"], day["kv_token_s"]) == (12.0, 24.0, 48.0)
    assert (day["cost"], day["output_cost"]) == (Decimal("1.5"), Decimal("0.6"))
    assert (day["cost_without_cache"], day["own_cost"]) == (Decimal("2.4"), 0)
    assert (day["cost_cache_blind"], day["blind_hit_tokens"]) == (Decimal("2.1"), 60)
    (tag,) = sums["daily_tags"]
    assert (tag["day"], tag["tenant"], tag["tag"], tag["requests"]) == (DAY, "ten_a", "nightly", 1)
    (tag,) = sums["hourly_tags"]
    assert (tag["hour"], tag["tag"], tag["instance"], tag["prefill_ms"]) == (DAY * 24 + 9, "nightly", "gpu-1", 4.0)


async def test_what_is_written_again_is_not_counted_again(database: Database) -> None:
    rows = _some_rows(40, seed=1)
    assert await write(database, rows[:30]) == 30
    before = await _sums(database)
    assert await write(database, rows[:30]) == 0
    assert await _sums(database) == before
    assert await write(database, rows[20:]) == 10  # a replay that overlaps
    assert sum(line["requests"] for line in (await _sums(database))["daily"]) == 40


async def test_a_batch_that_fails_takes_its_sums_with_it(database: Database) -> None:
    async def fail() -> None:
        async with database.write() as connection:
            await add_to_rollups(connection, [row("1")])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert (await _sums(database))["daily"] == []


async def test_adding_up_and_making_anew_give_the_same(database: Database) -> None:
    rows = _some_rows(300, seed=2)
    for first in range(0, len(rows), 50):
        await write(database, rows[first : first + 50])
    added = await _sums(database)
    assert len(added["hourly"]) > 200
    async with database.write() as connection:
        await connection.execute(update(hourly).values(cost=1, requests=0))
        await connection.execute(update(daily).values(cost=1, requests=0))
        await connection.execute(update(daily_tags).values(cost=1, requests=0))
        await connection.execute(update(hourly_tags).values(cost=1, requests=0))
    await _rebuild(database, DAY, DAY + 1)
    assert await _sums(database) == added


async def test_sums_whose_rows_are_gone_are_not_made_anew(database: Database) -> None:
    await write(database, [row("1"), row("2")])
    before = await _sums(database)
    async with database.write() as connection:
        await connection.execute(delete(requests).where(requests.c.id == "1"))
    with pytest.raises(RowsAreGone):
        await _rebuild(database)
    assert await _sums(database) == before


async def test_writers_at_once_and_one_that_rebuilds_lose_nothing(database: Database) -> None:
    rows = _some_rows(240, seed=3)

    async def write_part(number: int) -> None:
        part = rows[number::3]
        for first in range(0, len(part), 10):
            await write(database, part[first : first + 10] + part[:2])

    async def make_anew() -> None:
        for _ in range(4):
            await _rebuild(database)

    await asyncio.gather(write_part(0), write_part(1), write_part(2), make_anew())
    summed = await _sums(database)
    async with database.read() as connection:
        assert await connection.scalar(select(func.count()).select_from(requests)) == 240
    assert sum(line["requests"] for line in summed["daily"]) == 240
    await _rebuild(database, DAY, DAY + 1)
    assert await _sums(database) == summed
