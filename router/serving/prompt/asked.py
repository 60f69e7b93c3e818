"""From an OpenAI request body to the pieces of its prompt: text still to be tokenized, or ids already."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from router.serving.prompt.as_chat import MESSAGES, RESPONSES, as_chat, characters_in, joined, spelled
from router.serving.prompt.cut import Cutter
from router.serving.prompt.dialect import Dialect, refuse_unknown_prompts
from router.serving.prompt.pieces import NO_IDS, Asked, Beginning, Begun, Piece
from router.serving.prompt.plain_chat import PlainChat
from router.serving.prompt.reason import TooLong, Unreadable
from router.serving.prompt.template import ChatTemplates
from router.serving.prompt.tokenizer import Ids, Tokenizer

Body = Mapping[str, Any]

IDS_A_PIECE = 2_048
NOT_CHAT = frozenset((MESSAGES, RESPONSES))
"""Paths whose prompt an engine makes into a chat."""
_AS_CHAT = "read as the chat that is made of it"
_SURROGATES = re.compile("[\ud800-\udfff]")


def kind_of(path: str, body: Body) -> str:
    """`chat`, `as_chat`, `completion` or `ids`. Raises `Unreadable` for everything else."""
    if path in NOT_CHAT:
        return "as_chat"
    if body.get("input_ids") is not None:
        return "ids"  # SGLang takes them on all its routes
    if path.endswith("/chat/completions"):
        return "chat"
    if path.endswith("/completions") or path.endswith("/generate"):
        return "completion"
    raise Unreadable("this route's prompt is not read")


class BodyReader:
    """Reads bodies as one model's engine does: its dialect, its templates, its tokenizer."""

    def __init__(
        self,
        dialect: Dialect,
        templates: ChatTemplates | None,
        tokenizer: Tokenizer,
        cutter: Cutter,
        *,
        variables: Mapping[str, Any] | None = None,
        plain: Mapping[str, PlainChat] | None = None,
    ) -> None:
        """`plain`: by the name of a dialect, how it reads plain conversations with these templates and variables."""
        self.dialect = dialect
        self._templates = templates
        self._tokenizer = tokenizer
        self._cut = cutter.cut
        self._variables = variables or {}
        self._plain = plain or {}
        self._plain_chat = self._plain.get(dialect.name)

    def with_dialect(self, dialect: Dialect) -> BodyReader:
        reader = BodyReader.__new__(BodyReader)
        reader.__dict__.update(self.__dict__, dialect=dialect, _plain_chat=self._plain.get(dialect.name))
        return reader

    def go_on(self, path: str, body: Body, beginning: Beginning, seed: int, at_most: float) -> Asked | None:
        """What a body has that begins like one before it, whose pieces are hashed from `seed` on. None: all is new.

        Raises `TooLong` for over `at_most` new characters.
        """
        chat = self._plain_chat
        if chat is None or not path.endswith("/chat/completions"):
            return None
        begun = beginning.notes.get((chat, seed))
        known = len(beginning.messages)
        return chat.read(body, at_most, begun, pause_at=known if begun is None or begun.messages < known else -1)

    def note(self, asked: Asked, beginning: Beginning, seed: int, hashes: Sequence[int]) -> None:
        """`hashes` of its pieces, and of those before them, so that the next body that begins so is read from there."""
        if asked.paused is not None:
            at, state = asked.paused
            begun = Begun(len(beginning.messages), tuple(hashes[: len(asked.begun) + at]), state)
            beginning.notes[self._plain_chat, seed] = begun

    def read(self, path: str, body: Body, at_most: float = math.inf) -> Asked:
        """Raises `Unreadable` when the engine's tokens cannot be known; `TooLong` for over `at_most` characters."""
        if self._plain_chat is not None and path.endswith("/chat/completions"):
            asked = self._plain_chat.read(body, at_most)
            if asked is not None:
                return asked
        if _characters(path, body, at_most) > at_most:
            raise TooLong
        return self.read_any(path, body)

    def read_any(self, path: str, body: Body) -> Asked:
        """The same without the short cut for plain conversations."""
        refuse_unknown_prompts(body)
        kind = kind_of(path, body)
        if kind == "chat":
            return self._chat(body)
        if kind == "as_chat":
            return msgspec.structs.replace(self._chat(as_chat(path, body)), reason=_AS_CHAT)
        if kind == "ids":
            return ids_asked(body["input_ids"])
        return self._completion(body)

    def is_continued(self, body: Body, continued: Body, text: str) -> bool:
        """Whether the chat `continued` is read as `body` with `text` after it. Raises `Unreadable`."""
        if self._templates is None:
            return False
        if self.dialect.appends_continued:
            return True
        before, after = (self.dialect.read(one, self._templates, self._variables).render() for one in (body, continued))
        return after == before + text

    def _chat(self, body: Body) -> Asked:
        if self._templates is None:
            raise Unreadable("the model has no chat template")
        reading = self.dialect.read(body, self._templates, self._variables)
        answered, turn = roles_of(body["messages"])
        opening = self._opening() if body.get("add_special_tokens") is True else NO_IDS
        pieces = self._pieces(reading.render())
        return Asked(
            pieces, opening, len(pieces) if answered else 0, turn
        )  # which piece is whose, the text does not tell

    def _completion(self, body: Body) -> Asked:
        prompt, reason = prompt_of(body)
        if not isinstance(prompt, str):
            return ids_asked(prompt, reason)
        if not prompt:
            raise Unreadable("an empty prompt")
        opening = NO_IDS if body.get("add_special_tokens") is False else self._opening()
        return Asked(self._pieces(prompt), opening, reason=reason)

    def _opening(self) -> Ids:
        if self._tokenizer.closing:
            raise Unreadable("the tokenizer closes a prompt with a special token")
        return self._tokenizer.opening

    def _pieces(self, text: str) -> list[str]:
        return self._cut(text)


class ApproximateReader:
    """For models without a tokenizer: four bytes of UTF-8 make a "token", roles stand as marks between the texts.

    Such keys are compared only with keys made here, never with an engine's events.
    """

    def read(self, path: str, body: Body, at_most: float = math.inf) -> Asked:
        """Raises `Unreadable`; `TooLong` for over `at_most` characters."""
        if _characters(path, body, at_most) > at_most:
            raise TooLong
        refuse_unknown_prompts(body)
        kind = kind_of(path, body)
        if kind == "as_chat":
            return _spelled(path, body)
        if kind == "ids":
            return ids_asked(body["input_ids"])
        if kind == "completion":
            prompt, reason = prompt_of(body)
            if not isinstance(prompt, str):
                return ids_asked(prompt, reason)
            return Asked(list(_pseudo_pieces(prompt)), reason=reason)
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise Unreadable("no messages")
        pieces: list[Piece] = []
        answered = 0
        if body.get("tools"):
            pieces += _pseudo_pieces(_json(body["tools"]))
        for message in messages:
            role = message.get("role")
            pieces += _pseudo_pieces(f"\x1e{role}\x1f{_flat(message)}")
            if role == "assistant":
                answered = len(pieces)
        return Asked(pieces, answered=answered, turn=roles_of(messages)[1])


def _spelled(path: str, body: Body) -> Asked:
    pieces: list[Piece] = []
    answered = turn = 0
    for role, text in spelled(path, body):
        pieces += _pseudo_pieces(joined(role, text))
        turn += role == "user"
        if role == "assistant":
            answered = len(pieces)
    return Asked(pieces, answered=answered, turn=max(turn, 1))


def roles_of(messages: Sequence[Mapping[str, Any]]) -> tuple[bool, int]:
    """Whether the model has answered in this conversation, and how many user turns it has."""
    roles = [message.get("role") for message in messages]
    return "assistant" in roles, max(roles.count("user"), 1)


def prompt_of(body: Body) -> tuple[Any, str]:
    """The prompt of a body without messages, and what is left out of it. Raises `Unreadable`."""
    if body.get("features"):
        raise Unreadable("token ids that stand for images or sound")
    return first_of_batch(body.get("prompt", body.get("text", body.get("token_ids"))))


def first_of_batch(prompt: Any) -> tuple[Any, str]:
    """A prompt, or the first of several."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        many = len(prompt) > 1
        return prompt[0], f"batch: the first of {len(prompt)} prompts" if many else ""
    return prompt, ""


def ids_asked(ids: Any, reason: str = "") -> Asked:
    """A prompt of ids is the best case: they are the tokens."""
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        ids, reason = first_of_batch(ids)
    if not isinstance(ids, list) or not ids:
        raise Unreadable("a prompt that is neither text nor token ids")
    try:
        pieces = [array("I", ids[at : at + IDS_A_PIECE]) for at in range(0, len(ids), IDS_A_PIECE)]
    except (TypeError, OverflowError) as error:
        raise Unreadable("a prompt that is neither text nor token ids") from error
    return Asked(pieces, answered=len(pieces), reason=reason)


def without_surrogates(text: str) -> str:
    """Half a character is no text; like a decoder, we read it as U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


def rough_tokens(body: Body) -> int:
    """About how long a prompt is that is not read: four characters a token."""
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, list):
        return sum(len(_flat(message)) // 4 + 4 for message in messages if isinstance(message, dict)) or 1
    prompt, _ = first_of_batch(body.get("prompt", body.get("text", body.get("input"))))
    return max(1, len(prompt) // 4) if isinstance(prompt, str) else 1


def _characters(path: str, body: Body, at_most: float) -> int:
    """Of what makes prompts long: the contents of messages, or the prompt."""
    if path in NOT_CHAT:
        return characters_in(body, at_most)
    messages = body.get("messages")
    if not isinstance(messages, list):
        prompt, _ = first_of_batch(body.get("prompt", body.get("text")))
        return len(prompt) if isinstance(prompt, str) else 0
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    texts = [*contents, *(part.get("text") for part in parts)]
    return sum(len(text) for text in texts if isinstance(text, str))


def _pseudo_pieces(text: str) -> list[Ids]:
    data = without_surrogates(text).encode()
    ids = array("I", data + b"\0" * (-len(data) % 4))
    return [ids[at : at + IDS_A_PIECE] for at in range(0, len(ids), IDS_A_PIECE)]


def _flat(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    texts = [content] if isinstance(content, str) else []
    if isinstance(content, list):
        texts += [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if message.get("tool_calls"):
        texts.append(_json(message["tool_calls"]))
    return "\n".join(texts)


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # orjson writes neither lone surrogates nor integers beyond 64 bits
        return repr(value)
