"""What the server and the client of the relay share: a request, the limits, and how a head is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from http import HTTPStatus

import msgspec

Header = tuple[bytes, bytes]
"""Name in lower case, value without surrounding white space."""

Headers = Mapping[bytes, bytes]

CRLF = b"\r\n"
ONE_WRITE_BYTES = 16 * 1024
"""Up to this size a body is copied behind its head: cheaper than a second buffer."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

HOP_BY_HOP = frozenset(
    b"connection content-length keep-alive proxy-connection te trailer transfer-encoding upgrade".split()
)
"""Headers that speak of one connection (RFC 9110 §7.6.1), and the length: each side writes its own."""

_STATUS_LINES = {int(status): b"HTTP/1.1 %d %b" % (status, status.phrase.encode()) for status in HTTPStatus}


class Request(msgspec.Struct, eq=False):
    """A whole request. `path` keeps its percent-encoding, `query` follows the "?", `peer` has no port.

    named    the first value of each header but Content-Length; requests share it, so it is not to be changed
    head     all headers; requests share it, and its Content-Length may be another one's
    headers  all headers
    """

    method: str
    path: str
    query: bytes
    head: Sequence[Header]
    named: Headers
    body: bytes
    peer: str

    @property
    def headers(self) -> list[Header]:
        length = b"%d" % len(self.body)
        return [(name, value if name != b"content-length" else length) for name, value in self.head]

    def header(self, name: bytes) -> bytes | None:
        """The first value of `name` (lower case)."""
        return self.named.get(name)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask of the server. Sizes in bytes, times in seconds."""

    head_bytes: int = 64 * 1024
    headers: int = 100
    url_bytes: int = 16 * 1024
    body_bytes: int = 64 * 1024 * 1024
    connections: int = 10_000  # open at once; who comes then is told to try again
    pipelined: int = 4  # requests that wait behind the running one before reading stops
    write_buffer_bytes: int = 64 * 1024  # unsent bytes at which the handler is asked to pause
    keep_alive_s: float = 75.0  # above the 60 s of common load balancers, so that the balancer closes first
    head_s: float = 30.0  # from the first byte of a head to its last
    body_idle_s: float = 30.0  # between two pieces of a body
    body_bytes_per_s: float = 1024.0  # a body may take body_idle_s, and a second more for each so many bytes of it
    stall_s: float = 60.0  # a client that takes nothing of its answer
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


def header_lines(headers: Iterable[Header], omit: Container[bytes] = ()) -> bytes:
    """The headers but those in `omit`, each behind a line end.

    Raises ValueError when a line break hides in a name or value: it would let a value start a head of its own.
    """
    lines = [b"\r\n%b: %b" % header for header in headers if header[0] not in omit]
    block = b"".join(lines)
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines):
        raise ValueError("a header holds a line break")
    return block
