"""One rank's event stream, made whole: order, duplicates, gaps, replays and restarts. No sockets, no tasks.

The driver (`_zmq.py`) says what arrived and yields what comes out; when `wanted` is a sequence number it drops the
replay it may have running, asks the engine for everything from that number on, and sets it to None. What the wire lets
us know (vLLM 0.9 to 0.33, SGLang 0.4.6 to 0.5.23):

    sequence = last + 1     the next batch
    sequence > last + 1     a gap: the publisher dropped batches
    sequence <= last        a re-delivery, or a new engine process, which counts from 0 again and says nothing
    replay                  the last 10,000 batches or so; too old a start is no error, the answer just begins later

A replay is asked from the last batch we have, not from the one after it: that the engine still has this very batch
proves that it is the same process, even if a new one has counted past our last number while we were away.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from xxhash import xxh3_64_intdigest

from adapters._events import decode
from router.core import EventBatch, Lost
from router.errors import EngineProtocolError

Item = EventBatch | Lost

_REMEMBERED = 4096  # batches whose digest is kept: more than can arrive live while a replay runs
_REDELIVERY = 8  # a batch we have no digest of, but no further back than this, is late rather than a new engine's
_HOLES = 4  # replays asked again from a hole, per replay


class EventStream:
    """`after`: the last sequence number already known, None: nothing is known yet.

    Methods return what to yield, in order. Iterate the result to its end before the next call: decoding and the state
    behind it move on as it is iterated, so that a long run of batches can be spread over several turns of a loop.
    """

    def __init__(
        self,
        after: int | None,
        *,
        can_replay: bool,
        clock: Callable[[], float],
        max_held_bytes: int = 32 << 20,
        cooldown_s: float = 30.0,
    ) -> None:
        self.wanted: int | None = None
        self.replaying = False
        self._can_replay = can_replay
        self._clock = clock
        self._max_held_bytes = max_held_bytes
        self._cooldown_s = cooldown_s
        self._cooling_until = float("-inf")
        self._last = -1 if after is None else after
        self._joined = False  # whether a batch was taken since the start, or since the last restart
        self._digests = array("Q", bytes(8 * _REMEMBERED))  # by sequence modulo its length; 0: not seen
        self._held: dict[int, bytes] = {}  # batches past `_last` + 1
        self._held_bytes = 0
        self._first_reply: int | None = None
        self._holes_left = 0
        self._stray = False  # whether the last batch was another one under a sequence we had just seen
        self._in_doubt = after is not None  # whether the driver's reader waits to hear that nothing was missed

    def connected(self) -> Iterable[Item]:
        """The subscription is in force, for the first time or again: only a replay tells what it has missed."""
        self._cooling_until = float("-inf")
        if self._can_replay:
            self._ask_anew(max(self._last, 0))
        return ()

    def disconnected(self, reason: str) -> Iterable[Item]:
        self._in_doubt = True
        return (Lost("silent", reason),)

    def live(self, seq: int, payload: bytes) -> Iterable[Item]:
        """A batch from the subscription."""
        if seq == self._last + 1 and not self.replaying:
            return (self._take(seq, payload),)
        if seq <= self._last:
            return () if self._is_repeat(seq, payload) else self._restart("sequence fell", seq, payload)
        self._hold(seq, payload)
        if self.replaying:
            return () if self._held_bytes <= self._max_held_bytes else self.replay_failed("too much to hold")
        if self._can_replay and self._clock() >= self._cooling_until:
            self._ask_anew(max(self._last, 0))
            return ()
        return self._go_on("no replay")

    def replayed(self, seq: int, payload: bytes) -> Iterable[Item]:
        """A batch from the replay that was asked for last."""
        if not self.replaying:
            return ()
        if self._first_reply is None:
            self._first_reply = seq
        if seq <= self._last:
            known = self._known(seq)
            return () if known in (0, _digest(payload)) else self._restart("another batch under the last sequence")
        if seq == self._last + 1:
            self._release(seq)
            return (self._take(seq, payload),)
        self._hold(seq, payload)
        return () if self._held_bytes <= self._max_held_bytes else self.replay_failed("too much to hold")

    def replay_ended(self) -> Iterable[Item]:
        """The end mark has come."""
        if not self.replaying:
            return ()
        if self._first_reply is None and not self._held and self._last >= 0:
            return self._restart("sequence fell")  # it does not even have the batch we already know
        return self._settle()

    def replay_failed(self, reason: str) -> Iterable[Item]:
        """No answer, or not all of one. What is missing is lost, and no gap asks again for a while."""
        if not self.replaying:
            return ()
        self._cooling_until = self._clock() + self._cooldown_s
        return self._go_on(reason)

    def _ask_anew(self, start: int) -> None:
        self._holes_left = _HOLES
        self._ask(start)

    def _ask(self, start: int) -> None:
        self.wanted = start
        self.replaying = True
        self._first_reply = None

    def _settle(self) -> Iterator[Item]:
        """After a replay: hand over what is in order now; a hole within the answer is asked for once more."""
        yield from self._drain()
        if self._held and not self._is_hole_within_replay():
            yield self._lose("no longer in the engine's replay buffer")
            yield from self._drain()
        if self._held and self._holes_left and self._is_hole_within_replay():
            self._holes_left -= 1
            self._ask(self._last + 1)
            return
        if self._in_doubt and self._last >= 0:
            self._in_doubt = False
            yield EventBatch(self._last, [])  # nothing was missed: the stream is whole up to here
        yield from self._go_on("missing in the replay")

    def _is_hole_within_replay(self) -> bool:
        # Before the first reply there is no hole: the engine's history begins later than what we asked for.
        return self._first_reply is not None and self._last >= self._first_reply

    def _go_on(self, reason: str) -> Iterator[Item]:
        """Follow the live stream again; what is missing before and between the batches held is lost."""
        self.replaying = False
        self.wanted = None
        yield from self._drain()
        while self._held:
            yield self._lose(reason)
            yield from self._drain()

    def _lose(self, reason: str) -> Lost:
        """Give up the batches before the first one held."""
        first, last = self._last + 1, min(self._held) - 1
        for seq in range(max(first, last - _REMEMBERED + 1), last + 1):
            self._digests[seq % _REMEMBERED] = 0
        self._last = last
        return Lost("gap", reason, first, last)

    def _drain(self) -> Iterator[Item]:
        while (payload := self._release(self._last + 1)) is not None:
            yield self._take(self._last + 1, payload)

    def _take(self, seq: int, payload: bytes) -> Item:
        self._last = seq
        self._joined = True
        self._stray = self._in_doubt = False
        self._digests[seq % _REMEMBERED] = _digest(payload)
        try:
            return decode(seq, payload)
        except EngineProtocolError as error:
            return Lost("gap", error.message, seq, seq)

    def _hold(self, seq: int, payload: bytes) -> None:
        self._release(seq)
        self._held[seq] = payload
        self._held_bytes += len(payload)

    def _release(self, seq: int) -> bytes | None:
        payload = self._held.pop(seq, None)
        if payload is not None:
            self._held_bytes -= len(payload)
        return payload

    def _known(self, seq: int) -> int:
        """The digest of a batch up to `_last`; 0: lost, too long ago, or before we joined."""
        return self._digests[seq % _REMEMBERED] if seq > self._last - _REMEMBERED else 0

    def _is_repeat(self, seq: int, payload: bytes) -> bool:
        known = self._known(seq)
        if known == _digest(payload):
            return True
        if not self._joined or seq <= self._last - _REDELIVERY:
            return False
        # Nearly the last sequence, but not the bytes seen under it. One such batch is a stray; a new process goes on.
        was_stray, self._stray = self._stray, bool(known)
        return not known or (not was_stray and seq >= _REDELIVERY)

    def _restart(self, reason: str, seq: int | None = None, payload: bytes = b"") -> Iterator[Item]:
        """A new engine process. `seq` and `payload`: its batch that showed it, where that is not from a replay."""
        self._last = -1
        self._joined = self._stray = self._in_doubt = self.replaying = False
        self.wanted = None
        self._digests = array("Q", bytes(8 * _REMEMBERED))
        self._held.clear()
        self._held_bytes = 0
        yield Lost("restart", reason)
        if seq == 0:
            yield self._take(0, payload)
            return
        if seq is not None:
            self._hold(seq, payload)
        if self._can_replay:
            self._ask_anew(0)
        else:
            yield from self._go_on("no replay")


def _digest(payload: bytes) -> int:
    return xxh3_64_intdigest(payload) or 1
