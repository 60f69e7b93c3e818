from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import insert, update

from router.errors import BadRequest
from router.store import reports
from router.store.database import Database, open_database
from router.store.report_lines import Line
from router.store.reports import Question, cost_report, statement
from router.store.schema import daily, hourly, instance_hours, projects, tenants
from tests.router.store.rows import DAY, DAY_S, engine_hour, row, write

NOVEMBER_30 = datetime.date(2026, 11, 30)
NINE = DAY * DAY_S + 9 * 3600


def _question(
    *by: str, first: datetime.date = NOVEMBER_30, last: datetime.date | None = None, **filters: Any
) -> Question:
    return Question(by, first, last or NOVEMBER_30, {name: [value] for name, value in filters.items()})


async def _lines(database: Database, *by: str, **how: Any) -> list[Line]:
    return list((await cost_report(database, _question(*by, **how))).lines)


async def _add_names(database: Database) -> None:
    common = {"metadata": {}, "created_at": 0.0, "revision": 1}
    async with database.write() as connection:
        await connection.execute(
            insert(tenants).values(
                id="ten_a", name="Acme", isolation="tenant", priority=0, steers=False, instance_labels={}, **common
            )
        )
        await connection.execute(insert(projects).values(id="proj_a", tenant="ten_a", name="search", **common))


async def test_the_figures_of_one_line(database: Database) -> None:
    await _add_names(database)
    await write(
        database,
        [
            row("1", at=NINE),
            row("2", at=NINE, cached_known=False, uncached_input_tokens=100, cache_read_tokens=0),
            row("3", at=NINE, reasoning_tokens=20, output_tokens=0, cache_write_5m_tokens=50),
            row("4", at=NINE, status=502, finish="upstream_failed", output_tokens=0, cost=Decimal(0),
                output_cost=Decimal(0), cost_without_cache=Decimal(0), cost_cache_blind=Decimal(0)),
        ],
    )  # fmt: skip
    (line,) = await _lines(database, "tenant", "project", "key")
    assert line.where == {"tenant": "ten_a", "project": "proj_a", "key": "key_a"}
    assert line.names == {"tenant": "Acme", "project": "search", "key": ""}
    assert (line.requests, line.failed, line.aborted, line.cached_unknown) == (4, 1, 0, 1)
    assert line.input_tokens == 100 + 100 + 150 + 100
    assert line.output_tokens == 10 + 10 + 20
    assert line.hit_rate == 180 / 450
    assert (line.cost, line.cost_without_cache, line.saved) == (Decimal("1.5"), Decimal("2.4"), Decimal("0.9"))
    assert (line.cost_cache_blind, line.saved_by_placement, line.blind_hit_tokens) == (
        Decimal("2.1"),
        Decimal("0.6"),
        80,
    )
    assert line.per_million_input == Decimal("2000")  # 0.9 $ for 450 tokens
    assert line.per_million_output == Decimal("15000")  # 0.6 $ for 40 tokens
    assert (line.own_cost, line.margin) == (None, None)


async def test_by_each_dimension(database: Database) -> None:
    tomorrow = NOVEMBER_30 + datetime.timedelta(days=1)
    await write(
        database,
        [
            row("1", at=NINE, tags=["nightly", "eval"]),
            row("2", at=NINE + 3600, key="key_b", instance="gpu-2", uncached_input_tokens=2000),
            row("3", at=NINE + DAY_S, model="large", uncached_input_tokens=300_000, tags=["nightly"]),
        ],
    )

    async def requests(*by: str, **how: Any) -> list[tuple[Any, ...]]:
        return [(*line.where.values(), line.requests) for line in await _lines(database, *by, last=tomorrow, **how)]

    assert await requests() == [(3,)]
    assert await requests("key") == [("key_a", 2), ("key_b", 1)]
    assert await requests("model", "instance") == [("large", "gpu-1", 1), ("small", "gpu-1", 1), ("small", "gpu-2", 1)]
    assert await requests("day") == [("2026-11-30", 2), ("2026-12-01", 1)]
    assert await requests("hour") == [("2026-11-30T09:00Z", 1), ("2026-11-30T10:00Z", 1), ("2026-12-01T09:00Z", 1)]
    assert await requests("day", "hour", model="large") == [("2026-12-01", "2026-12-01T09:00Z", 1)]
    assert await requests("band") == [("≤1k", 1), ("1k-4k", 1), (">256k", 1)]
    assert await requests("tag") == [("nightly", 2), ("eval", 1)]
    assert await requests("tag", "day", tag="nightly") == [("nightly", "2026-11-30", 1), ("nightly", "2026-12-01", 1)]
    assert await requests("key", instance="gpu-2") == [("key_b", 1)]
    assert await requests("tenant", tenant="ten_other") == []


async def test_currencies_are_not_added(database: Database) -> None:
    await write(database, [row("1"), row("2", currency="EUR"), row("3", currency=None, cost=Decimal(0))])
    report = await cost_report(database, _question("model"))
    assert sorted((line.currency, line.cost) for line in report.lines) == [
        ("", Decimal(0)), ("EUR", Decimal("0.5")), ("USD", Decimal("0.5")),
    ]  # fmt: skip
    assert [(total.currency, total.requests) for total in report.totals] == [("", 1), ("EUR", 1), ("USD", 1)]


async def test_sums_beyond_64_bits_are_exact(database: Database) -> None:
    most = Decimal("9000000.000000000001")  # just in 64 bits of 1e-12
    await write(database, [row(str(number), key=f"key_{number}", cost=most) for number in range(5)])
    (line,) = await _lines(database, "tenant")
    assert line.cost == Decimal("45000000.000000000005")


async def test_what_instances_cost_and_what_is_left(database: Database) -> None:
    await write(database, [row("1", at=NINE), row("2", at=NINE + 3600), row("3", at=NINE, currency="EUR")])
    async with database.write() as connection:
        await connection.execute(update(hourly).values(own_cost=Decimal("0.1")))
        await connection.execute(update(daily).values(own_cost=Decimal("0.2")).where(daily.c.currency == "USD"))
        await connection.execute(update(daily).values(own_cost=Decimal("0.1")).where(daily.c.currency == "EUR"))
        await connection.execute(insert(instance_hours).values(engine_hour(DAY * 24 + 9)))
        await connection.execute(insert(instance_hours).values(engine_hour(DAY * 24, currency="EUR", cost=Decimal(0))))
    report = await cost_report(database, _question("instance"))
    assert report.own_currency == "USD"
    found = {line.currency: (line.own_cost, line.margin) for line in report.lines}
    assert found == {"USD": (Decimal("0.2"), Decimal("0.8")), "EUR": (Decimal("0.1"), None)}
    by_hour = await _lines(database, "hour")
    assert sorted(line.own_cost or 0 for line in by_hour) == [Decimal("0.1")] * 3


async def test_own_costs_in_two_currencies_are_not_told(database: Database) -> None:
    await write(database, [row("1", at=NINE)])
    async with database.write() as connection:
        for instance, currency in (("gpu-1", "USD"), ("gpu-2", "EUR")):
            of_hour = engine_hour(DAY * 24, instance=instance, currency=currency)
            await connection.execute(insert(instance_hours).values(of_hour))
    report = await cost_report(database, _question("instance"))
    assert report.own_currency is None
    assert report.lines[0].own_cost is None


async def test_a_statement_is_of_one_tenant_and_one_month(database: Database) -> None:
    november_1, december_1 = (DAY - 29) * DAY_S, (DAY + 1) * DAY_S
    ats = [november_1 - 1.0, november_1, NINE, december_1 - 0.5, december_1]
    await write(database, [row(str(number), at=float(at), cost=Decimal(10**number)) for number, at in enumerate(ats)])
    await write(database, [row("other", at=NINE, tenant="ten_b")])
    report = await statement(database, "ten_a", datetime.date(2026, 11, 17))
    assert (report.first, report.last) == (datetime.date(2026, 11, 1), NOVEMBER_30)
    assert [(line.where, line.cost) for line in report.lines] == [
        ({"project": "proj_a", "model": "small"}, Decimal(10 + 100 + 1000))
    ]


@pytest.mark.parametrize(
    ("question", "told"),
    [
        (_question("colour"), "no report by 'colour'"),
        (_question("day", "day"), "twice"),
        (_question("tag", "model"), "by day and tenant only, not by model"),
        (_question("tag", key="key_a"), "not by key"),
        (_question("hour", first=NOVEMBER_30 - datetime.timedelta(days=7)), "By hour, a report is of 7 days at most"),
        (_question("day", first=NOVEMBER_30 + datetime.timedelta(days=1)), "ends before it begins"),
    ],
)
async def test_what_cannot_be_answered_is_said(question: Question, told: str, sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    with pytest.raises(BadRequest, match=told):
        await cost_report(database, question)
    await database.aclose()


async def test_a_report_without_an_end_is_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MOST_LINES", 2)
    await write(database, [row(str(number), key=f"key_{number}") for number in range(3)])
    assert len(await _lines(database, "model")) == 1
    with pytest.raises(BadRequest, match="more than 2 lines"):
        await _lines(database, "key")
