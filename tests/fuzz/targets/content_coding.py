"""Compressed request bodies: decoded as their own libraries do, never past the bound, whole or refused."""

from __future__ import annotations

import gzip
import zlib

import zstandard

from router.errors import BadRequest
from router.serving.encoding import _decoded
from tests.fuzz.source import Source

WORDS = (
    b"\x1f\x8b\x08\0\0\0\0\0\0\xff", b"\x78\x9c", b"\x03\0", b"\x03\0\0\0\0\0\0\0\0\0", b"\x28\xb5\x2f\xfd",
    b"\x50\x2a\x4d\x18", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x4b\x04\0", gzip.compress(b"ab", mtime=0),
    zlib.compress(b"ab"), zlib.compress(b"ab", wbits=-15), zstandard.compress(b"ab"),
    zstandard.compress(bytes(5000)), gzip.compress(bytes(5000), mtime=0),
)  # fmt: skip


def target(data: bytes) -> None:
    source = Source(data)
    name, limit = source.pick(("gzip", "deflate", "zstd")), source.number(256)
    body = source.rest()
    try:
        decoded = _decoded(body, name, limit)
    except BadRequest:
        return
    if decoded is None:
        return
    assert len(decoded) <= limit
    if name == "gzip":
        assert decoded == gzip.decompress(body)
    elif name == "zstd":
        assert decoded == b"".join(_frames(body))
    else:
        assert decoded in (_inflated(body, 15), _inflated(body, -15))


def _frames(body: bytes) -> list[bytes]:
    frames = []
    while body:
        frame = zstandard.ZstdDecompressor().decompressobj()
        frames.append(frame.decompress(body))
        assert frame.eof
        body = frame.unused_data
    return frames


def _inflated(body: bytes, wbits: int) -> bytes | None:
    member = zlib.decompressobj(wbits)
    try:
        inflated = member.decompress(body)
    except zlib.error:
        return None
    return inflated if member.eof else None
