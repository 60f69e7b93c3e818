"""What clients ask of their accounts at their base_url: passed on to the admin API, and nothing without a key."""

from __future__ import annotations

import httpx
import pytest
from sqlalchemy import func, select

from router.admin.account_relay import ROUTES
from router.state import kept_secret
from router.store.schema import keys
from tests.accounts import Accounts
from tests.flows.site import Client, Site


@pytest.fixture
async def gateway(site: Site) -> Client:
    return await site.gateway({"url": "http://127.0.0.1:9", "model": "demo"}, ready=0)


async def test_nothing_is_passed_on_without_a_key(gateway: Client) -> None:
    """The admin API is open to its own machine while it has no key, and the relay is of that machine."""
    assert (await gateway.http.get(f"{gateway.running.admin_url}/team/list")).status_code == 200
    for path, method in ROUTES.items():
        for headers in ({}, {"authorization": ""}, {"x-api-key": ""}):
            body = {} if method == "POST" else None
            answer = await gateway.http.request(method, gateway.running.url + path, json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
    async with gateway.running.store.read() as connection:
        assert await connection.scalar(select(func.count()).select_from(keys)) == 0


async def test_a_key_sees_its_own_usage_and_cannot_make_others(site: Site, gateway: Client) -> None:
    key = await Accounts(gateway.running.store, kept_secret(site.folder / "state", "pepper")).new()
    url, bearer = gateway.running.url, {"authorization": f"Bearer {key}"}
    assert (await gateway.http.get(f"{url}/v1/usage", headers=bearer)).json() == {"object": "list", "data": []}
    assert (await gateway.http.post(f"{url}/key/generate", json={}, headers=bearer)).status_code == 403
    large: httpx.Response = await gateway.http.post(f"{url}/key/generate", content=b"x" * 65_537, headers=bearer)
    assert large.status_code == 413
