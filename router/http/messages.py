"""What the server and the client of the relay share: a request, the limits, and how a head is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from http import HTTPStatus

import msgspec

Header = tuple[bytes, bytes]
"""Name in lower case, value without surrounding white space."""

CRLF = b"\r\n"
ONE_WRITE_BYTES = 16 * 1024
"""Up to this size a body is copied behind its head: cheaper than a second buffer."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

HOP_BY_HOP = frozenset(
    b"connection content-length keep-alive proxy-connection te trailer transfer-encoding upgrade".split()
)
"""Headers that speak of one connection (RFC 9110 §7.6.1), and the length: each side writes its own."""

_STATUS_LINES = {int(status): b"HTTP/1.1 %d %b" % (status, status.phrase.encode()) for status in HTTPStatus}


class Request:
    """A whole request. `path` keeps its percent-encoding, `query` follows the "?", `peer` has no port."""

    __slots__ = ("body", "headers", "method", "path", "peer", "query")

    def __init__(self, method: str, path: str, *, query: bytes, headers: list[Header], body: bytes, peer: str) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.peer = peer

    def header(self, name: bytes) -> bytes | None:
        """The first value of `name` (lower case)."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask of the server. Sizes in bytes, times in seconds."""

    head_bytes: int = 64 * 1024
    headers: int = 100
    url_bytes: int = 16 * 1024
    body_bytes: int = 64 * 1024 * 1024
    pipelined: int = 4  # requests that wait behind the running one before reading stops
    write_buffer_bytes: int = 64 * 1024  # unsent bytes at which the handler is asked to pause
    keep_alive_s: float = 75.0  # above the 60 s of common load balancers, so that the balancer closes first
    head_s: float = 30.0  # from the first byte of a head to its last
    body_idle_s: float = 30.0  # between two pieces of a body
    stall_s: float = 120.0  # a client that takes nothing of its answer
    linger_s: float = 5.0  # after a refusal: so long the client's remaining bytes are read and dropped


@dataclasses.dataclass(frozen=True, slots=True)
class PoolLimits:
    """How an engine's connections are used. Times in seconds."""

    connect_s: float = 5.0
    idle_s: float = 4.0  # below the 5 s after which vLLM 0.32 and SGLang 0.5.23 close an idle connection
    connections: int = 0  # open at once; 0: unlimited. Further exchanges wait for a free one, in order
    head_bytes: int = 256 * 1024


class Refusal(Exception):
    """A request that is answered by the server itself, and ends its connection. `message` never repeats client data."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


def error_body(message: str, *, kind: str = "invalid_request_error", code: str | None = None) -> bytes:
    """The error object of the OpenAI API."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def lower_names(fields: Iterable[Header]) -> list[Header]:
    """Headers from a parser that leaves names as they came and white space after values."""
    return [(name.lower(), value.rstrip(b" \t")) for name, value in fields]


def status_line(status: int) -> bytes:
    """Without the line end. The reason phrase may be empty (RFC 9112 §4)."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status


def head_lines(first: Sequence[bytes], headers: Iterable[Header], omit: frozenset[bytes]) -> bytes:
    """`first` and the headers but those in `omit`, one a line, without the last line end.

    Raises ValueError when a line break hides in a name or value: it would let a value start a head of its own.
    """
    lines = [*first, *[name + b": " + value for name, value in headers if name not in omit]]
    block = CRLF.join(lines)
    if block.count(b"\n") != len(lines) - 1 or block.count(b"\r") != len(lines) - 1:
        raise ValueError("a header holds a line break")
    return block
