"""Where finished requests wait for the database: files in a folder, appended to.

    FOLDER/RUN-NUMBER.spool     a segment: frames (`records.py`), in order
    FOLDER/position             how far the database has it (`reading.py`)

A run is one gateway's from its start to its end. It holds a lock on its last segment, which the kernel takes back
however the process ends: so whoever reads the folder can tell that a run is over, and that what it had open is lost.

In a gateway, what one turn of the loop appends is one write, made before anything of that turn goes out to an engine or
a client (`http/outbox.py`): what is not written when the process is killed, nobody has been sent or told either.

A write goes to the kernel's memory, not to the disk. So `kill -9` loses nothing that was written; a machine that loses
power loses what the kernel had not got to yet, some 30 s of it on most systems, or what came since the last fsync
(`ledger.fsync_s`).

A full disk fails no request: records wait in memory, up to a bound, and are written once there is room. Beyond it, or
with too much in the folder, the spool is `full`, and no further requests are taken.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from router.serving.ledger.records import Record, frame

_log = logging.getLogger("warmroute")

SUFFIX = ".spool"
SEGMENT_BYTES = 16 << 20
_HELD_BYTES = 16 << 20  # in memory, while the disk takes nothing
_SEGMENTS = 8  # at least so many in the bound of the folder
_TRY_AGAIN_S = 0.2


class Spool:
    """One run. `append` is for the loop: it takes microseconds and never raises."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        is_synced: bool = False,
        later: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """`is_synced`: `sync` is called again and again. `later`: calls `flush` at the end of the turn, if nobody has
        called it before; None: there are no turns, and every record is written at once. Raises OSError where there can
        be no files.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = min(SEGMENT_BYTES, max_bytes // _SEGMENTS)
        self._run = f"{time.time_ns():016x}{secrets.token_hex(2)}"
        self._number = 0
        self._size = 0  # of the segment
        self._file = self._new_segment()
        self._is_synced = is_synced
        self._syncing = threading.Lock()
        self._ended: list[int] = []  # segments that `sync` has to bring to the disk, and close
        self._later = later
        self._new: list[bytes] = []  # frames of this turn
        self._held = bytearray()  # what the disk has not taken
        self._try_at = 0.0
        self._folder_bytes = 0
        self.full = False
        self.measure()

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    @property
    def waiting_bytes(self) -> int:
        """In the folder; of the segment that is being read, all of it."""
        return self._folder_bytes

    def append(self, record: Record) -> None:
        self._new.append(frame(record))
        if self._later is None:
            self.flush()
        elif len(self._new) == 1:
            self._later(self.flush)

    def flush(self) -> None:
        """Write what has been appended."""
        if not self._new:
            return
        data = b"".join(self._new)
        self._new.clear()
        if self._held:
            self._held += data
            self._write_held()
        else:
            self._write(data)
        self._folder_bytes += len(data)
        if self._size >= self._segment_bytes:
            self._roll()
        if self._folder_bytes > self._max_bytes:
            self.full = True

    def measure(self) -> None:
        """Again and again: what has been read is gone from the folder, and there may be room on the disk."""
        if self._held:
            self._write_held()
        self._folder_bytes = sum(_size(entry) for entry in os.scandir(self._folder) if entry.name.endswith(SUFFIX))
        full = self._folder_bytes > self._max_bytes or len(self._held) > _HELD_BYTES
        if full and not self.full:
            _log.error("the ledger's spool is full: new requests get 503 until the database has taken some of it")
        self.full = full

    def sync(self) -> None:
        """To the disk itself. Takes milliseconds and more: for a thread."""
        with self._syncing:
            while self._ended:
                os.fsync(self._ended[0])
                os.close(self._ended.pop(0))
            os.fsync(self._file)

    def close(self) -> None:
        """The run is over."""
        self.flush()
        if self._held:
            self._try_at = 0.0
            self._write_held()
        if self._held:
            _log.error("the ledger's spool could not be written to the end: %d bytes are lost", len(self._held))
        if self._is_synced:
            with suppress(OSError):
                self.sync()
        for file in (*self._ended, self._file):
            os.close(file)

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._file, data)
        except OSError as error:
            self._hold(data, error.strerror or "")
            return
        self._size += written
        if written < len(data):  # the rest goes first, whatever comes: no frame is torn by a disk that fills up
            self._hold(data[written:], "no space left")

    def _hold(self, data: bytes, reason: str) -> None:
        if not self._held:
            _log.error("the ledger cannot be written to its spool (%s): it is kept in memory for now", reason)
        self._held[:0] = data
        self._try_at = time.monotonic() + _TRY_AGAIN_S

    def _write_held(self) -> None:
        if len(self._held) > _HELD_BYTES:
            self.full = True
        if time.monotonic() < self._try_at:
            return
        data, self._held = bytes(self._held), bytearray()
        self._write(data)
        if not self._held:
            _log.info("the ledger's spool is written again")

    def _roll(self) -> None:
        try:
            file = self._new_segment()
        except OSError:
            return  # the old one goes on
        ended, self._file, self._size = self._file, file, 0
        if self._is_synced:
            fcntl.flock(ended, fcntl.LOCK_UN)
            self._ended.append(ended)
        else:
            os.close(ended)

    def _new_segment(self) -> int:
        """Locked before it has its name: nobody may find the last segment of a run unlocked while it lives."""
        unnamed = self._folder / f"{self._run}.new"
        file = os.open(unnamed, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(unnamed, self._folder / f"{self._run}-{self._number:06d}{SUFFIX}")
        except OSError:
            os.close(file)
            raise
        self._number += 1
        return file


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # read and deleted just now
        return 0
