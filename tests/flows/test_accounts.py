"""An operator's way over the real thing, from the bootstrap key to a bill, and what must not leak on the way."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import httpx
import pytest

from router.admin.account_relay import ROUTES
from router.app import AdminMode
from tests.flows.site import CHAT, Client, Site, chat, until

BOOTSTRAP = "b" * 32
SECTIONS: dict[str, Any] = {
    "auth": {"mode": "keys", "refresh_s": 0.05},
    "admin": {"port": 0, "auth": {"bootstrap_key": BOOTSTRAP}},
}


class Operator:
    """Calls port 4001 as the administrator, and port 4000 as whoever has a key."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, method: str, path: str, **fields: Any) -> Any:
        url = f"{self.client.running.admin_url}/admin/v1{path}"
        body = fields or None
        answer = await self.client.http.request(method, url, json=body, headers=_bearer(BOOTSTRAP))
        assert answer.is_success, answer.text
        return answer.json()

    async def costs(self) -> list[dict[str, Any]]:
        """Those without a price have a line of their own."""
        found: list[dict[str, Any]] = (await self.call("GET", "/reports/cost?by=tenant,project,key,model"))["lines"]
        return found

    async def on_4000(self, method: str, path: str, key: str | None, body: Any = None) -> httpx.Response:
        headers = {} if key is None else _bearer(key)
        return await self.client.http.request(method, self.client.running.url + path, json=body, headers=headers)

    async def completes(self, key: str) -> int:
        return (await self.on_4000("POST", CHAT, key, chat("hello"))).status_code

    async def until(self, key: str, status: int) -> None:
        """A completion with the key is answered so."""

        async def is_so() -> bool:
            return await self.completes(key) == status

        await until(is_so, what=f"the key gets {status}")


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("admin_in", ["inline", "process"])
async def test_from_the_bootstrap_key_to_the_bill(site: Site, admin_in: AdminMode) -> None:
    operator = Operator(await site.gateway(await site.engine(), admin_in=admin_in, **SECTIONS))
    price = await operator.call("POST", "/prices", model="demo", per_million={"uncached_input": "2", "output": "4"})
    tenant = await operator.call("POST", "/tenants", name="acme")
    project = await operator.call("POST", "/projects", tenant=tenant["id"], name="search")
    made = await operator.call("POST", "/keys", project=project["id"], name="production", models=["demo"])
    key, answered = made["key"], 1
    await operator.until(key, 200)
    (model,) = (await operator.call("GET", "/models"))["data"]
    assert (model["id"], model["state"], model["price"]["id"]) == ("demo", "ready", price["id"])

    async def is_billed() -> bool:
        """All are in the books; one more is sent as long as none has the price, which comes through within a second."""
        nonlocal answered
        lines = await operator.costs()
        if sum(line["requests"] - line["failed"] for line in lines) < answered:
            return False
        if any(Decimal(line["cost"]) for line in lines):
            return True
        answered += await operator.completes(key) == 200
        return False

    await until(is_billed, what="the requests are in the books", seconds=30)
    lines = await operator.costs()
    assert {(line["tenant"], line["project"], line["key"], line["model"]) for line in lines} == {
        (tenant["id"], project["id"], made["id"], "demo")
    }
    own = (await operator.on_4000("GET", "/v1/usage", key)).json()["data"]
    assert sum(row["requests"] for row in own) == sum(line["requests"] for line in lines)
    assert sum(Decimal(row["cost"]) for row in own) == sum(Decimal(line["cost"]) for line in lines)

    limit = await operator.call(
        "POST", "/limits", level="key", owner=made["id"], measure="requests", window="30d", amount=answered
    )
    await operator.until(key, 429)
    refused = await operator.on_4000("POST", CHAT, key, chat("hello"))
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"]
    await operator.call("DELETE", f"/limits/{limit['id']}")
    await operator.until(key, 200)

    await operator.call("DELETE", f"/keys/{made['id']}")
    await operator.until(key, 401)
    assert (await operator.on_4000("GET", "/v1/usage", key)).status_code == 401
    log = await operator.call("GET", f"/audit?object={made['id']}")
    assert [row["action"] for row in log["data"]] == ["key.revoke", "key.create"]
    assert (await operator.call("POST", "/audit/verify"))["whole"]
    assert key not in str(await operator.call("GET", "/audit?limit=100"))


async def test_litellms_tools_at_the_base_url(site: Site) -> None:
    operator = Operator(await site.gateway(await site.engine(), **SECTIONS))
    wanted = {"key_alias": "ci", "models": ["demo"], "rpm_limit": 1000}
    made = await operator.on_4000("POST", "/key/generate", BOOTSTRAP, wanted)
    assert made.status_code == 200, made.text
    key = made.json()["key"]
    await operator.until(key, 200)
    info = await operator.on_4000("GET", f"/key/info?key={key}", BOOTSTRAP)
    assert info.json()["info"]["key_alias"] == "ci"
    deleted = await operator.on_4000("POST", "/key/delete", BOOTSTRAP, {"keys": [key]})
    assert deleted.json() == {"deleted_keys": [made.json()["token"]]}
    await operator.until(key, 401)


async def test_account_routes_at_the_base_url_open_for_nobody_else(site: Site) -> None:
    operator = Operator(await site.gateway(await site.engine(), **SECTIONS))
    key = (await operator.on_4000("POST", "/key/generate", BOOTSTRAP, {})).json()["key"]
    await operator.until(key, 200)
    assert await operator.completes(BOOTSTRAP) == 401
    for path, method in ROUTES.items():
        own = "usage" in path or "billing" in path
        assert (await operator.on_4000(method, path, None, {})).status_code == 401, path
        assert (await operator.on_4000(method, path, "sk-unknown", {})).status_code == 401, path
        assert (await operator.on_4000(method, path, key, {})).status_code == (200 if own else 403), path
        if own:
            assert (await operator.on_4000(method, path, BOOTSTRAP, {})).status_code in (401, 403), path
    for path in ("/admin/v1/tenants", "/admin/v1/config", "/metrics", "/openapi.json"):
        assert (await operator.on_4000("GET", path, BOOTSTRAP)).status_code == 404, path
