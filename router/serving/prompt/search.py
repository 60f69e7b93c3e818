"""How far one prompt's chain of pieces is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, cast

import msgspec
from xxhash import xxh3_64_intdigest

from router.serving.prompt.memo import Link, Sizes
from router.serving.prompt.pieces import Asked, Piece
from router.serving.prompt.tokenizer import Ids

Source: TypeAlias = Literal["exact", "engine", "approximate"]


class Search(msgspec.Struct):
    """Starts with what the memo knows, and goes on as pieces are tokenized."""

    asked: Asked
    hashes: Sequence[int]  # of each piece and all before it, those that were read earlier too
    known: list[Link]
    root: int  # the key before the first block
    sizes: Sizes
    source: Source

    def pieces(self, first: int, upto: int | None = None) -> Sequence[Piece]:
        """Of the chain, from one index to another. Those that were read earlier are not there."""
        pieces = self.asked.pieces
        skipped = len(self.hashes) - len(pieces)
        return pieces[first - skipped : None if upto is None else upto - skipped]

    @property
    def link(self) -> Link:
        """The last that is known."""
        if self.known:
            return self.known[-1]
        root = Link.root(self.root, self.sizes)
        return root.extend(self.asked.opening) if self.asked.opening else root


def chain_hashes(pieces: Sequence[Piece], seed: int) -> list[int]:
    """Each hash stands for its piece and all before it. Raises UnicodeEncodeError for text with half a character."""
    digest = xxh3_64_intdigest
    if isinstance(pieces[0], str):
        return [seed := digest(text.encode(), seed) for text in cast("Sequence[str]", pieces)]
    return [seed := digest(ids, seed) for ids in cast("Sequence[Ids]", pieces)]


def weight(piece: Piece) -> int:
    """Work to encode a piece, in bytes of text. Ids only need their keys."""
    if isinstance(piece, str):
        return len(piece) if piece.isascii() else len(piece.encode())
    return len(piece) >> 4
