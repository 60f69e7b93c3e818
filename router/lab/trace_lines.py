"""A trace file line by line: rows of a known shape, and errors that say where."""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from router.lab.trace_request import TraceError

Row = TypeVar("Row")

_MOST_TOKENS = 100_000_000  # a row beyond it is damaged; as it stands it would fill the memory with block names
InputTokens = Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
OutputTokens = Annotated[int, Meta(ge=0, le=_MOST_TOKENS)] | None


class BadRow(ValueError):
    """What is wrong with a row, said by code that knows neither file nor line."""


def at_line(path: Path, number: int, what: object) -> TraceError:
    return TraceError(f"{path}:{number}: {what}")


def rows(path: Path, shape: type[Row]) -> Iterator[tuple[int, Row]]:
    """(line number from 1, row) of every line that is not blank. Raises TraceError, or OSError where it can't open."""
    decoder = msgspec.json.Decoder(shape)
    for number, line in _lines(path):
        try:
            row = decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise at_line(path, number, error) from None
        yield number, row


def first_fields(path: Path) -> set[str]:
    """The names of the fields of the first row."""
    for _, row in rows(path, dict[str, msgspec.Raw]):
        return set(row)
    raise TraceError(f"{path}: no requests")


def produced(output_length: int | None) -> int:
    """Tokens to produce: whoever computes a prompt produces one at least, also where the record has 0 or null."""
    return max(1, output_length or 0)


def check_blocks(count: int, input_tokens: int, block_size: int) -> None:
    """A row names every full block that can be hit, and at most the partial one besides. Raises BadRow."""
    least, most = (input_tokens - 1) // block_size, -(-input_tokens // block_size)
    if not least <= count <= most:
        raise BadRow(
            f"{count} block ids for {input_tokens} input tokens; blocks of {block_size} make it {least} to {most}:"
            " another block size?"
        )


def packed(ids: Sequence[int]) -> array[int]:
    """Block names, 8 bytes each. Raises BadRow for one that is no u64."""
    try:
        return array("Q", ids)
    except OverflowError:
        raise BadRow("a block id that is negative or takes more than 64 bits") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise at_line(path, number + 1, f"not whole gzip data: {error}") from None
