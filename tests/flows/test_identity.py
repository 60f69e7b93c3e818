"""Keys from the first start on: the open mode and its end, the database at the start, what operators see."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import openai
import pytest

from router.app import Running
from router.errors import ConfigError
from router.state import kept_secret
from router.store.database import open_database
from tests.accounts import Accounts
from tests.flows.site import CHAT, Client, Site, chat, until

QUICK = {"refresh_s": 0.02}
UNPROVEN = {"unverified": "allow"}
"""Whether engines keep tenants apart is not the question here."""


async def accounts(site: Site, client: Client) -> Accounts:
    """Of a gateway with all defaults: its own database, its own pepper."""
    return Accounts(client.running.store, kept_secret(site.folder / "state", "pepper"))


async def test_the_first_tenant_ends_the_open_mode_without_a_restart(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine, auth=QUICK, isolation=UNPROVEN)
    sdk = await site.sdk(client)
    await sdk.chat.completions.create(model="demo", messages=[{"role": "user", "content": "hello"}], max_tokens=1)
    assert (await client.running.live.readiness())["auth"]["mode"] == "open"

    key = await (await accounts(site, client)).new(models=["demo"])

    async def is_known() -> bool:
        auth = (await client.running.live.readiness())["auth"]
        return (auth["mode"], auth["keys"]) == ("keys", 1)

    await until(is_known, what="the key is known")
    with pytest.raises(openai.AuthenticationError) as refused:
        await sdk.models.list()
    assert refused.value.code == "invalid_api_key"
    keyed = sdk.with_options(api_key=key)
    assert [model.id async for model in await keyed.models.list()] == ["demo"]
    answer = await keyed.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hello"}], max_tokens=1, user="ann"
    )
    assert answer.choices
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        await keyed.chat.completions.create(model="other", messages=[])
    assert (forbidden.value.code, forbidden.value.param) == ("model_not_allowed", "model")
    found = (await client.running.live.readiness())["auth"]
    assert (found["mode"], found["database"], found["tenants"], found["keys"]) == ("keys", "ok", 1, 1)


async def test_beyond_loopback_nobody_is_served_without_tenants(site: Site) -> None:
    engine = await site.engine()
    listen = {"port": 0, "host": "0.0.0.0"}
    client = await site.gateway(engine, listen=listen)
    url = client.running.url.replace("0.0.0.0", "127.0.0.1")
    refused = await client.http.post(url + CHAT, json=chat("hello"))
    assert refused.status_code == 401
    assert "auth.mode: open" in refused.json()["error"]["message"]
    assert (await client.running.live.readiness())["auth"]["mode"] == "closed"


async def test_open_by_the_operators_word(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine, listen={"port": 0, "host": "0.0.0.0"}, auth={"mode": "open"})
    await (await accounts(site, client)).new()
    url = client.running.url.replace("0.0.0.0", "127.0.0.1")
    assert (await client.http.post(url + CHAT, json=chat("hello"))).status_code == 200


async def test_explain_as_for_a_tenant(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine, auth=QUICK)
    tenant = await (await accounts(site, client)).tenant("acme", priority=5)

    async def explained(name: str) -> Any:
        params = {"path": CHAT, "tenant": name}
        return await client.http.post(f"{client.running.admin_url}/admin/v1/explain", params=params, json=chat("hello"))

    async def is_known() -> bool:
        return bool((await explained(tenant)).status_code == 200)

    await until(is_known, what="the tenant is known")
    assert (await explained("acme")).json()["candidates"]
    unknown = await explained("nobody")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "unknown_tenant")


async def test_a_database_that_is_away_at_the_start(site: Site, postgres_url: str) -> None:
    """The gateway comes up, serves nobody, and says why."""
    engine = await site.engine()
    nowhere = postgres_url.replace(postgres_url.rpartition(":")[2], "1/warmroute")
    client = await site.gateway(engine, auth=QUICK, store={"url": nowhere})
    answer = await client.post(chat("hello"), authorization="Bearer sk-any")
    assert (answer.status, answer.json["error"]["code"]) == (503, "store_unavailable")
    assert answer.headers["retry-after"] == "1"
    state = await client.running.live.readiness()
    assert (state["ready"], state["auth"]["database"], state["auth"]["mode"]) == (False, "unread", "unknown")


async def test_a_postgresql_that_goes_and_comes_back(site: Site, postgres: Any, postgres_url: str) -> None:
    engine = await site.engine()
    client = await site.gateway(
        engine, auth={**QUICK, "mode": "keys", "pepper": "p" * 32}, store={"url": postgres_url}, isolation=UNPROVEN
    )
    database = open_database(postgres_url)
    key = await Accounts(database).new()
    await database.aclose()

    async def statuses() -> tuple[int, int]:
        known = await client.post(chat("hello"), x_api_key=key)
        return known.status, (await client.post(chat("hello"), x_api_key="sk-unknown")).status

    async def is_fresh() -> bool:
        return await statuses() == (200, 401)

    async def is_away() -> bool:
        return await statuses() == (200, 503)

    await until(is_fresh, what="the key is known")
    await asyncio.to_thread(postgres.stop)
    try:
        await until(is_away, what="it is noticed")
    finally:
        await asyncio.to_thread(postgres.start)
    await until(is_fresh, what="the database is back")


async def test_a_database_that_needs_an_upgrade_stops_the_start(site: Site, tmp_path: Path) -> None:
    engine = await site.engine()
    config = site.configured(engine, store={"url": f"sqlite:///{tmp_path / 'empty.db'}"})
    with pytest.raises(ConfigError, match="warmroute db upgrade"):
        async with Running(config):
            pass


async def test_what_is_kept_is_for_its_own_user_only(site: Site) -> None:
    await site.gateway(await site.engine())
    state = site.folder / "state"
    kept = {"secret", "pepper", "warmroute.sqlite"}
    assert kept <= {file.name for file in state.iterdir()}
    for name in kept:
        assert stat.S_IMODE((state / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert len((state / "pepper").read_bytes()) == 32


async def test_settings_of_identity_wait_for_a_restart(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine)
    site.write(engine, auth={"mode": "open", "refresh_s": 1})
    assert (await client.running.reload())["needs_restart"] == ["auth.mode", "auth.refresh_s"]
    assert (await client.running.live.readiness())["auth"]["mode"] == "open"
