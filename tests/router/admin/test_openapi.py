"""The OpenAPI schema says what is true: rights, statuses, examples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.admin import examples
from router.admin.access import SCOPES
from tests.router.admin.office import Office, opened

_OPEN = {"/healthz", "/readyz", "/metrics"}


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as office:
        yield office


@pytest.fixture
async def schema(office: Office) -> Any:
    return (await office.ask("GET", "/openapi.json", key=None)).json()


def _operations(schema: Any) -> list[tuple[str, str, Any]]:
    return [(path, method, said) for path, item in schema["paths"].items() for method, said in item.items()]


async def test_every_route_says_which_key_and_scope_it_needs(office: Office, schema: Any) -> None:
    schemes = schema["components"]["securitySchemes"]
    assert {name: scheme["scheme"] for name, scheme in schemes.items()} == {
        "admin_key": "bearer",
        "inference_key": "bearer",
    }
    for path, _, said in _operations(schema):
        needed = said.get("security", [])
        if path in _OPEN:
            assert needed == []
        elif "/dashboard/" in path or path == "/v1/usage":
            assert needed == [{"inference_key": []}], path
        else:
            ((scope,),) = (one["admin_key"] for one in needed)
            assert scope in SCOPES, path
    nobody = await office.make("/keys", name="x", kind="admin", scopes=["keys:read"])
    refused = await office.call("GET", "/config", key=nobody["key"])
    assert schema["paths"]["/admin/v1/config"]["get"]["security"] == [{"admin_key": ["config:read"]}]
    assert "config:read" in refused.json()["error"]["message"]


async def test_no_route_says_422_which_is_never_answered(office: Office, schema: Any) -> None:
    assert (await office.call("GET", "/tenants?limit=no")).status_code == 400
    for path, method, said in _operations(schema):
        assert "422" not in said["responses"], f"{method} {path}"
        assert "default" in said["responses"], f"{method} {path}"
    assert "HTTPValidationError" not in schema["components"]["schemas"]


async def test_examples_have_the_fields_that_are_answered(office: Office, schema: Any) -> None:
    tenant, project, key = await office.tenant("acme")
    limit = await office.make("/limits", level="tenant", owner=tenant["id"], measure="requests", window="1m", amount=1)
    price = await office.make("/prices", model="m", per_million={"output": 1})
    cost = await office.make("/instance-costs", instance="a", per_hour=1)
    made = {
        "tenants": (tenant, examples.A_TENANT),
        "projects": (project, examples.A_PROJECT),
        "keys": (key, examples.A_NEW_KEY),
        "limits": (limit, examples.A_LIMIT),
        "prices": (price, examples.A_PRICE),
        "instance-costs": (cost, examples.A_COST),
    }
    for name, (answered, example) in made.items():
        assert example.keys() == answered.keys(), name
        item = schema["paths"][f"/admin/v1/{name}"]
        created = item["post"]["responses"]["201"]["content"]["application/json"]["example"]
        assert created == {field: value for field, value in example.items() if value is not None}  # FastAPI drops nulls
        (listed,) = item["get"]["responses"]["200"]["content"]["application/json"]["example"]["data"]
        assert listed.keys() == created.keys() - {"key"}, name
        assert [header["name"] for header in item["post"]["parameters"]] == ["Idempotency-Key"]
        for path, one in schema["paths"].items():
            if path.startswith(f"/admin/v1/{name}/{{") and "get" in one:
                got = one["get"]["responses"]["200"]["content"]["application/json"]["example"]
                assert got["object"] == answered["object"]


async def test_what_a_body_must_have_has_an_example(schema: Any) -> None:
    for name in ("NewTenant", "NewProject", "NewKey", "NewLimit", "NewPrice", "NewCost"):
        body = schema["components"]["schemas"][name]
        for field in body["required"]:
            assert body["properties"][field]["examples"], f"{name}.{field}"
