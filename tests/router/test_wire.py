"""`Placement` over a Unix socket behaves as it does in the same process."""

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from router.core import Ask, Booking, Candidate, Cost, Decision, Outcome, Prompt, Scored
from router.errors import BadRequest, EngineUnreachable, NoEngine, WarmrouteError
from router.wire import RemotePlacement, WireClient, WireServer, placement_methods


class Recorder:
    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.progressed: list[int] = []
        self.released: list[tuple[int, Outcome]] = []
        self.gate: asyncio.Event | None = None
        self.placed = asyncio.Event()

    async def place(self, ask: Ask) -> Booking:
        self.asked.append(ask)
        if ask.model == "unknown":
            raise NoEngine("no engine serves 'unknown'", param="model", code="none_here", retry_after_s=2.5)
        if ask.model == "broken":
            raise RuntimeError("a mistake of ours")
        if self.gate is not None:
            await self.gate.wait()
        self.placed.set()
        return Booking(
            id=6 + len(self.asked), request_id=ask.request_id, instance="a", rank=1, url="http://127.0.0.1:1",
            served="m", engine="vllm", target_rank=True, tokens=ask.prompt.tokens, best_hit_tokens=32,
            predicted_hit_tokens=16, predicted_prefill_ms=1.5, alone=True, policy="kv_aware",
        )  # fmt: skip

    def progress(self, booking_id: int) -> None:
        if booking_id < 0:
            raise RuntimeError("a mistake of ours")
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
        assert await remote.place(ASK) == await Recorder().place(ASK)
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
        with pytest.raises(NoEngine, match="no engine serves 'unknown'") as caught:
            await remote.place(_ask("unknown"))
    assert (caught.value.param, caught.value.code, caught.value.retry_after_s) == ("model", "none_here", 2.5)


async def test_a_mistake_of_the_brain_is_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = Recorder()
    async with over_socket(local, tmp_path / "s") as remote:
        with pytest.raises(WarmrouteError) as caught:
            await remote.place(_ask("broken"))
        assert caught.value.status == 500
        remote.progress(-1)
        remote.progress(7)
        await remote.explain(ASK)  # the connection has outlived both
        assert local.progressed == [7]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "a mistake of ours" not in caplog.text


async def test_what_is_no_method_is_a_bad_request(tmp_path: Path) -> None:
    server = WireServer(placement_methods(Recorder()))
    await server.start(tmp_path / "s")
    client = WireClient(tmp_path / "s")
    for method, arguments in (("nothing", ()), ("explain", ()), ("explain", (7,))):
        with pytest.raises(BadRequest):
            await client.call(method, *arguments)
    await client.aclose()
    await server.stop()


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


# --- nothing stays booked


async def test_a_caller_that_leaves_ends_its_call(tmp_path: Path) -> None:
    local = Recorder()
    local.gate = asyncio.Event()
    async with over_socket(local, tmp_path / "s") as remote:
        caller = asyncio.create_task(remote.place(ASK))
        await _until(lambda: bool(local.asked))
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await remote.explain(ASK)  # what was cast before it has arrived
        local.gate.set()
        assert not local.placed.is_set()  # nobody waits there any more
    assert local.released == []


async def test_an_answer_that_comes_too_late_is_given_back(tmp_path: Path) -> None:
    local = Recorder()
    async with over_socket(local, tmp_path / "s") as remote:
        caller = asyncio.create_task(remote.place(ASK))
        await local.placed.wait()  # booked there, not known here
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await _until(lambda: bool(local.released))
    ((booking, outcome),) = local.released
    assert (booking, outcome.finish, outcome.request_id) == (7, "client_gone", "r-1")


async def test_an_answer_that_comes_in_the_same_moment_is_given_back(tmp_path: Path) -> None:
    """Cancelled when its answer is already there: the caller never sees the booking."""
    local = Recorder()
    local.gate = asyncio.Event()
    async with over_socket(local, tmp_path / "s") as remote:
        caller = asyncio.create_task(remote.place(ASK))
        await _until(lambda: bool(local.asked))
        (call,) = remote._client._waiting
        remote._client._take(call, True, msgspec.to_builtins(await Recorder().place(ASK)))
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await _until(lambda: bool(local.released))
    assert [(booking, outcome.finish) for booking, outcome in local.released] == [(7, "client_gone")]


async def test_a_relay_that_dies_leaves_nothing_booked(tmp_path: Path) -> None:
    local = Recorder()
    server = WireServer(placement_methods(local))
    await server.start(tmp_path / "s")
    dying, living = WireClient(tmp_path / "s"), WireClient(tmp_path / "s")
    first, second = await RemotePlacement(dying).place(ASK), await RemotePlacement(dying).place(ASK)
    await RemotePlacement(living).place(ASK)
    RemotePlacement(dying).release(first.id, OUTCOME)
    await RemotePlacement(dying).explain(ASK)
    assert local.released == [(first.id, OUTCOME)]
    await dying.aclose()
    await _until(lambda: len(local.released) > 1)
    booking, outcome = local.released[1]
    assert (booking, outcome.finish, outcome.error) == (second.id, "upstream_failed", "relay_gone")
    assert (outcome.request_id, outcome.instance, outcome.rank, outcome.input_tokens) == ("r-1", "a", 1, 40)
    await living.aclose()
    await server.stop()
    assert len(local.released) == 3  # and each once


async def test_a_relay_that_dies_while_it_waits_is_not_placed(tmp_path: Path) -> None:
    local = Recorder()
    local.gate = asyncio.Event()
    server = WireServer(placement_methods(local))
    await server.start(tmp_path / "s")
    client = WireClient(tmp_path / "s")
    caller = asyncio.create_task(RemotePlacement(client).place(ASK))
    await _until(lambda: bool(local.asked))
    await client.aclose()
    with pytest.raises(EngineUnreachable):
        await caller
    await server.stop()
    local.gate.set()
    await asyncio.sleep(0)
    assert not local.placed.is_set()


async def test_a_relay_finds_the_brain_again(tmp_path: Path) -> None:
    local = Recorder()
    client = WireClient(tmp_path / "s")
    remote = RemotePlacement(client)
    for number in range(2):
        server = WireServer(placement_methods(local))
        await server.start(tmp_path / "s")
        assert (await remote.place(ASK)).id == 7 + number
        await server.stop()
        assert [booking for booking, _ in local.released] == list(range(7, 8 + number))
        await _until(lambda: client._writer is None)
    await client.aclose()


def _ask(model: str) -> Ask:
    return Ask("r-2", model, Prompt(tokens=1, known_tokens=1, keys={}))


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came about")
