"""Compressed bodies of clients, in several parts; compressed answers of engines, however they are cut."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from router.errors import BadRequest
from router.serving.encoding import CorruptAnswer, decode_body, response_decoder

LARGE = random.Random(1).randbytes(100_000)
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}


@pytest.mark.parametrize(
    "parts", [[b"a"], [b"a", b"b"], [b"", b"a", b""], [LARGE, b"b"], [b"a", LARGE], [b"ab"] * 1024]
)
@pytest.mark.parametrize(("coding", "compress"), [(b"gzip", gzip.compress), (b"zstd", zstandard.compress)])
async def test_parts_are_one_body(parts: list[bytes], coding: bytes, compress) -> None:
    body = b"".join(map(compress, parts))
    assert await decode_body(body, coding, limit=1 << 20) == b"".join(parts)


@pytest.mark.parametrize("parts", [[b"a"], [b"a", b"bc" * 50], [LARGE]])
@pytest.mark.parametrize(("coding", "compress"), [(b"gzip", gzip.compress), (b"zstd", zstandard.compress)])
async def test_a_last_part_that_is_cut_short_is_no_whole_body(parts: list[bytes], coding: bytes, compress) -> None:
    body = b"".join(map(compress, parts))
    with pytest.raises(BadRequest, match="corrupt"):
        await decode_body(body[:-1], coding, limit=1 << 20)


@pytest.mark.parametrize(("coding", "compress"), [(b"gzip", gzip.compress), (b"zstd", zstandard.compress)])
async def test_a_body_of_very_many_parts_is_refused(coding: bytes, compress) -> None:
    """Each costs as much as a kilobyte of text, however short it is."""
    with pytest.raises(BadRequest, match="corrupt"):
        await decode_body(compress(b"") * 1025, coding, limit=1 << 20)


def unfolded(coding: str, data: bytes, cut: int) -> tuple[bytes, bool]:
    decoder = response_decoder(coding.encode())
    assert decoder is not None
    pieces = [decoder.decompress(data[at : at + cut]) for at in range(0, len(data), cut)]
    return b"".join(pieces), decoder.whole


@pytest.mark.parametrize("coding", CODINGS)
@given(body=st.binary(max_size=3_000), cut=st.integers(1, 3_000))
def test_what_comes_out_does_not_depend_on_how_it_came(coding: str, body: bytes, cut: int) -> None:
    data = CODINGS[coding](body)
    assert unfolded(coding, data, cut) == (body, True)
    assert not unfolded(coding, data[:-1], cut)[1]


@pytest.mark.parametrize("coding", CODINGS)
@given(start=st.sampled_from([b"", *[compress(b"abc") for compress in CODINGS.values()]]), rest=st.binary(max_size=200))
def test_arbitrary_bytes_come_out_or_are_corrupt(coding: str, start: bytes, rest: bytes) -> None:
    try:
        unfolded(coding, start + rest, 7)
    except CorruptAnswer:
        pass
