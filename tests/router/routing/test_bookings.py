"""Bookings: one per request, given back exactly once, and totals that always end at zero."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from router.routing.bookings import LEASE_EXTRA_S, TICK_S, Booked, Bookings, Record


def book(
    bookings: Bookings[str], booked: Booked[str], now: float = 0.0, ms: float = 100.0, **rest: object
) -> Record[str]:
    return bookings.book(booked, "owner", now=now, prefill_ms=ms, prefill_tokens=1000, kv_tokens=1200, **rest)  # type: ignore[arg-type]


def totals(booked: Booked[str]) -> tuple[int, int, int, int, int, int]:
    return (
        booked.requests,
        booked.kv_tokens,
        booked.prefill_tokens,
        booked.prefill_us,
        len(booked.prefills),
        len(booked.awaited),
    )


def test_a_booking_counts_until_it_is_released() -> None:
    bookings, booked = Bookings[str](), Booked[str]()
    record = book(bookings, booked)
    assert totals(booked) == (1, 1200, 1000, 100_000, 1, 0)
    released = bookings.release(record.id, 1.0)
    assert released is record
    assert released.owner == "owner"
    assert totals(booked) == (0, 0, 0, 0, 0, 0)


def test_a_second_release_and_an_unknown_id_change_nothing() -> None:
    bookings, booked = Bookings[str](), Booked[str]()
    record = book(bookings, booked)
    other = book(bookings, booked)
    bookings.release(record.id, 1.0)
    assert bookings.release(record.id, 1.0) is None
    assert bookings.release(987_654, 1.0) is None
    assert totals(booked) == (1, 1200, 1000, 100_000, 1, 0)
    assert bookings.release(other.id, 1.0) is other


def test_first_token_ends_the_prefill_but_not_the_booking() -> None:
    bookings, booked = Bookings[str](), Booked[str]()
    record = book(bookings, booked, last_key=7)
    assert bookings.first_token(record.id, 0.1) is record
    assert totals(booked) == (1, 1200, 0, 0, 0, 0)
    assert bookings.first_token(record.id, 0.1) is None
    assert bookings.first_token(12345, 0.1) is None


def test_an_event_for_the_last_block_ends_every_prefill_that_ends_with_it() -> None:
    bookings, booked, elsewhere = Bookings[str](), Booked[str](), Booked[str]()
    for _ in range(2):
        book(bookings, booked, last_key=7)
    book(bookings, booked, last_key=8)
    book(bookings, elsewhere, last_key=7)
    bookings.computed(booked, 6, 0.1)
    assert len(booked.prefills) == 3
    bookings.computed(booked, 7, 0.1)
    assert len(booked.prefills) == 1
    assert len(elsewhere.prefills) == 1
    assert booked.requests == 3


def test_without_a_stream_the_estimate_ends_the_prefill() -> None:
    bookings, booked = Bookings[str](), Booked[str]()
    book(bookings, booked, now=10.0, ms=400.0)
    book(bookings, booked, now=10.0, ms=100.0, streams=False)  # behind the other: due at 10.5
    assert bookings.sweep(10.45) == ()
    assert len(booked.prefills) == 2
    assert bookings.sweep(10.6) == []
    assert [record.streams for record in booked.prefills.values()] == [True]
    assert booked.requests == 2


def test_a_stream_without_a_first_token_is_reported_when_its_lease_runs_out() -> None:
    bookings, booked = Bookings[str](), Booked[str]()
    record = book(bookings, booked, ms=1000.0)
    lease = 5 * 1.0 + LEASE_EXTRA_S
    assert bookings.sweep(lease - 0.1) == ()
    assert bookings.sweep(lease + 0.1) == [record]
    assert totals(booked) == (1, 1200, 0, 0, 0, 0)
    assert bookings.sweep(lease + 100) == ()
    assert bookings.release(record.id, 200.0) is record


def test_a_first_token_gives_the_lease_up() -> None:
    bookings, booked = Bookings[str](), Booked[str]()
    record = book(bookings, booked)
    bookings.first_token(record.id, 0.2)
    assert list(bookings.sweep(1000.0)) == []


def test_work_of_the_oldest_prefill_fades_as_time_passes() -> None:
    bookings, booked = Bookings[str](), Booked[str]()
    first = book(bookings, booked, now=1.0, ms=100.0)
    book(bookings, booked, now=1.0, ms=300.0)
    assert booked.prefill_ms(1.0) == pytest.approx(400)
    assert booked.prefill_ms(1.06) == pytest.approx(340, abs=0.01)
    assert booked.prefill_ms(9.0) == pytest.approx(300)  # the second has not begun before the first is done
    bookings.first_token(first.id, 1.1)
    assert booked.prefill_ms(1.2) == pytest.approx(200, abs=0.01)


def test_ids_of_two_runs_need_not_meet() -> None:
    assert book(Bookings[str](first_id=1 << 40), Booked[str]()).id == 1 << 40


class Storm(RuleBasedStateMachine):
    """Every way a booking can end, in any order, twice or never: totals equal a plain recount at every step."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.bookings = Bookings[str]()
        self.booked = [Booked[str](), Booked[str]()]
        self.open: dict[int, Record[str]] = {}
        self.now = 0.0

    @rule(
        target=ids,
        rank=st.integers(0, 1),
        ms=st.floats(0, 5e4),
        key=st.none() | st.integers(0, 3),
        streams=st.booleans(),
        tokens=st.integers(0, 200_000),
    )
    def book(self, rank: int, ms: float, key: int | None, streams: bool, tokens: int) -> int:
        record = self.bookings.book(
            self.booked[rank],
            "",
            now=self.now,
            prefill_ms=ms,
            prefill_tokens=tokens,
            kv_tokens=tokens + 1,
            last_key=key,
            streams=streams,
        )
        self.open[record.id] = record
        return record.id

    @rule(id=ids)
    def first_token(self, id: int) -> None:
        self.bookings.first_token(id, self.now)

    @rule(id=consumes(ids))
    def release(self, id: int) -> None:
        assert self.bookings.release(id, self.now) is self.open.pop(id)

    @rule(id=st.integers(-5, 50))
    def release_any(self, id: int) -> None:
        if id not in self.open:
            assert self.bookings.release(id, self.now) is None

    @rule(rank=st.integers(0, 1), key=st.integers(0, 3))
    def computed(self, rank: int, key: int) -> None:
        self.bookings.computed(self.booked[rank], key, self.now)

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.bookings.sweep(self.now)

    @invariant()
    def totals_are_a_recount(self) -> None:
        for booked in self.booked:
            mine = [record for record in self.open.values() if record.booked is booked]
            prefilling = [record for record in mine if record.id in booked.prefills]
            assert booked.requests == len(mine)
            assert booked.kv_tokens == sum(record.kv_tokens for record in mine)
            assert len(booked.prefills) == len(prefilling)
            assert booked.prefill_us == sum(record.prefill_us for record in prefilling)
            assert booked.prefill_tokens == sum(record.prefill_tokens for record in prefilling)
            assert 0 <= booked.prefill_ms(self.now) <= booked.prefill_us / 1e3
            assert booked.head is next(iter(booked.prefills.values()), None)

    @invariant()
    def nothing_is_overdue(self) -> None:
        deadlines = [tick * TICK_S for tick, bucket in self.bookings._buckets.items() if bucket]
        assert self.bookings.due <= min(deadlines, default=inf)

    def teardown(self) -> None:
        for id in list(self.open):
            self.bookings.release(id, self.now)
        for booked in self.booked:
            assert totals(booked) == (0, 0, 0, 0, 0, 0)
        assert len(self.bookings) == 0


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=50))
def test_deadlines_do_not_outlive_their_time(requests: list[tuple[float, bool]]) -> None:
    bookings, booked = Bookings[str](), Booked[str]()
    for ms, streams in requests:
        book(bookings, booked, ms=ms, streams=streams)
    bookings.sweep(1e9)
    assert not booked.prefills
    assert not bookings._buckets
    assert not bookings._ticks
