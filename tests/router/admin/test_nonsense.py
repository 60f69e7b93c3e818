"""What makes no sense is refused by name, on both databases: never a 500, and never something that cannot be read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.admin.access import Access
from router.admin.api import create_app
from router.admin.desk import Desk
from router.store.database import open_database
from tests.router.admin.test_api import FakeLive

KEY = {"name": "x", "kind": "admin", "scopes": ["*"]}
PRICE = {"model": "m", "per_million": {"output": 1}}
BAD_BODIES: list[tuple[str, Any]] = [
    ("/admin/v1/tenants", {"name": "a\0b"}),
    ("/admin/v1/tenants", {"name": "a", "metadata": {"k": "\0"}}),
    ("/admin/v1/tenants", {"name": "a", "metadata": {"\0": "v"}}),
    ("/admin/v1/tenants", {"name": "\ud800"}),
    ("/admin/v1/keys", KEY | {"expires_at": float("inf")}),
    ("/admin/v1/keys", KEY | {"expires_at": 1e300}),
    ("/admin/v1/prices", PRICE | {"model": "m\0"}),
    ("/admin/v1/prices", PRICE | {"valid_from": float("nan")}),
    ("/admin/v1/prices", PRICE | {"valid_from": -1}),
    ("/admin/v1/audit/verify", {"number": 2**70, "mac": "0" * 64}),
    ("/key/generate", {"duration": "99999mo"}),
    ("/key/generate", {"max_budget": 1, "budget_duration": "99999mo"}),
]
BAD_QUERIES = [
    "/admin/v1/tenants/%00",
    "/admin/v1/keys?tenant=%00",
    "/admin/v1/audit?action=%00",
    "/admin/v1/audit?after=17716322383290603520",
    "/admin/v1/reports/cost?tenant=%00",
    "/admin/v1/reports/cost?to=0001-01-01",
    "/admin/v1/reports/statement?tenant=a&month=9999-12",
    "/admin/v1/usage?start_time=0&project_ids=%00",
    "/key/info?key=%00",
]


@pytest.fixture
async def client(database_url: str) -> AsyncIterator[httpx.AsyncClient]:
    database = open_database(database_url)
    desk = Desk(database, audit_secret=b"a", pepper=b"p")
    app = create_app(FakeLive(), desk, Access(database, pepper=b"p"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        yield client
    await database.aclose()


async def test_nonsense_is_400(client: httpx.AsyncClient) -> None:
    for path, body in BAD_BODIES:
        content = json.dumps(body).encode()
        answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, f"{path} {body}: {answer.text}"
        assert answer.json()["error"]["type"] == "invalid_request_error"
    for path in BAD_QUERIES:
        answer = await client.get(path)
        assert answer.status_code == 400, f"{path}: {answer.text}"


async def test_a_mistake_of_ours_is_an_error_object_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: FakeLive) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(FakeLive, "fleet", broken)
    transport = httpx.ASGITransport(create_app(FakeLive()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        answer = await client.get("/admin/v1/fleet")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
