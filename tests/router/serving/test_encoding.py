"""Compressed answers of engines, however they are cut and whatever they are."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from router.serving.encoding import CorruptAnswer, response_decoder

CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}


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
