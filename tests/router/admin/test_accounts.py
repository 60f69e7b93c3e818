"""Tenants, projects, keys, limits and prices over the admin API, on a real SQLite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select

from router.store.keys import key_mac
from router.store.schema import idempotency, keys, prices
from tests.router.admin.office import PEPPER, Office, opened


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as office:
        yield office


async def test_a_tenant_is_made_read_changed_and_archived(office: Office) -> None:
    made = await office.make("/tenants", name="acme", metadata={"crm": "17"})
    assert made["object"] == "tenant"
    assert made["isolation"] == "tenant"
    path = f"/tenants/{made['id']}"
    assert (await office.call("GET", path)).json() == made
    changed = (await office.call("PATCH", path, json={"isolation": "group:eu", "name": None})).json()
    assert changed == made | {"isolation": "group:eu"}
    office.at = 2_000_000.0
    archived = (await office.call("DELETE", path)).json()
    assert archived["archived_at"] == 2_000_000.0
    assert (await office.call("DELETE", path)).json() == archived
    assert (await office.call("PATCH", path, json={"name": "x"})).status_code == 409
    assert (await office.call("GET", "/tenants")).json()["data"] == []
    assert [t["id"] for t in (await office.call("GET", "/tenants?archived=true")).json()["data"]] == [made["id"]]


async def test_organizations_are_tenants(office: Office) -> None:
    made = await office.make("/organizations", name="acme")
    assert (await office.call("GET", f"/tenants/{made['id']}")).json() == made


async def test_a_name_is_given_once(office: Office) -> None:
    await office.make("/tenants", name="acme")
    again = await office.call("POST", "/tenants", json={"name": "acme"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tenants", {"name": ""}, "name"),
        ("/tenants", {"name": "a", "isolation": "group:"}, "isolation"),
        ("/tenants", {"name": "a", "isolatoin": "tenant"}, "isolatoin"),
        ("/limits", {"level": "tenant", "owner": "ten_1", "measure": "requests", "amount": 1}, "window"),
        ("/limits", {"level": "tenant", "owner": "t", "measure": "money", "amount": 1, "window": "1d"}, "currency"),
        ("/limits", {"level": "tenant", "owner": "t", "measure": "tokens", "amount": 1.5, "window": "1d"}, "amount"),
        ("/prices", {"model": "m", "per_million": {"tokens": 1}}, "[key]"),
        ("/prices", {"model": "m", "per_million": {"output": "0.0000001"}}, "output"),
        ("/keys", {"name": "k"}, "project"),
        ("/keys", {"name": "k", "kind": "admin", "scopes": ["everything"]}, "scopes"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(office: Office, path: str, body: object, param: str) -> None:
    answer = await office.call("POST", path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_lists_are_read_page_by_page_while_they_grow(office: Office) -> None:
    made = [(await office.make("/tenants", name=f"t{at}"))["id"] for at in range(5)]
    first = (await office.call("GET", "/tenants?limit=2")).json()
    assert [row["id"] for row in first["data"]] == made[:2:-1]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, made[4], made[3])
    await office.make("/tenants", name="new")
    rest = (await office.call("GET", f"/tenants?limit=100&after={first['last_id']}")).json()
    assert [row["id"] for row in rest["data"]] == made[2::-1]
    assert rest["has_more"] is False
    lost = await office.call("GET", "/tenants?after=ten_x")
    assert (lost.status_code, lost.json()["error"]["code"]) == (400, "invalid_cursor")


async def test_rows_of_one_moment_are_neither_lost_nor_repeated_between_pages(office: Office) -> None:
    for at in range(7):
        answer = await office.call("POST", "/tenants", json={"name": f"t{at}"})
        assert answer.status_code == 201
    seen: list[str] = []
    after = ""
    while True:
        page = (await office.call("GET", f"/tenants?limit=3{after}")).json()
        seen += [row["name"] for row in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert sorted(seen) == [f"t{at}" for at in range(7)]


async def test_a_key_is_shown_once_and_kept_as_a_mac(office: Office) -> None:
    tenant, project, made = await office.tenant("acme")
    assert made["key"].startswith("sk-")
    assert (made["tenant"], made["project"], made["shown"]) == (tenant["id"], project["id"], made["key"][:9])
    again = (await office.call("GET", f"/keys/{made['id']}")).json()
    assert again == {name: value for name, value in made.items() if name != "key"}
    async with office.database.read() as connection:
        stored = (await connection.execute(select(keys.c.mac))).scalar_one()
    assert stored == key_mac(PEPPER, made["key"])


async def test_a_rotated_key_works_on_for_its_grace_and_a_revoked_one_not(office: Office) -> None:
    _, _, old = await office.tenant("acme")
    office.at = 2_000_000.0
    new = await office.make(f"/keys/{old['id']}/rotate", grace_s=3600)
    assert new["key"] != old["key"]
    before = (await office.call("GET", f"/keys/{old['id']}")).json()
    assert (before["revoked_at"], before["replaced_by"]) == (2_003_601.0, new["id"])
    assert (await office.call("POST", f"/keys/{old['id']}/rotate", json={})).status_code == 409
    revoked = (await office.call("DELETE", f"/keys/{old['id']}")).json()
    assert revoked["revoked_at"] == office.at


async def test_a_post_with_an_idempotency_key_is_done_once(office: Office) -> None:
    _, project, _ = await office.tenant("acme")
    how = {"headers": {"idempotency-key": "k1"}, "json": {"project": project["id"], "name": "two"}}
    first, again = await office.call("POST", "/keys", **how), await office.call("POST", "/keys", **how)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json() == first.json() | {"key": None}
    assert again.headers["idempotent-replayed"] == "true"
    other = await office.call("POST", "/keys", **(how | {"json": {"project": project["id"], "name": "three"}}))
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    async with office.database.read() as connection:
        assert first.json()["key"] not in (await connection.execute(select(idempotency.c.body))).scalar_one()
    office.at += 86_401
    assert (await office.call("POST", "/keys", **how)).json()["id"] != first.json()["id"]


async def test_a_limit_of_money_is_text_outside_and_parts_inside(office: Office) -> None:
    tenant, _, _ = await office.tenant("acme")
    wanted = {"level": "tenant", "owner": tenant["id"], "measure": "money", "window": "month", "currency": "EUR"}
    made = await office.make("/limits", **wanted, amount="250.50")
    assert made["amount"] == "250.5"
    changed = await office.call("PATCH", f"/limits/{made['id']}", json={"amount": 300})
    assert changed.json()["amount"] == "300"
    listed = (await office.call("GET", f"/limits?owner={tenant['id']}")).json()["data"]
    assert [row["amount"] for row in listed] == ["300"]


async def test_a_new_price_ends_the_one_before_where_it_begins(office: Office) -> None:
    office.at = 1_000.0
    old = await office.make("/prices", model="m", per_million={"uncached_input": "0.20", "output": 1})
    early = await office.make("/prices", model="m", per_million={"output": 2}, valid_from=5_000)
    between = await office.make("/prices", model="m", per_million={"output": 3}, valid_from=2_000)
    other = await office.make("/prices", model="m", per_million={"output": 3}, valid_from=2_000, currency="EUR")
    async with office.database.read() as connection:
        rows = {row.id: row for row in await connection.execute(select(prices))}
    assert (rows[old["id"]].valid_from, rows[old["id"]].valid_to) == (1_001.0, 2_000.0)
    assert (rows[between["id"]].valid_from, rows[between["id"]].valid_to) == (2_000.0, 5_000.0)
    assert (rows[early["id"]].valid_to, rows[other["id"]].valid_to) == (None, None)
    assert old["per_million"] == {"uncached_input": "0.20", "output": "1"}
    twice = await office.call("POST", "/prices", json={"model": "m", "per_million": {}, "valid_from": 2_000})
    assert twice.status_code == 409


async def test_what_an_instance_costs(office: Office) -> None:
    made = await office.make("/instance-costs", instance="10.0.0.5:8000", per_hour="2.49")
    assert made["per_hour"] == "2.49"
    assert (await office.call("GET", "/instance-costs")).json()["data"] == [made]


async def test_every_change_has_a_revision_of_its_own(office: Office) -> None:
    await office.tenant("acme")
    await office.tenant("umbrella")
    async with office.database.read() as connection:
        revisions = (await connection.execute(select(keys.c.revision).order_by(keys.c.revision))).scalars().all()
    assert revisions == [3, 6]
