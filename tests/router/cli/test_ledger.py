"""`warmroute reprice`, `warmroute erase`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from router.cli import main
from router.serving.ledger.reading import Ended
from router.serving.ledger.rows import row_of
from router.serving.pricing import PriceBook
from router.store.database import Database, open_database
from router.store.ledger import SeenHour, add_rows, note_seen
from router.store.pseudonyms import pseudonym
from router.store.schema import audit, daily, hourly, instance_hours, prices, requests
from tests.router.serving.ledger.made import AT, DAY, HOUR, end, mark

PEPPER = "p" * 32


@pytest.fixture
def file(tmp_path: Path, database_url: str) -> Path:
    found = tmp_path / "warmroute.yaml"
    settings = {
        "engines": [{"url": "http://127.0.0.1:9"}], "state_dir": str(tmp_path / "state"),
        "store": {"url": database_url}, "auth": {"pepper": PEPPER},
    }  # fmt: skip
    found.write_text(json.dumps(settings))
    return found


def in_database(url: str, work: Callable[[Any], Any]) -> Any:
    async def run() -> Any:
        database: Database = open_database(url)
        async with database.write() as connection:
            found = await work(connection)
        await database.aclose()
        return found

    return asyncio.run(run())


def rows(url: str, *columns: Any) -> list[Any]:
    async def read(connection: Any) -> list[Any]:
        return [tuple(row) for row in await connection.execute(select(*columns))]

    found: list[Any] = in_database(url, read)
    return found


def wrong(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_costs_are_made_anew_and_the_sums_with_them(
    file: Path, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was billed without a price gets the one that should have been there; what failed stays free."""
    book = PriceBook()
    made = [row_of(Ended(end(f"r{n}"), mark(f"r{n}"), 1.0), book, "full_price") for n in range(700)]
    made.append(row_of(Ended(end("x", finish="upstream_failed", usage=None), mark("x"), 1.0), book, "full_price"))
    price = {
        "id": "p", "model": "m", "currency": "EUR", "valid_from": 0.0, "created_at": 0.0, "revision": 0,
        "per_million": {"uncached_input": "2", "cache_read": "1", "output": "10"},
    }  # fmt: skip

    async def fill(connection: Any) -> None:
        await add_rows(connection, made)
        await note_seen(connection, [SeenHour(HOUR, "A", "EUR", AT, AT + 3600, 1, 0, Decimal(5))])
        await connection.execute(insert(prices).values(price))

    in_database(database_url, fill)
    assert set(rows(database_url, daily.c.cost)) == {(Decimal(0),)}
    assert wrong("reprice", "-c", str(file), "--from", "2027-01-15", "--to", "2027-01-16") == 0
    assert capsys.readouterr().out == "2027-01-15: 700 of 701 requests have another cost\n"
    assert set(rows(database_url, requests.c.cost, requests.c.currency)) == {
        (Decimal("0.0013"), "EUR"), (Decimal(0), None),
    }  # fmt: skip
    sums = dict(rows(database_url, hourly.c.currency, hourly.c.cost))
    assert sums == {"EUR": Decimal("0.91"), "": Decimal(0)}
    own = sum(row[0] for row in rows(database_url, hourly.c.own_cost))
    ((cost, idle),) = rows(database_url, instance_hours.c.cost, instance_hours.c.idle)
    assert (cost, own + idle) == (5, 5)
    assert own > 0
    ((actor, action, noted),) = rows(database_url, audit.c.actor, audit.c.action, audit.c.after)
    assert (actor, action, noted["requests"]) == ("cli", "ledger.reprice", 700)

    assert wrong("reprice", "-c", str(file), "--from", "2027-01-15T12:00:00", "--to", "2027-01-16") == 0
    assert "2027-01-15: 0 of 0" in capsys.readouterr().out


def test_a_day_whose_rows_are_gone_keeps_its_sums(
    file: Path, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [row_of(Ended(end(f"r{n}"), mark(f"r{n}"), 1.0), PriceBook(), "full_price") for n in range(3)]

    async def fill(connection: Any) -> None:
        await add_rows(connection, made)
        await connection.execute(update(daily).values(requests=4))

    in_database(database_url, fill)
    assert wrong("reprice", "-c", str(file), "--from", "2027-01-15", "--to", "2027-01-16") == 1
    assert "some of its rows are no longer there" in capsys.readouterr().out
    assert rows(database_url, daily.c.requests, daily.c.day) == [(4, DAY)]


def test_an_end_user_is_erased_under_every_tenant(
    file: Path, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        row_of(
            Ended(end(f"{tenant}-{user}", tenant=tenant, end_user=pseudonym(PEPPER.encode(), tenant, user)), None, 1.0),
            PriceBook(),
            "full_price",
        )
        for tenant in ("ten_1", "ten_2")
        for user in ("ann", "bob")
    ]
    in_database(database_url, lambda connection: add_rows(connection, made))
    assert wrong("erase", "-c", str(file), "--end-user", "ann") == 0
    assert capsys.readouterr().out == "2 requests have no end user any more\n"
    left = dict(rows(database_url, requests.c.id, requests.c.end_user))
    assert {name for name, user in left.items() if user is None} == {"ten_1-ann", "ten_2-ann"}
    assert wrong("erase", "-c", str(file), "--end-user", "bob", "--tenant", "ten_1") == 0
    assert capsys.readouterr().out == "1 requests have no end user any more\n"
