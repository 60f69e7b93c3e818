"""From the spool to the database: some rows at a time, each once, for as long as it takes.

Runs in a thread or a process of its own, with its own event loop: a row takes some 100 µs of Python, which the relay's
loop has not got. All it shares with the relay is the folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

import msgspec

from router.errors import StoreUnavailable
from router.serving.ledger.reading import Ended, Read, Reader, Unknown
from router.serving.ledger.records import Seen
from router.serving.ledger.rows import Row, row_of
from router.serving.pricing import Prices, UnknownCached
from router.store.costs import allocate_hour
from router.store.database import Database
from router.store.ledger import SeenHour, add_rows, note_seen, speaks_against_row

_log = logging.getLogger("warmroute")

BATCH = 200
"""Rows: 3,000 at once keep others from the database, and the interpreter, for 30 ms."""
GATHER_S = 0.1
"""What comes in the meantime is written together: a transaction of some rows costs what one of many does."""
AWAY_S = (0.2, 2.0)
"""Between attempts while the database is away: from the first to the last."""
PRICES_S = 1.0
KEEP_S = 1.0
HOURS_S = 60.0
"""How often the hours that have changed are allocated to who used the engines in them."""
_HOUR_S = 3600
_HOURS_AT_START = 24  # allocated anew: who wrote before may have been killed before it came to it
_SEEN_MOST_S = 2 * _HOUR_S
_CLAIM_S = 1.0
_REFUSED = "refused.jsonl"


class WriterSettings(msgspec.Struct, frozen=True):
    """What a writer needs to know."""

    folder: Path
    unknown_cached: UnknownCached = "full_price"
    currency: str = "USD"  # of prices per hour in the configuration
    retention_days: int = 90


class Writer:
    """`run` until `stop`.

    written   rows that are in the database and were not before
    refused   rows that the database does not take: they are set aside in the folder, and a mistake of ours
    away      why the database cannot be written to just now; "": it can
    """

    def __init__(self, settings: WriterSettings, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self.written = 0
        self.refused = 0
        self.away = ""
        self._settings = settings
        self._database = database
        self._clock = clock
        self._reader = Reader(settings.folder)
        self._in_hand: Sequence[Read] = []  # read, and not in the database yet
        self._prices = Prices()
        self._prices_due = self._keep_due = self._hours_due = 0.0
        self._hours: set[int] = set()  # whose costs have to be allocated anew
        self._wake = asyncio.Event()
        self._stopping = False

    def stop(self) -> None:
        """What is in the spool by now is written, if the database is there."""
        self._stopping = True
        self._wake.set()

    def figures(self) -> dict[str, float]:
        return {"rows_total": self.written, "rows_refused_total": self.refused, "store_up": float(not self.away)}

    async def run(self) -> None:
        try:
            while not self._reader.claim():  # another gateway's writer has the folder, and writes ours as well
                if await self._pause(_CLAIM_S):
                    return
            this_hour = int(self._clock() // _HOUR_S)
            self._hours.update(range(this_hour - _HOURS_AT_START, this_hour + 1))
            while True:
                is_last = self._stopping
                try:
                    count = await self._write_next(is_last=is_last)
                except OSError as error:
                    _log.error("the ledger's spool cannot be read on: %s", error.strerror)
                    count = 0
                if is_last and not count:
                    return
                if count < BATCH and not is_last:
                    await self._pause(GATHER_S)
        finally:
            self._reader.close()

    async def _write_next(self, *, is_last: bool) -> int:
        """How much there was. `is_last`: not waiting for a database that is away."""
        found = self._in_hand = self._in_hand or self._reader.read(BATCH)
        wait_s = AWAY_S[0]
        while not await self._has_taken(found):
            if is_last or self._stopping:
                return 0
            await self._pause(wait_s)
            wait_s = min(2 * wait_s, AWAY_S[1])
        self._in_hand = []
        now = time.monotonic()
        if now >= self._hours_due or is_last:
            self._hours_due = now + HOURS_S
            await self._allocate()
        if self._reader.must_keep or is_last or (found and now >= self._keep_due):
            self._keep_due = now + KEEP_S
            self._reader.keep()
        return len(found)

    async def _has_taken(self, found: Sequence[Read]) -> bool:
        """Whether the database has all of it."""
        try:
            if (now := time.monotonic()) >= self._prices_due:
                await self._prices.refresh(self._database)
                self._prices_due = now + PRICES_S
            await self._write(found)
        except Exception as error:
            reason = type(error.__cause__ or error).__name__
            if not self.away:
                _log.error("the ledger's database is away (%s): finished requests wait in the spool", reason)
            self.away = reason
            return False
        if self.away:
            _log.info("the ledger's database is back")
        self.away = ""
        return True

    async def _write(self, found: Sequence[Read]) -> None:
        seen = [hour for read in found if isinstance(read, Seen) for hour in self._hours_of(read)]
        rows = [row for read in found if not isinstance(read, Seen) and (row := self._row_of(read)) is not None]
        try:
            await self._add(rows, seen)
        except Exception as mistake:
            if isinstance(mistake, StoreUnavailable) or not speaks_against_row(mistake):
                raise
            # there is one that must not keep the others out
            _log.error("the ledger's database refuses some rows: %s", type(mistake).__name__)
            for row in rows:
                await self._add_alone(row)
            await self._add([], seen)
        self._hours.update(int(row["at"] // _HOUR_S) for row in rows)
        self._hours.update(hour.hour for hour in seen)

    def _row_of(self, read: Ended | Unknown) -> Row | None:
        try:
            return row_of(read, self._prices.book, self._settings.unknown_cached)
        except Exception as mistake:  # in one record: it must not keep the others out
            self.refused += 1
            _log.error("a record of the ledger makes no row: %s", type(mistake).__name__)
            return None

    async def _add(self, rows: Sequence[Row], seen: Sequence[SeenHour]) -> None:
        if not rows and not seen:
            return
        async with self._database.write() as connection:
            written = await add_rows(connection, rows) if rows else 0
            await note_seen(connection, seen)
        self.written += written

    async def _add_alone(self, row: Row) -> None:
        try:
            await self._add([row], [])
        except Exception as mistake:
            if isinstance(mistake, StoreUnavailable) or not speaks_against_row(mistake):
                raise
            self.refused += 1
            _log.error("a row of the ledger is refused by the database: %s", type(mistake).__name__)
            _set_aside(self._settings.folder / _REFUSED, row)

    def _hours_of(self, seen: Seen) -> list[SeenHour]:
        """One that was seen across the turn of an hour was there in both."""
        per_hour = Decimal(seen.per_hour) if seen.per_hour is not None else None
        first, last = int(max(seen.since, seen.at - _SEEN_MOST_S) // _HOUR_S), int(seen.at // _HOUR_S)
        return [
            SeenHour(
                hour,
                seen.instance[:200],
                self._settings.currency,
                max(seen.since, hour * _HOUR_S),
                min(seen.at, (hour + 1) * _HOUR_S),
                seen.ranks,
                seen.capacity_tokens,
                per_hour,
            )
            for hour in range(first, last + 1)
        ]

    async def _allocate(self) -> None:
        """No row waits for it: what fails is tried again later."""
        for hour in sorted(self._hours):
            try:
                async with self._database.write() as connection:
                    await allocate_hour(connection, hour)
            except Exception as error:
                _log.error("what engines cost could not be allocated: %s", type(error.__cause__ or error).__name__)
                return
            self._hours.discard(hour)

    async def _pause(self, seconds: float) -> bool:
        """Whether it is to stop."""
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            pass
        return self._stopping


def _set_aside(path: Path, row: Row) -> None:
    """One JSON line a row."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")
