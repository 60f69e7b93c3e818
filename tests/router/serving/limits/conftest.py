from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis as Client

from tests.router.serving.limits.gateways import Gateways
from tests.router.serving.limits.stand import SharedClock, with_clock_of_a_test


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    async with Client.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def clock(client: Client, monkeypatch: pytest.MonkeyPatch) -> SharedClock:
    with_clock_of_a_test(monkeypatch)
    return SharedClock(client)


@pytest.fixture
async def gateways(redis_url: str, clock: SharedClock) -> AsyncIterator[Gateways]:
    async with Gateways(redis_url, clock) as gateways:
        yield gateways
