"""Compressed bodies in several parts; the rest is in tests/cases/test_fidelity.py."""

from __future__ import annotations

import gzip
import random

import pytest
import zstandard

from router.errors import BadRequest
from router.serving.encoding import decode_body

LARGE = random.Random(1).randbytes(100_000)


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
