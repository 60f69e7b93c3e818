"""What engines cost, hour by hour, divided among those who used them: allocated + idle = cost, to the last unit.

    cost       price per hour × the part of the hour in which a gateway saw the engine
    share      of a group of requests, the larger of
                   time:    (prefill_ms + decode_ms) / (ranks × 3,600,000)
                   memory:  kv_token_s / (capacity_tokens × 3,600)               where the capacity is known
    allocated  cost × share, rounded down; × 1/Σ shares where they are more than the whole hour
    idle       what is left of the cost

The part of a tag is found by the same share, of the same whole; a request may have several, so that tags together may
have more or less than all.

So whoever fills an engine's memory pays for it as one who keeps it computing: the scarcer of the two is what nobody
else can have meanwhile (dominant resource: Ghodsi et al., NSDI 2011). The shares are estimates (`ledger/rows.py`), the
sum is not. The price is the one valid when the hour began, of the table `instance_costs`, else of the configuration.

An hour may be allocated as often as one likes: each time all of it is computed anew, from the sums as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

from sqlalchemy import RowMapping, Table, and_, bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from router.store.money import PARTS
from router.store.rollup import lock
from router.store.schema import daily, daily_tags, hourly, hourly_tags, instance_costs, instance_hours

_HOUR_S = 3600
_HOUR_MS = 3_600_000
_DAY_HOURS = 24


class Work(NamedTuple):
    """What one group of requests had of an engine in an hour."""

    time_ms: float
    kv_token_s: float


async def allocate_hour(connection: AsyncConnection, hour: int) -> None:
    """hour: hours since 1970-01-01 UTC."""
    await lock(connection, shared=False)
    engines = (await connection.execute(select(instance_hours).where(instance_hours.c.hour == hour))).mappings().all()
    for engine in engines:
        price, currency = await _price(connection, engine)
        cost = int(price * PARTS * _seen_share(engine))
        idle = cost - await _allocate(connection, engine, cost)
        await connection.execute(
            update(instance_hours)
            .where(instance_hours.c.hour == hour, instance_hours.c.instance == engine["instance"])
            .values(currency=currency, cost=Decimal(cost) / PARTS, idle=Decimal(idle) / PARTS)
        )
    if engines:
        await _carry_to_day(connection, hourly, daily, hour // _DAY_HOURS)
        await _carry_to_day(connection, hourly_tags, daily_tags, hour // _DAY_HOURS)


async def _allocate(connection: AsyncConnection, engine: RowMapping, cost: int) -> int:
    """To those who used the engine, and to the tags. Returns how much those who used it have."""
    groups, tags = await _used(connection, hourly, engine), await _used(connection, hourly_tags, engine)
    shares = _shares(groups, engine)
    parts = divide(cost, shares)
    await _set_own_costs(connection, hourly, groups, parts)
    whole = sum(shares)
    of_tags = [part_of(cost, share, whole) for share in _shares(tags, engine)]
    await _set_own_costs(connection, hourly_tags, tags, of_tags)
    return sum(parts)


async def _used(connection: AsyncConnection, table: Table, engine: RowMapping) -> Sequence[RowMapping]:
    """What was done there in that hour, in the order of the key."""
    query = select(*table.primary_key, table.c.prefill_ms, table.c.decode_ms, table.c.kv_token_s).where(
        table.c.hour == engine["hour"], table.c.instance == engine["instance"]
    )
    return (await connection.execute(query.order_by(*table.primary_key))).mappings().all()


def _shares(groups: Sequence[RowMapping], engine: RowMapping) -> list[float]:
    works = [Work(group["prefill_ms"] + group["decode_ms"], group["kv_token_s"]) for group in groups]
    return [share_of(work, ranks=engine["ranks"], capacity_tokens=engine["capacity_tokens"]) for work in works]


async def _set_own_costs(
    connection: AsyncConnection, table: Table, groups: Sequence[RowMapping], parts: Sequence[int]
) -> None:
    if not groups:
        return
    key = [column.name for column in table.primary_key]
    own = [
        {**{f"key_{name}": group[name] for name in key}, "own": Decimal(part) / PARTS}
        for group, part in zip(groups, parts, strict=True)
    ]
    same = and_(*(table.c[name] == bindparam(f"key_{name}") for name in key))
    await connection.execute(update(table).where(same).values(own_cost=bindparam("own")), own)


async def _carry_to_day(connection: AsyncConnection, of_hours: Table, of_days: Table, day: int) -> None:
    names = [column.name for column in of_days.primary_key if column.name != "day"]
    own = (
        select(*(of_hours.c[name] for name in names), func.sum(of_hours.c.own_cost).label("own_cost"))
        .where(of_hours.c.hour.between(day * _DAY_HOURS, (day + 1) * _DAY_HOURS - 1))
        .group_by(*(of_hours.c[name] for name in names))
        .subquery()
    )
    same = and_(of_days.c.day == day, *(of_days.c[name] == own.c[name] for name in names))
    await connection.execute(update(of_days).where(same).values(own_cost=own.c.own_cost))


def share_of(work: Work, *, ranks: int, capacity_tokens: int) -> float:
    memory = work.kv_token_s / (capacity_tokens * _HOUR_S) if capacity_tokens else 0.0
    return max(work.time_ms / (ranks * _HOUR_MS), memory)


def part_of(cost: int, share: float, whole: float) -> int:
    """In whole numbers, since a float of this size has lost its last digits. `whole`: of an hour; less is idle."""
    return cost * int(share / max(1.0, whole) * PARTS) // PARTS


def divide(cost: int, shares: Sequence[float]) -> list[int]:
    """Whole parts of `cost`, one for each, together never more than it."""
    parts: list[int] = []
    left, whole = cost, sum(shares)
    for share in shares:
        parts.append(min(left, part_of(cost, share, whole)))
        left -= parts[-1]
    return parts


async def _price(connection: AsyncConnection, engine: RowMapping) -> tuple[Decimal, str]:
    """Money for an hour of it, and the currency."""
    begins = engine["hour"] * _HOUR_S
    costs = instance_costs.c
    found = (
        await connection.execute(
            select(costs.per_hour, costs.currency)
            .where(
                costs.instance == engine["instance"],
                costs.valid_from <= begins,
                costs.valid_to.is_(None) | (costs.valid_to > begins),
            )
            .order_by(costs.valid_from.desc())
            .limit(1)
        )
    ).first()
    if found is not None:
        return found.per_hour, found.currency
    return engine["per_hour"] or Decimal(0), engine["currency"]


def _seen_share(engine: RowMapping) -> Decimal:
    begins = engine["hour"] * _HOUR_S
    seen_s = min(engine["seen_to"], begins + _HOUR_S) - max(engine["seen_from"], begins)
    return min(Decimal(1), max(Decimal(0), Decimal(seen_s) / _HOUR_S))
