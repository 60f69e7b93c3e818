"""Where requests go, and what is left when they have ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from itertools import count
from typing import Any

from tests.cases.engine import Engine, Exchange, Script, event
from tests.cases.stand import COMPLETIONS, Stand, case_input, client_bodies, kv_steps, request_head, written


# https://github.com/vllm-project/aibrix/issues/917
async def test_a_prefix_is_matched_from_the_first_token_on(stand: Stand) -> None:
    """A holds the same block, but of prompts that begin with it."""
    await stand.start(Engine("A"), Engine("B"))
    for step in kv_steps("61"):
        await stand.publish(step)
    (body,) = client_bodies("61")
    assert await stand.overlap(body["prompt"]) == {"A": 0, "B": 4}
    await stand.ask(body, path=COMPLETIONS)
    assert (len(stand.engines["A"].seen), len(stand.engines["B"].seen)) == (0, 1)


# https://github.com/vllm-project/router/pull/215, https://github.com/sgl-project/sglang-omni/pull/931
class TestAfterAStorm:
    CHUNK = event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
    END = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + event("[DONE]")

    def _mixed(self) -> Script:
        """The case's five ways to answer, in turn."""
        turns: Iterator[int] = count()

        async def script(exchange: Exchange) -> None:
            match next(turns) % 5:
                case 0:
                    await asyncio.sleep(0.5)
                    await self._stream(exchange)
                case 1:
                    await exchange.begin_stream()
                    await exchange.chunk(self.CHUNK)
                    exchange.reset()
                    raise ConnectionError
                case 2:
                    raise ConnectionError  # closes without a word
                case 3:
                    await exchange.answer({"error": {"message": "no", "code": 500}}, status=500)
                case _:
                    await self._stream(exchange)

        return script

    async def _stream(self, exchange: Exchange) -> None:
        """For half a second, so that clients leave in the middle of it."""
        await exchange.begin_stream()
        for _ in range(10):
            await exchange.chunk(self.CHUNK)
            await asyncio.sleep(0.05)
        await exchange.chunk(self.END)
        await exchange.chunk(b"")

    async def test_nothing_is_left_in_flight(self, stand: Stand) -> None:
        await stand.start(Engine("A", script=self._mixed()), Engine("B", script=self._mixed()))
        calls = case_input("54")["client"]
        work = [self._call(stand, call) for call in calls for _ in range(call["times"])]
        answers = await asyncio.gather(*work)
        assert any(b"data: [DONE]" in answer for answer in answers)
        await stand.until(lambda: self._have_ended(stand), what="the end of every request")
        finishes = {receipt["finish"] for receipt in await stand.receipts()}
        assert finishes == {"complete", "client_gone", "upstream_failed"}
        await self._check_nothing_is_booked(stand)

    async def _call(self, stand: Stand, call: dict[str, Any]) -> bytes:
        """What came of the answer until the client's patience ended; that begins when the request has been sent."""
        answer = bytearray()
        async with stand.connection() as (reader, writer):
            writer.write(request_head(call["json"], {}) + written(call["json"]))
            await writer.drain()
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(call.get("abort_after_ms", 30_000) / 1e3):
                    while part := await reader.read(65536):
                        answer += part
        return bytes(answer)

    async def _have_ended(self, stand: Stand) -> bool:
        """A request whose client has left ends as soon as that is noticed."""
        return not any(row["booked_requests"] for row in await stand.fleet())

    async def _check_nothing_is_booked(self, stand: Stand) -> None:
        fields = ("booked_requests", "booked_prefills", "booked_prefill_ms", "booked_kv_tokens")
        for row in await stand.fleet_rows():
            assert {field: row[field] for field in fields} == dict.fromkeys(fields, 0)
        page = await stand.metrics()
        booked = {sample: value for sample, value in page.items() if sample.startswith("warmroute_rank_booked_")}
        assert len(booked) >= 2 * 2
        assert set(booked.values()) == {0}
