from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from router.admin.isolation import isolation_router
from router.store.isolation import TenantRule

ENGINES = [
    {"instance": "seen", "verified": True, "method": "events", "labels": {}},
    {"instance": "unseen", "verified": False, "method": "none", "labels": {}},
    {"instance": "gold", "verified": False, "method": "none", "labels": {"tenant": "gold"}},
]
HELD = {"models": {"m": {"kv_tokens": 100, "kv_share": 0.1}}, "shadow": {"lost_tokens": 7}}
TENANTS = [
    TenantRule("ten_a", "acme", "tenant", {}, ()),
    TenantRule("ten_b", "bolt", "group:finance", {}, ()),
    TenantRule("ten_c", "core", "group:finance", {}, ()),
    TenantRule("ten_k", "keys", "key", {}, ("key_1", "key_2")),
    TenantRule("ten_g", "gilt", "tenant", {"tenant": "gold"}, ()),
]


class FakeLive:
    unverified = "refuse"

    async def isolation(self) -> dict[str, Any]:
        return {
            "salt_version": 1,
            "unverified": self.unverified,
            "cold_share": None,
            "engines": ENGINES,
            "domains": {"tenant:ten_a": HELD},
        }


async def ask(path: str, live: FakeLive | None = None) -> httpx.Response:
    async def rules() -> list[TenantRule]:
        return TENANTS

    app = FastAPI()
    app.include_router(isolation_router(live or FakeLive(), rules), prefix="/admin/v1/isolation")  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        return await client.get(f"/admin/v1/isolation{path}")


async def test_it_tells_engines_groups_costs_and_what_remains() -> None:
    report = (await ask("")).json()
    assert report["engines"] == ENGINES
    assert report["groups"] == {"group:finance": ["bolt", "core"]}
    assert {one["channel"] for one in report["residual"]} >= {"load", "eviction"}
    acme = report["tenants"][0]
    assert (acme["name"], acme["domains"], acme["shares_with"]) == ("acme", {"tenant:ten_a": HELD}, [])


@pytest.mark.parametrize("name", ["ten_b", "bolt"])
async def test_a_tenant_is_found_by_id_and_name(name: str) -> None:
    report = (await ask(f"/{name}")).json()
    assert (report["tenant"], report["shares_with"]) == ("ten_b", ["core"])
    assert report["domains"] == {"group:finance": None}


async def test_keys_with_domains_of_their_own_are_listed() -> None:
    assert list((await ask("/keys")).json()["domains"]) == ["key:key_1", "key:key_2"]


@pytest.mark.parametrize(
    ("tenant", "unverified", "open_to_it"),
    [
        ("acme", "refuse", ["seen"]),
        ("acme", "allow", ["seen", "unseen"]),
        ("gilt", "refuse", []),
        ("gilt", "dedicated", ["gold"]),
        ("gilt", "allow", ["gold"]),
    ],
)
async def test_it_tells_which_engines_a_tenant_may_use(tenant: str, unverified: str, open_to_it: list[str]) -> None:
    live = FakeLive()
    live.unverified = unverified
    engines = (await ask(f"/{tenant}", live)).json()["engines"]
    assert [row["instance"] for row in engines if row["open_to_it"]] == open_to_it


async def test_a_tenant_that_is_not_there() -> None:
    assert (await ask("/nobody")).status_code == 404
