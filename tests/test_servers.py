from __future__ import annotations

from redis.asyncio import Redis as Client

from tests.servers import Redis


async def test_redis_begins_with_nothing_and_can_be_stopped(redis: Redis, redis_url: str) -> None:
    async with Client.from_url(redis_url) as client:
        assert await client.dbsize() == 0
        await client.set("a", 1)
    redis.stop()
    assert not redis.is_ready()
    redis.start()
    async with Client.from_url(redis_url) as client:
        assert await client.ping()
