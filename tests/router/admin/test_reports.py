from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, update

from router.store.schema import daily, hourly, instance_hours
from tests.router.admin.office import Office, opened
from tests.router.store.rows import DAY, DAY_S, engine_hour, row, write

ONE_DAY = "from=2026-11-30&to=2026-11-30"


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    """On 2026-11-30, with a request of each of two tenants, of which gpu-1 cost 0.1 $ each."""
    async with opened(tmp_path) as office:
        office.at = float(DAY * DAY_S)
        tenants = [(await office.make("/tenants", name=name))["id"] for name in ("=acme", "umbrella")]
        rows = [row(tenant, at=DAY * DAY_S + 60.0, tenant=tenant, tags=["=HYPERLINK(1)"]) for tenant in tenants]
        await write(office.database, rows)
        async with office.database.write() as connection:
            await connection.execute(update(hourly).values(own_cost=Decimal("0.1")))
            await connection.execute(update(daily).values(own_cost=Decimal("0.1")))
            await connection.execute(insert(instance_hours).values(engine_hour(DAY * 24)))
        yield office


async def _tenants(office: Office) -> list[str]:
    return [tenant["id"] for tenant in (await office.call("GET", "/tenants")).json()["data"]]


async def _key_of(office: Office, tenant: str) -> str:
    made = await office.make("/keys", kind="admin", name="theirs", scopes=["reports:read"], tenant=tenant)
    return str(made["key"])


def _read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


async def test_the_figures_as_json(office: Office) -> None:
    report = (await office.call("GET", f"/reports/cost?by=model&{ONE_DAY}")).json()
    line = {
        "requests": 2, "failed": 0, "aborted": 0, "cached_unknown": 0, "input_tokens": 200, "output_tokens": 20,
        "hit_rate": 0.6, "best_hit_tokens": 120, "predicted_hit_tokens": 120, "blind_hit_tokens": 40,
        "cost": "1", "cost_without_cache": "1.6", "cost_cache_blind": "1.4", "saved": "0.6",
        "saved_by_placement": "0.4", "per_million_input": "3000", "per_million_output": "20000", "own_cost": "0.2",
        "margin": "0.8", "tokens": {
            "uncached_input": 80, "cache_read": 120, "cache_write_5m": 0, "cache_write_1h": 0, "cache_write": 0,
            "output": 20, "reasoning": 0, "media_input": 0, "media_output": 0,
        },
    }  # fmt: skip
    assert report == {
        "object": "report.cost", "from": "2026-11-30", "to": "2026-11-30", "by": ["model"], "filters": {},
        "own_currency": "USD", "lines": [{"model": "small", "currency": "USD", **line}],
        "totals": [{"currency": "USD", **line}],
    }  # fmt: skip


async def test_the_last_30_days_are_the_default_and_lists_are_filters(office: Office) -> None:
    first, second = await _tenants(office)
    report = (await office.call("GET", f"/reports/cost?tenant={first}&tenant={second}&model=small")).json()
    assert (report["from"], report["to"], report["by"]) == ("2026-11-01", "2026-11-30", ["tenant", "model"])
    assert report["filters"] == {"tenant": [first, second], "model": ["small"]}
    assert {line["tenant_name"] for line in report["lines"]} == {"=acme", "umbrella"}


@pytest.mark.parametrize("how", [{"params": {"format": "csv"}}, {"headers": {"accept": "text/csv"}}])
async def test_csv_by_parameter_and_by_accept(office: Office, how: dict[str, Any]) -> None:
    answer = await office.call(
        "GET", f"/reports/cost?by=day,tag&{ONE_DAY}" if "headers" in how else "/reports/cost", **how
    )
    assert answer.headers["content-type"].startswith("text/csv")
    assert sum(int(line["requests"]) for line in _read(answer.text)) == 2


async def test_no_cell_is_a_formula(office: Office) -> None:
    tags = await office.call("GET", f"/reports/cost?by=tag&{ONE_DAY}&format=csv")
    assert [line["tag"] for line in _read(tags.text)] == ["'=HYPERLINK(1)"]
    names = await office.call("GET", f"/reports/cost?by=tenant&{ONE_DAY}&format=focus")
    assert {line["BillingAccountName"] for line in _read(names.text)} == {"'=acme", "umbrella"}


async def test_a_page_that_needs_nothing_else(office: Office) -> None:
    await write(office.database, [row("x", at=DAY * DAY_S + 61.0, model="</script><b>")])
    page = (await office.call("GET", f"/reports/cost?by=model,tenant&{ONE_DAY}&format=html")).text
    assert page.count('class="figure"') == 4
    ours = page[: page.index("<script>")] + page[page.rindex("<script>") :]  # without plotly's
    assert "</script><b>" not in ours
    assert "&lt;/script&gt;&lt;b&gt;" in ours
    assert "http" not in ours.replace("http-equiv", "")


async def test_focus_columns(office: Office) -> None:
    answer = await office.call("GET", f"/reports/cost?{ONE_DAY}&format=focus")
    acme = (await _tenants(office))[0]
    rows = [line for line in _read(answer.text) if line["BillingAccountId"] == acme]
    assert [(line["SkuMeter"], line["ConsumedQuantity"], line["BilledCost"]) for line in rows] == [
        ("Input tokens", "100", "0.3"),
        ("Output tokens", "10", "0.2"),
    ]
    first = rows[0]
    assert (first["BillingPeriodStart"], first["BillingPeriodEnd"]) == ("2026-11-01T00:00:00Z", "2026-12-01T00:00:00Z")
    assert (first["ChargePeriodStart"], first["ChargePeriodEnd"]) == ("2026-11-30T00:00:00Z", "2026-12-01T00:00:00Z")
    assert (first["PricingQuantity"], first["PricingUnit"]) == ("0.0001", "1000000 Tokens")
    assert (first["SkuId"], first["SubAccountId"], first["x_CostWithoutCache"]) == ("small/input", "proj_a", "0.6")
    mandatory = (
        "BilledCost BillingAccountId BillingCurrency BillingPeriodEnd BillingPeriodStart ChargeCategory ChargePeriodEnd"
        " ChargeDescription ChargePeriodStart ContractedCost EffectiveCost InvoiceIssuerName ListCost PricingQuantity"
        " PricingUnit ProviderName PublisherName ServiceCategory ServiceName ServiceSubcategory BillingAccountType"
    )  # not null for usage, FOCUS 1.2
    assert all(first[name] for name in mandatory.split())


async def test_a_tenant_sees_its_own_figures_and_not_what_they_cost_the_operator(office: Office) -> None:
    mine, foreign = await _tenants(office)
    key = await _key_of(office, mine)
    report = (await office.call("GET", f"/reports/cost?by=tenant&{ONE_DAY}", key=key)).json()
    assert [line["tenant"] for line in report["lines"]] == [mine]
    assert report["own_currency"] is report["lines"][0]["own_cost"] is report["totals"][0]["margin"] is None
    theirs = (await office.call("GET", f"/reports/cost?tenant={foreign}&{ONE_DAY}", key=key)).json()
    assert theirs["lines"] == []
    assert (await office.call("GET", "/reports/cost?by=instance", key=key)).status_code == 403
    assert (await office.call("GET", "/reports/cost?instance=gpu-1", key=key)).status_code == 403
    for format in ("csv", "focus"):
        text = (await office.call("GET", f"/reports/cost?{ONE_DAY}&format={format}", key=key)).text
        assert mine in text
        assert foreign not in text


async def test_a_months_statement(office: Office) -> None:
    mine, foreign = await _tenants(office)
    key = await _key_of(office, mine)
    found = (await office.call("GET", f"/reports/statement?tenant={mine}&month=2026-11", key=key)).json()
    assert (found["object"], found["month"], found["closed"]) == ("report.statement", "2026-11", False)
    assert [(line["project"], line["model"], line["cost"]) for line in found["lines"]] == [("proj_a", "small", "0.5")]
    assert found["lines"][0]["own_cost"] is None
    theirs = (await office.call("GET", f"/reports/statement?tenant={foreign}&month=2026-11", key=key)).json()
    assert theirs["lines"] == theirs["totals"] == []
    office.at = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    closed = await office.call("GET", f"/reports/statement?tenant={mine}&month=2026-11")
    assert (closed.json()["closed"], closed.json()["totals"][0]["own_cost"]) == (True, "0.1")
    as_csv = await office.call("GET", f"/reports/statement?tenant={mine}&month=2026-11&format=csv")
    assert [line["cost"] for line in _read(as_csv.text)] == ["0.5"]


@pytest.mark.parametrize(
    ("query", "param"),
    [("cost?by=colour", "by"), ("cost?from=2026-12-02", "from"), ("cost?from=x", "from"),
     ("statement?tenant=a&month=2026-13", "month")],
)  # fmt: skip
async def test_what_cannot_be_answered(office: Office, query: str, param: str) -> None:
    answer = await office.call("GET", f"/reports/{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
