"""`Placement` over a Unix socket behaves as it does in the same process."""

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.core import Ask, Booking, Candidate, Cost, Decision, Outcome, Prompt, Scored
from router.errors import EngineUnreachable, NoEngine
from router.wire import RemotePlacement, WireClient, WireServer, placement_methods


class Recorder:
    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.progressed: list[int] = []
        self.released: list[tuple[int, Outcome]] = []

    async def place(self, ask: Ask) -> Booking:
        self.asked.append(ask)
        if ask.model == "unknown":
            raise NoEngine("no engine serves 'unknown'")
        return Booking(
            id=7, request_id=ask.request_id, instance="a", rank=1, url="http://127.0.0.1:1", served="m", engine="vllm",
            target_rank=True, tokens=ask.prompt.tokens, best_hit_tokens=32, predicted_hit_tokens=16,
            predicted_prefill_ms=1.5, alone=True, policy="kv_aware",
        )  # fmt: skip

    def progress(self, booking_id: int) -> None:
        self.progressed.append(booking_id)

    def release(self, booking_id: int, outcome: Outcome) -> None:
        self.released.append((booking_id, outcome))

    async def explain(self, ask: Ask) -> Decision:
        cost = Cost(value=3.0, parts={"prefill": 3.0})
        return Decision(policy="p", scored=(Scored(Candidate("a", 0, hit_tokens=16), cost),))


ASK = Ask("r-1", "m", Prompt(tokens=40, known_tokens=40, keys={16: array("Q", [2**64 - 1, 5])}), exclude=("b",))
OUTCOME = Outcome(
    request_id="r-1", model="m", tenant="", instance="a", rank=1, status=200, finish="complete", usage=None,
    input_tokens=40, best_hit_tokens=32, predicted_hit_tokens=16, delivered_hit_tokens=None, delivered_source="none",
    started_at=1.0, queue_s=0.0, ttft_s=None, took_s=0.5, stream=False,
)  # fmt: skip


@asynccontextmanager
async def over_socket(placement: Recorder, path: Path) -> AsyncIterator[RemotePlacement]:
    server = WireServer(placement_methods(placement))
    await server.start(path)
    client = WireClient(path)
    try:
        yield RemotePlacement(client)
    finally:
        await client.aclose()
        await server.stop()


async def test_a_booking_crosses_the_socket_whole(tmp_path: Path) -> None:
    local = Recorder()
    async with over_socket(local, tmp_path / "s") as remote:
        assert await remote.place(ASK) == await local.place(ASK)
        assert local.asked[0] == ASK  # block keys with all 64 bits


async def test_progress_and_release_arrive_in_order(tmp_path: Path) -> None:
    local = Recorder()
    async with over_socket(local, tmp_path / "s") as remote:
        await remote.place(ASK)
        remote.progress(7)
        remote.release(7, OUTCOME)
        decision = await remote.explain(ASK)  # an answered call: what was cast before it has arrived
        assert decision.chosen.hit_tokens == 16
        assert local.progressed == [7]
        assert local.released == [(7, OUTCOME)]


async def test_an_error_keeps_its_class(tmp_path: Path) -> None:
    async with over_socket(Recorder(), tmp_path / "s") as remote:
        with pytest.raises(NoEngine, match="no engine serves 'unknown'"):
            await remote.place(Ask("r-2", "unknown", Prompt(tokens=1, known_tokens=1, keys={})))


async def test_a_missing_brain_is_an_engine_error(tmp_path: Path) -> None:
    client = WireClient(tmp_path / "nobody")
    with pytest.raises(EngineUnreachable):
        await RemotePlacement(client).place(ASK)
    await client.aclose()


async def test_only_the_owner_may_open_the_socket(tmp_path: Path) -> None:
    server = WireServer(placement_methods(Recorder()))
    await server.start(tmp_path / "s")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    await server.stop()
