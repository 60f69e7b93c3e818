"""The record of served requests over the admin API: JSON lines, in slices, under a salt of their own."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from router.admin.api import create_app
from router.admin.trace import TraceLine, trace_lines
from router.core import Ask, Live, Outcome, Prompt, Usage
from router.errors import EngineUnreachable
from router.routing.trace_log import TraceLog
from router.wire import RemoteLive, WireClient, WireServer, live_methods


class Recorded:
    """The one method of `core.Live` that is needed here, and the names of the others."""

    fleet = explain = parity = readiness = requests = metrics = None
    instances = models = policies = config = drain = undrain = reload = isolation = None

    def __init__(self, log: TraceLog) -> None:
        self._log = log

    async def trace(self, position: int) -> tuple[list[bytes], int | None]:
        return self._log.read(position)


def live_of(log: TraceLog) -> Live:
    return cast("Live", Recorded(log))


def served(log: TraceLog, at: float, blocks: range, *, tokens: int | None = None, **about: Any) -> None:
    """A prompt of blocks of 64 tokens with these keys."""
    keys = array("Q", blocks)
    prompt = Prompt(64 * len(keys), 64 * len(keys), {64: keys} if keys else {}, turn=2)
    ask = Ask("r", about.get("model", "m"), prompt, tenant=about.get("tenant", ""), session=about.get("session"))
    log.note(
        ask,
        Outcome(
            "r", ask.model, "", "a", 0, 200, "complete", Usage(0, 9), tokens or prompt.tokens or 1, 0, 0, None, "none",
            at, 0.0, 0.25, 1.0, True,
        ),
    )  # fmt: skip


async def lines(live: Live, **asked: Any) -> list[TraceLine]:
    data = b"".join([piece async for piece in trace_lines(live, **asked)])
    assert data.endswith(b"\n") or not data
    return [msgspec.json.decode(line, type=TraceLine) for line in data.splitlines()]


async def test_a_line_is_a_request() -> None:
    log = TraceLog()
    served(log, 1_700_000_000.25, range(5, 8), tokens=200, session="s", tenant="t")
    (line,) = await lines(live_of(log))
    assert (line.timestamp, line.input_length, line.output_length) == (1_700_000_000_250.0, 200, 9)
    assert (line.model, line.instance, line.stream, line.turn, line.ttft_s) == ("m", "a", True, 2, 0.25)
    assert (line.block_size, len(line.hash_ids)) == (64, 3)
    assert None not in (line.session, line.tenant)


async def test_ids_are_equal_within_an_answer_and_mean_nothing_beside_it() -> None:
    log = TraceLog()
    served(log, 1.0, range(5, 8), session="s")
    served(log, 2.0, range(5, 9), session="s")
    served(log, 3.0, range(20, 23))
    first, again = await lines(live_of(log)), await lines(live_of(log))
    a, b, c = first
    assert a.hash_ids == b.hash_ids[:3]
    assert a.session == b.session is not None
    assert c.session is None
    assert not set(c.hash_ids) & set(b.hash_ids)
    seen = {name for line in first for name in (*line.hash_ids, line.session)}
    assert not seen & {name for line in again for name in (*line.hash_ids, line.session) if name is not None}
    assert not seen & set(range(23))


async def test_no_more_blocks_than_the_engine_counted_whole_ones() -> None:
    log = TraceLog()
    served(log, 1.0, range(4), tokens=190)
    served(log, 1.0, range(0), tokens=190)
    cut, unknown = await lines(live_of(log))
    assert (len(cut.hash_ids), cut.block_size) == (2, 64)
    assert (unknown.hash_ids, unknown.block_size) == ([], None)


async def test_only_what_is_asked_for() -> None:
    log = TraceLog()
    for at, model in ((1.0, "m"), (2.0, "m"), (3.0, "other")):
        served(log, at, range(3), model=model)
    assert [line.timestamp for line in await lines(live_of(log), since=2.0)] == [2_000.0, 3_000.0]
    assert [line.timestamp for line in await lines(live_of(log), model="other")] == [3_000.0]
    assert [line.timestamp for line in await lines(live_of(log), since=1.5, model="m")] == [2_000.0]
    assert await lines(live_of(log), model="nobody's") == []


async def test_others_get_their_turn_whether_or_not_rows_are_wanted() -> None:
    log = TraceLog()
    for _ in range(2_000):
        served(log, 1.0, range(40))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert len(await lines(live_of(log))) == 2_000
    wanted, turns = turns, 0
    assert await lines(live_of(log), since=2.0) == []
    task.cancel()
    assert wanted >= 2_000 * 60 // 2_100
    assert turns >= 2_000 * 20 // 2_100


async def test_the_route() -> None:
    log = TraceLog()
    for number in range(500):
        served(log, float(number), range(number, number + 30), model="m" if number % 2 else "other")
    transport = httpx.ASGITransport(create_app(live_of(log)))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        answer = await client.get("/admin/v1/trace")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
        assert len(answer.text.splitlines()) == 500
        some = await client.get("/admin/v1/trace", params={"since": 400, "model": "m"})
        assert len(some.text.splitlines()) == 50
        assert (await client.get("/admin/v1/trace", params={"model": "x"})).text == ""
        assert (await client.get("/admin/v1/trace", params={"since": "yesterday"})).status_code == 400


async def test_a_gateway_that_is_gone_is_an_error_not_an_empty_trace() -> None:
    class Gone(Recorded):
        async def trace(self, position: int) -> tuple[list[bytes], int | None]:
            raise EngineUnreachable("the gateway process has gone")

    transport = httpx.ASGITransport(create_app(cast("Live", Gone(TraceLog()))))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        answer = await client.get("/admin/v1/trace")
    assert (answer.status_code, answer.json()["error"]["message"]) == (502, "the gateway process has gone")


@pytest.mark.parametrize("requests", [0, 1, 1_000])
async def test_over_the_socket_of_the_admin_process(tmp_path: Path, requests: int) -> None:
    log = TraceLog()
    for number in range(requests):
        served(log, float(number), range(20))
    server = WireServer(live_methods(live_of(log)))
    await server.start(tmp_path / "s")
    client = WireClient(tmp_path / "s")
    found = await lines(RemoteLive(client))
    await client.aclose()
    await server.stop()
    assert [line.timestamp for line in found] == [number * 1_000.0 for number in range(requests)]
