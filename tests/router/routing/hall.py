"""A desk in the test's hand for the waiting room: what an engine holds is told, what it does is played.

Prefill goes at 10 tokens a millisecond everywhere, so 10,000 uncached tokens are a second of work, and an engine is
free while fewer than 2,048 are under way.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from router.core import Ask, Booking, Candidate, Instance, Load, Prompt, Rates
from router.errors import NoEngine, WarmrouteError
from router.routing.bookings import Bookings, Record
from router.routing.fleet import Rank
from router.routing.room_rule import RoomRule
from router.routing.tenant_memory import TenantMemory
from router.routing.waiting_room import Look, RoomLimits, WaitingRoom
from tests.timers import Timers

RATES = Rates(c0_ms=0.0, c1_ms=0.1, c2_ms=0.0)
BLOCK = 16
REST_S = 0.085
"""The longest: 100 ms less the signal's 15."""


class Seat:
    """A request of the test and what became of it."""

    def __init__(self, ask: Ask, at: float) -> None:
        self.ask = ask
        self.at = at
        self.booking: Booking | None = None
        self.error: WarmrouteError | None = None
        self.placed_at: float | None = None
        self.settled = 0
        self.cancelled = False
        self.cancel: Callable[[], None] | None = None
        self.held_for: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return self.ask.request_id

    @property
    def on(self) -> str | None:
        return None if self.booking is None else self.booking.instance

    @property
    def waits(self) -> bool:
        return self.booking is None and self.error is None and not self.cancelled


class Hall(Timers):
    """Engines, a clock, timers, and the room. It is the room's desk, and chooses the least prefill, then the idlest.

    alive      engines in rotation
    holds      (engine, prefix) → tokens of it that the engine has cached
    expects    (engine, text) → tokens of it that were only just sent there
    offloads   engines that keep what they hold in a slower tier as well
    fits       engine → the longest prompt it takes
    order      everybody in the order of their placing
    looks      how often `look` was called
    """

    def __init__(
        self, *engines: str, rule: RoomRule | None = None, limits: RoomLimits | None = None, model: str = "m"
    ) -> None:
        super().__init__()
        self.bookings = Bookings[Rank]()
        self.bookings.prefill_ended = self._prefill_ended
        self.all: dict[str, Rank] = {}
        self.alive: set[str] = set()
        self.holds: dict[tuple[str, int], int] = {}
        self.expects: dict[tuple[str, int], int] = {}
        self.offloads: set[str] = set()
        self.fits: dict[str, int] = {}
        self.order: list[Seat] = []
        self.seats: dict[str, Seat] = {}
        self.holders: dict[int, str] = {}  # booking → tenant
        self.looks = 0
        self.tenants = TenantMemory()
        self.plays = False  # whether engines do what they are sent, one prompt after the other
        self._busy_until: dict[str, float] = {}
        self._names = count(1000)
        self.room = WaitingRoom(self, call_at=self.call_at, clock=lambda: self.now, rule=rule, limits=limits)
        for engine in engines:
            self.add(engine, model)

    def add(self, engine: str, model: str = "m", *, rates: Rates = RATES) -> None:
        self.all[engine] = Rank(Instance(engine, f"http://{engine}", "vllm", model), 0, rates=rates, now=0.0)
        self.alive.add(engine)

    # --- the desk

    @property
    def due(self) -> float:
        return self.bookings.due

    def sweep(self, now: float) -> None:
        self.bookings.sweep(now)

    def ranks(self, model: str, lora: str | None) -> Sequence[Rank]:
        return [rank for name, rank in self.all.items() if name in self.alive and rank.instance.model == model]

    def memory(self, model: str) -> TenantMemory:
        return self.tenants

    def look(self, ask: Ask, now: float) -> Look:
        self.looks += 1
        ranks = [rank for rank in self.ranks(ask.model, ask.lora) if rank.instance.id not in ask.exclude]
        fitting = [rank for rank in ranks if ask.prompt.tokens <= self.fits.get(rank.instance.id, 1 << 40)]
        ranks = fitting or ranks
        if not ranks:
            raise NoEngine("nobody")
        return Look(ranks, tuple(self._candidate(rank, ask.prompt, now) for rank in ranks), {})

    def _candidate(self, rank: Rank, prompt: Prompt, now: float) -> Candidate:
        engine, (prefix, text) = rank.instance.id, prompt.keys[BLOCK]
        held = min(self.holds.get((engine, prefix), 0), prompt.tokens - 1)
        expected = max(0, self.expects.get((engine, text), 0) - held)
        return Candidate(
            engine,
            0,
            hit_tokens=held + expected,
            held_tokens={"gpu": held, "host": held} if engine in self.offloads else {"gpu": held},
            expected_tokens=expected,
            booked_requests=rank.booked.requests,
            booked_prefill_ms=rank.booked.prefill_ms(now),
            booked_prefill_tokens=rank.booked.prefill_tokens,
            rates=rank.factor.rates,
            capacity_tokens=rank.capacity_tokens,
            kv_usage=rank.load.kv_usage,
            load_age_s=now - rank.load.at,
            unreported_kv_tokens=rank.booked.fresh_tokens - rank.fresh_tokens_then,
        )

    def tells(self, engine: str, kv_usage: float, *, capacity_tokens: int = 100_000) -> None:
        """Its word on its KV memory."""
        rank = self.all[engine]
        rank.capacity_tokens = capacity_tokens
        rank.load, rank.fresh_tokens_then = Load(self.now, kv_usage=kv_usage), rank.booked.fresh_tokens

    def book(self, ask: Ask, look: Look, now: float, *, among: Sequence[int] | None) -> Booking:
        assert now == self.now
        tokens = ask.prompt.tokens
        ready = look.candidates if among is None else [look.candidates[i] for i in among]
        chosen = min(ready, key=lambda c: (tokens - c.hit_tokens, c.booked_requests))
        uncached = tokens - chosen.hit_tokens
        answer = self.tenants.answer_tokens(ask.tenant, ask.max_output_tokens)
        record = self._book(chosen.instance, uncached, stream=ask.stream, answer=answer)
        self.tenants.hold(ask.tenant, uncached + answer)
        self.holders[record.id] = ask.tenant
        if self.plays:
            ends = max(now, self._busy_until.get(chosen.instance, 0.0)) + uncached * RATES.c1_ms / 1e3
            self._busy_until[chosen.instance] = ends
            self.call_at(ends, lambda: self._over(record.id))
        seat = self.seats[ask.request_id]
        seat.placed_at = now
        self.order.append(seat)
        return Booking(
            record.id, ask.request_id, chosen.instance, 0, "", "m", "vllm", False, tokens, chosen.hit_tokens,
            chosen.hit_tokens, record.prefill_us / 1e3, True, "test",
        )  # fmt: skip

    def _book(self, engine: str, uncached: int, *, stream: bool = True, answer: int = 0) -> Record[Rank]:
        rank = self.all[engine]
        return self.bookings.book(
            rank.booked,
            rank,
            now=self.now,
            prefill_ms=rank.factor.rates.prefill_ms(uncached, uncached),
            prefill_tokens=uncached,
            kv_tokens=uncached,
            fresh_tokens=uncached,
            answer_tokens=answer,
            grown_tokens=uncached + answer,
            streams=stream,
        )

    def _prefill_ended(self, record: Record[Rank], now: float) -> None:
        self.room.prefill_ended(record.owner, record.prefill_us / 1e3, now)

    # --- clock

    def settle(self) -> None:
        """What this moment has brought is looked at."""
        self.run_until(self.now)

    # --- engines and clients

    def occupy(self, engine: str, tokens: int) -> int:
        """Uncached tokens under way there that are nobody's of ours. The booking's id."""
        return self._book(engine, tokens).id

    def first_token(self, seat: Seat) -> None:
        assert seat.booking is not None
        self.bookings.first_token(seat.booking.id, self.now)

    def free(self, booking_id: int) -> None:
        self.bookings.first_token(booking_id, self.now)

    def end(self, seat: Seat) -> None:
        assert seat.booking is not None
        self._over(seat.booking.id)

    def _over(self, booking_id: int) -> None:
        record = self.bookings.release(booking_id, self.now)
        if record is not None and booking_id in self.holders:
            self.tenants.free(self.holders.pop(booking_id), record.grown_tokens)
        self.room.wake(self.now)

    def ask(
        self,
        id: str,
        tokens: int,
        *,
        prefix: int = 0,
        text: int | None = None,
        size: int = 100,
        model: str = "m",
        **rest: Any,
    ) -> Seat:
        """A request arrives. `prefix` is what engines may hold of it; equal `text`s are equal prompts."""
        keys = array("Q", [prefix, next(self._names) if text is None else text])
        asked = Ask(id, model, Prompt(tokens, tokens, {BLOCK: keys}), body_bytes=size, **rest)
        seat = self.seats[id] = Seat(asked, self.now)
        placed = self.room.place(asked, self.now)
        if isinstance(placed, Booking):
            seat.booking = placed
            return seat

        def settle(became: Booking | WarmrouteError) -> None:
            seat.settled += 1
            assert seat.waits
            if isinstance(became, Booking):
                seat.booking = became
            else:
                seat.error = became

        def cancel() -> None:
            seat.cancelled = seat.waits
            placed.cancel()

        placed.settle, seat.cancel = settle, cancel
        seat.held_for = lambda: placed.held_for
        return seat

    def nothing_left(self) -> None:
        room = self.room
        assert (len(room), room.held, room._body_bytes, room.lacking_memory) == (0, 0, 0, 0)
        assert (room._lanes, room._twins, room.waiting) == ({}, {}, {})


def named(seats: Sequence[Seat]) -> list[str]:
    return [seat.ask.request_id for seat in seats]
