"""Two tenants before simulated engines, which cache by salt and say so in events and counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import select

from router.store.database import open_database
from router.store.schema import tenants
from tests.accounts import PEPPER, Accounts
from tests.flows.site import Client, Site, chat, essay, until


@pytest.fixture
async def accounts(sqlite_url: str) -> AsyncIterator[Accounts]:
    database = open_database(sqlite_url)
    yield Accounts(database)
    await database.aclose()


async def engines_of(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.running.live.isolation())["engines"]
    return found


async def test_an_engine_is_seen_by_its_events_and_tenants_find_only_their_own(
    site: Site, accounts: Accounts, sqlite_url: str
) -> None:
    keys = {name: await accounts.new(name) for name in ("a", "b")}
    engines = [await site.engine(), await site.engine()]
    client = await site.gateway(
        *engines, store={"url": sqlite_url}, auth={"pepper": PEPPER, "refresh_s": 0.05}, listen={"port": 0}
    )

    async def all_seen() -> bool:
        return all(row["verified"] for row in await engines_of(client))

    await until(all_seen, what="engines are seen to honour salts")
    assert {row["method"] for row in await engines_of(client)} == {"events"}
    body = chat(essay("report"))
    first, other = [await client.ask(body, authorization=f"Bearer {keys[name]}") for name in ("a", "b")]
    await client.caught_up(*engines)
    again, others_own = [await client.ask(body, authorization=f"Bearer {keys[name]}") for name in ("a", "b")]
    assert [(answer.predicted, answer.cached) for answer in (first, other)] == [(0, 0), (0, 0)]
    assert again.predicted == again.cached > 0
    assert others_own.predicted == others_own.cached == again.cached

    async def is_counted() -> bool:
        found = (await client.running.live.isolation())["domains"]
        return all(row["shadow"] and row["shadow"]["requests"] == 2 for row in found.values())

    await until(is_counted, what="the shadow has seen all")
    report = await client.running.live.isolation()
    mine, theirs = [report["domains"][f"tenant:{await _id_of(accounts, name)}"] for name in ("a", "b")]
    assert mine["models"]["demo"]["kv_tokens"] > 100
    assert mine["shadow"]["lost_tokens"] == 0
    assert theirs["shadow"]["lost_tokens"] > 100
    page = (await client.http.get(f"{client.running.admin_url}/metrics")).text
    assert "warmroute_isolation_kv_tokens{" in page
    assert "warmroute_isolation_lost_tokens{" in page


async def _id_of(accounts: Accounts, name: str) -> str:
    async with accounts.database.read() as connection:
        return str(await connection.scalar(select(tenants.c.id).where(tenants.c.name == name)))


async def test_an_open_gateway_asks_no_engine(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine)
    await client.ask(chat("hello"))
    (row,) = await engines_of(client)
    assert (row["verified"], row["method"]) == (False, None)
