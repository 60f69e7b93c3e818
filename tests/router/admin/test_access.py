"""Who may do what on port 4001: the rules one by one, then all routes by all kinds of keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.admin.access import SCOPES, Access, Administrator
from router.admin.api import create_app
from router.store.database import open_database
from tests.router.admin.office import BOOTSTRAP, PEPPER, Office, opened
from tests.router.admin.test_api import FakeLive

_PUBLIC = {"/healthz", "/readyz", "/metrics"}
_OWN = {"/v1/usage"} | {f"{v}/dashboard/billing/{what}" for v in ("/v1", "") for what in ("usage", "subscription")}
"""For keys for completions, and only for those: test_own.py."""


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as office:
        yield office


async def _admin_key(office: Office, *scopes: str, tenant: str | None = None) -> str:
    made = await office.make("/keys", name="admin", kind="admin", scopes=list(scopes), tenant=tenant)
    return str(made["key"])


async def test_without_any_admin_key_the_port_is_open_where_that_is_wanted(tmp_path: Path) -> None:
    async with opened(tmp_path, bootstrap=None) as office:
        assert (await office.call("GET", "/tenants", key=None)).status_code == 200
        wanted = {"name": "admin", "kind": "admin", "scopes": ["*"]}
        made = (await office.call("POST", "/keys", key=None, json=wanted)).json()
        key = made["key"]
        closed = await office.call("GET", "/tenants", key=None)
        assert (closed.status_code, closed.json()["error"]["code"]) == (401, "invalid_api_key")
        assert closed.headers["www-authenticate"] == "Bearer"
        assert (await office.call("GET", "/tenants", key=key)).status_code == 200
        await office.call("DELETE", f"/keys/{made['id']}", key=key)
        assert (await office.call("GET", "/tenants", key=None)).status_code == 401  # whoever stole it is out


async def test_beyond_loopback_it_is_closed_from_the_first_moment(tmp_path: Path) -> None:
    access = Access(None, pepper=PEPPER, open=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(FakeLive(), None, access))) as client:
        assert (await client.get("http://admin/admin/v1/fleet")).status_code == 401
        assert (await client.get("http://admin/healthz")).status_code == 200


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
async def test_a_key_is_taken_from_where_it_is_put(office: Office, header: str) -> None:
    key = await _admin_key(office, "tenants:read")
    value = f"Bearer {key}" if header == "authorization" else key
    answer = await office.call("GET", "/tenants", key=None, headers={header: value})
    assert answer.status_code == 200


@pytest.mark.parametrize("value", ["Basic eDp5", "Bearer", "Bearer a b", "sk-admin-x"])
async def test_an_authorization_that_is_none(office: Office, value: str) -> None:
    assert (await office.call("GET", "/tenants", key=None, headers={"authorization": value})).status_code == 401


async def test_two_keys_that_differ_are_none(office: Office) -> None:
    assert (await office.call("GET", "/tenants", headers={"x-api-key": "sk-admin-other"})).status_code == 401
    assert (await office.call("GET", "/tenants", headers={"x-api-key": BOOTSTRAP})).status_code == 200


async def test_a_scope_that_is_missing_is_named(office: Office) -> None:
    key = await _admin_key(office, "tenants:read")
    answer = await office.call("POST", "/tenants", key=key, json={"name": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")
    assert "tenants:write" in answer.json()["error"]["message"]


def test_writing_includes_reading_and_not_the_other_way() -> None:
    writer, reader = Administrator("w", frozenset({"keys:write"})), Administrator("r", frozenset({"keys:read"}))
    assert writer.may("keys:read")
    assert not reader.may("keys:write")
    assert not writer.may("audit:read")
    assert all(Administrator("a", frozenset("*")).may(scope) for scope in SCOPES)


async def test_expired_revoked_and_archived_keys_open_nothing(office: Office) -> None:
    tenant, _, _ = await office.tenant("acme")
    short = await office.make("/keys", name="a", kind="admin", scopes=["*"], expires_at=office.at + 100)
    gone = await office.make("/keys", name="b", kind="admin", scopes=["*"])
    bound = await office.make("/keys", name="c", kind="admin", scopes=["*"], tenant=tenant["id"])
    for made in (short, gone, bound):
        assert (await office.call("GET", "/projects", key=made["key"])).status_code == 200
    office.at += 100
    await office.call("DELETE", f"/keys/{gone['id']}")
    await office.call("DELETE", f"/tenants/{tenant['id']}")
    for made in (short, gone, bound):
        assert (await office.call("GET", "/projects", key=made["key"])).status_code == 401


async def test_nobody_gives_more_than_they_have(office: Office) -> None:
    tenant, project, _ = await office.tenant("acme")
    other, _, _ = await office.tenant("umbrella")
    own = await _admin_key(office, "keys:write", "limits:write", "tenants:write", tenant=tenant["id"])
    mighty = await office.make("/keys", name="m", kind="admin", scopes=["*"], tenant=tenant["id"])

    async def status(method: str, path: str, body: object) -> int:
        return (await office.call(method, path, key=own, json=body)).status_code

    admin = {"name": "x", "kind": "admin"}
    assert await status("POST", "/keys", admin | {"scopes": ["*"], "tenant": tenant["id"]}) == 403
    assert await status("POST", "/keys", admin | {"scopes": ["keys:read"]}) == 403
    assert await status("POST", "/keys", admin | {"scopes": ["keys:read"], "tenant": other["id"]}) == 403
    assert await status("POST", "/keys", admin | {"scopes": ["keys:read"], "tenant": tenant["id"]}) == 201
    assert await status("DELETE", f"/keys/{mighty['id']}", None) == 403
    assert await status("POST", f"/keys/{mighty['id']}/rotate", {}) == 403
    assert await status("PATCH", f"/tenants/{tenant['id']}", {"name": "new"}) == 200
    assert await status("PATCH", f"/tenants/{tenant['id']}", {"isolation": "shared"}) == 403
    assert await status("POST", "/tenants", {"name": "x"}) == 403
    limit = {"measure": "requests", "window": "1m", "amount": 10}
    assert await status("POST", "/limits", limit | {"level": "tenant", "owner": tenant["id"]}) == 403
    assert await status("POST", "/limits", limit | {"level": "project", "owner": project["id"]}) == 201
    assert await status("POST", "/limits", limit | {"level": "tenant", "owner": other["id"]}) == 404


# -- every route by every kind of key


def _routes(office: Office) -> list[tuple[str, Any]]:
    return [(method, route) for route in _walk(office.app.routes) for method in route.methods]


def _walk(routes: Iterable[Any]) -> Iterator[Any]:
    """Routers that are included keep their routes to themselves, and give them with their whole path and rights."""
    for route in routes:
        if hasattr(route, "effective_candidates"):
            yield from _walk(route.effective_candidates())
        elif hasattr(route, "dependant") and route.path not in _PUBLIC | _OWN:
            yield route


def _scope(route: Any) -> str | None:
    for dependency in route.dependant.dependencies:
        scope = getattr(dependency.call, "scope", None)
        if scope is not None:
            return str(scope)
    return None


async def test_every_route_names_its_scope_and_only_reads_where_it_says_so(office: Office) -> None:
    routes = list(_routes(office))
    assert len(routes) > 30
    for method, route in routes:
        scope = _scope(route)
        assert scope in SCOPES, f"{method} {route.path} names no scope"
        if method in ("PATCH", "DELETE", "PUT"):
            assert scope.endswith(":write"), f"{method} {route.path} needs only {scope}"


async def test_no_route_answers_without_a_right_to_it(office: Office) -> None:
    _, _, inference = await office.tenant("acme")
    nothing = await _admin_key(office, "keys:read")  # of another area than most routes
    for method, route in _routes(office):
        path = route.path.replace("{", "").replace("}", "")
        body: dict[str, Any] = {} if method == "GET" else {"json": {}}
        for key, allowed in ((None, {401}), ("sk-admin-unknown", {401}), (inference["key"], {403})):
            answer = await office.ask(method, path, key=key, **body)
            assert answer.status_code in allowed, f"{method} {path}: {answer.status_code}"
        if _scope(route) != "keys:read":
            answer = await office.ask(method, path, key=nothing, **body)
            assert answer.status_code == 403, f"{method} {path}: {answer.status_code}"


async def test_no_tenant_sees_or_touches_anything_of_another(office: Office) -> None:
    """By a key that may do everything, of one tenant: every route with an id of the other's objects."""
    mine, _, _ = await office.tenant("acme")
    foreign, project, key = await office.tenant("umbrella")
    limit = await office.make("/limits", level="tenant", owner=foreign["id"], measure="requests", window="1m", amount=1)
    price = await office.make("/prices", model="m", tenant=foreign["id"], per_million={"output": 1})
    ids = {"tenant_id": foreign, "project_id": project, "key_id": key, "limit_id": limit, "price_id": price}
    own = await _admin_key(office, "*", tenant=mine["id"])
    foreign_words = {made["id"] for made in ids.values()} | {"umbrella"}
    looked_at = 0
    for method, route in _routes(office):
        path = route.path
        for name, made in ids.items():
            path = path.replace(f"{{{name}}}", made["id"])
        path = path.replace("{instance_id}", "a").replace("{request_id}", "r-1")
        body = {} if method == "GET" else {"json": {}}
        answer = await office.ask(method, path, key=own, **body)
        foreign_route = "{" in route.path
        assert answer.status_code in ({403, 404} if foreign_route else {200, 201, 400, 403, 404}), f"{method} {path}"
        if method == "GET":
            looked_at += 1
            assert not any(word in answer.text for word in foreign_words if word not in path), f"{method} {path}"
    assert looked_at > 12
    for filtered in ("/projects?tenant=", "/keys?tenant=", "/prices?tenant="):
        assert (await office.call("GET", filtered + foreign["id"], key=own)).json()["data"] == []
    unchanged = (await office.call("GET", f"/tenants/{foreign['id']}")).json()
    assert unchanged == foreign


async def test_a_database_that_is_away_is_said_to_be() -> None:
    database = open_database("postgresql://nobody@127.0.0.1:1/none")
    access = Access(database, pepper=PEPPER)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(FakeLive(), None, access))) as client:
        answer = await client.get("http://admin/admin/v1/fleet")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    await database.aclose()
