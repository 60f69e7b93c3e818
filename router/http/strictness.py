"""The head of a request read the strict way (RFC 9112), so that two readers cannot disagree on where it ends.

llhttp 9 (httptools 0.9) itself refuses repeated or malformed lengths, a length beside a coding, bare CR or LF, folded
lines, white space before a colon, control bytes, bad chunks. It accepts, and this file refuses: "gzip, chunked",
codings in HTTP/1.0, HTTP/0.9 and 2.0, a missing or second Host, fragments, "*" for any method, CONNECT.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from router.http.messages import Header, Refusal

_FRAMING = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect"))
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::[0-9]*)?").fullmatch
_ABSOLUTE = re.compile(rb"https?://([^/?@]+)(/[^?]*)?(?:\?(.*))?", re.IGNORECASE).fullmatch
_METHODS = {name.encode(): name for name in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")}


def check_version(version: str) -> bool:
    """Whether it is HTTP/1.0. Raises Refusal."""
    if version == "1.1":
        return False
    if version == "1.0":
        return True
    raise Refusal(505, "Only HTTP/1.1 and HTTP/1.0 are spoken here.")


def check_method(method: bytes) -> str:
    """Raises Refusal for CONNECT, and for the WebDAV, UPnP and RTSP methods that llhttp knows as well."""
    try:
        return _METHODS[method]
    except KeyError:
        raise Refusal(405, "This method is not supported.", code="method_not_allowed") from None


def check_framing(headers: Iterable[Header], *, http10: bool) -> tuple[int, bool]:
    """Bytes of body announced (0 for a chunked one), and whether a 100 is awaited before it. Raises Refusal."""
    hosts = 0
    length: int | None = None
    chunked = expects = False
    for name, value in headers:
        if name not in _FRAMING:
            continue
        if name == b"host":
            hosts += 1
            _check_host(value)
        elif name == b"content-length":
            length = _length(value, seen=length)
        elif name == b"transfer-encoding":
            chunked = _chunked(value, seen=chunked, http10=http10)
        else:
            expects = _expects_continue(value, http10=http10)
    if hosts > 1 or (hosts == 0 and not http10):
        raise Refusal(400, "An HTTP/1.1 request has exactly one Host header.")
    if chunked and length is not None:
        raise Refusal(400, "Content-Length and Transfer-Encoding exclude each other.")
    return length or 0, expects and (chunked or bool(length))


def _check_host(value: bytes) -> None:
    if not _HOST(value):
        raise Refusal(400, "The Host header is not valid.")


def _length(value: bytes, *, seen: int | None) -> int:
    if seen is not None or not value.isdigit():
        raise Refusal(400, "The Content-Length is not one number.")
    return int(value)


def _chunked(value: bytes, *, seen: bool, http10: bool) -> bool:
    if seen or http10 or value.lower() != b"chunked":
        raise Refusal(400, 'The only Transfer-Encoding accepted is "chunked", once, in HTTP/1.1.')
    return True


def _expects_continue(value: bytes, *, http10: bool) -> bool:
    if http10:  # such an expectation is ignored (RFC 9110 §10.1.1)
        return False
    if value.lower() != b"100-continue":
        raise Refusal(417, "The only expectation that can be met is 100-continue.")
    return True


def split_target(target: bytes, method: str, headers: list[Header]) -> tuple[str, bytes]:
    """Path and query. The authority of an absolute target takes the place of Host (RFC 9112 §3.2.2). Raises Refusal."""
    if b"#" in target:
        raise Refusal(400, "A request target has no fragment.")
    if target.startswith(b"/"):
        path, _, query = target.partition(b"?")
        return path.decode("ascii"), query
    if target == b"*" and method == "OPTIONS":
        return "*", b""
    absolute = _ABSOLUTE(target)
    if absolute is None or not _HOST(absolute[1]):
        raise Refusal(400, "The request target is not valid.")
    headers[:] = [(name, absolute[1] if name == b"host" else value) for name, value in headers]
    return (absolute[2] or b"/").decode("ascii"), absolute[3] or b""
