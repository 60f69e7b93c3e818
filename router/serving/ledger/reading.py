"""The spool's records, read in order and paired: what a request's row is made of.

How far they have been read is kept in the folder, and with it the marks that are still open, since a segment is deleted
once it has been read, however long a request of its beginning goes on. The position is behind the database, never ahead
of it: what is read twice is the same row again, which the database has already.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from router.serving.ledger.records import End, Frames, Mark, Record, Seen
from router.serving.ledger.spool import SUFFIX

_log = logging.getLogger("warmroute")

_POSITION = "position"
_READ_BYTES = 256 * 1024
_DAMAGED = ".damaged"


class Open(msgspec.Struct, array_like=True, frozen=True):
    """A request that was sent and has not ended. `beside`: of ours at the same engine then, itself among them."""

    mark: Mark
    beside: int


class Ended(NamedTuple):
    """One that has. `mark` None: it was never sent. `beside`: how many ran there, the mean of its beginning and end."""

    end: End
    mark: Mark | None
    beside: float


class Unknown(NamedTuple):
    """One whose gateway was killed under it."""

    mark: Mark


Read = Ended | Unknown | Seen


class _Run(msgspec.Struct, array_like=True):
    """How far a run has been read, and what is open there, by serial."""

    number: int  # of the segment
    offset: int
    open: dict[str, Open]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, _Run]).decode


class Reader:
    """For one thread, which may block. `folder` is read by one reader at a time (`claim`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._claim: int | None = None
        self._runs: dict[str, _Run] = {}
        self._beside: dict[tuple[str, str], int] = {}  # open requests by run and instance
        self._done: list[Path] = []  # segments to delete once the position is beyond them
        self._over: list[str] = []  # runs that have been read to their end

    def claim(self) -> bool:
        """Whether nobody else reads the folder: from now on this one does, until `close`."""
        if self._claim is None:
            file = os.open(self._folder / "reader", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                return False
            self._claim = file
            self._runs = self._kept_position()
            for name, run in self._runs.items():
                for each in run.open.values():
                    self._count(name, each.mark.instance, 1)
        return True

    def close(self) -> None:
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def read(self, most: int) -> list[Read]:
        """About the next `most` records. Fewer: there are no more just now. Then `keep` what has been read.

        Raises OSError where nothing else can be read than what cannot.
        """
        found: list[Read] = []
        unreadable: OSError | None = None
        for name, numbers in self._segments().items():
            run = self._runs.setdefault(name, _Run(numbers[0], 0, {}))
            try:
                for number in numbers:
                    if number >= run.number and len(found) < most:
                        self._read_segment(name, run, number, found, most, is_last=number == numbers[-1])
            except OSError as error:
                unreadable = error
        if unreadable is not None and not found:
            raise unreadable
        for name in self._runs.keys() - self._segments().keys() - set(self._over) if not found else ():
            found += self._end_of(name, self._runs[name])  # somebody has deleted its files
        return found

    def keep(self) -> None:
        """The database has all that was read: it need not be read again."""
        for name in self._over:
            del self._runs[name]
        self._over.clear()
        draft = self._folder / f".{_POSITION}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_encode(self._runs))
        os.rename(draft, self._folder / _POSITION)
        for path in self._done:
            path.unlink(missing_ok=True)
        self._done.clear()

    @property
    def must_keep(self) -> bool:
        """There is something to delete."""
        return bool(self._done)

    # -- segments

    def _segments(self) -> dict[str, list[int]]:
        """Numbers by run, the oldest run first; those not yet deleted are left out."""
        found: dict[str, list[int]] = {}
        done = {path.name for path in self._done}
        for name in sorted(os.listdir(self._folder)):
            if name.endswith(SUFFIX) and name not in done:
                run, _, number = name.removesuffix(SUFFIX).rpartition("-")
                found.setdefault(run, []).append(int(number))
        return found

    def _read_segment(self, name: str, run: _Run, number: int, found: list[Read], most: int, *, is_last: bool) -> None:
        """Adds to `found`: what has been read is so even where reading on fails."""
        path = self._path(name, number)
        if number > run.number:
            run.number, run.offset = number, 0
        with open(path, "rb", buffering=0) as file:
            # Asked first: what was written before is still read. A run that goes on has its next segment by then.
            is_over = is_last and _is_unlocked(file.fileno()) and not self._path(name, number + 1).exists()
            at_end = False
            while len(found) < most and not at_end:
                frames = Frames(os.pread(file.fileno(), _READ_BYTES, run.offset))
                found += self._take(name, run, frames, most - len(found))
                run.offset += frames.end
                at_end = not frames.end
            if not at_end or (is_last and not is_over):
                return
            if rest := os.fstat(file.fileno()).st_size - run.offset:
                self._set_aside(path, run.offset, rest)
        self._done.append(path)
        if is_over:
            found += self._end_of(name, run)

    def _path(self, name: str, number: int) -> Path:
        return self._folder / f"{name}-{number:06d}{SUFFIX}"

    def _take(self, name: str, run: _Run, frames: Frames, most: int) -> Iterator[Read]:
        for record in frames:
            read = self._pair(name, run, record)
            if read is not None:
                yield read
                most -= 1
                if most <= 0:
                    return

    def _pair(self, name: str, run: _Run, record: Record) -> Read | None:
        if isinstance(record, Seen):
            return record
        before = run.open.pop(record.serial, None)
        beside = 1
        if before is not None:
            beside = self._count(name, before.mark.instance, -1) + 1
        if isinstance(record, Mark):
            run.open[record.serial] = Open(record, self._count(name, record.instance, 1))
            return None
        if before is None:
            return Ended(record, None, 1.0)
        return Ended(record, before.mark, (before.beside + beside) / 2)

    def _count(self, name: str, instance: str, change: int) -> int:
        """How many are open there, after it."""
        count = self._beside.get((name, instance), 0) + change
        if count:
            self._beside[name, instance] = count
        else:
            self._beside.pop((name, instance), None)
        return count

    def _end_of(self, name: str, run: _Run) -> list[Read]:
        """The run is over: what it had open was lost with it."""
        unknown: list[Read] = [Unknown(each.mark) for each in run.open.values()]
        run.open.clear()
        for key in [key for key in self._beside if key[0] == name]:
            del self._beside[key]
        self._over.append(name)
        return unknown

    def _set_aside(self, path: Path, offset: int, rest: int) -> None:
        """For whoever can make something of it."""
        aside = path.with_suffix(_DAMAGED)
        if not aside.exists():
            os.link(path, aside)
        _log.error("the ledger's spool is torn: %d bytes from byte %d of %s on are left there", rest, offset, aside)

    def _kept_position(self) -> dict[str, _Run]:
        try:
            return _decode((self._folder / _POSITION).read_bytes())
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError:
            _log.error("the ledger's position is damaged: its spool is read from the beginning")
            return {}


def _is_unlocked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
