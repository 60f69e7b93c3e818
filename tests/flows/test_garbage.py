"""A request that is over leaves nothing that only the garbage collector finds.

What holds each other outlives its request until a collection, out of every processor cache by then, and takes the
client's parsed body with it. Such cycles cost a seventh of a request's CPU when there were some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.flows.site import CHAT, Client, Site, chat, essay, said, until
from tests.garbage import gathered

TIMES = 5


async def whole(client: Client) -> None:
    await client.ask(chat(essay("rivers")))


async def streamed(client: Client) -> None:
    await client.ask(chat(essay("lakes"), stream=True))


async def refused(client: Client) -> None:
    assert (await client.post({"model": "nobody's", "messages": [said("a")]})).status == 404


async def left_amid_its_stream(client: Client) -> None:
    body = chat(essay("seas"), stream=True, max_tokens=2_000)
    async with client.http.stream("POST", client.running.url + CHAT, json=body) as response:
        async for _ in response.aiter_bytes():
            break


async def waited_in_the_room(client: Client) -> None:
    await asyncio.gather(*[client.ask(chat(essay(f"pond {number}"), max_tokens=2)) for number in range(8)])


@pytest.mark.parametrize("work", [whole, streamed, refused, left_amid_its_stream, waited_in_the_room])
async def test_a_request_that_is_over_leaves_no_garbage(site: Site, work: Callable[[Client], Awaitable[None]]) -> None:
    client = await site.gateway(await site.engine(), waiting_room={"free_tokens": 256})
    await work(client)  # what is made once for all requests
    with gathered() as left:
        for _ in range(TIMES):
            await work(client)
        await until(partial(_nothing_runs, client), what="all have ended")
    assert not left


async def _nothing_runs(client: Client) -> bool:
    return not client.running._edge.running
