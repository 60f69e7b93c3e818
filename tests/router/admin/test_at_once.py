"""What is asked twice, at once, by who may not, or is too much; and what a log says of a mistake."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from router.admin.answers import WithoutTraces
from router.store.keys import key_mac
from tests.router.admin.office import BOOTSTRAP, PEPPER, Office, opened

_JSON = {"content-type": "application/json"}


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as office:
        yield office


async def test_a_body_that_is_too_large_is_not_read(office: Office) -> None:
    answer = await office.call("POST", "/tenants", key=None, content=b" " * (17 << 20), headers=_JSON)
    assert answer.status_code == 413


async def test_a_mistake_of_ours_is_logged_without_what_it_says(
    office: Office, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise RuntimeError("SELECT secret FROM keys")

    monkeypatch.setattr(office.desk, "list", fails)
    transport = httpx.ASGITransport(WithoutTraces(office.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        answer = await client.get("/admin/v1/tenants", headers={"authorization": f"Bearer {BOOTSTRAP}"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    (logged,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "RuntimeError at fails" in logged
    assert "SELECT" not in logged + answer.text
    assert "SELECT" not in json.dumps([str(record.exc_info) for record in caplog.records])


async def test_a_key_that_is_rotated_again_under_the_same_idempotency_key(office: Office) -> None:
    """Who lost the answer asks again; two who ask apart do not get a key each."""
    _, _, key = await office.tenant("acme")
    path, again = f"/keys/{key['id']}/rotate", {"idempotency-key": "once"}
    first = await office.call("POST", path, json={}, headers=again)
    second = await office.call("POST", path, json={}, headers=again)
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.json()["id"] == first.json()["id"]
    assert (await office.call("POST", path, json={})).status_code == 409


async def test_an_update_is_of_what_is_there_now(office: Office) -> None:
    """Between an administrator's look and the change another one has changed it."""
    made = await office.make("/tenants", name="acme")
    desk, one = office.desk, office.desk.one

    async def and_then_another(*args: object) -> object:
        row = await one(*args)  # type: ignore[arg-type]
        desk.one = one  # type: ignore[method-assign]
        assert (await office.call("PATCH", f"/tenants/{made['id']}", json={"name": "other"})).status_code == 200
        return row

    desk.one = and_then_another  # type: ignore[assignment, method-assign]
    changed = await office.call("PATCH", f"/tenants/{made['id']}", json={"name": "acme"})
    assert changed.json()["name"] == "acme"
    assert (await office.call("GET", f"/tenants/{made['id']}")).json()["name"] == "acme"


async def test_limits_of_tokens_go_beyond_those_of_money(office: Office) -> None:
    _, _, key = await office.tenant("acme")
    limit = {"level": "key", "owner": key["id"], "measure": "tokens", "window": "1d", "amount": 10**9}
    made = await office.call("POST", "/limits", json=limit)
    assert (made.status_code, made.json()["amount"]) == (201, 10**9)
    money = limit | {"measure": "money", "currency": "USD", "amount": 9_000_001}
    assert (await office.call("POST", "/limits", json=money)).status_code == 400
    money = (await office.call("POST", "/limits", json=money | {"amount": 5})).json()
    assert (await office.call("PATCH", f"/limits/{money['id']}", json={"amount": 9_000_001})).status_code == 400


async def test_a_key_of_a_project_that_is_archived_sees_nothing_any_more(office: Office) -> None:
    _, project, key = await office.tenant("acme")
    assert (await office.ask("GET", "/v1/usage", key=key["key"])).status_code == 200
    await office.call("DELETE", f"/projects/{project['id']}")
    assert (await office.ask("GET", "/v1/usage", key=key["key"])).status_code == 401


async def test_a_shim_makes_no_team_for_who_may_only_make_keys(office: Office) -> None:
    maker = (await office.make("/keys", name="m", kind="admin", scopes=["keys:write"]))["key"]
    answer = await office.ask("POST", "/key/generate", key=maker, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
    tenant, _, _ = await office.tenant("acme")
    await office.call("DELETE", f"/tenants/{tenant['id']}")
    answer = await office.ask("POST", "/key/generate", key=maker, json={"team_id": tenant["id"]})
    assert answer.status_code == 409


def test_a_key_of_strange_characters_is_looked_for_like_any() -> None:
    assert len(key_mac(PEPPER, "sk-\udcff\xff")) == 32
