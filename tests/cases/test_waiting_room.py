"""Requests that wait for an engine that has room: they leave without a trace, and nobody waits without an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.cases.engine import Engine, Exchange, whole_answer
from tests.cases.stand import COMPLETIONS, Stand, ids_body, written

LONG = list(range(10_000, 16_000))
OTHER = list(range(20_000, 24_000))
"""Each of them is more than an engine takes besides."""


class Busy:
    """Answers nobody until it is `free`."""

    def __init__(self) -> None:
        self.free = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        await self.free.wait()
        await exchange.answer(whole_answer())


async def figures(stand: Stand, names: Sequence[str]) -> list[float]:
    page = await stand.metrics()
    return [page[f"warmroute_room_{name}"] for name in names]


async def until_room(stand: Stand, **expected: int) -> None:
    async def so_it_is() -> bool:
        return await figures(stand, list(expected)) == list(expected.values())

    await stand.until(so_it_is, what=f"a room with {expected}")


def asking(stand: Stand, tokens: list[int], *, stream: bool = False) -> asyncio.Future[Any]:
    return asyncio.ensure_future(stand.ask({**ids_body(tokens), "stream": stream}, path=COMPLETIONS))


async def occupied(stand: Stand, scripts: Mapping[str, Busy], **sections: Any) -> list[asyncio.Future[Any]]:
    """Two engines, one with `LONG` to do, the other with `OTHER`; streamed, so that no estimate ends their prefills."""
    await stand.start(*(Engine(name, script=script) for name, script in scripts.items()), **sections)
    asked = []
    for count, tokens in enumerate((LONG, OTHER), 1):
        asked.append(asking(stand, tokens, stream=True))
        await until_room(stand, placed_at_once_total=count)
    return asked


# https://github.com/vllm-project/production-stack/issues/634, https://github.com/sgl-project/sglang/issues/11139
class TestClientsThatLeave:
    @pytest.mark.parametrize("held", [False, True])
    async def test_while_they_wait_are_never_sent(self, stand: Stand, held: bool) -> None:
        """In line; or held for the engine that computes what their prompts begin with, while another one is free."""
        scripts = {"A": Busy(), "B": Busy()}
        asked = await occupied(stand, scripts)
        (first,) = [name for name, engine in stand.engines.items() if engine.seen[0].json["prompt"] == LONG]
        other = "B" if first == "A" else "A"
        async with AsyncExitStack() as clients:
            for number in range(10):
                own = list(range(1_000 * number, 1_000 * number + 900))
                await self._send(stand, clients, [*LONG, *own])
            await until_room(stand, waiting=10, held=0)
            if held:
                scripts[other].free.set()
                await until_room(stand, waiting=0, held=10)
        await until_room(stand, waiting=0, held=0, left_total=10)
        for script in scripts.values():
            script.free.set()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
        assert {len(engine.seen) for engine in stand.engines.values()} == {1}
        assert (
            sorted(receipt["finish"] for receipt in await stand.receipts()) == ["client_gone"] * 10 + ["complete"] * 2
        )
        fields = ("booked_requests", "booked_prefills", "booked_prefill_ms", "booked_kv_tokens")
        for row in await stand.fleet_rows():
            assert {field: row[field] for field in fields} == dict.fromkeys(fields, 0)

    async def _send(self, stand: Stand, clients: AsyncExitStack, tokens: list[int]) -> None:
        body = written(ids_body(tokens))
        _, writer = await clients.enter_async_context(stand.connection())
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)


class TestARequestThatCannotBePlaced:
    """It is told so, and when to come again."""

    async def test_since_too_many_wait(self, stand: Stand) -> None:
        scripts = {"A": Busy(), "B": Busy()}
        asked = await occupied(stand, scripts, waiting_room={"max_requests": 1})
        asked.append(asking(stand, list(range(100))))
        await until_room(stand, waiting=1)
        self._check(await stand.ask(ids_body(list(range(200))), path=COMPLETIONS), code="overloaded")
        for script in scripts.values():
            script.free.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}

    async def test_in_time(self, stand: Stand) -> None:
        # What is under way should take half a second, by the estimate.
        rates = {"rates": {"c1_ms": 0.1, "c2_ms": 0}}
        scripts = {"A": Busy(), "B": Busy()}
        asked = await occupied(stand, scripts, engine=rates, waiting_room={"wait_s": 1.0})
        answer = await stand.ask(ids_body(list(range(100))), path=COMPLETIONS)
        self._check(answer, code="queue_timeout")
        for script in scripts.values():
            script.free.set()
        await asyncio.gather(*asked)

    def _check(self, answer: httpx.Response, *, code: str) -> None:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == code
        assert int(answer.headers["retry-after"]) >= 1
