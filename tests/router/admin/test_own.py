"""What a key may see of itself."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from router.store.schema import TOKEN_CLASSES, daily
from tests.router.admin.office import Office, opened

TODAY = datetime.datetime.now(datetime.UTC).date()
DAY = (TODAY - datetime.date(1970, 1, 1)).days


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as office:
        yield office


async def used(office: Office, key: dict[str, Any], cost: str, *, day: int = DAY, model: str = "m") -> None:
    where = {name: key[name] for name in ("tenant", "project")} | {"key": key["id"], "model": model, "instance": "a"}
    row: dict[str, Any] = {column.name: 0 for column in daily.c} | where
    row |= {f"{name}_tokens": at for at, name in enumerate(TOKEN_CLASSES)}
    row |= {"day": day, "band": 0, "currency": "USD", "requests": 3}
    row |= {column.name: Decimal(0) for column in daily.c if "cost" in column.name} | {"cost": Decimal(cost)}
    async with office.database.write() as connection:
        await connection.execute(insert(daily).values(row))


async def _asked(office: Office, path: str, key: str) -> Any:
    answer = await office.ask("GET", path, key=key)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_key_sees_what_its_tenant_used_and_no_other(office: Office) -> None:
    _, project, key = await office.tenant("acme")
    second = await office.make("/keys", project=project["id"], name="two")
    _, _, foreign = await office.tenant("umbrella")
    await used(office, key, "1.25")
    await used(office, second, "0.5")
    await used(office, foreign, "99")
    await used(office, key, "7", day=DAY - 40)
    (line,) = (await _asked(office, "/v1/usage", key["key"]))["data"]
    assert (line["day"], line["model"], line["requests"]) == (TODAY.isoformat(), "m", 6)
    assert (line["cost"], line["currency"], line["tokens"]["cache_read"]) == ("1.75", "USD", 2)
    older = await _asked(office, f"/v1/usage?start_date={TODAY - datetime.timedelta(days=50)}", key["key"])
    assert [line["cost"] for line in older["data"]] == ["7", "1.75"] or len(older["data"]) == 2


async def test_what_one_api_asks_for(office: Office) -> None:
    tenant, project, key = await office.tenant("acme")
    await used(office, key, "1.25")
    await used(office, await office.make("/keys", project=project["id"], name="two"), "5")
    assert (await _asked(office, "/v1/dashboard/billing/subscription", key["key"]))["hard_limit_usd"] == 1e8
    money = {"measure": "money", "window": "month", "currency": "USD"}
    await office.make("/limits", **money, level="tenant", owner=tenant["id"], amount=100)
    await office.make("/limits", **money, level="key", owner=key["id"], amount="12.5")
    assert (await _asked(office, "/dashboard/billing/subscription", key["key"]))["hard_limit_usd"] == 12.5
    assert (await _asked(office, "/v1/dashboard/billing/usage", key["key"]))["total_usage"] == 125.0


async def test_admin_keys_and_strangers_have_no_usage(office: Office) -> None:
    admin = await office.make("/keys", name="admin", kind="admin", scopes=["*"])
    for path in ("/v1/usage", "/v1/dashboard/billing/usage", "/v1/dashboard/billing/subscription"):
        assert (await office.ask("GET", path, key=admin["key"])).status_code == 403
        assert (await office.ask("GET", path, key="sk-unknown")).status_code == 401
        assert (await office.ask("GET", path, key=None)).status_code == 401
