"""What the admin API says of models, policies and the configuration of a gateway that runs."""

from __future__ import annotations

from typing import Any

from tests.flows.site import Client, Site

SECTIONS: dict[str, Any] = {
    "models": {
        "*": {"tokenizer": "demo"},
        "base": {"tokenizer": "demo", "aliases": ["fast"], "fallbacks": ["new"], "policy": "lmetric"},
        "both": {"split": {"base": 3, "new": 1}},
        "late": {},
    },
    "policy": {"name": "kv_aware", "weights": {"price": 2}, "shadow": ["session"]},
}


async def _asked(client: Client, path: str) -> Any:
    return (await client.http.get(f"{client.running.admin_url}/admin/v1/{path}")).json()


async def test_what_is_offered_and_by_which_rules(site: Site) -> None:
    base, new = await site.engine(loras=("legal",)), await site.engine()
    declared = [{"url": base.url, "model": "base", "api_key": "engine-secret"}, {"url": new.url, "model": "new"}]
    client = await site.gateway(*declared, ready=2, admin_in="process", **SECTIONS)
    models = {row["id"]: row for row in (await _asked(client, "models"))["data"]}
    assert models.keys() == {"base", "new", "both", "late"}
    assert [models[name]["state"] for name in ("base", "both", "late")] == ["ready", "split", "pending"]
    row = models["base"]
    assert (row["aliases"], row["adapters"], row["fallbacks"], row["policy"]) == (
        ["fast"],
        ["legal"],
        ["new"],
        "lmetric",
    )
    assert (row["instances"], row["ranks"], row["ready"]) == ([base.url.removeprefix("http://")], 1, 1)
    assert models["new"]["policy"] == "kv_aware"
    assert models["both"]["split"] == {"base": 0.75, "new": 0.25}

    policies = {row["id"]: row for row in (await _asked(client, "policies"))["data"]}
    assert (policies["kv_aware"]["default"], policies["kv_aware"]["weights"]) == (True, {"price": 2})
    assert policies["lmetric"]["models"] == ["base"]
    assert policies["session"]["shadow"]["agreed"] == 0
    assert policies["round_robin"]["shadow"] is None

    found = await _asked(client, "config")
    assert found["config"]["policy"]["shadow"] == ["session"]
    assert found["config"]["engines"][0]["api_key"] == "*" * 10
    assert "engine-secret" not in str(found)
    assert (found["changed"], found["needs_restart"]) == ([], [])


async def test_a_file_that_has_changed_since(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine)
    site.write(engine, policy={"name": "lmetric"}, auth={"mode": "open"})
    found = await _asked(client, "config")
    assert (found["changed"], found["needs_restart"]) == (["policy.name"], ["auth.mode"])
    assert found["config"]["policy"]["name"] == "kv_aware"
    site.write(engine, policy={"name": "nobody"}, listen={"port": -1})
    found = await _asked(client, "config")
    assert "listen.port" in found["mistakes"][0]
