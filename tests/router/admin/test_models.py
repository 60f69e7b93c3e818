"""What is offered, and by which rules: `Live`'s word with prices and plug-ins beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.admin.office import Office, opened


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with opened(tmp_path) as office:
        yield office


async def _data(office: Office, path: str) -> dict[str, Any]:
    answer = await office.call("GET", path)
    assert answer.status_code == 200, answer.text
    return {row["id"]: row for row in answer.json()["data"]}


async def test_models_have_the_price_that_everybody_pays_now(office: Office) -> None:
    tenant, _, _ = await office.tenant("acme")
    assert (await _data(office, "/models"))["m"]["price"] is None
    await office.make("/prices", model="*", per_million={"output": "9"})
    await office.make("/prices", model="m", per_million={"output": "1"})
    later = await office.make("/prices", model="m", per_million={"output": "2"}, valid_from=office.at + 100)
    await office.make("/prices", model="m", tenant=tenant["id"], per_million={"output": "0.5"})
    models = await _data(office, "/models")
    assert (models["m"]["object"], models["m"]["aliases"], models["m"]["state"]) == ("model", ["fast"], "ready")
    assert models["m"]["price"]["per_million"] == {"output": "1"}
    assert models["later"]["price"]["per_million"] == {"output": "9"}
    office.at = later["valid_from"]
    assert (await _data(office, "/models"))["m"]["price"]["id"] == later["id"]


async def test_policies_that_are_installed_and_where_they_decide(office: Office) -> None:
    policies = await _data(office, "/policies")
    assert policies["kv_aware"] == {
        **{"id": "kv_aware", "object": "policy", "installed": True},
        **{"default": True, "models": [], "weights": {"price": 1.0}, "shadow": None},
    }
    assert policies["lmetric"]["default"] is False


async def test_the_configuration_in_force(office: Office) -> None:
    assert (await office.call("GET", "/config")).json() == {
        "object": "config",
        "config": {"listen": {"port": 4000}},
        "changed": [],
        "needs_restart": ["listen.port"],
    }
    reader = await office.make("/keys", name="r", kind="admin", scopes=["config:read"])
    assert (await office.call("GET", "/config", key=reader["key"])).status_code == 200
