"""Usage and costs in the shape of OpenAI's organization routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from router.store.schema import daily
from tests.router.admin.office import Office, opened

DAY_S = 86_400
DAY = 11


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as office:
        yield office  # its clock stands in day 11


async def _used(office: Office, key: dict[str, Any], cost: str, **values: Any) -> None:
    row: dict[str, Any] = {column.name: 0 for column in daily.c}
    row |= {name: key[name] for name in ("tenant", "project")} | {"key": key["id"], "instance": "a"}
    row |= {column.name: Decimal(0) for column in daily.c if "cost" in column.name} | {"cost": Decimal(cost)}
    tokens = {"uncached_input_tokens": 100, "cache_read_tokens": 50, "output_tokens": 7, "reasoning_tokens": 3}
    row |= {"day": DAY, "model": "m", "currency": "USD", "requests": 2, **tokens, **values}
    async with office.database.write() as connection:
        await connection.execute(insert(daily).values(row))


async def _asked(office: Office, path: str, key: str | None = None, **query: Any) -> Any:
    how: dict[str, Any] = {} if key is None else {"key": key}
    answer = await office.call("GET", path, params=query, **how)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_days_are_buckets_even_those_without_a_request(office: Office) -> None:
    _, _, key = await office.tenant("acme")
    await _used(office, key, "1.5")
    await _used(office, key, "2", currency="EUR", day=DAY)
    found = await _asked(office, "/usage", start_time=(DAY - 1) * DAY_S)
    assert (found["object"], found["has_more"], found["next_page"]) == ("page", False, None)
    empty, full = found["data"]
    assert (empty["start_time"], empty["end_time"], empty["results"]) == ((DAY - 1) * DAY_S, DAY * DAY_S, [])
    (result,) = full["results"]
    assert (result["input_tokens"], result["input_cached_tokens"], result["output_tokens"]) == (300, 100, 20)
    assert (result["num_model_requests"], result["model"]) == (4, None)
    assert await _asked(office, "/organization/usage/completions", start_time=(DAY - 1) * DAY_S) == found


async def test_by_model_and_project_and_only_of_some(office: Office) -> None:
    _, project, key = await office.tenant("acme")
    await _used(office, key, "1")
    await _used(office, key, "1", model="n")
    where = {"start_time": DAY * DAY_S, "group_by": ["project_id", "model"]}
    (bucket,) = (await _asked(office, "/usage", **where))["data"]
    assert {(row["project_id"], row["model"]) for row in bucket["results"]} == {
        (project["id"], "m"),
        (project["id"], "n"),
    }
    (bucket,) = (await _asked(office, "/usage", **where, models=["n"]))["data"]
    assert [row["model"] for row in bucket["results"]] == ["n"]


async def test_costs_by_currency(office: Office) -> None:
    _, _, key = await office.tenant("acme")
    await _used(office, key, "1.25")
    await _used(office, key, "2", currency="EUR")
    (bucket,) = (await _asked(office, "/costs", start_time=DAY * DAY_S, group_by="line_item"))["data"]
    assert {(row["amount"]["value"], row["amount"]["currency"], row["line_item"]) for row in bucket["results"]} == {
        (1.25, "usd", "m"),
        (2.0, "eur", "m"),
    }


async def test_pages_follow_each_other(office: Office) -> None:
    found = await _asked(office, "/usage", start_time=0, limit=10)
    assert (len(found["data"]), found["has_more"]) == (10, True)
    rest = await _asked(office, "/usage", start_time=0, limit=10, page=found["next_page"])
    assert [bucket["start_time"] for bucket in rest["data"]] == [10 * DAY_S, 11 * DAY_S]
    assert rest["next_page"] is None


async def test_a_tenants_administrator_sees_its_own(office: Office) -> None:
    mine, _, key = await office.tenant("acme")
    _, _, foreign = await office.tenant("umbrella")
    await _used(office, key, "1")
    await _used(office, foreign, "99")
    own = await office.make("/keys", name="a", kind="admin", scopes=["reports:read"], tenant=mine["id"])
    (bucket,) = (await _asked(office, "/costs", own["key"], start_time=DAY * DAY_S))["data"]
    assert [row["amount"]["value"] for row in bucket["results"]] == [1.0]


@pytest.mark.parametrize(
    "query",
    ["", "start_time=-1", "start_time=86400&end_time=86400", "start_time=0&bucket_width=1m", "start_time=99999999999"],
)
async def test_what_makes_no_sense_is_400(office: Office, query: str) -> None:
    assert (await office.call("GET", f"/usage?{query}")).status_code == 400
