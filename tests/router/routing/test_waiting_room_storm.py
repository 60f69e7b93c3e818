"""Whatever happens in the waiting room, in whatever order: everybody ends once, and nothing is left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.errors import NoEngine, RoomFull, WaitedTooLong
from router.routing.waiting_room import LOOK_AGAIN_S, RoomLimits
from tests.router.routing.hall import Hall, Seat


class Storm(RuleBasedStateMachine):
    """Arrivals, first tokens, ends, cancellations and deaths in any order: everybody ends once, and totals at zero."""

    @initialize()
    def begin(self) -> None:
        self.hall = Hall("a", "b", "c", limits=RoomLimits(requests=12, body_bytes=5_000, wait_s=20.0))
        self.hall.fits["c"] = 10_000
        self.number = 0
        self.refused = 0

    def _arrive(self, tokens: int, **rest: Any) -> None:
        self.number += 1
        id = f"r{self.number}"
        try:
            self.hall.ask(id, tokens, **rest)
        except (NoEngine, RoomFull):
            assert self.hall.seats.pop(id).waits
            self.refused += 1

    def _one(self, seats: list[Seat], number: int) -> Seat | None:
        return seats[number % len(seats)] if seats else None

    @property
    def waiting(self) -> list[Seat]:
        return [seat for seat in self.hall.seats.values() if seat.waits]

    @property
    def running(self) -> list[Seat]:
        records = self.hall.bookings._records
        return [seat for seat in self.hall.seats.values() if seat.booking is not None and seat.booking.id in records]

    @rule(
        tokens=st.sampled_from([10, 1_500, 2_100, 9_000, 60_000]),
        tenant=st.sampled_from(["t", "u"]),
        priority=st.sampled_from([0, 0, 1]),
        prefix=st.integers(0, 2),
        text=st.sampled_from([None, 1, 2]),
        stream=st.booleans(),
        size=st.integers(0, 900),
    )
    def arrive(self, **rest: Any) -> None:
        self._arrive(**rest)

    @rule(number=st.integers(0, 99))
    def first_token(self, number: int) -> None:
        if (seat := self._one(self.running, number)) is not None:
            self.hall.first_token(seat)

    @rule(number=st.integers(0, 99))
    def end(self, number: int) -> None:
        if (seat := self._one(self.running, number)) is not None:
            self.hall.end(seat)

    @rule(number=st.integers(0, 99))
    def leave(self, number: int) -> None:
        if (seat := self._one(self.waiting, number)) is not None:
            assert seat.cancel is not None
            seat.cancel()

    @rule(engine=st.sampled_from("abc"), retried=st.booleans())
    def die(self, engine: str, retried: bool) -> None:
        self.hall.alive.discard(engine)
        for seat in self.running:
            if seat.on == engine:
                self.hall.end(seat)
                if retried:
                    self._arrive(seat.ask.prompt.tokens, exclude=(engine,), text=1)

    @rule(engine=st.sampled_from("abc"))
    def come_back(self, engine: str) -> None:
        self.hall.alive.add(engine)

    @rule(engine=st.sampled_from("abc"), prefix=st.integers(1, 2), tokens=st.sampled_from([0, 1_000, 8_000, 50_000]))
    def cache(self, engine: str, prefix: int, tokens: int) -> None:
        self.hall.holds[engine, prefix] = tokens

    @rule(engine=st.sampled_from("abc"), text=st.integers(1, 2), tokens=st.sampled_from([0, 1_500, 8_900]))
    def just_sent(self, engine: str, text: int, tokens: int) -> None:
        self.hall.expects[engine, text] = tokens

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.09, 0.5, 3.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.hall.run_until(self.hall.now + seconds)

    @rule()
    def nobody_waits_beside_a_free_engine(self) -> None:
        """Whoever could be placed just now has been; whoever is held waits for an engine that is not free."""
        hall = self.hall
        hall.room.wake(hall.now)
        hall.settle()
        free = {name for name in hall.alive if hall.room._is_free(hall.all[name], hall.now)}
        for seat in self.waiting:
            held_for = seat.held_for()
            if held_for is not None:
                assert held_for not in {(name, 0) for name in free}
            elif free:
                assert not free & {rank.instance.id for rank in hall.look(seat.ask, hall.now).ranks}

    @invariant()
    def the_room_counts_those_who_wait(self) -> None:
        room, waiting = self.hall.room, self.waiting
        assert len(room) == len(waiting) <= 12
        assert room._body_bytes == sum(seat.ask.body_bytes for seat in waiting) <= 5_000
        assert sum(lane.size for lane in room._lanes.values()) == len(waiting)
        assert room.held == sum(seat.held_for() is not None for seat in waiting)
        assert all(lane.size for lane in room._lanes.values())
        assert sum(map(len, room._twins.values())) == sum(not seat.ask.exclude for seat in waiting)
        for lane in room._lanes.values():
            assert lane.waiting_ms == pytest.approx(sum(one.prefill_ms for one in room.waiting if one.lane is lane))

    @invariant()
    def who_waits_will_be_looked_at(self) -> None:
        if self.waiting:
            assert self.hall.now <= self.hall.room._due <= self.hall.now + LOOK_AGAIN_S

    @invariant()
    def nobody_is_settled_twice(self) -> None:
        for seat in self.hall.seats.values():
            assert (seat.booking is not None) + (seat.error is not None) + seat.cancelled + seat.waits == 1
            assert seat.settled <= 1

    def teardown(self) -> None:
        hall = self.hall
        hall.alive |= {"a", "b", "c"}
        for _ in range(100):
            for seat in self.running:
                hall.end(seat)
            hall.run_until(hall.now + 1.0)
        assert not self.waiting
        assert not self.running
        hall.nothing_left()
        stats = hall.room.stats
        seats = list(hall.seats.values())
        assert stats.placed + stats.placed_at_once == sum(seat.booking is not None for seat in seats)
        assert stats.left == sum(seat.cancelled for seat in seats)
        assert stats.expired == sum(isinstance(seat.error, WaitedTooLong) for seat in seats)
        for rank in hall.all.values():
            booked = rank.booked
            assert (booked.requests, booked.kv_tokens, booked.prefill_tokens, booked.prefill_us) == (0, 0, 0, 0)


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
