"""What was appended is read, each record once and in order, however the writing ended."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.serving.ledger.reading import Ended, Read, Reader, Unknown
from router.serving.ledger.records import Frames, Seen, frame
from router.serving.ledger.spool import SUFFIX, Spool
from tests.router.serving.ledger.made import AT, end, mark

MIB = 1 << 20


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def reader(folder: Path) -> Reader:
    made = Reader(folder)
    assert made.claim()
    return made


def serials(reads: Iterable[Read]) -> list[str]:
    return [_serial(read) for read in reads if not isinstance(read, Seen)]


def _serial(read: Ended | Unknown) -> str:
    return read.end.serial if isinstance(read, Ended) else f"?{read.mark.serial}"


@given(cut=st.integers(0, 2000), records=st.lists(st.sampled_from(["mark", "end", "seen"]), max_size=4))
def test_frames_end_where_the_data_is_cut(cut: int, records: list[str]) -> None:
    made = {"mark": mark(), "end": end(), "seen": Seen(AT, AT, "A", "2.5", 1, 0)}
    framed = [frame(made[name]) for name in records]
    data = b"".join(framed)[:cut]
    frames = Frames(data)
    found = list(frames)
    whole = sum(len(b"".join(framed[: n + 1])) <= cut for n in range(len(framed)))
    assert found == [made[name] for name in records[:whole]]
    assert (frames.end, frames.torn) == (len(b"".join(framed[:whole])), False)


@pytest.mark.parametrize("at", [0, 3, 5, 40])
def test_a_damaged_frame_is_noticed(at: int) -> None:
    first, second = frame(mark()), bytearray(frame(end()))
    second[at] ^= 0x40
    frames = Frames(first + bytes(second) + first)
    assert list(frames) == [mark()]
    assert frames.torn or at == 0  # a length that has become larger: what follows is waited for
    assert frames.end == len(first)


def test_a_record_of_a_later_version_is_passed_over() -> None:
    later = frame(mark()).replace(b"\xa1m", b"\xa1z")
    later = later[:4] + zlib.crc32(later[8:]).to_bytes(4, "little") + later[8:]
    frames = Frames(later + frame(end()))
    assert list(frames) == [end()]
    assert frames.strange == 1


def test_requests_are_paired_and_counted_beside_each_other(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", max_bytes=MIB)
    read = reader(tmp_path / "spool")
    spool.append(mark("a"))
    spool.append(mark("b"))
    spool.append(mark("c", instance="B"))
    assert read.read(10) == []
    spool.append(mark("a", instance="B", attempts=2))  # it failed on A and went to B
    spool.append(end("a", instance="B"))
    spool.append(end("b"))
    spool.append(end("never sent", instance=None))
    found = read.read(10)
    assert found == [
        Ended(end("a", instance="B"), mark("a", instance="B", attempts=2), 2.0),
        Ended(end("b"), mark("b"), 1.5),
        Ended(end("never sent", instance=None), None, 1.0),
    ]
    assert read.read(10) == []
    spool.close()
    assert read.read(10) == [Unknown(mark("c", instance="B"))]
    read.keep()
    assert segments(tmp_path / "spool") == []
    assert read.read(10) == []


def test_segments_go_when_they_are_read_and_what_is_open_stays(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", max_bytes=64 * 1024)  # segments of 8 KiB
    spool.append(mark("long"))
    for n in range(100):
        spool.append(mark(f"r{n}"))
        spool.append(end(f"r{n}"))
    assert len(segments(tmp_path / "spool")) > 3
    first = reader(tmp_path / "spool")
    found: list[str] = []
    while some := first.read(7):
        assert len(some) <= 7
        found += serials(some)
    assert found == [f"r{n}" for n in range(100)]
    first.keep()
    assert len(segments(tmp_path / "spool")) == 1
    first.close()
    spool.append(end("long"))
    second = reader(tmp_path / "spool")  # another process, after a restart
    assert second.read(10) == [Ended(end("long"), mark("long"), 1.0)]


def test_what_was_not_kept_is_read_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", max_bytes=MIB)
    for n in range(3):
        spool.append(mark(f"r{n}"))
        spool.append(end(f"r{n}"))
    first = reader(tmp_path / "spool")
    assert serials(first.read(2)) == ["r0", "r1"]
    first.keep()
    assert serials(first.read(2)) == ["r2"]
    first.close()  # killed
    assert serials(reader(tmp_path / "spool").read(10)) == ["r2"]


def test_one_reader_at_a_time(tmp_path: Path) -> None:
    Spool(tmp_path / "spool", max_bytes=MIB)
    first, second = reader(tmp_path / "spool"), Reader(tmp_path / "spool")
    assert not second.claim()
    first.close()
    assert second.claim()


KILLED = """
import os, signal, sys
from pathlib import Path
from router.serving.ledger.spool import Spool
from tests.router.serving.ledger.made import mark, end
spool = Spool(Path(sys.argv[1]), max_bytes=1 << 20)
for n in range(50):
    spool.append(mark(f"r{n}"))
    if n % 2:
        spool.append(end(f"r{n}"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_loses_nothing_that_had_ended(tmp_path: Path) -> None:
    """And of what had not, it is known that it was lost; a gateway that lives beside it is not touched."""
    folder = tmp_path / "spool"
    living = Spool(folder, max_bytes=MIB)
    living.append(mark("alive"))
    killed = subprocess.run([sys.executable, "-c", KILLED, folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    read = reader(folder)
    found = serials(read.read(1000))
    assert found == [f"r{n}" for n in range(1, 50, 2)] + [f"?r{n}" for n in range(0, 50, 2)]
    living.append(end("alive"))
    assert serials(read.read(10)) == ["alive"]


def test_a_torn_end_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a machine without power may leave it."""
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=MIB)
    spool.append(mark("a"))
    spool.append(end("a"))
    spool.append(mark("b"))
    spool.close()
    (segment,) = segments(folder)
    os.truncate(segment, segment.stat().st_size - 5)
    read = reader(folder)
    assert serials(read.read(10)) == ["a"]
    read.keep()
    assert segments(folder) == []
    assert len(list(folder.glob("*.damaged"))) == 1
    assert "torn" in caplog.text


def test_a_disk_that_takes_nothing_loses_nothing(tmp_path: Path) -> None:
    """Not even when it takes half a record before it is full."""
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=MIB)
    spool.append(mark("a"))
    (segment,) = segments(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (segment.stat().st_size + 40, limits[1]))
    try:
        spool.append(end("a"))
        spool.append(mark("b"))
        spool.measure()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert spool.held_bytes > 0
    assert not spool.full
    spool.append(end("b"))
    spool.close()
    assert spool.held_bytes == 0
    assert serials(reader(folder).read(10)) == ["a", "b"]


def test_a_folder_that_holds_too_much_is_full_until_it_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=64 * 1024)
    count = 0
    while not spool.full:
        spool.append(mark(f"r{count}"))
        spool.append(end(f"r{count}"))
        count += 1
    read = reader(folder)
    assert serials(read.read(10_000)) == [f"r{n}" for n in range(count)]
    spool.measure()
    assert spool.full
    read.keep()
    spool.measure()
    assert not spool.full
    assert spool.waiting_bytes <= 8 * 1024 + 1000


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    spool = Spool(folder, max_bytes=MIB)
    spool.append(mark("a"))
    read = reader(folder)
    read.read(10)
    read.keep()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


def test_a_run_that_goes_on_in_a_new_segment_is_not_over(tmp_path: Path) -> None:
    """The reader lists the folder, the gateway begins another segment, and only then the reader looks at the first."""
    spool = Spool(tmp_path, max_bytes=64 * 1024)
    spool.append(mark("open"))

    class Slow(Reader):
        def _segments(self) -> dict[str, list[int]]:
            listed = super()._segments()
            while len(segments(tmp_path)) == 1:
                spool.append(end("other"))
            return listed

    slow = Slow(tmp_path)
    assert slow.claim()
    found = slow.read(1000)
    slow.keep()
    spool.append(end("open"))
    found += slow.read(1000)
    assert not [read for read in found if isinstance(read, Unknown)]
    (read,) = [read for read in found if isinstance(read, Ended) and read.end.serial == "open"]
    assert read.mark == mark("open")


def test_a_segment_that_cannot_be_read_keeps_no_other_run_out(tmp_path: Path) -> None:
    (tmp_path / f"0-000000{SUFFIX}").mkdir(parents=True)
    spool = Spool(tmp_path, max_bytes=MIB)
    spool.append(end("r1"))
    (tmp_path / f"x-000000{SUFFIX}").mkdir()
    reading = reader(tmp_path)
    assert serials(reading.read(10)) == ["r1"]
    with pytest.raises(OSError, match="directory"):
        reading.read(10)


def test_segments_that_have_ended_are_brought_to_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, max_bytes=64 * 1024, is_synced=True)
    while len(segments(tmp_path)) < 3:
        spool.append(end())
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    spool.sync()
    assert synced == {path.stat().st_ino for path in segments(tmp_path)}
    assert len(reader(tmp_path).read(10_000)) > 100
    spool.close()


def test_what_a_turn_appends_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made as soon as somebody asks for it, or else at the end of the turn."""
    written: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: written.append(len(data)) or write(file, data))
    turn: list[Callable[[], None]] = []
    spool = Spool(tmp_path, max_bytes=MIB, later=turn.append)
    first, second = mark("a"), end("a")
    spool.append(first)
    spool.append(second)
    assert not written
    spool.flush()
    assert written == [len(frame(first)) + len(frame(second))]
    assert len(turn) == 1
    turn.pop()()
    assert len(written) == 1
    spool.append(mark("b"))
    turn.pop()()
    assert len(written) == 2
    spool.append(end("b"))
    spool.close()
    assert serials(reader(tmp_path).read(10)) == ["a", "b"]
