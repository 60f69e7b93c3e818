"""Limits of the tables, as a gateway that `router.app` has built keeps them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import insert

from router.errors import ConfigError
from router.store import schema
from router.store.database import open_database
from router.store.limits import used_in
from router.store.windows import read_window
from tests.flows.site import Client, Site, chat
from tests.router.serving.limits.stand import CALLER

ROW: dict[str, Any] = {
    "id": "lim_1", "level": "tenant", "owner": "ten_a", "measure": "requests", "window": "30d", "amount": 2,
    "weights": {}, "currency": None, "without_redis": "local_share", "created_at": 1.0, "archived_at": None,
    "revision": 1,
}  # fmt: skip


async def limited(site: Site, url: str, *rows: dict[str, Any], **sections: Any) -> Client:
    database = open_database(url)
    async with database.write() as connection:
        await connection.execute(insert(schema.limits), [{**ROW, **row} for row in rows])
    await database.aclose()
    client = await site.gateway(await site.engine(), store={"url": url}, **sections)
    client.running._edge._identify = lambda headers: CALLER
    return client


async def mode(client: Client) -> str:
    ready = await client.running.live.readiness()
    page = (await client.http.get(f"{client.running.admin_url}/metrics")).text
    found: str = ready["limits"]["mode"]
    assert f'warmroute_limiter_mode{{mode="{found}"}} 1.0' in page
    return found


async def test_limits_in_one_gateway_survive_its_restart(site: Site, sqlite_url: str) -> None:
    tokens = {"id": "lim_2", "measure": "tokens", "amount": 100_000}
    async with Site(site._chat_model, site.folder) as first:
        client = await limited(first, sqlite_url, {"amount": 3}, tokens)
        answers = [await client.post(chat("hello")) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        assert answers[-1].headers["x-ratelimit-remaining-requests"] == "1"
        assert await mode(client) == "memory"
        total = sum(answer.json["usage"]["total_tokens"] for answer in answers)
    start = read_window("30d").span(time.time())[0]
    database = open_database(sqlite_url)
    counted = await used_in(database, [("lim_1", start), ("lim_2", start)])  # before the next gateway counts on
    await database.aclose()
    assert counted == {("lim_1", start): 2, ("lim_2", start): total}
    client = await site.gateway(await site.engine(), store={"url": sqlite_url})
    client.running._edge._identify = lambda headers: CALLER
    assert [(await client.post(chat("hello"))).status for _ in range(2)] == [200, 429]
    assert (
        "warmroute_limiter_refused_total{code=" in (await client.http.get(f"{client.running.admin_url}/metrics")).text
    )


async def test_two_gateways_share_their_limits_through_redis(site: Site, sqlite_url: str, redis_url: str) -> None:
    redis = {"url": redis_url, "timeout_s": 5}
    one = await limited(site, sqlite_url, {}, {"id": "lim_2", "measure": "parallel", "window": ""}, redis=redis)
    two = await site.gateway(await site.engine(), store={"url": sqlite_url}, redis=redis)
    two.running._edge._identify = lambda headers: CALLER
    assert [(await client.post(chat("hello"))).status for client in (one, two, one, two)] == [200, 200, 429, 429]
    assert [await mode(client) for client in (one, two)] == ["redis", "redis"]


async def test_a_redis_that_is_none_is_told(site: Site, sqlite_url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: must be redis://"):
        await site.gateway(await site.engine(), store={"url": sqlite_url}, redis={"url": "http://127.0.0.1"})


async def test_without_tenants_nothing_is_limited(site: Site) -> None:
    client = await site.gateway(await site.engine())
    answer = await client.post(chat("hello"))
    assert [name for name in answer.headers if "ratelimit" in name] == []
