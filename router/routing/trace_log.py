"""What was served lately, one compact row a request: what a replay needs of it, and nothing anybody wrote.

No text and no token ids. A prompt is the names of its blocks, sessions and tenants are hashes under a salt that is new
with every process.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec
from xxhash import xxh3_64_intdigest

from router.core import Ask, Outcome

BLOCK_TOKENS = 64
"""Prompts are named in blocks of at least so many tokens. With an engine's own 16, names would take four times the
memory; with these, a replay's caches hit up to 48 tokens less of a prompt."""

_ROW_BYTES = 48  # of a row beside what is in it
_SEGMENT_BYTES = 64 << 10  # what is dropped, and handed out, at once
_PACKED_AT_ONCE = 32
_MOST_TOKENS = 100_000_000  # a count beyond it is an engine's mistake
_NAMES = 8  # of a prompt that was not known: as many as a later one says of itself
_MOST_NAMES = 1 << 14
_FORGOTTEN_AT_ONCE = 256
"""Names: a dict walks over what it has dropped at its front each time it is asked for the first."""
_ROWS_OF_A_NAME = 64


class TracedRequest(msgspec.Struct, array_like=True, gc=False):
    """One row.

    keys: u64s in native order, one a block of `block_size` tokens, each standing for its block and all before it. They
    end where the prompt was not known. block_size 0: there are none.
    session, tenant: salted hashes; 0: none.
    """

    at: float  # arrival, wall clock, seconds
    input_tokens: int
    output_tokens: int
    keys: bytes
    block_size: int
    turn: int
    session: int
    tenant: int
    model: str
    stream: bool
    ttft_s: float | None  # of streams
    instance: str


_encoder = msgspec.msgpack.Encoder()
_buffer = bytearray()
unpack = msgspec.msgpack.Decoder(TracedRequest).decode
"""A row of `TraceLog.read`."""


def _pack(row: TracedRequest) -> bytes:
    """Copied out of a buffer: what the encoder returns by itself keeps its spare room, a third more memory."""
    _encoder.encode_into(row, _buffer)
    return bytes(_buffer)


class _Segment:
    __slots__ = ("bytes", "first", "rows")

    def __init__(self, first: int) -> None:
        self.first = first  # the number of its first row, of all rows there ever were
        self.rows: list[bytes] = []
        self.bytes = 0


class TraceLog:
    """Give `note` every request that has ended. Lives on one event loop.

    max_requests, max_bytes: bounds of what is kept, at which the oldest are dropped, some hundred at a time.
    salt: for tests.

    Text that nobody has sent before is mostly not tokenized before it is placed (`serving/prompt`), so the first turn
    of a conversation has no keys for it. The turn after it has: it says by which text keys its beginning went while it
    was unknown, and the first turn's row gets the keys it should have had.
    """

    def __init__(
        self,
        *,
        max_requests: int = 100_000,
        max_bytes: int = 64 << 20,
        block_tokens: int = BLOCK_TOKENS,
        salt: int | None = None,
    ) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._block_tokens = block_tokens
        self._salt = secrets.randbits(64) if salt is None else salt
        self._segments: deque[_Segment] = deque((_Segment(0),))
        self._next = 0
        self._bytes = 0
        self._ended: list[tuple[Ask, Outcome]] = []
        self._unknown: dict[int, tuple[int, ...]] = {}  # text key → rows without its tokens, by age

    def __len__(self) -> int:
        """Requests kept."""
        self._pack_all()
        return self._next - self._segments[0].first

    @property
    def size_bytes(self) -> int:
        self._pack_all()
        return self._bytes

    def note(self, ask: Ask, outcome: Outcome) -> None:
        """A request has ended. Of those that no engine answered nothing is kept. Packed several at once: 2 µs each."""
        if outcome.status < 400 if outcome.finish == "complete" else outcome.ttft_s is not None:
            self._ended.append((ask, outcome))
            if len(self._ended) >= _PACKED_AT_ONCE:
                self._pack_all()

    def read(self, position: int) -> tuple[list[bytes], int | None]:
        """Some packed rows, in the order in which they ended, and the position of those after them; None: no more.

        0 is the oldest that is kept. What is dropped between two calls is passed over.
        """
        self._pack_all()
        segments = self._segments
        found = max(0, bisect_right(segments, position, key=lambda segment: segment.first) - 1)
        segment = segments[found]
        rows = segment.rows[max(0, position - segment.first) :]
        return rows, None if segment is segments[-1] else segment.first + len(segment.rows)

    # --- writing

    def _pack_all(self) -> None:
        ended, self._ended = self._ended, []
        for ask, outcome in ended:
            self._add(ask, outcome)

    def _add(self, ask: Ask, outcome: Outcome) -> None:
        prompt, usage = ask.prompt, outcome.usage
        block_size, keys = 0, b""
        for size, fine in prompt.keys.items():  # the smallest first: every prompt of the model has keys of that size
            step = -(-self._block_tokens // size)
            block_size, keys = size * step, fine[step - 1 :: step].tobytes()
            break
        if prompt.known_text_keys and self._unknown and block_size:
            self._make_known(prompt.known_text_keys, keys, block_size)
        if prompt.text_keys:
            self._remember(prompt.text_keys[-_NAMES:])
        self._append(
            _pack(
                TracedRequest(
                    outcome.started_at,
                    min(max(1, outcome.input_tokens), _MOST_TOKENS),
                    min(max(1, usage.output_tokens if usage is not None else outcome.events), _MOST_TOKENS),
                    keys,
                    block_size,
                    max(1, prompt.turn),
                    self._hashed(ask.session) if ask.session else 0,
                    self._hashed(ask.tenant) if ask.tenant else 0,
                    ask.model,
                    ask.stream,
                    outcome.ttft_s,
                    outcome.instance or "",
                )
            )
        )

    def _hashed(self, name: str) -> int:
        return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"), self._salt)

    def _append(self, row: bytes) -> None:
        segment = self._segments[-1]
        if segment.bytes >= _SEGMENT_BYTES:
            segment = _Segment(self._next)
            self._segments.append(segment)
        segment.rows.append(row)
        self._next += 1
        self._grow(segment, len(row) + _ROW_BYTES)
        while len(self._segments) > 1 and (
            self._bytes > self._max_bytes or self._next - self._segments[0].first > self._max_requests
        ):
            self._bytes -= self._segments.popleft().bytes

    def _grow(self, segment: _Segment, by: int) -> None:
        segment.bytes += by
        self._bytes += by

    # --- prompts that become known later

    def _remember(self, text_keys: Sequence[tuple[int, int]]) -> None:
        """The row to be written lacks the tokens of these texts."""
        unknown, number = self._unknown, self._next
        for name, _ in text_keys:
            rows = unknown.get(name)
            if rows is None:
                unknown[name] = (number,)
            elif len(rows) < _ROWS_OF_A_NAME:
                unknown[name] = (*rows, number)
        if len(unknown) > _MOST_NAMES:
            for name in list(islice(unknown, _FORGOTTEN_AT_ONCE)):
                del unknown[name]

    def _make_known(self, known_text_keys: Sequence[tuple[int, int]], keys: bytes, block_size: int) -> None:
        """`keys` of a later prompt that begins with these texts, so many tokens each."""
        for name, tokens in reversed(known_text_keys):  # the longest first
            for number in self._unknown.pop(name, ()):
                self._lengthen(number, keys[: tokens // block_size * 8], block_size)

    def _lengthen(self, number: int, keys: bytes, block_size: int) -> None:
        segments = self._segments
        if number < segments[0].first:
            return
        segment = segments[bisect_right(segments, number, key=lambda segment: segment.first) - 1]
        row = unpack(segment.rows[number - segment.first])
        if len(keys) > len(row.keys):
            self._grow(segment, len(keys) - len(row.keys))
            row.keys, row.block_size = keys, block_size
            segment.rows[number - segment.first] = _pack(row)
