"""Clients that leave or stop reading: the engine is freed at once, nothing piles up, and it is accounted for."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from router.http.connection import ServerProtocol
from tests.cases.engine import Engine, Exchange, answer_ok, event
from tests.cases.stand import Stand, case_input, client_bodies, request_head, written

SOON_S = 1.0
"""What the cases allow from the client's leaving to the engine's being free."""
SLICE = 16 * 1024


class Gone:
    """Notes that the gateway has closed its connection."""

    def __init__(self, speak: Callable[[Exchange], Any]) -> None:
        self.begun = asyncio.Event()
        self.left = asyncio.Event()
        self._speak = speak

    async def __call__(self, exchange: Exchange) -> None:
        speaking = asyncio.ensure_future(self._speak(exchange))
        self.begun.set()
        await exchange.until_gone()
        self.left.set()
        speaking.cancel()

    async def noticed(self) -> None:
        await asyncio.wait_for(self.left.wait(), SOON_S)


async def silent(exchange: Exchange) -> None:
    pass


async def nothing_is_in_flight(stand: Stand) -> None:
    fields = ("booked_requests", "booked_prefills", "booked_prefill_ms", "booked_kv_tokens")

    async def so_it_is() -> bool:
        return not any(row[field] for row in await stand.fleet() for field in fields)

    await stand.until(so_it_is, what="an idle fleet")


async def only_receipt(stand: Stand) -> dict[str, Any]:
    async def is_there() -> bool:
        return bool(await stand.receipts())

    await stand.until(is_there, what="a receipt")
    (receipt,) = await stand.receipts()
    return receipt


# https://github.com/BerriAI/litellm/issues/30244, https://github.com/vllm-project/production-stack/issues/634
async def test_a_client_that_leaves_in_mid_stream_frees_the_engine(stand: Stand) -> None:
    case = case_input("11")
    chunk = event(case["upstream"][0]["sse_forever"])

    async def speak(exchange: Exchange) -> None:
        await exchange.begin_stream()
        while True:
            await exchange.chunk(chunk)
            await asyncio.sleep(0.005)

    gone = Gone(speak)
    engine = Engine(script=gone)
    await stand.start(engine)
    (call,) = case["client"]
    async with stand.connection() as (reader, writer):
        writer.write(request_head(call["json"], {}) + written(call["json"]))
        await reader.readexactly(call["abort_after_bytes"])
    await gone.noticed()
    await nothing_is_in_flight(stand)
    receipt = await only_receipt(stand)
    assert (receipt["status"], receipt["finish"], receipt["error"]) == (499, "client_gone", "client_gone")
    assert receipt["events"] >= 1  # what reached the client counts
    engine.script = answer_ok
    assert (await stand.ask(client_bodies("11")[0] | {"stream": False})).status_code == 200
    assert engine.seen[0]._writer is not engine.seen[1]._writer  # nobody gets that connection after it


# https://github.com/BerriAI/litellm/pull/31499, https://github.com/BerriAI/litellm/issues/37140
class TestAClientThatLeavesBeforeTheAnswer:
    """For a client that still waits in the gateway, see test_waiting_room.py."""

    CALLS = case_input("12")["client"][:2]

    @pytest.mark.parametrize("cut", ["reset", "closed"])
    @pytest.mark.parametrize("call", CALLS)
    async def test_frees_the_engine(self, stand: Stand, call: dict[str, Any], cut: str) -> None:
        """While the engine computes a prompt; a whole answer is computed so from its first token to its last."""
        gone = Gone(silent)
        await stand.start(Engine(script=gone))
        async with stand.connection() as (_, writer):
            writer.write(request_head(call["json"], {}) + written(call["json"]))
            await asyncio.wait_for(gone.begun.wait(), 10)
            if cut == "closed":
                writer.close()
                await writer.wait_closed()
        await gone.noticed()
        await nothing_is_in_flight(stand)
        assert (await only_receipt(stand))["finish"] == "client_gone"

    async def test_in_mid_body_was_never_there(self, stand: Stand) -> None:
        await stand.start(Engine())
        body = self.CALLS[0]["json"]
        async with stand.connection() as (_, writer):
            writer.write(request_head(body, {}) + written(body)[:-1])
            await stand.until(self._is_connected(stand), what="a connection")
        await stand.until(self._is_alone(stand), what="its end")
        assert await stand.receipts() == []
        assert stand.engines["A"].seen == []

    def _is_connected(self, stand: Stand) -> Callable[[], Any]:
        async def is_connected() -> bool:
            return any(connection._reader.body_size for connection in connections(stand))

        return is_connected

    def _is_alone(self, stand: Stand) -> Callable[[], Any]:
        async def is_alone() -> bool:
            return not any(connection._reader.body_size for connection in connections(stand))

        return is_alone


# https://github.com/MAXeaglet/commandcode-proxy/issues/20, https://github.com/BerriAI/litellm/pull/36008
class TestAClientThatStopsReading:
    """At most 64 KiB and one read of the engine (256 KiB) wait for it here, and 128 KiB in the kernel."""

    (CALL,) = case_input("13")["client"]
    TOTAL = int(case_input("13")["upstream"][0]["sse_bytes_total"])
    BOUND = 64 * 1024 + 256 * 1024 + SLICE

    async def test_makes_the_engine_wait_and_nobody_else(self, stand: Stand) -> None:
        flood = Flood(self.TOTAL)
        await stand.start(Engine(script=flood))
        tracemalloc.start()
        try:
            async with stand.connection() as (reader, writer):
                await self._stall(stand, reader, writer, flood)
                (connection,) = paused(stand)
                assert connection._transport.get_write_buffer_size() <= self.BOUND
                stand.engines["A"].script = answer_ok
                assert (await stand.ask(self.CALL["json"] | {"stream": False})).status_code == 200
                assert paused(stand) == [connection]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 5 << 20
        await nothing_is_in_flight(stand)

    async def test_is_dropped_after_its_time_and_accounted_for(self, stand: Stand) -> None:
        flood = Flood(self.TOTAL)
        await stand.start(Engine(script=flood), listen={"port": 0, "stalled_reader_s": 45})
        async with stand.connection() as (reader, writer):
            await self._stall(stand, reader, writer, flood)
            (connection,) = paused(stand)
            connection.sweep(1.0)  # whatever it took until now
            connection.sweep(44.0)
            assert paused(stand) == [connection]
            connection.sweep(2.0)
            receipt = await only_receipt(stand)
            assert (receipt["finish"], receipt["error"], receipt["status"]) == ("client_gone", "reader_stalled", 499)
            assert receipt["events"] >= 1
            await flood.cut_off()
            await nothing_is_in_flight(stand)
            assert paused(stand) == []
        metrics = await stand.metrics()
        assert metrics['warmroute_errors_total{error="reader_stalled",model="m-chat"}'] == 1

    async def test_and_goes_on_gets_every_byte(self, stand: Stand) -> None:
        flood = Flood(20 << 20)
        await stand.start(Engine(script=flood))
        async with stand.connection() as (reader, writer):
            await self._stall(stand, reader, writer, flood)
            size = 1024
            while piece := await reader.read(1 << 20):
                size += len(piece)
        assert size > 20 << 20
        assert (await only_receipt(stand))["events"] == flood.events

    async def _stall(
        self, stand: Stand, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flood: Flood
    ) -> None:
        """The first 1 KiB, then nothing, until the engine can write no more."""
        writer.write(request_head(self.CALL["json"], {}) + written(self.CALL["json"]))
        await reader.readexactly(1024)
        before, still = -1, 0

        async def stands() -> bool:
            nonlocal before, still
            still = still + 1 if before == flood.events and paused(stand) else 0
            before = flood.events
            return still > 20

        await stand.until(stands, what="a stand")
        assert flood.events < self.TOTAL // SLICE


class Flood:
    """A stream as fast as it is taken. `events`: how many were."""

    def __init__(self, total: int) -> None:
        self.events = 0
        self._total = total
        self._cut_off = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        chunk = event({"choices": [{"index": 0, "delta": {"content": "x" * SLICE}}]})
        try:
            await exchange.begin_stream()
            for _ in range(self._total // SLICE):
                await exchange.chunk(chunk)
                self.events += 1
            await exchange.chunk(event("[DONE]"))
            await exchange.chunk(b"")
        except ConnectionError:
            self._cut_off.set()
            raise

    async def cut_off(self) -> None:
        await asyncio.wait_for(self._cut_off.wait(), SOON_S)


def connections(stand: Stand) -> list[ServerProtocol]:
    return list(stand._running._server.connections)


def paused(stand: Stand) -> list[ServerProtocol]:
    """Connections whose clients do not take what is written."""
    return [connection for connection in connections(stand) if connection._paused]
