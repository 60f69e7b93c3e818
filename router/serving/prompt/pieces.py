"""A prompt in pieces: what is asked of the memo, one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from router.serving.prompt.tokenizer import Ids

Piece: TypeAlias = "str | array[int]"
"""Text still to be tokenized, or ids already."""

NO_IDS: Ids = array("I")


class Asked(msgspec.Struct, frozen=True):
    """A prompt in pieces, all of one kind."""

    pieces: Sequence[Piece]
    opening: Ids = NO_IDS  # ids before the first piece
    answered: int = 0  # so many pieces go up to the model's last answer: an engine held them, whoever asked
    turn: int = 1
    reason: str = ""
