"""A prompt in pieces: what is asked of the memo, one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import msgspec

from router.serving.prompt.tokenizer import Ids

Piece: TypeAlias = "str | array[int]"
"""Text still to be tokenized, or ids already."""

NO_IDS: Ids = array("I")


class Begun(msgspec.Struct, frozen=True):
    """How the first messages of a conversation were read.

    messages: how many. hashes: of each of their pieces and all before it. state: what the reader goes on with.
    """

    messages: int
    hashes: tuple[int, ...]
    state: Any


class Beginning(msgspec.Struct, eq=False):
    """What a body begins with, as one before it did: all up to its last message, or to an earlier one.

    digest: of these `length` bytes, whose last are `end`. opening: those before the first message. messages: what they
    were parsed to, shared by all bodies that begin so. notes: how readers of prompts have read some of these messages.
    """

    length: int
    digest: int
    end: bytes
    opening: bytes
    messages: Sequence[Mapping[str, Any]]
    notes: dict[object, Begun]


class ReadFor(TypedDict, total=False):
    """For whom a prompt is read, and what its body begins with, as one before it did."""

    domain: str
    salt: str | None
    lora: str | None
    beginning: Beginning | None


class Asked(msgspec.Struct, frozen=True):
    """A prompt in pieces, all of one kind.

    begun: hashes of the pieces before these, which were read earlier. paused: at which of the pieces the message begins
    at which the reader was asked to pause, and what it would go on with from there.
    """

    pieces: Sequence[Piece]
    opening: Ids = NO_IDS  # ids before the first piece
    answered: int = 0  # so many pieces go up to the model's last answer: an engine held them, whoever asked
    turn: int = 1
    reason: str = ""
    begun: Sequence[int] = ()
    paused: tuple[int, Any] | None = None
