"""Costs made anew: by the prices that hold now for the time of each request, as far as its row is there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

from router.serving.counting import is_billed
from router.serving.ledger.rows import money
from router.serving.pricing import Hits, PriceBook, Prices, Tokens, UnknownCached, bill
from router.store.costs import allocate_hour
from router.store.database import Database
from router.store.ledger import rows_to_price, set_costs
from router.store.rollup import RowsAreGone, rebuild
from router.store.schema import TOKEN_CLASSES

_AT_ONCE = 500  # rows
_DAY_S = 86_400
_DAY_HOURS = 24


class Repriced(NamedTuple):
    """Of one day. `gone`: some of its rows are no longer there, so that its sums stay as they were."""

    day: int
    rows: int
    changed: int
    gone: bool


async def reprice(
    database: Database, *, since: float, until: float, unknown_cached: UnknownCached
) -> AsyncIterator[Repriced]:
    """Day by day, from `since` until before `until` (wall clock). Raises StoreUnavailable; days done by then are done.

    Some rows at a time, so that no gateway has to wait; until a day's last row its sums are the old ones.
    """
    prices = Prices()
    await prices.refresh(database)
    for day in range(int(since // _DAY_S), int(-(-until // _DAY_S))):
        rows = changed = 0
        after = ""
        while True:
            async with database.write() as connection:
                found = await rows_to_price(connection, day, since=since, until=until, after=after, most=_AT_ONCE)
                different = [priced for row in found if (priced := _priced(row, prices.book, unknown_cached)) != row]
                await set_costs(connection, different)
            rows, changed = rows + len(found), changed + len(different)
            if len(found) < _AT_ONCE:
                break
            after = found[-1]["id"]
        yield Repriced(day, rows, changed, gone=bool(rows) and not await _rebuild(database, day))


async def _rebuild(database: Database, day: int) -> bool:
    try:
        async with database.write() as connection:
            await rebuild(connection, day)
            for hour in range(day * _DAY_HOURS, (day + 1) * _DAY_HOURS):
                await allocate_hour(connection, hour)
    except RowsAreGone:
        return False
    return True


def _priced(row: Mapping[str, Any], prices: PriceBook, unknown_cached: UnknownCached) -> Mapping[str, Any]:
    """The row with its money as it should be."""
    if not is_billed(row["finish"]):
        return row
    tokens = Tokens(*(row[f"{name}_tokens"] for name in TOKEN_CLASSES))
    billed = bill(
        prices.price_at(row["model"], row["tenant"], row["at"]),
        tokens,
        Hits(row["cached_known"], row["predicted_hit_tokens"], row["blind_hit_tokens"]),
        unknown_cached,
    )
    return {**row, **money(billed)}
