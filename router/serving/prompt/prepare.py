"""What a request's prompt is, in tokens and block keys, at the cost of its new text alone.

body --read--> pieces of text --chain of hashes--> what is known comes from the memo; of the rest
    text an engine may hold   is tokenized now if it is short, else in a thread, and awaited
    text never seen           can be held by no engine: its length is estimated and its hash names it;
                              if it is long, the thread tokenizes it afterwards, so that the next turn is exact
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Literal, Protocol, Unpack

import msgspec
import orjson
from xxhash import xxh3_64_intdigest

from router.core import Prompt
from router.errors import EngineError
from router.routing.blocks import root_key
from router.serving.prompt.as_chat import as_chat, characters_in
from router.serving.prompt.asked import (
    NOT_CHAT,
    ApproximateReader,
    Body,
    BodyReader,
    ids_asked,
    rough_tokens,
    without_surrogates,
)
from router.serving.prompt.dialect import Dialect
from router.serving.prompt.encode import Chunk, Encoder
from router.serving.prompt.memo import Memo, Sizes, joined_keys
from router.serving.prompt.parity import Parity, Watch
from router.serving.prompt.pieces import NO_IDS, Asked, Beginning, Piece, ReadFor
from router.serving.prompt.reason import TooLong, Unreadable
from router.serving.prompt.search import Search, Source, chain_hashes, weight
from router.serving.prompt.seen import SeenTexts
from router.serving.prompt.spare import SpareTime
from router.serving.prompt.tokenizer import Ids, Tokenizer

EngineTokenize = Callable[[str, Mapping[str, Any]], Awaitable[list[int]]]
"""The engine's own ids for a path and body. Raises EngineError."""
OnDifference = Literal["enforce", "warn", "off"]

_ENGINE_CACHE_TOKENS = 4_000_000  # 16 MB of ids
_ROOTS = 4_096  # (domain, salt, adapter) combinations remembered; each costs some microseconds to make again
_RENDERED_FIELDS = (
    *("messages", "prompt", "text", "input_ids", "token_ids", "tools", "tool_choice", "documents"),
    *("chat_template_kwargs", "features"),
    *("reasoning_effort", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
)
_UNREADABLE = (Unreadable, AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)
"""The latter is what code that reads JSON raises where a client sends a number for a list."""
_LONGEST_PIECE = 65_536  # characters; a text without a place to cut becomes ids in one go, and the loop waits for it
_NAMED_FROM_TOKENS = 256  # shorter text is mostly tokenized at once
_NAMED_PIECES = 8
_FAILED = "tokenizing failed"
_ESTIMATED = "text not seen before: its length is an estimate"


class Reader(Protocol):
    def read(self, path: str, body: Body, at_most: float = ...) -> Asked: ...


class Shadow(Protocol):
    """What isolation costs (`serving/isolation/shadow.py`)."""

    def note(self, domain: str, root: str, pieces: Sequence[Piece], bytes_per_token: float) -> None: ...


class PromptLimits(msgspec.Struct, frozen=True):
    memo_bytes: int = 256 << 20
    inline_us: float = 800.0  # tokenizing on the loop, at most
    wait_s: float = 0.3  # for the thread, or for an engine's /tokenize
    backlog_bytes: int = 16 << 20  # text waiting for the thread
    read_at_once_chars: int = 1 << 19  # longer bodies are read in a thread
    worth_tokenizing_bytes: int = 4_096  # unseen text from here on is tokenized afterwards
    always: bool = False  # tokenize unseen text too
    spare_share: float = 0.0  # of the loop's time, for short unseen text: exact while there is little to do


class PromptStats(msgspec.Struct):
    """Running totals."""

    prompts: int = 0
    unread: int = 0  # without keys
    estimated: int = 0  # of a length that is partly an estimate
    waited: int = 0  # for the thread
    timeouts: int = 0  # of these, in vain


class ModelPrompts:
    """The prompts of one public model. Used from one event loop."""

    def __init__(
        self,
        model: str,
        *,
        secret: bytes,
        block_sizes: Callable[[], Collection[int]],
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        reader: BodyReader | None = None,
        limits: PromptLimits | None = None,
        unseen_counts: Callable[[], bool] = lambda: False,
        on_difference: OnDifference = "enforce",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a tokenizer keys are approximate. `block_sizes` may answer otherwise later; one thread is enough.

        `unseen_counts`: whether text that was never seen here matters all the same, because an engine holds what others
        sent it, or because what we send it is all we know of it. `on_difference`: what follows when our tokens are not
        the engine's: its own are asked for, or ours are kept, or nobody compares.
        """
        self.model = model
        self.limits = limits or PromptLimits()
        self.stats = PromptStats()
        self.parity = Parity()
        self.engine_tokenize: EngineTokenize | None = None
        self.shadow: Shadow | None = None  # told of what callers of some domain ask
        self.mode: Source = "exact" if tokenizer is not None and reader is not None else "approximate"
        self._tokenizer = tokenizer
        self._exact = reader
        self._approximate = ApproximateReader()
        self._secret = secret
        self._block_sizes = block_sizes
        self._told_sizes: Collection[int] = ()
        self._sizes: Sizes = ()
        self._unseen_counts = unseen_counts
        self._on_difference = on_difference
        self._spare = SpareTime(self.limits.spare_share, clock=clock)
        self._memo = Memo(self.limits.memo_bytes)
        self._seen = SeenTexts()
        self._encoder = Encoder(tokenizer, self._memo, executor, backlog_bytes=self.limits.backlog_bytes)
        self._engine_ids = _EngineIds(_ENGINE_CACHE_TOKENS)
        self._watch = Watch()
        self._roots: dict[tuple[_Whose, int, Source], tuple[int, int]] = {}

    async def prepare(self, path: str, body: Body, **read_for: Unpack[ReadFor]) -> Prompt:
        """Never raises for what a client sends: a prompt that cannot be known has no keys and a reason."""
        prompt = self.prepare_now(path, body, **read_for)
        return prompt if isinstance(prompt, Prompt) else await prompt

    def prepare_now(
        self,
        path: str,
        body: Body,
        *,
        domain: str = "",
        salt: str | None = None,
        lora: str | None = None,
        beginning: Beginning | None = None,
    ) -> Prompt | Coroutine[Any, Any, Prompt]:
        """The same without a task switch where nothing has to be waited for; else something to await."""
        self.stats.prompts += 1
        whose = (domain, salt, lora)
        if self.mode == "engine":
            return self._ask_engine(path, body, whose)
        if beginning is not None and (prompt := self._go_on(path, body, whose, beginning)) is not None:
            return prompt
        reader: Reader = self._exact if self.mode == "exact" and self._exact is not None else self._approximate
        try:
            asked = reader.read(path, body, self.limits.read_at_once_chars)
        except TooLong:
            return self._read_in_thread(reader, path, body, whose)
        except _UNREADABLE as error:
            if path in NOT_CHAT and reader is not self._approximate:
                return self._spelled(path, body, whose, _reason_of(error))
            return self._unread(body, _reason_of(error))
        if not asked.pieces:
            return self._unread(body, "an empty prompt")
        return self._find(asked, whose, self.mode)

    def _go_on(
        self, path: str, body: Body, whose: _Whose, beginning: Beginning
    ) -> Prompt | Coroutine[Any, Any, Prompt] | None:
        """By what is known of its beginning. None: that does not help, it is to be read as any other."""
        reader = self._exact
        if reader is None or self.mode != "exact" or (self.shadow is not None and whose[0]):
            return None
        seed, root = self._roots.get((whose, 0, "exact")) or self._root(whose, NO_IDS, "exact")
        try:
            asked = reader.go_on(path, body, beginning, seed, self.limits.read_at_once_chars)
        except TooLong:
            return None
        if asked is None:
            return None
        try:
            hashes = [*asked.begun, *chain_hashes(asked.pieces, asked.begun[-1] if asked.begun else seed)]
        except UnicodeEncodeError:
            return None
        reader.note(asked, beginning, seed, hashes)
        search = self._search(asked, hashes, root, "exact")
        return self._found(search) if len(search.known) >= len(asked.begun) else None

    async def _read_in_thread(self, reader: Reader, path: str, body: Body, whose: _Whose) -> Prompt:
        source = "approximate" if reader is self._approximate else self.mode
        try:
            # Not in the thread that tokenizes: that may have to do for longer than anybody wants to wait.
            asked = await asyncio.to_thread(reader.read, path, body)
        except _UNREADABLE as error:
            if path in NOT_CHAT and reader is not self._approximate:
                prompt = self._spelled(path, body, whose, _reason_of(error))
                return prompt if isinstance(prompt, Prompt) else await prompt
            return self._unread(body, _reason_of(error))
        prompt = self._find(asked, whose, source)
        return prompt if isinstance(prompt, Prompt) else await prompt

    def _spelled(self, path: str, body: Body, whose: _Whose, reason: str) -> Prompt | Coroutine[Any, Any, Prompt]:
        """Where the chat an engine makes of it is not known: keys that keep the turns of a conversation together."""
        try:
            asked = self._approximate.read(path, body, self.limits.read_at_once_chars)
        except TooLong:
            return self._read_in_thread(self._approximate, path, body, whose)
        except _UNREADABLE as error:
            return self._unread(body, _reason_of(error))
        if not asked.pieces:
            return self._unread(body, "an empty prompt")
        return self._find(msgspec.structs.replace(asked, reason=reason), whose, "approximate")

    # --- an answer as a part of its prompt: for a thread, since it takes as long as rendering and tokenizing do -------

    def is_continued(self, body: Body, continued: Body, text: str) -> bool:
        """Whether engines read the chat `continued` as they do `body`, with `text` after it. False: it is not known."""
        if self.mode != "exact" or self._exact is None:
            return False
        try:
            return self._exact.is_continued(body, continued, text)
        except _UNREADABLE:
            return False

    def count_tokens(self, text: str) -> int | None:
        """Of a text by itself. None without a tokenizer."""
        return len(self._tokenizer.encode([text])[0]) if self._tokenizer is not None else None

    # --- parity -------------------------------------------------------------------------------------------------------

    @property
    def dialect(self) -> Dialect | None:
        return self._exact.dialect if self._exact is not None else None

    def token_ids(self, path: str, body: Body, dialect: Dialect) -> list[int]:
        """A probe's ids in a dialect, computed here and now and not remembered. Raises `Unreadable`."""
        if self._exact is None or self._tokenizer is None:
            raise Unreadable("no tokenizer")
        asked = self._exact.with_dialect(dialect).read_any(path, body)
        ids = asked.opening.tolist()
        for piece in asked.pieces:
            ids += (self._tokenizer.encode([piece])[0] if isinstance(piece, str) else piece).tolist()
        return ids

    def settle(self, parity: Parity, dialect: Dialect | None = None) -> None:
        """Takes over what a parity check found: where our ids are not the engine's, it is asked."""
        if dialect is not None and self._exact is not None:
            self._exact = self._exact.with_dialect(dialect)
        self.parity = parity
        if self._exact is not None and (parity.state != "DEGRADED" or self._on_difference != "enforce"):
            self.mode = "exact"
        else:
            self.mode = "engine" if self.engine_tokenize is not None else "approximate"
        self._watch = Watch()

    def observe(self, prompt: Prompt, engine_tokens: int) -> None:
        """Compares a prompt's length with the one the engine reported for it (`usage.prompt_tokens`)."""
        if self._on_difference == "off" or self.parity.state == "DEGRADED":
            return
        if self.mode == "exact" and prompt.source == "exact" and prompt.exact and not prompt.reason:
            found = self._watch.observe(prompt.tokens, engine_tokens)
            if found is not None:
                found.log(self.model)
                self.settle(found)

    # --- finding ------------------------------------------------------------------------------------------------------

    def _find(self, asked: Asked, whose: _Whose, source: Source) -> Prompt | Coroutine[Any, Any, Prompt]:
        seed, root = self._roots.get((whose, len(asked.opening), source)) or self._root(whose, asked.opening, source)
        try:
            hashes = chain_hashes(asked.pieces, seed)
        except UnicodeEncodeError:
            asked = msgspec.structs.replace(asked, pieces=[without_surrogates(str(piece)) for piece in asked.pieces])
            hashes = chain_hashes(asked.pieces, seed)
        if self.shadow is not None and whose[0]:
            self.shadow.note(whose[0], f"{self.model}\0{whose[2]}", asked.pieces, self._encoder.bytes_per_token)
        return self._found(self._search(asked, hashes, root, source))

    def _search(self, asked: Asked, hashes: Sequence[int], root: int, source: Source) -> Search:
        if (told := self._block_sizes()) is not self._told_sizes:
            self._told_sizes, self._sizes = told, tuple(sorted(told))
        return Search(asked, hashes, self._memo.known(hashes, self._sizes), root, self._sizes, source)

    def _found(self, search: Search) -> Prompt | Coroutine[Any, Any, Prompt]:
        count, first = len(search.hashes), len(search.known)
        if first == count:
            return self._exact_prompt(search)
        # What nobody has asked before, and no engine has answered, none can hold; what may be held is worth knowing.
        upto = max(self._seen.add(search.hashes, first), search.asked.answered)
        if upto < count and (self.limits.always or self._unseen_counts() or self._can_afford(search.pieces(upto))):
            upto = count
        return self._learn(search, upto) if upto > first else self._estimated(search, "", rest_later=True)

    def _can_afford(self, unseen: Sequence[Piece]) -> bool:
        """No engine holds it whole; the block it begins in may be held, and whoever sends it next finds it sooner."""
        if not self.limits.spare_share:
            return False
        size = 0
        for piece in unseen:
            size += len(piece) if isinstance(piece, str) and piece.isascii() else weight(piece)
        us = size * self._encoder.us_per_byte
        return us <= self.limits.inline_us and self._spare.spend(us)

    def _learn(self, search: Search, upto: int) -> Prompt | Coroutine[Any, Any, Prompt]:
        first = len(search.known)
        pieces = _tokenizable(search.pieces(first, upto))
        if not pieces:
            return self._estimated(search, "a text too long for its tokens to be taken at once")
        hashes = search.hashes[: first + len(pieces)]
        size = sum(map(weight, pieces))
        if size * self._encoder.us_per_byte > self.limits.inline_us:
            work = self._encoder.in_thread(search.link, pieces, hashes, size)
            if work is None:
                return self._estimated(search, "the tokenizer has too much to do")
            return self._await(work, search)
        links = self._encoder.now(search.link, pieces, hashes, size)
        return self._learned(search, links) if links is not None else self._estimated(search, _FAILED)

    async def _await(self, work: asyncio.Future[Chunk], search: Search) -> Prompt:
        self.stats.waited += 1
        await asyncio.wait((work,), timeout=self.limits.wait_s)
        if not work.done():
            self.stats.timeouts += 1
            return self._estimated(search, "tokenizing takes too long")
        if work.cancelled() or work.exception() is not None:
            return self._estimated(search, _FAILED)
        return self._learned(search, work.result())

    def _learned(self, search: Search, links: Chunk) -> Prompt:
        search.known += links
        if len(search.known) < len(search.hashes):
            return self._estimated(search, "", rest_later=True)
        return self._exact_prompt(search)

    def _exact_prompt(self, search: Search) -> Prompt:
        asked, known = search.asked, search.known
        tokens = known[-1].tokens
        keys = joined_keys(known, search.sizes)
        return Prompt(tokens, tokens, keys, (), search.source, asked.reason, asked.turn, _named(search))

    def _estimated(self, search: Search, reason: str, *, rest_later: bool = False) -> Prompt:
        """Each piece that is not known has its hash for a key, and a length by its bytes.

        `rest_later`: if they are long, the thread tokenizes them afterwards.
        """
        self.stats.estimated += 1
        asked, hashes, first = search.asked, search.hashes, len(search.known)
        pieces, bytes_per_token = search.pieces(first), self._encoder.bytes_per_token
        known_tokens = search.known[-1].tokens if search.known else len(asked.opening)
        tokens, size = float(known_tokens), 0
        text_keys: list[tuple[int, int]] = []
        for name, piece in zip(hashes[first:], pieces, strict=True):
            if isinstance(piece, str):
                size += (length := len(piece) if piece.isascii() else len(piece.encode()))
                tokens += length / bytes_per_token
            else:
                tokens += len(piece)
            text_keys.append((name, round(tokens)))
        if rest_later and size >= self.limits.worth_tokenizing_bytes and (rest := _tokenizable(pieces)):
            self._encoder.in_thread(search.link, rest, hashes[: first + len(rest)], size)
        return Prompt(
            max(round(tokens), known_tokens + 1),
            known_tokens,
            joined_keys(search.known, search.sizes),
            tuple(text_keys),
            search.source,
            asked.reason or reason or _ESTIMATED,
            asked.turn,
            _named(search),
        )

    def _unread(self, body: Body, reason: str) -> Prompt:
        self.stats.unread += 1
        return Prompt(tokens=rough_tokens(body), known_tokens=0, keys={}, source="none", reason=reason)

    def _root(self, whose: _Whose, opening: Ids, source: Source) -> tuple[int, int]:
        """The seed of the text chain and the key before the first block: apart for each domain, adapter and source."""
        if len(self._roots) >= _ROOTS:
            self._roots.clear()
        domain, salt, lora = whose
        # Pseudo tokens must not be taken for tokens: their chain has a root of its own.
        model = self.model if source != "approximate" else f"{self.model}\0approximate"
        key = root_key(self._secret, model, lora, salt)
        seed = xxh3_64_intdigest(f"{source}|{len(opening)}|{domain}".encode("utf-8", "surrogatepass"), key)
        found = self._roots[whose, len(opening), source] = (seed, key)
        return found

    # --- the engine's own tokens --------------------------------------------------------------------------------------

    async def _ask_engine(self, path: str, body: Body, whose: _Whose) -> Prompt:
        if path in NOT_CHAT:
            return await self._ask_engine_for_chat(path, body, whose)
        if self.engine_tokenize is None:
            return self._unread(body, "no engine to ask for its tokens")
        seed, _ = self._roots.get((whose, 0, "engine")) or self._root(whose, NO_IDS, "engine")
        try:
            name = xxh3_64_intdigest(orjson.dumps([path, [body.get(field) for field in _RENDERED_FIELDS]]), seed)
        except TypeError:
            return self._unread(body, "a body that is no plain JSON")
        asked = self._engine_ids.get(name)
        try:
            if asked is None:
                if "token_ids" in body:
                    body = {**body, "prompt": body["token_ids"]}
                ids = await asyncio.wait_for(self.engine_tokenize(path, body), self.limits.wait_s)
                asked = ids_asked(ids)
                self._engine_ids.put(name, asked, len(ids))
            prompt = self._find(asked, whose, "engine")
            return prompt if isinstance(prompt, Prompt) else await prompt
        except TimeoutError:
            return self._unread(body, "the engine takes too long to tokenize")
        except EngineError as error:
            return self._unread(body, f"the engine did not tokenize: {type(error).__name__}")
        except Unreadable as unreadable:
            return self._unread(body, unreadable.reason)

    async def _ask_engine_for_chat(self, path: str, body: Body, whose: _Whose) -> Prompt:
        at_once = self.limits.read_at_once_chars
        try:
            is_long = characters_in(body, at_once) > at_once
            chat = await asyncio.to_thread(as_chat, path, body) if is_long else as_chat(path, body)
        except _UNREADABLE as error:
            prompt = self._spelled(path, body, whose, _reason_of(error))
            return prompt if isinstance(prompt, Prompt) else await prompt
        return await self._ask_engine(_CHAT, chat, whose)


_CHAT = "/v1/chat/completions"
_Whose = tuple[str, str | None, str | None]
"""Isolation domain, salt, adapter."""


class _EngineIds:
    """Ids an engine has told, least recently used first, bounded in tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._asked: OrderedDict[int, tuple[Asked, int]] = OrderedDict()

    def get(self, name: int) -> Asked | None:
        found = self._asked.get(name)
        if found is None:
            return None
        self._asked.move_to_end(name)
        return found[0]

    def put(self, name: int, asked: Asked, tokens: int) -> None:
        old = self._asked.pop(name, None)
        self._tokens += tokens - (old[1] if old is not None else 0)
        self._asked[name] = (asked, tokens)
        while self._tokens > self._max_tokens and self._asked:
            self._tokens -= self._asked.popitem(last=False)[1][1]


def _reason_of(error: Exception) -> str:
    return error.reason if isinstance(error, Unreadable) else "a body of an unexpected shape"


def _tokenizable(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Those before the first that is too long."""
    for at, piece in enumerate(pieces):
        if len(piece) > _LONGEST_PIECE:
            return pieces[:at]
    return pieces


def _named(search: Search) -> tuple[tuple[int, int], ...]:
    """The text keys of the last pieces that are known: by these a sibling was noted that came before their tokens."""
    known = search.known
    if not known or known[-1].tokens < _NAMED_FROM_TOKENS:
        return ()
    first = max(0, len(known) - _NAMED_PIECES)
    return tuple([(search.hashes[at], known[at].tokens) for at in range(first, len(known))])
