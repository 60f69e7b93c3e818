"""A rank's event stream, batches, replays and faults in any order: what is missing is said, nothing comes twice."""

from __future__ import annotations

from collections.abc import Iterable

from adapters._stream import EventStream, Item
from router.core import EventBatch
from tests.fuzz.source import Source

WORDS = tuple(
    bytes(word) for word in ((0,), (1,), (2,), (3,), (0, 1), (1, 0, 0), (0, 2, 0), (0, 7), (5, 5), (255, 255))
)

_HELD = 200
_PAYLOADS = (b"\x93\x01\x90\x00", b"\x93\x02\x90\x00", b"\x92\x01\x90", b"broken", b"\x93\x03\x91\xc0\x00" + b"x" * 90)
_JUMPS = (*[1] * 20, *[0, 2, 3, -1, -9] * 4, 5000, -5000)
_LAST = 2**64 - 1


class _Reader:
    """Follows what comes out, as the feed does."""

    def __init__(self, after: int | None) -> None:
        self.last = after if after is not None else -1

    def take(self, items: Iterable[Item]) -> None:
        for item in items:
            if isinstance(item, EventBatch):
                assert item.seq == self.last + 1 or (item.seq == self.last and not item.events)
                self.last = item.seq
            elif item.kind == "restart":
                self.last = -1
            elif item.kind == "gap":
                assert item.first_seq is not None
                assert item.last_seq is not None
                assert item.first_seq == self.last + 1
                assert item.last_seq >= item.first_seq
                self.last = item.last_seq


def target(data: bytes) -> None:
    source = Source(data)
    now = 0.0
    after = source.pick((None, 0, 3, 100))
    stream = EventStream(after, can_replay=source.flag(), clock=lambda: now, max_held_bytes=_HELD)
    reader = _Reader(after)
    seq = reader.last
    while not source.empty:
        kind = source.number(10)
        if kind < 8:
            seq = source.number(6) if kind == 7 else min(max(seq + source.pick(_JUMPS), 0), _LAST)
            payload = source.pick(_PAYLOADS)
            reader.take((stream.live if kind % 2 else stream.replayed)(seq, payload))
        elif kind == 8:
            reader.take(source.pick((stream.replay_ended, stream.connected))())
        else:
            reader.take(source.pick((stream.replay_failed, stream.disconnected))("why"))
            now += 20.0
        _check(stream, reader)


def _check(stream: EventStream, reader: _Reader) -> None:
    assert stream._last == reader.last
    assert stream._held_bytes == sum(map(len, stream._held.values()))
    assert stream._held_bytes <= _HELD + max(map(len, _PAYLOADS))
    assert all(seq > stream._last for seq in stream._held)
    assert not stream._held or stream.replaying
    assert stream.wanted is None or 0 <= stream.wanted <= _LAST
