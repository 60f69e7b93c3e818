"""A model's own tokenizer: text to token ids.

Encoding releases the GIL (measured, tokenizers 0.23: `encode` holds it throughout, 397 ms for 110,000 tokens;
`encode_batch_fast` for at most 2 ms), so long texts can be encoded in a thread while the event loop goes on.
"""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn, Protocol, TypeAlias

import tiktoken
import tiktoken_ext.openai_public as published  # type: ignore[import-untyped]
from tiktoken.model import MODEL_TO_ENCODING
from tokenizers import Tokenizer as FastTokenizer

Ids: TypeAlias = "array[int]"
"""Token ids as unsigned 32-bit integers: an array('I')."""


class Tokenizer(Protocol):
    specials: frozenset[str]
    """Texts that always become one token of their own, whatever stands before or behind them."""
    opening: Ids
    """What goes before a completion prompt, e.g. BOS. A chat template writes its own."""
    closing: Ids
    """What goes behind a completion prompt."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text by itself, with nothing added. May be called from any thread."""
        ...


class HuggingFaceTokenizer:
    """`tokenizer.json`, by the `tokenizers` library."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._encode = tokenizer.encode_batch_fast
        added = tokenizer.get_added_tokens_decoder().values()
        # A token that swallows spaces on its left depends on the text before it.
        self.specials = frozenset(token.content for token in added if not (token.lstrip or token.single_word))
        self.opening, self.closing = self._additions("a")

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [array("I", encoding.ids) for encoding in self._encode(list(texts), add_special_tokens=False)]

    def _additions(self, probe: str) -> tuple[Ids, Ids]:
        bare = self._encode([probe], add_special_tokens=False)[0].ids
        full = self._encode([probe], add_special_tokens=True)[0].ids
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return array("I", full[:at]), array("I", full[at + len(bare) :])
        raise ValueError("the tokenizer changes a text's tokens when it adds special ones")


class TiktokenTokenizer:
    """Ranks from a file in tiktoken's format, split and special tokens as tiktoken knows them by name."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self.specials = frozenset(encoding.special_tokens_set)
        self.opening: Ids = array("I")
        self.closing: Ids = array("I")

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        encode = self._encoding.encode
        return [array("I", encode(text, allowed_special="all")) for text in texts]


def load_tokenizer(source: str) -> Tokenizer:
    """`source`: a directory with a tokenizer.json, `tiktoken:NAME@FILE`, or `demo`. Nothing is downloaded.

    NAME is an encoding (`o200k_base`) or a model tiktoken knows. Raises OSError or ValueError.
    """
    if source == "demo":
        return HuggingFaceTokenizer(_read(demo_model() / "tokenizer.json"))
    if source.startswith("tiktoken:"):
        name, _, file = source.removeprefix("tiktoken:").partition("@")
        return TiktokenTokenizer(_tiktoken(name, Path(file)))
    return HuggingFaceTokenizer(_read(Path(source) / "tokenizer.json"))


def demo_model() -> Path:
    """The directory of the demo tokenizer and chat template that come with the package."""
    return Path(str(resources.files("router"))) / "lab" / "demo_model"


def _read(path: Path) -> FastTokenizer:
    try:
        return FastTokenizer.from_str(path.read_text("utf-8"))
    except OSError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path} is not a tokenizer.json") from error


def _tiktoken(name: str, file: Path) -> tiktoken.Encoding:
    """The library's own definition of an encoding, but with the ranks of `file` where it would download them."""
    ranks = _ranks(file)

    def no_download(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(f"the encoding {name!r} cannot be read from a file of ranks")

    names: dict[str, Any] = {**vars(published), "data_gym_to_mergeable_bpe_ranks": no_download}
    names["load_tiktoken_bpe"] = lambda *_, **__: ranks
    definitions = {key: FunctionType(make.__code__, names) for key, make in published.ENCODING_CONSTRUCTORS.items()}
    names.update(definitions)
    definition = definitions.get(MODEL_TO_ENCODING.get(name, name))
    if definition is None:
        raise ValueError(f"tiktoken knows no encoding or model {name!r}")
    try:
        return tiktoken.Encoding(**definition())
    except AssertionError as error:  # the library asserts the size of the vocabulary
        raise ValueError(f"{file} does not hold the ranks of {name!r}") from error


def _ranks(file: Path) -> dict[bytes, int]:
    """tiktoken's format: on each line a token in base64, a space, its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if line:
            token, _, rank = line.partition(b" ")
            if not rank.isdigit():
                raise ValueError(f"{file}:{number}: not a token and its rank")
            ranks[b64decode(token)] = int(rank)
    return ranks
