"""Serving and routing in two halves, joined by a Unix socket: nothing changes for anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from router.core import Placement
from router.lab.server import SimEngineServer
from router.wire import RemotePlacement, WireClient, WireServer, placement_methods
from tests.flows.site import Answer, Client, Site, chat, essay, name, until


class Joint:
    """The socket between a relay and the brain. One for each gateway."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.client = WireClient(path)

    @asynccontextmanager
    async def __call__(self, brain: Placement) -> AsyncIterator[Placement]:
        server = WireServer(placement_methods(brain))
        await server.start(self._path)
        try:
            yield RemotePlacement(self.client)
        finally:
            await self.client.aclose()
            await server.stop()


async def _talk(client: Client, engines: list[SimEngineServer]) -> list[Answer]:
    """The same prompts again and again, whole and streamed, and some that cannot be served."""
    answers = []
    for number in range(12):
        body = chat(essay(f"talk {number % 3}", 200), f"part {number % 2}", stream=number % 4 == 3)
        answers.append(await client.post(body))
        await client.caught_up(*engines)
    answers.append(await client.post(chat("hello", model="nobody")))
    answers.append(await client.post(chat("hello", temperature=-1)))
    return answers


async def _told(site: Site, joint: Joint | None) -> list[tuple[int, int | None, str]]:
    """Status, cached tokens and text of every answer, of engines that have just been started."""
    engines = [await site.engine(seed=7) for _ in range(2)]
    async with site.running(*engines, door=joint) as client:
        answers = await _talk(client, engines)
        assert await _nothing_booked_soon(client)
        for answer in answers[:12]:
            assert (await client.receipt(answer.id))["decision"]["candidates"][0]["instance"] == answer.instance
    return [(a.status, _cached(a), a.said if a.status == 200 else a.text) for a in answers]


def _cached(answer: Answer) -> int | None:
    return answer.cached if answer.status == 200 and not answer.streamed else None


async def _nothing_booked_soon(client: Client) -> bool:
    """A release is a cast: it arrives after the answer."""
    await until(client.nothing_booked, what="nothing is booked")
    return True


async def test_the_same_answers(site: Site, tmp_path: Path) -> None:
    assert await _told(site, Joint(tmp_path / "socket")) == await _told(site, None)


async def test_what_nobody_can_serve_is_said_as_before(site: Site, tmp_path: Path) -> None:
    engine = await site.engine()
    client = await site.gateway(engine, door=Joint(tmp_path / "socket"))
    await site.killed(engine)

    async def refused() -> bool:
        return (await client.post(chat("anybody there"))).status == 503

    await until(refused, what="the gateway knows that nobody is there")
    answer = await client.post(chat("anybody there"))
    assert answer.json["error"]["code"] == "no_engine_available"
    assert int(answer.headers["retry-after"]) >= 1
    assert await _nothing_booked_soon(client)


async def test_an_engine_that_refuses_is_left_out_of_the_second_attempt(site: Site, tmp_path: Path) -> None:
    engines = [await site.engine() for _ in range(2)]
    client = await site.gateway(*engines, door=Joint(tmp_path / "socket"))
    body = chat(essay("second attempt"))
    await client.ask(body)
    await client.caught_up(*engines)
    holder = (await client.ask(body)).instance
    dying, other = engines if holder == name(engines[0]) else engines[::-1]
    await site.killed(dying)
    answer = await client.ask(body)
    assert answer.instance == name(other)
    assert (await client.receipt(answer.id))["attempts"] == 2
    assert await _nothing_booked_soon(client)


async def test_clients_that_leave_leave_nothing_booked(site: Site, tmp_path: Path) -> None:
    engines = [await site.engine(speed=5) for _ in range(2)]
    client = await site.gateway(*engines, door=Joint(tmp_path / "socket"))
    asked = [asyncio.create_task(client.post(_long(number))) for number in range(40)]
    for number, task in enumerate(asked):
        await asyncio.sleep(0.002 * (number % 5))
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert await _nothing_booked_soon(client)
    await until(lambda: _idle(engines), what="the engines are idle")
    assert (await client.ask(chat("still there"))).status == 200


async def test_a_relay_that_is_cut_off_leaves_nothing_booked(site: Site, tmp_path: Path) -> None:
    engine = await site.engine(speed=1)
    joint = Joint(tmp_path / "socket")
    client = await site.gateway(engine, door=joint)
    asked = [asyncio.create_task(client.post(_long(number))) for number in range(3)]

    async def booked() -> bool:
        return bool((await client.row(engine))["booked_requests"] == engine.model.running == 3)

    await until(booked, what="all are on their way")
    await joint.client.aclose()
    assert await _nothing_booked_soon(client)
    assert engine.model.running  # the engine goes on: it is only the brain that no longer counts on hearing of it
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert (await client.ask(chat("joined again"))).status == 200  # the next call opens the socket again
    assert await _nothing_booked_soon(client)


def _long(number: int) -> dict[str, object]:
    return chat(essay(f"long {number % 3}"), max_tokens=2_000, stream=number % 2 == 0)


async def _idle(engines: list[SimEngineServer]) -> bool:
    return all(engine.model.running == engine.model.waiting == 0 for engine in engines)
