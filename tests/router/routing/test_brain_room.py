"""The brain with its waiting room: over a real fleet, index and bookings, with clock and timers in the test's hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from policies.kv_aware import KvAware
from router.core import Ask, Booking, Load, Prompt, Usage
from router.errors import NoEngine, RoomFull, WaitedTooLong
from router.routing.fleet import Health
from router.routing.room_rule import RoomRule
from router.routing.waiting_room import LOOK_AGAIN_S, Look, RoomLimits
from router.wire import RemotePlacement, WireClient, WireServer, placement_methods
from tests.router.routing.hall import REST_S
from tests.router.routing.test_brain import BLOCK, LONG, World, ask, outcome
from tests.timers import Timers

LONG_MS = 2048 * 0.01983 + 7.95e-7 * 2048 * 1024
"""Prefill of LONG, which just fills an engine: 42.3 ms."""


def text(number: int, tokens: int = 2_048) -> list[int]:
    """A prompt like no other."""
    return list(range(number * 10_000 + 5_000, number * 10_000 + 5_000 + tokens))


class Lobby(World, Timers):
    """A fleet of ready engines, the brain over it, and its waiting room."""

    def __init__(
        self,
        *engines: str,
        rule: RoomRule | None = None,
        limits: RoomLimits | None = None,
        every_policy: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(*engines, **rest)
        Timers.__init__(self, self.now)
        self.room = self.brain.open_room(self.call_at, rule=rule, limits=limits, every_policy=every_policy)

    def booked(self, request: Ask) -> Booking:
        """One that has not to wait."""
        placed = self.brain.place_now(request)
        assert isinstance(placed, Booking)
        return placed

    def waits(self, request: Ask) -> asyncio.Future[Booking]:
        placed = self.brain.place_now(request)
        assert isinstance(placed, asyncio.Future)
        return placed

    def first_token(self, booking: Booking) -> None:
        self.brain.progress(booking.id)

    def nothing_left(self) -> None:
        assert (len(self.room), self.room.held, self.room._body_bytes, len(self.bookings)) == (0, 0, 0, 0)
        for rank in self.fleet:
            booked = rank.booked
            assert (booked.requests, booked.kv_tokens, booked.prefill_tokens, booked.prefill_us) == (0, 0, 0, 0)
            assert booked.grown_tokens == 0
        for memory in self.brain._memories.values():
            assert (memory._held, memory._total) == ({}, 0)


def decodes(lobby: Lobby, *, owed_s: float) -> None:
    """Two answers on engine a, to which so much is owed."""
    for number in (90, 91):
        lobby.first_token(lobby.booked(ask(text(number, 100), id=f"d{number}")))
    lobby.rank("a").owed_s = owed_s


async def turn() -> None:
    """What callbacks of this turn of the loop have asked for is done."""
    await asyncio.sleep(0)


# --- a booking, or a future


async def test_at_light_load_the_booking_is_given_at_once() -> None:
    lobby = Lobby("a", "b")
    bookings = [lobby.booked(ask(text(number), id=f"r{number}")) for number in range(2)]
    assert {booking.instance for booking in bookings} == {"a", "b"}
    assert (lobby.timers, len(lobby.room), lobby.room.stats.placed_at_once) == (0, 0, 2)


async def test_who_has_to_wait_gets_the_engine_after_its_first_token_and_a_rest() -> None:
    lobby = Lobby("a")
    decodes(lobby, owed_s=9.0)
    first = lobby.booked(ask(text(0)))
    second = lobby.waits(ask(text(1, 9_000), id="r2"))
    lobby.run_for(1.0)
    assert not second.done()
    lobby.first_token(first)
    lobby.run_for(REST_S - 0.001)
    assert not second.done()
    lobby.run_for(0.002)
    booking = second.result()
    assert (booking.instance, booking.request_id, booking.alone) == ("a", "r2", False)
    assert len(lobby.bookings) == 4
    assert lobby.brain.receipt("r2") is not None


async def test_an_engine_faster_than_thought_does_not_rest_for_longer_than_it_worked() -> None:
    """Nobody waits for the 42 ms that a prefill was thought to take, when the whole answer is there after 2."""
    lobby = Lobby("a")
    decodes(lobby, owed_s=1.0)
    first = lobby.booked(ask(text(0), stream=False))
    second = lobby.waits(ask(text(1, 9_000), id="r2"))
    lobby.run_for(0.002)
    lobby.brain.release(first.id, outcome(took_s=0.002, stream=False))
    lobby.run_for(0.0021)
    assert second.done()


async def test_to_wait_for_the_booking_is_to_call_place() -> None:
    lobby = Lobby("a")
    first = await lobby.brain.place(ask(text(0)))
    placing = asyncio.ensure_future(lobby.brain.place(ask(text(1), id="r2")))
    await turn()
    assert len(lobby.room) == 1
    lobby.first_token(first)
    lobby.run_for(0.1)
    assert (await placing).request_id == "r2"


async def test_a_release_makes_room_even_without_a_first_token() -> None:
    lobby = Lobby("a")
    first = lobby.booked(ask(text(0)))
    second = lobby.waits(ask(text(1)))
    lobby.brain.release(first.id, outcome(finish="client_gone", ttft_s=None))
    lobby.run_for(0.1)
    assert second.result().alone


async def test_an_event_for_the_last_block_makes_room() -> None:
    lobby = Lobby("a")
    request = ask(text(0))
    lobby.booked(request)
    second = lobby.waits(ask(text(1)))
    lobby.bookings.computed(lobby.rank("a").booked, request.prompt.keys[BLOCK][-1], lobby.now)
    lobby.run_for(0.1)
    assert second.done()


async def test_an_answer_that_is_not_streamed_makes_room_by_its_estimate() -> None:
    lobby = Lobby("a")
    lobby.booked(ask(text(0), stream=False))
    second = lobby.waits(ask(text(1), id="r2", stream=False))
    third = lobby.waits(ask(text(2), id="r3"))
    lobby.run_for(LONG_MS / 1e3 - 0.001)
    assert not second.done()
    lobby.run_for(0.051)  # deadlines lie in ticks of 50 ms
    assert second.done()
    assert not third.done()
    lobby.run_for(0.2)
    assert third.done()
    assert lobby.rank("a").booked.requests == 3


async def test_an_engine_that_gives_no_sign_of_life_holds_nobody_up_beyond_its_lease() -> None:
    """It is suspected then, and goes on all the same where it is the only one."""
    lobby = Lobby("a")
    lobby.booked(ask(text(0)))
    second = lobby.waits(ask(text(1)))
    lobby.run_for(30.0)
    assert not second.done()
    lobby.run_for(1.0)
    assert second.done()


# --- whose turn it is


async def test_siblings_go_together_and_all_but_the_first_hit_what_it_leaves() -> None:
    lobby = Lobby("a", "b")
    firsts = [lobby.booked(ask(text(number))) for number in range(2)]
    family = [lobby.waits(ask(LONG, id=f"s{number}")) for number in range(4)]
    lobby.first_token(firsts[1])
    lobby.run_for(0.1)
    bookings = [one.result() for one in family]
    assert [booking.instance for booking in bookings] == [firsts[1].instance] * 4
    assert [booking.predicted_hit_tokens for booking in bookings] == [0, 2_032, 2_032, 2_032]


async def test_a_sibling_that_comes_a_little_later_follows_to_the_busy_engine() -> None:
    lobby = Lobby("a", "b")
    first, _other = lobby.booked(ask(text(7, 9_000))), lobby.booked(ask(text(1)))
    lobby.run_for(0.01)
    sibling = lobby.booked(ask(text(7, 9_000), id="sibling"))
    assert (sibling.instance, sibling.predicted_hit_tokens) == (first.instance, 8_992)
    assert lobby.waits(ask([*text(7, 8_000), *text(8, 1_000)])) is not None  # a thousand more to compute


async def test_a_tenant_pays_for_its_siblings_what_is_left_of_them() -> None:
    lobby = Lobby("a")
    busy = lobby.booked(ask(text(0), tenant="other"))
    for number in range(4):
        lobby.waits(ask(LONG, id=f"s{number}", tenant="family"))
    lobby.first_token(busy)
    lobby.run_for(0.1)
    assert len(lobby.room) == 0
    assert LONG_MS < lobby.room._shares.start("family") < 1.1 * LONG_MS


async def test_a_request_waits_for_the_busy_engine_that_the_index_says_holds_its_prefix() -> None:
    """20,000 tokens are 556 ms of prefill, all of which is saved on a; that has 1.3 × 0.01983 × 1,024 + 50 = 76 ms."""
    lobby = Lobby("a", "b")
    prefix = text(7, 20_000)
    lobby.store("a", prefix)
    first = lobby.booked(ask([*prefix, *text(1, 3_072)]))
    assert first.instance == "a"
    held = lobby.waits(ask([*prefix, *text(2, 100)], id="r2"))
    assert (lobby.room.held, lobby.rank("b").booked.requests) == (1, 0)
    assert lobby.booked(ask(text(3, 500))).instance == "b"
    lobby.first_token(first)
    lobby.run_for(0.1)
    assert (held.result().instance, held.result().predicted_hit_tokens) == ("a", 20_000)


async def test_who_waits_for_an_engine_that_dies_goes_elsewhere() -> None:
    lobby = Lobby("a", "b")
    prefix = text(7, 20_000)
    lobby.store("a", prefix)
    lobby.booked(ask([*prefix, *text(1, 3_072)]))
    held = lobby.waits(ask([*prefix, *text(2, 100)]))
    lobby.fleet.set_health("a", Health.DOWN, "died", now=lobby.now)
    lobby.run_for(LOOK_AGAIN_S)
    assert held.result().instance == "b"


async def test_what_a_tenants_answers_took_counts_against_it() -> None:
    """Both have had one prompt; the talker's was answered at length."""
    lobby = Lobby("a")
    for number, (tenant, tokens) in enumerate((("talker", 5_000), ("reader", 1))):
        booking = lobby.booked(ask(text(10 + number), tenant=tenant))
        lobby.first_token(booking)
        lobby.brain.release(booking.id, outcome(tenant=tenant, usage=Usage(2_048, tokens, 0)))
    busy = lobby.booked(ask(text(1), tenant="other"))
    talker = lobby.waits(ask(text(2), tenant="talker"))
    reader = lobby.waits(ask(text(3), tenant="reader"))
    lobby.first_token(busy)
    lobby.run_for(0.1)
    assert (reader.done(), talker.done()) == (True, False)


@pytest.mark.parametrize(
    ("told", "step_ms"),
    [
        ({"ttft_s": 2.0, "took_s": 2.1, "usage": Usage(2_048, 8, 0)}, -1.2),  # late: more than 1 s and 2 × 42 ms
        ({"ttft_s": 1.0, "took_s": 1.36, "usage": Usage(2_048, 8, 0)}, 0.8),  # slow: 7 tokens in 360 ms
        ({"ttft_s": 1.0, "took_s": 1.34, "usage": Usage(2_048, 8, 0)}, -0.2),
        ({"ttft_s": 2.0, "took_s": 9.0, "usage": Usage(2_048, 7, 0)}, 0.0),  # too short to tell
        ({"ttft_s": None, "took_s": 9.0, "usage": Usage(2_048, 8, 0)}, 0.0),
        ({"ttft_s": 2.0, "took_s": 9.0, "usage": None}, 0.0),
    ],
)
async def test_what_answers_took_moves_the_gap(told: dict[str, Any], step_ms: float) -> None:
    lobby = Lobby("a")
    booking = lobby.booked(ask(text(0)))
    lobby.room.gap_s = 0.05
    lobby.brain.release(booking.id, outcome(input_tokens=2_048, queue_s=told["ttft_s"] or 0.0, **told))
    assert lobby.room.gap_s == pytest.approx(0.05 + step_ms / 1e3)


async def test_an_answer_that_clears_an_engine_of_suspicion_makes_room() -> None:
    lobby = Lobby("a", "b")
    by_instance = {booking.instance: booking for booking in (lobby.booked(ask(text(number))) for number in range(2))}
    lobby.first_token(by_instance["a"])
    lobby.fleet.suspect(lobby.rank("a"), "refused a connection", now=lobby.now)
    waiting = lobby.waits(ask(text(2)))
    lobby.run_for(1.2)
    assert not waiting.done()
    lobby.brain.release(by_instance["a"].id, outcome())
    lobby.run_for(1.0)
    assert waiting.result().instance == "a"


async def test_a_second_attempt_goes_first_and_elsewhere() -> None:
    lobby = Lobby("a", "b")
    by_instance = {booking.instance: booking for booking in (lobby.booked(ask(text(number))) for number in range(2))}
    waiting = lobby.waits(ask(text(2, 3_000)))
    again = lobby.waits(ask(text(3, 9_000), exclude=("a",)))
    lobby.first_token(by_instance["b"])
    lobby.run_for(0.1)
    assert again.result().instance == "b"
    lobby.first_token(by_instance["a"])
    lobby.run_for(0.1)
    assert waiting.result().instance == "a"


# --- policies that do not choose among free engines


async def test_a_policy_whose_word_holds_as_it_is_does_not_wait() -> None:
    lobby = Lobby("a", "b")
    placed = [lobby.booked(ask(text(number), policy="round_robin")).instance for number in range(6)]
    assert placed in (["a", "b"] * 3, ["b", "a"] * 3)
    assert lobby.waits(ask(text(9))) is not None


async def test_unless_the_room_is_for_every_policy() -> None:
    lobby = Lobby("a", every_policy=True)
    lobby.booked(ask(text(0), policy="round_robin"))
    assert not lobby.waits(ask(text(1), policy="round_robin")).done()


def test_the_default_policy_waits() -> None:
    assert KvAware.joint


# --- leaving


@pytest.mark.parametrize("held", [False, True])
async def test_to_cancel_the_future_is_to_leave(held: bool) -> None:
    lobby = Lobby("a", "b")
    lobby.store("a", LONG * 4)
    first = lobby.booked(ask([*LONG * 4, *text(1)]))
    others = [first] if held else [first, lobby.booked(ask(text(2)))]
    left = lobby.waits(ask([*LONG * 4, 1, 2], body_bytes=500))
    assert lobby.room.held == held
    left.cancel()
    await turn()
    assert (len(lobby.room), lobby.room._body_bytes, lobby.room.stats.left) == (0, 0, 1)
    for booking in others:
        lobby.brain.release(booking.id, outcome())
    lobby.run_for(10.0)
    lobby.nothing_left()


async def test_to_cancel_place_is_to_leave() -> None:
    lobby = Lobby("a")
    first = lobby.booked(ask(text(0)))
    placing = asyncio.ensure_future(lobby.brain.place(ask(text(1))))
    await turn()
    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing
    assert len(lobby.room) == 0
    lobby.brain.release(first.id, outcome())
    lobby.nothing_left()


async def test_a_booking_made_in_the_turn_in_which_its_future_was_cancelled_is_given_back() -> None:
    """The room hears of it in the next turn only."""
    lobby = Lobby("a")
    first = lobby.booked(ask(text(0)))
    left = lobby.waits(ask(text(1)))
    lobby.first_token(first)
    left.cancel()
    lobby.run_for(0.1)
    assert len(lobby.bookings) == 1
    await turn()
    assert lobby.room.stats.left == 0  # it was placed
    assert (await lobby.brain.explain(ask(text(1)))).best_hit_tokens == 0  # siblings are not sent after it
    lobby.brain.release(first.id, outcome())
    lobby.nothing_left()


async def test_a_booking_made_in_the_turn_in_which_place_is_cancelled_is_given_back() -> None:
    lobby = Lobby("a")
    first = lobby.booked(ask(text(0)))
    placing = asyncio.ensure_future(lobby.brain.place(ask(text(1))))
    await turn()
    lobby.first_token(first)
    lobby.run_for(0.1)
    assert len(lobby.bookings) == 2
    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing
    lobby.brain.release(first.id, outcome())
    lobby.nothing_left()


async def test_what_is_given_back_lets_the_next_one_go() -> None:
    lobby = Lobby("a")
    first = lobby.booked(ask(text(0)))
    left, stays = lobby.waits(ask(text(1))), lobby.waits(ask(text(2)))
    lobby.first_token(first)
    left.cancel()
    lobby.run_for(0.2)
    assert stays.result().instance == "a"
    assert len(lobby.bookings) == 2


# --- what is said instead of a booking


async def test_when_nobody_is_left_those_who_wait_are_told() -> None:
    lobby = Lobby("a")
    lobby.booked(ask(text(0)))
    second = lobby.waits(ask(text(1)))
    lobby.fleet.set_health("a", Health.DOWN, "died", now=lobby.now)
    lobby.run_for(LOOK_AGAIN_S)
    with pytest.raises(NoEngine, match="No engine can serve the model 'm'"):
        second.result()
    with pytest.raises(NoEngine):
        lobby.brain.place_now(ask(text(2)))


async def test_a_full_room_refuses_at_once() -> None:
    lobby = Lobby("a", limits=RoomLimits(requests=1))
    lobby.booked(ask(text(0)))
    first = lobby.waits(ask(text(1)))
    with pytest.raises(RoomFull) as caught:
        lobby.brain.place_now(ask(text(2)))
    assert caught.value.retry_after_s == 1.0
    with pytest.raises(RoomFull):
        await lobby.brain.place(ask(text(2)))
    assert not first.done()


async def test_who_has_waited_too_long_is_told_so() -> None:
    lobby = Lobby("a", limits=RoomLimits(wait_s=2.0))
    lobby.booked(ask(text(0)))
    second = lobby.waits(ask(text(1)))
    lobby.run_for(2.0 + LOOK_AGAIN_S)
    with pytest.raises(WaitedTooLong):
        second.result()
    assert len(lobby.room) == 0


# --- explain


async def test_explain_says_what_would_be_chosen_now_whoever_waits() -> None:
    lobby = Lobby("a", "b")
    lobby.store("a", LONG)
    lobby.booked(ask([*LONG, *text(1, 3_000)]))
    lobby.booked(ask(text(2)))
    waiting = [lobby.waits(ask(text(number))) for number in range(3, 6)]
    before = lobby.timers
    decision = await lobby.brain.explain(ask([*LONG, 1]))
    assert {scored.candidate.instance: scored.candidate.hit_tokens for scored in decision.scored} == {"a": 2048, "b": 0}
    assert (len(lobby.room), len(lobby.bookings), lobby.timers) == (3, 2, before)
    assert not any(one.done() for one in waiting)


# --- much waits


def count_looks(lobby: Lobby) -> Callable[[], int]:
    look, looks = lobby.brain.look, count()

    def counted(request: Ask, now: float) -> Look:
        next(looks)
        return look(request, now)

    lobby.brain.look = counted  # type: ignore[method-assign]
    return lambda: next(looks)


async def test_with_many_waiting_each_is_looked_at_a_few_times() -> None:
    lobby = Lobby("a", "b")
    looks = count_looks(lobby)
    bookings = [lobby.booked(ask(text(number))) for number in range(2)]
    futures = [lobby.waits(Ask(f"r{number}", "m", Prompt(2_048 + number, 0, {}))) for number in range(300)]
    assert looks() <= 2 * 302
    while not all(one.done() for one in futures):
        for booking in bookings:
            lobby.first_token(booking)
        lobby.run_for(1.0)
        bookings = [one.result() for one in futures if one.done()]
    assert looks() <= 4 * 302


async def test_with_many_waiting_beside_a_suspect_each_is_looked_at_a_few_times() -> None:
    """An engine that refused a connection is avoided for 5 s, and idle as long."""
    lobby = Lobby("a", "b")
    looks = count_looks(lobby)
    lobby.fleet.suspect(lobby.rank("a"), "refused a connection", now=lobby.now, for_s=5.0)
    lobby.booked(ask(text(0)))
    for number in range(200):
        lobby.waits(Ask(f"r{number}", "m", Prompt(2_048 + number, 0, {})))
    assert looks() <= 5 * 201


# --- memory


def holds(lobby: Lobby, engine: str = "a") -> tuple[int, int]:
    """Expected tokens of answers there, and of all short requests by the ends of those."""
    booked = lobby.rank(engine).booked
    return booked.answer_tokens, booked.grown_tokens


async def test_a_request_will_hold_its_uncached_tokens_and_an_answer_as_its_tenants_are_until_it_is_over() -> None:
    lobby = Lobby("a", capacity_tokens=400_000)
    first = lobby.booked(ask(text(0), tenant="t"))
    assert holds(lobby) == (256, 2_048 + 256)
    lobby.brain.release(first.id, outcome(tenant="t", usage=Usage(2_048, 700, 0)))
    assert holds(lobby) == (0, 0)
    for number, limit in ((1, None), (2, 100)):
        lobby.booked(ask(text(number, 1_000), id=f"r{number}", tenant="t", max_output_tokens=limit))
    assert holds(lobby) == (700 + 100, 2 * 1_000 + 700 + 100)


async def test_of_several_answers_to_one_prompt_each_takes_memory() -> None:
    lobby = Lobby("a", capacity_tokens=400_000)
    booking = lobby.booked(ask(text(0), tenant="t", choices=4))
    assert holds(lobby) == (1_024, 2_048 + 1_024)
    lobby.brain.release(booking.id, outcome(tenant="t", usage=Usage(2_048, 2_000, 0)))
    lobby.booked(ask(text(1), tenant="t"))
    assert holds(lobby) == (500, 2_548)


async def test_a_long_request_is_not_counted_since_it_would_keep_out_all_short_ones() -> None:
    """From 5 % of the memory on: 2,048 + 256 of 46,080."""
    for capacity, counted in ((46_080, 0), (46_081, 2_304)):
        lobby = Lobby("a", capacity_tokens=capacity)
        lobby.booked(ask(text(0)))
        assert holds(lobby) == (256, counted)


async def test_a_request_whose_client_leaves_as_it_is_placed_holds_nothing() -> None:
    lobby = Lobby("a", capacity_tokens=400_000)
    busy = lobby.booked(ask(text(0, 9_000)))
    waiting = asyncio.ensure_future(lobby.brain.place(ask(text(1, 9_000), id="r2")))
    await turn()
    lobby.first_token(busy)
    lobby.run_for(0.2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    lobby.brain.release(busy.id, outcome())
    lobby.nothing_left()


# --- on a real loop


async def _serve_all(requests: int) -> list[Booking]:
    """Whole answers, of which nobody hears when their prefill ends: timers alone bring everybody through."""
    loop, world = asyncio.get_running_loop(), World("a", "b")
    world.brain._clock = time.monotonic
    for rank in world.fleet:
        rank.load = Load(at=time.monotonic())

    def call_at(when: float, call: Callable[[], None]) -> None:
        loop.call_later(max(0.0, when - time.monotonic()), call)

    world.brain.open_room(call_at, rule=RoomRule(free_tokens=16, signal_delay_s=0.0, gap_s=0.001))
    asks = [Ask(f"r{number}", "m", Prompt(100, 0, {}), stream=False) for number in range(requests)]
    async with asyncio.timeout(30):
        return await asyncio.gather(*[world.brain.place(one) for one in asks])


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_on_a_real_loop_everybody_is_placed(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        assert len(runner.run(_serve_all(40))) == 40


# --- over a socket


@asynccontextmanager
async def over_socket(lobby: Lobby, path: Path) -> AsyncIterator[tuple[RemotePlacement, WireClient]]:
    server = WireServer(placement_methods(lobby.brain))
    await server.start(path)
    client = WireClient(path)
    try:
        yield RemotePlacement(client), client
    finally:
        await client.aclose()
        await server.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is awaited is the state of the code under test)
            await asyncio.sleep(0.001)


async def test_over_a_socket_a_request_waits_and_is_placed(tmp_path: Path) -> None:
    lobby = Lobby("a")
    async with over_socket(lobby, tmp_path / "s") as (remote, _):
        first = await remote.place(ask(text(0)))
        placing = asyncio.ensure_future(remote.place(ask(text(1), id="r2", body_bytes=77)))
        await until(lambda: len(lobby.room) == 1)
        assert lobby.room._body_bytes == 77
        remote.progress(first.id)
        await until(lambda: not lobby.rank("a").booked.prefills)
        lobby.run_for(0.1)
        assert (await placing).request_id == "r2"


async def test_over_a_socket_to_cancel_is_to_leave(tmp_path: Path) -> None:
    lobby = Lobby("a")
    async with over_socket(lobby, tmp_path / "s") as (remote, _):
        first = await remote.place(ask(text(0)))
        asked: Sequence[asyncio.Future[Booking]] = [
            asyncio.ensure_future(remote.place(ask(text(number), id=f"r{number}"))) for number in range(1, 6)
        ]
        await until(lambda: len(lobby.room) == 5)
        for placing in asked[:4]:
            placing.cancel()
        await until(lambda: len(lobby.room) == 1)
        remote.release(first.id, outcome())
        await until(lambda: not lobby.bookings)
        lobby.run_for(0.1)
        last = await asked[4]
        assert last.request_id == "r5"
        remote.release(last.id, outcome())
        await until(lambda: not lobby.bookings)
        lobby.nothing_left()


async def test_over_a_socket_a_booking_that_crosses_its_cancellation_comes_back(tmp_path: Path) -> None:
    lobby = Lobby("a")
    async with over_socket(lobby, tmp_path / "s") as (remote, _):
        first = await remote.place(ask(text(0)))
        placing = asyncio.ensure_future(remote.place(ask(text(1))))
        await until(lambda: len(lobby.room) == 1)
        lobby.brain.release(first.id, outcome())
        lobby.run_for(0.1)  # booked here, not yet known there
        assert len(lobby.bookings) == 1
        placing.cancel()
        await until(lambda: not lobby.bookings)
        lobby.nothing_left()


async def test_over_a_socket_a_relay_that_goes_takes_those_who_wait_along(tmp_path: Path) -> None:
    lobby = Lobby("a")
    async with over_socket(lobby, tmp_path / "s") as (remote, client):
        await remote.place(ask(text(0)))
        asked: Sequence[Awaitable[Booking]] = [
            asyncio.ensure_future(remote.place(ask(text(number)))) for number in range(1, 4)
        ]
        await until(lambda: len(lobby.room) == 3)
        await client.aclose()
        await until(lambda: not lobby.bookings and not len(lobby.room))
        await asyncio.gather(*asked, return_exceptions=True)
        lobby.run_for(5.0)
        lobby.nothing_left()


async def test_over_a_socket_a_full_room_says_when_to_come_back(tmp_path: Path) -> None:
    lobby = Lobby("a", limits=RoomLimits(requests=1))
    async with over_socket(lobby, tmp_path / "s") as (remote, _):
        lobby.booked(msgspec.structs.replace(ask(text(0, 9_000))))
        lobby.waits(ask(text(1, 200_000 // 21), id="r1"))
        with pytest.raises(RoomFull) as caught:
            await remote.place(ask(text(2)))
        assert caught.value.retry_after_s == pytest.approx(1.0)
