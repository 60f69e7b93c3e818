"""Content codings (RFC 9110 §8.4.1; zstd: RFC 8878): compressed bodies of clients, compressed answers of engines.

A bound on the decoded size holds while decoding, so that a small body cannot unfold into a large one.
"""

from __future__ import annotations

import asyncio
import io
import zlib
from typing import Protocol

import zstandard

from router.errors import BadRequest, BodyTooLarge, EngineProtocolError, UnsupportedEncoding

SUPPORTED = "gzip, deflate, zstd"
_ON_LOOP_BYTES = 256 * 1024  # unfolds in well under a millisecond; more goes to a thread
_WINDOW_BYTES = 8 << 20  # what RFC 8878 asks decoders to support; a larger window is a claim on our memory
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's wbits
_MEMBERS = 1024  # of which one body may consist: each costs about 2 µs, however short
_FIRST_PIECE = 512
_UNFOLDED_BYTES = 16 << 20  # what one read of an answer may become: a read has at most 256 KiB
_ANSWER_MEMBERS = 256  # in one read of an answer
_ZSTD_PIECE = 1024  # becomes at most 32 MiB, however hostile: a block is 4 bytes or more, and 128 KiB when unfolded

GZIP_MAGIC = b"\x1f\x8b"
_TEXT = frozenset(b'{["deir: \t\r\n')
"""What JSON and event streams begin with, and no coding does."""


class CorruptAnswer(Exception):
    """It is not what its coding says, or unfolds without a bound."""


class Decoder(Protocol):
    """whole: nothing is missing at the end of what came."""

    @property
    def whole(self) -> bool: ...

    def decompress(self, data: bytes, /) -> bytes:
        """Raises CorruptAnswer."""
        ...


async def decode_body(body: bytes, coding: bytes, *, limit: int) -> bytes:
    """A request body without its content coding, at most `limit` bytes of it.

    Raises UnsupportedEncoding, BodyTooLarge, and BadRequest where the data is corrupt or cut short.
    """
    name = _name(coding)
    if name == "identity":
        return body
    if name not in ("gzip", "deflate", "zstd"):
        raise UnsupportedEncoding(f"Content-Encoding is not supported; use one of {SUPPORTED}.")
    if len(body) <= _ON_LOOP_BYTES:
        small = _decoded(body, name, min(limit, _ON_LOOP_BYTES))
        if small is not None:
            return small
    whole = await asyncio.to_thread(_decoded, body, name, limit)
    if whole is None:
        raise BodyTooLarge(f"The decoded request body is larger than {limit} bytes.")
    return whole


def response_decoder(coding: bytes) -> Decoder | None:
    """Unfolds an engine's answer piece by piece; None for identity. We never ask for a coding, but proxies add them.

    Some add no more than the header: text that claims to be compressed and is not passes as it is.
    """
    name = _name(coding)
    if name == "identity":
        return None
    if name in ("gzip", "deflate"):
        return _Zlib(_GZIP if name == "gzip" else _ZLIB)
    if name == "zstd":
        return _Zstd()
    raise EngineProtocolError("The engine answered in a content coding that was not asked for.")


class _Zlib:
    def __init__(self, wbits: int) -> None:
        self._wbits = wbits
        self._member: zlib._Decompress | None = None
        self._plain: bool | None = None  # None: nothing has come

    @property
    def whole(self) -> bool:
        return self._member is None or self._member.eof

    def decompress(self, data: bytes) -> bytes:
        if self._plain is None and data:
            self._plain = data[0] in _TEXT
        if self._plain:
            return data
        unfolded, members = b"", 0
        while data:  # one gzip file may be several, one after the other
            members += 1
            if self._member is None or self._member.eof:
                self._member = zlib.decompressobj(self._wbits)
            try:
                unfolded += self._member.decompress(data, _UNFOLDED_BYTES - len(unfolded) + 1)
            except zlib.error as error:
                raise CorruptAnswer(repr(error)) from error
            if len(unfolded) > _UNFOLDED_BYTES or members > _ANSWER_MEMBERS:
                raise CorruptAnswer("it unfolds without a bound")
            data = self._member.unused_data if self._member.eof and self._wbits == _GZIP else b""
        return unfolded


class _Zstd:
    def __init__(self) -> None:
        self._frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
        self._plain: bool | None = None  # None: nothing has come

    @property
    def whole(self) -> bool:
        return self._plain is not False or self._frame.eof

    def decompress(self, data: bytes) -> bytes:
        if self._plain is None and data:
            self._plain = data[0] in _TEXT
        if self._plain:
            return data
        unfolded, size = [], 0
        for start in range(0, len(data), _ZSTD_PIECE):
            if self._frame.eof:  # a second frame, which nobody writes unasked
                break
            try:
                unfolded.append(self._frame.decompress(data[start : start + _ZSTD_PIECE]))
            except zstandard.ZstdError as error:
                raise CorruptAnswer(repr(error)) from error
            size += len(unfolded[-1])
            if size > _UNFOLDED_BYTES:
                raise CorruptAnswer("it unfolds without a bound")
        return b"".join(unfolded)


def _name(coding: bytes) -> str:
    name = coding.decode("latin-1").strip().lower()
    return {"": "identity", "x-gzip": "gzip"}.get(name, name)


def _decoded(body: bytes, name: str, limit: int) -> bytes | None:
    """None: more than `limit` bytes would come out."""
    try:
        decoded = _zstd(body, limit) if name == "zstd" else _zlib(body, name, limit)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise BadRequest("The compressed request body is corrupt.", code="invalid_body") from error
    return decoded if len(decoded) <= limit else None


def _zlib(body: bytes, name: str, limit: int) -> bytes:
    if name == "gzip":
        return _members(body, _GZIP, limit)
    try:
        return _members(body, _ZLIB, limit)
    except zlib.error:  # "deflate" means zlib's format, but some clients send it bare
        return _members(body, _RAW, limit)


def _members(body: bytes, wbits: int, limit: int) -> bytes:
    """One gzip file may be several, one after the other. Reads at most one byte past `limit`.

    Where a member ends, zlib copies all it was given beyond; so it is given little at first, then ever more.
    """
    decoded = bytearray()
    at = 0
    for _ in range(_MEMBERS):
        member, size = zlib.decompressobj(wbits), _FIRST_PIECE
        while not member.eof:
            piece = body[at : at + size]
            if not piece:
                raise EOFError("cut short")
            decoded += member.decompress(piece, limit + 1 - len(decoded))
            if len(decoded) > limit:
                return bytes(decoded)
            at, size = at + len(piece), size * 2
        at -= len(member.unused_data)
        if wbits != _GZIP or at == len(body):
            return bytes(decoded)
    raise zlib.error("too many members")


def _zstd(body: bytes, limit: int) -> bytes:
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(
        io.BytesIO(body), read_across_frames=True
    )
    decoded = reader.read(limit + 1)
    if len(decoded) <= limit and not _ends_whole(body):
        raise EOFError("cut short")
    return decoded


def _ends_whole(body: bytes) -> bool:
    """stream_reader takes a cut frame for an end, so each frame is asked whether it has seen its own."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    at = 0
    for _ in range(_MEMBERS):
        frame, size = decompressor.decompressobj(), _FIRST_PIECE
        while not frame.eof:
            piece = body[at : at + size]
            if not piece:
                return False
            frame.decompress(piece)
            at, size = at + len(piece), size * 2
        at -= len(frame.unused_data)
        if at == len(body):
            return True
    return False
