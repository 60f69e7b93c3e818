"""What a trace is made of, whatever file or generator it comes from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class TraceError(ValueError):
    """A trace that cannot be read or replayed as asked: file, line where there is one, and what is wrong."""


class TraceRequest(msgspec.Struct, gc=False):
    """One request.

    at: seconds from the trace's start. Of a request with `after` a replay does not use it: there it is an estimate, by
        the recorded pace, that puts requests in order.
    blocks: a name for each block of the trace's block size, u64; each stands for its block and all before it, so equal
        names mean an equal prefix. The last may name a partial block, which no engine caches.
    session: "" where none is known. turn: 1 for its first request.
    think_s: pause between the completion of `after` and this request.
    after: id of the request whose completion releases this one; None: released at `at`.
    """

    id: str
    at: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    session: str = ""
    turn: int = 1
    tenant: str = ""
    think_s: float = 0.0
    after: str | None = None
    priority: int = 0


class Trace(msgspec.Struct):
    """`requests` in order of arrival, each behind the one it waits for. `block_size` in tokens."""

    name: str
    block_size: int
    requests: list[TraceRequest]
