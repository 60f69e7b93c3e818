"""What we have under way on every rank: one booking a request, totals kept as we go.

A booking's prefill counts as queued work until the first token, until KV events show its last block computed, or until
the estimate has run out (an answer that is not streamed gives no other sign): whichever comes first. With such answers
booked to their end, mean TTFT past the knee was measured at 355 s; with events or estimate at 2.1 s.

A streamed answer without a first token holds a lease of 5 × the predicted time + 30 s. When that runs out its prefill
no longer counts, and `sweep` reports it, so that the engine is suspected instead of being waited for.

All totals are integers (prefill in µs of GPU time): after any storm they are exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

import msgspec

LEASE_FACTOR = 5
LEASE_EXTRA_S = 30.0
TICK_S = 0.05
"""Deadlines lie in buckets this wide: to give one up is O(1), and none outlives its request."""

Owner = TypeVar("Owner")
Bucket = dict[int, "Record[Owner]"]


class Record(msgspec.Struct, Generic[Owner], eq=False):
    """One request on one rank. `owner` is what whoever booked wants back at `release`."""

    id: int
    booked: Booked[Owner]
    owner: Owner
    at: float
    streams: bool
    prefill_us: int
    prefill_tokens: int
    kv_tokens: int
    last_key: int | None
    fresh_tokens: int = 0  # of kv_tokens, those that nothing holds yet
    answer_tokens: int = 0  # of an answer like those before it
    grown_tokens: int = 0  # what it will hold at the end of that, and nothing holds yet; 0 for long prompts
    bucket: Bucket[Owner] | None = None  # where its deadline lies
    took_us: int = 0  # from the end of the prefill before it, or its own begin, to its end; 0 for one that ended behind


class Booked(Generic[Owner]):
    """Totals of one rank: what has been placed there and not been taken back."""

    __slots__ = (
        "answer_tokens",
        "awaited",
        "fresh_tokens",
        "grown_tokens",
        "head",
        "head_since",
        "kv_tokens",
        "prefill_tokens",
        "prefill_us",
        "prefills",
        "requests",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.kv_tokens = 0
        self.fresh_tokens = 0
        self.answer_tokens = 0
        self.grown_tokens = 0
        self.prefill_tokens = 0
        self.prefill_us = 0
        self.prefills: Bucket[Owner] = {}  # by age: engines admit first come, first served
        self.head: Record[Owner] | None = None  # the oldest of `prefills`
        self.head_since = 0.0
        self.awaited: dict[int, Bucket[Owner]] = {}  # a prompt's last whole block -> whose prefill ends with it

    def prefill_ms(self, now: float) -> float:
        """Booked work not past its first token, less what the engine must have done of the oldest by now."""
        head = self.head
        if head is None:
            return 0.0
        started = self.head_since if self.head_since > head.at else head.at
        done_us = int((now - started) * 1e6)
        if done_us > head.prefill_us:
            done_us = head.prefill_us
        return (self.prefill_us - done_us) / 1e3 if done_us > 0 else self.prefill_us / 1e3

    def add(self, record: Record[Owner]) -> None:
        self.requests += 1
        self.kv_tokens += record.kv_tokens
        self.fresh_tokens += record.fresh_tokens
        self.answer_tokens += record.answer_tokens
        self.grown_tokens += record.grown_tokens
        self.prefill_tokens += record.prefill_tokens
        self.prefill_us += record.prefill_us
        self.prefills[record.id] = record
        if self.head is None:
            self.head = record
        if record.last_key is not None:
            self.awaited.setdefault(record.last_key, {})[record.id] = record

    def end_prefill(self, record: Record[Owner], now: float) -> bool:
        """False: it had ended before."""
        prefills = self.prefills
        if prefills.pop(record.id, None) is None:
            return False
        if self.head is record:
            record.took_us = int((now - max(self.head_since, record.at)) * 1e6)
            self.head = next(iter(prefills.values())) if prefills else None
        self.head_since = now
        self.prefill_tokens -= record.prefill_tokens
        self.prefill_us -= record.prefill_us
        if record.last_key is not None:
            waiting = self.awaited[record.last_key]
            del waiting[record.id]
            if not waiting:
                del self.awaited[record.last_key]
        return True

    def remove(self, record: Record[Owner], now: float) -> bool:
        """Whether that ended its prefill."""
        ended = record.id in self.prefills and self.end_prefill(record, now)
        self.requests -= 1
        self.kv_tokens -= record.kv_tokens
        self.fresh_tokens -= record.fresh_tokens
        self.answer_tokens -= record.answer_tokens
        self.grown_tokens -= record.grown_tokens
        return ended


class Bookings(Generic[Owner]):
    """All bookings by id. `first_id` should differ between runs: a relay may still hold ids of the one before.

    prefill_ended   called with every record whose prefill is over, however that became known, and the time
    """

    def __init__(self, *, first_id: int = 1) -> None:
        self.prefill_ended: Callable[[Record[Owner], float], None] = _nobody
        self.due = inf  # `sweep` has nothing to do before
        self._next_id = first_id
        self._records: dict[int, Record[Owner]] = {}
        self._buckets: dict[int, Bucket[Owner]] = {}
        self._ticks: list[int] = []  # a heap of the keys of `_buckets`

    def __len__(self) -> int:
        return len(self._records)

    def book(
        self,
        booked: Booked[Owner],
        owner: Owner,
        *,
        now: float,
        prefill_ms: float,
        prefill_tokens: int,
        kv_tokens: int,
        fresh_tokens: int = 0,
        answer_tokens: int = 0,
        grown_tokens: int = 0,
        last_key: int | None = None,
        streams: bool = True,
    ) -> Record[Owner]:
        """`last_key`: the prompt's last whole block, if events can show it. `prefill_ms`: without the queue."""
        id = self._next_id
        self._next_id = id + 1
        prefill_us = round(prefill_ms * 1e3)
        record = Record(
            id,
            booked,
            owner,
            now,
            streams,
            prefill_us,
            prefill_tokens,
            kv_tokens,
            last_key,
            fresh_tokens,
            answer_tokens,
            grown_tokens,
        )
        queued_ms = booked.prefill_ms(now) if booked.prefills else 0.0
        predicted_s = (queued_ms + prefill_ms) / 1e3
        booked.add(record)
        self._records[id] = record
        self._set_deadline(record, now + (LEASE_FACTOR * predicted_s + LEASE_EXTRA_S if streams else predicted_s))
        return record

    def first_token(self, id: int, now: float) -> Record[Owner] | None:
        """The prefill is over. None: it was so already, or the booking is unknown."""
        record = self._records.get(id)
        return record if record is not None and self._end_prefill(record, now) else None

    def computed(self, booked: Booked[Owner], key: int, now: float) -> None:
        """A KV event says that `key` has been computed on that rank: prefills that end with it are over."""
        waiting = booked.awaited.get(key)
        if waiting is not None:
            for record in tuple(waiting.values()):
                self._end_prefill(record, now)

    def release(self, id: int, now: float) -> Record[Owner] | None:
        """Takes a booking back. None: already released, or never made here; nothing changes then."""
        record = self._records.pop(id, None)
        if record is not None:
            if record.bucket is not None:
                self._drop_deadline(record)
            if record.booked.remove(record, now):
                self.prefill_ended(record, now)
        return record

    def sweep(self, now: float) -> Sequence[Record[Owner]]:
        """Ends the prefills whose time is up; returns those whose lease ran out. One comparison when none is `due`."""
        if now < self.due:
            return ()
        overdue: list[Record[Owner]] = []
        while self._ticks and self._ticks[0] * TICK_S <= now:
            for record in tuple(self._buckets.pop(heappop(self._ticks)).values()):
                self._end_prefill(record, now)
                if record.streams:
                    overdue.append(record)
        self.due = self._ticks[0] * TICK_S if self._ticks else inf
        return overdue

    def _end_prefill(self, record: Record[Owner], now: float) -> bool:
        self._drop_deadline(record)
        if not record.booked.end_prefill(record, now):
            return False
        self.prefill_ended(record, now)
        return True

    def _set_deadline(self, record: Record[Owner], at: float) -> None:
        tick = int(at / TICK_S) + 1
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = {}
            heappush(self._ticks, tick)
            self.due = self._ticks[0] * TICK_S
        bucket[record.id] = record
        record.bucket = bucket

    def _drop_deadline(self, record: Record[Owner]) -> None:
        if record.bucket is not None:
            record.bucket.pop(record.id, None)
            record.bucket = None


def _nobody(_record: object, _now: float) -> None:
    pass
