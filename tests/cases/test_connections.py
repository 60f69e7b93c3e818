"""Connections to engines, which close idle ones when it suits them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from router import app
from router.http.messages import PoolLimits
from tests.cases.engine import Engine, Exchange, answer_ok, whole_answer
from tests.cases.stand import Stand, client_bodies

WHOLE, STREAM = client_bodies("63")


@pytest.fixture
def _kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that keeps connections longer than the engine does, so that every one may be stale when it is taken."""
    monkeypatch.setattr(app, "PoolLimits", partial(PoolLimits, idle_s=60.0))


async def events_of(stand: Stand) -> dict[str, float]:
    metrics = await stand.metrics()
    names = ("opened", "reused", "retried", "unreachable")
    return {name: metrics[f'warmroute_engine_connections_total{{event="{name}",instance="A"}}'] for name in names}


# https://github.com/maximhq/bifrost/issues/4496, https://github.com/vllm-project/vllm/pull/41567
@pytest.mark.usefixtures("_kept_for_long")
class TestAConnectionThatTheEngineHasClosed:
    async def test_just_as_it_is_used_again_costs_nothing(self, stand: Stand) -> None:
        """The idle time of the case's engine and its client's pause, both a hundred times shorter: now one wins, now
        the other."""
        idle: set[asyncio.Task[Any]] = set()

        async def script(exchange: Exchange) -> None:
            for closing in list(idle):
                closing.cancel()
            await exchange.answer(whole_answer())
            closing = asyncio.ensure_future(self._close_idle(exchange, 0.05))
            idle.add(closing)
            closing.add_done_callback(idle.discard)

        await stand.start(Engine(script=script))
        for body, pause in ((WHOLE, 0.0499), (STREAM, 0.0501)):
            for _ in range(30):
                assert (await stand.ask(body)).status_code == 200
                await asyncio.sleep(pause)
        assert {receipt["attempts"] for receipt in await stand.receipts()} == {1}
        assert {receipt["finish"] for receipt in await stand.receipts()} == {"complete"}

    async def _close_idle(self, exchange: Exchange, seconds: float) -> None:
        await asyncio.sleep(seconds)
        exchange._writer.close()

    @pytest.mark.parametrize("reset", [True, False])
    async def test_after_it_has_taken_the_request_is_tried_once_more(self, stand: Stand, reset: bool) -> None:
        """On a fresh connection, without a second attempt being counted or the engine being avoided."""

        async def stale(exchange: Exchange) -> None:
            (engine,) = stand.engines.values()
            engine.script = answer_ok
            if reset:
                exchange.reset()
            else:
                exchange._writer.close()
            raise ConnectionError

        engine = Engine()
        await stand.start(engine)
        await stand.ask(WHOLE)
        before = await events_of(stand)
        for body in (WHOLE, STREAM):
            engine.script = stale
            assert (await stand.ask(body)).status_code == 200
        after = await events_of(stand)
        assert after["retried"] - before["retried"] == 2
        assert {receipt["attempts"] for receipt in await stand.receipts()} == {1}
        assert {row["health"] for row in await stand.fleet()} == {"ready"}

    async def test_as_all_others_are_costs_one_retry_each(self, stand: Stand) -> None:
        """Twenty stale ones in the pool: a retry takes none of them, however many there are."""
        together = asyncio.Barrier(20)

        async def meet(exchange: Exchange) -> None:
            await together.wait()
            await exchange.answer(whole_answer())

        async def stale(exchange: Exchange) -> None:
            if exchange._writer in pooled:
                exchange.reset()
                raise ConnectionError
            await exchange.answer(whole_answer())

        engine = Engine(script=meet)
        await stand.start(engine)
        await asyncio.gather(*[stand.ask(STREAM) for _ in range(20)])
        pooled = {exchange._writer for exchange in engine.seen}
        assert len(pooled) == 20
        before = await events_of(stand)
        engine.script = stale
        for _ in range(20):
            assert (await stand.ask(STREAM)).status_code == 200
        assert engine.seen[-1]._writer is engine.seen[-2]._writer  # the newest first: the fresh one serves all others
        assert (await events_of(stand))["retried"] - before["retried"] == 1

    async def test_a_fresh_connection_that_fails_is_not_tried_again(self, stand: Stand) -> None:
        async def fails(exchange: Exchange) -> None:
            exchange.reset()
            raise ConnectionError

        engine = Engine(script=fails)
        await stand.start(engine)
        answer = await stand.ask(WHOLE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_no_answer")
        assert len(engine.seen) == 1
        assert (await events_of(stand))["retried"] == 0


async def test_an_engine_that_tells_how_long_it_keeps_a_connection_is_believed(stand: Stand) -> None:
    """Told of one second, the pool lets go of it before; told of none, it does not keep it at all."""

    async def tells(exchange: Exchange, header: str) -> None:
        await exchange.write(f"HTTP/1.1 200 OK\r\n{header}content-length: 2\r\n\r\n{{}}".encode())

    engine = Engine(script=partial(tells, header="keep-alive: timeout=0\r\n"))
    await stand.start(engine)
    for _ in range(2):
        await stand.ask(WHOLE)
    assert engine.seen[0]._writer is not engine.seen[1]._writer
    engine.script = partial(tells, header="keep-alive: timeout=5, max=100\r\n")
    for _ in range(3):
        await stand.ask(WHOLE)
    assert engine.seen[-1]._writer is engine.seen[-2]._writer


def test_a_pool_lets_go_before_engines_do() -> None:
    """vLLM and SGLang close after 5 s."""
    assert PoolLimits().idle_s < 5
