from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert, select

from router.store.costs import Work, allocate_hour, divide, part_of, share_of
from router.store.database import Database
from router.store.schema import daily, daily_tags, instance_hours
from tests.router.store.rows import DAY, DAY_S, engine_hour, row, write

HOUR_MS = 3_600_000.0
WORK = st.builds(Work, st.floats(0, 1e7), st.floats(0, 1e12))


def _divided(cost: int, works: list[Work], *, ranks: int, capacity_tokens: int) -> list[int]:
    return divide(cost, [share_of(work, ranks=ranks, capacity_tokens=capacity_tokens) for work in works])


@given(
    cost=st.integers(0, 10**18),
    works=st.lists(WORK, max_size=20),
    ranks=st.integers(1, 8),
    capacity=st.integers(0, 10**7),
)
def test_parts_and_what_is_idle_are_the_cost(cost: int, works: list[Work], ranks: int, capacity: int) -> None:
    parts = _divided(cost, works, ranks=ranks, capacity_tokens=capacity)
    assert len(parts) == len(works)
    assert all(part >= 0 for part in parts)
    assert cost - sum(parts) >= 0


def test_an_hour_is_divided_by_time() -> None:
    works = [Work(HOUR_MS / 4, 0.0), Work(HOUR_MS / 2, 0.0)]
    assert _divided(1000, works, ranks=1, capacity_tokens=0) == [250, 500]
    assert _divided(1000, works, ranks=2, capacity_tokens=0) == [125, 250]


def test_who_fills_the_memory_pays_for_it() -> None:
    works = [Work(HOUR_MS / 10, 0.5 * 1000 * 3600), Work(HOUR_MS / 10, 0.0)]
    assert _divided(1000, works, ranks=1, capacity_tokens=1000) == [500, 100]


def test_more_work_than_an_hour_holds_is_scaled_down() -> None:
    works = [Work(HOUR_MS, 0.0), Work(3 * HOUR_MS, 0.0)]
    assert _divided(1000, works, ranks=1, capacity_tokens=0) == [250, 750]


def test_a_part_alone_is_what_it_is_among_the_others() -> None:
    assert part_of(1000, 0.25, 0.75) == 250
    assert part_of(1000, 1.0, 4.0) == 250


async def test_tags_have_their_part_of_what_an_hour_cost(database: Database) -> None:
    """An hour of 4 $ that was seen whole: three requests of a quarter each, the rest idle."""
    quarter = {"prefill_ms": HOUR_MS / 4, "decode_ms": 0.0, "kv_token_s": 0.0}
    nine = DAY * DAY_S + 9 * 3600
    seen = {"seen_from": float(nine), "seen_to": float(nine + 3600), "per_hour": Decimal(4)}
    await write(
        database,
        [
            row("1", at=nine, tags=["nightly", "eval"], **quarter),
            row("2", at=nine + 1, tags=["nightly"], key="key_b", **quarter),
            row("3", at=nine + 2, **quarter),
        ],
    )
    async with database.write() as connection:
        await connection.execute(insert(instance_hours).values(engine_hour(DAY * 24 + 9, **seen)))
    for _ in range(2):  # as often as one likes
        async with database.write() as connection:
            await allocate_hour(connection, DAY * 24 + 9)
    async with database.read() as connection:
        tags = dict((await connection.execute(select(daily_tags.c.tag, daily_tags.c.own_cost))).all())
        keys = dict((await connection.execute(select(daily.c.key, daily.c.own_cost))).all())
        idle = await connection.scalar(select(instance_hours.c.idle))
    assert tags == {"nightly": Decimal(2), "eval": Decimal(1)}
    assert (keys, idle) == ({"key_a": Decimal(2), "key_b": Decimal(1)}, Decimal(1))
