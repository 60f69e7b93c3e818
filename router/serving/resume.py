"""A stream that breaks off amid its answer, gone on with by another engine. Off unless `failover.resume` asks for it.

The engine that goes on is sent the request as it came, with the text the client has after the prompt: a completion's
prompt is made longer, a chat ends in an unfinished message (`continue_final_message`). Its chunks become the first
engine's (id, created, model; no second role), and each says `"warmroute": {"resumed": n}`, which SDKs pass by. The
usage is that of one answer: the prompt as the client sent it, and every token of its answer once.

Sound is that only where the text is all that the engine that broke off knew. So a request is not gone on with if

- it asks for several choices, for beams, or to have its prompt back: text is one string here;
- it asks for log-probabilities or ids of tokens: the text may be cut into other tokens the second time;
- its output is guided (`response_format`, a grammar, a tool that must be called): a grammar would begin anew;
- it has a seed: what that promised ended with the first engine;
- it punishes what was generated (presence, frequency): the text so far would count as prompt. What punishes prompt and
  output alike (`repetition_penalty`) is fine;
- its prompt is token ids, or it continues a message itself;
- it has a field that is not known here: fields are let in, not kept out;

nor a stream in which there was anything beside text (thoughts, a tool's call), whose end may be the beginning of a stop
string or half a character, or that is longer than is kept. An engine must say that it knows how (`Adapter`), and
a chat must be proven: its template, rendered here, has to give the old prompt with the text behind it
(`ModelPrompts.is_continued`). Templates that drop thoughts of finished turns or trim texts fail it, where they do.
Then the stream ends with an error, as all do without `resume`.

The same tokens at temperature 0 are to be expected only as far as the text is cut into the same tokens again; engines
themselves differ with the batch they compute in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from router.serving.apis import CHAT, COMPLETIONS
from router.serving.apis.api import Fields, limit_of, written
from router.serving.splice import splice, value_of
from router.serving.sse import DONE, SseRelay, payloads
from router.serving.usage import parse_object, read_usage

TEXT_BYTES = 256 * 1024
"""What is kept of a stream. A longer one ends with an error where it breaks."""

_HALF_CHARACTER = "\ufffd"
_LIMITS = ("max_tokens", "max_completion_tokens")
_HEAD = ("id", "object", "created", "model", "system_fingerprint")


def _any(value: Any) -> bool:
    return True


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_KNOWN: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("model", "messages", "stream", "stream_options", *_LIMITS, "min_tokens", "ignore_eos"), _any),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"), _any),
    **dict.fromkeys(("stop", "stop_token_ids", "include_stop_str_in_output", "chat_template_kwargs"), _any),
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "priority", "safety_identifier"), _any),
    **dict.fromkeys(("cache_salt", "prompt_cache_key", "prompt_cache_retention"), _any),
    **dict.fromkeys(("tools", "parallel_tool_calls"), _any),
    **dict.fromkeys(("n", "best_of"), _is(1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), _is(0)),
    **dict.fromkeys(("echo", "use_beam_search", "continue_final_message", "logprobs"), lambda value: value is False),
    "add_generation_prompt": lambda value: value is True,
    "skip_special_tokens": lambda value: value is True,
    "tool_choice": _is("auto", "none"),
    "response_format": _is_text_format,
    "prompt": lambda value: isinstance(value, str),
}
"""The fields of a request that may be gone on with, and what they may say. null is as good as nothing."""


def may_be_resumed(path: str, fields: Fields) -> bool:
    if path not in (CHAT, COMPLETIONS) or fields.get("messages" if path == CHAT else "prompt") is None:
        return False
    return all(value is None or (name in _KNOWN and _KNOWN[name](value)) for name, value in fields.items())


class Transcript:
    """What the client has of a stream with one choice.

    text     so far, UTF-8
    pieces   events that brought some of it: at least as many tokens, mostly as many
    events   all events
    resumed  engines that have gone on with it

    And what is known when one is to: `tokens` of the text, and of the prompt before it, if they have been counted.
    """

    __slots__ = ("_head", "_is_text", "events", "pieces", "prompt_tokens", "resumed", "text", "tokens")

    def __init__(self) -> None:
        self.text = bytearray()
        self.pieces = 0
        self.events = 0
        self.resumed = 0
        self.prompt_tokens: int | None = None
        self.tokens = 0
        self._head: dict[str, Any] | None = None
        self._is_text = True

    def begin(self, *, hide_usage: bool) -> SseRelay:
        return NotedRelay(self, hide_usage=hide_usage)

    def go_on(self, *, hide_usage: bool) -> SseRelay:
        """Another engine has begun to."""
        self.resumed += 1
        return ResumedRelay(self, hide_usage=hide_usage)

    def unfinished(self, stop: object) -> str | None:
        """The text, if another engine can go on with it. `stop`: the strings that end it."""
        if not self._is_text:
            return None
        text = self.text.decode()
        stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
        if text.endswith(_HALF_CHARACTER) or any(_may_have_begun(text, one) for one in stops):
            return None
        return text

    # -- what is passed on

    def note(self, events: bytes) -> None:
        """Whole events, as the client gets them."""
        if self._is_text:
            for payload in payloads(events):
                if payload.strip() != DONE:
                    self._note_chunk(parse_object(payload))

    def give_up(self) -> None:
        self._is_text = False
        self.text.clear()

    def _note_chunk(self, chunk: dict[str, Any] | None) -> None:
        if chunk is None:
            self.give_up()
            return
        if self._head is None:
            self._head = {name: chunk[name] for name in _HEAD if name in chunk}
        try:
            for choice in chunk.get("choices") or ():
                piece = text_of(choice).encode()
                self.pieces += bool(piece)
                self.text += piece
        except (AttributeError, TypeError, ValueError):  # something else than text, or half a surrogate pair
            self.give_up()
        if len(self.text) > TEXT_BYTES:
            self.give_up()

    # -- what comes of another engine

    def rewritten(self, chunk: dict[str, Any]) -> bytes:
        """As an event of the stream that broke off."""
        marked = {**chunk, **(self._head or {}), "warmroute": {"resumed": self.resumed}}
        return b"data: %b\n\n" % written(marked)

    def whole_usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Of an engine that got the text so far as a part of its prompt."""
        usage = read_usage(counts)
        if usage is None:
            return counts
        before = usage.input_tokens - self.prompt_tokens if self.prompt_tokens is not None else self.tokens
        before = min(max(before, 0), usage.input_tokens)
        prompt = usage.input_tokens - before
        whole = {**counts, "prompt_tokens": prompt, "completion_tokens": usage.output_tokens + before}
        if usage.cached_tokens is not None:
            details = {**counts["prompt_tokens_details"], "cached_tokens": min(usage.cached_tokens, prompt)}
            whole["prompt_tokens_details"] = details
        return whole


class NotedRelay(SseRelay):
    """Of which a transcript is kept."""

    __slots__ = ("_transcript",)

    def __init__(self, transcript: Transcript, *, hide_usage: bool) -> None:
        super().__init__(hide_usage=hide_usage)
        self._transcript = transcript

    def feed(self, data: bytes) -> bytes:
        return self._noted(super().feed(data))

    def end(self) -> bytes:
        return self._noted(super().end())

    def _noted(self, passed: bytes) -> bytes:
        transcript = self._transcript
        if self.inside:
            transcript.give_up()
        elif passed:
            transcript.note(passed)
        transcript.events = self.events
        return passed


class ResumedRelay(NotedRelay):
    """Of an engine that goes on. `events` and `usage` are those of the whole answer."""

    __slots__ = ()

    def __init__(self, transcript: Transcript, *, hide_usage: bool) -> None:
        super().__init__(transcript, hide_usage=hide_usage)
        self.events = transcript.events

    def _is_plain(self, data: bytes) -> bool:
        return False

    def _begin_oversized(self) -> bytes:
        self._held.clear()
        self.error = {"message": "a chunk that is too large", "code": 502}
        return b""

    def _chunk(self, chunk: dict[str, Any], event: bytes, payload: bytes) -> bytes:
        """The engine's chunk as one of the stream that broke off; nothing where it has nothing new to say."""
        super()._chunk(chunk, event, payload)
        choices = chunk.get("choices") or []
        try:
            says_something = any([_goes_on(choice) for choice in choices])
            if chunk.get("usage"):
                chunk["usage"] = self._transcript.whole_usage(chunk["usage"])
                self.take_usage(read_usage(chunk["usage"]))
        except (AttributeError, KeyError, TypeError):
            self.error = {"message": "it goes on with something else than text", "code": 502}
            return b""
        if self._hide_usage:
            chunk.pop("usage", None)
        return self._transcript.rewritten(chunk) if says_something or chunk.get("usage") else b""


def text_of(choice: Any) -> str:
    """What a choice of a chunk adds. Raises TypeError where that is not just text."""
    if "delta" not in choice:
        text = choice.get("text")
    else:
        delta = choice["delta"] or {}
        if any(value for name, value in delta.items() if name not in ("role", "content")):
            raise TypeError
        text = delta.get("content")
    if not isinstance(text, str | None):
        raise TypeError
    return text or ""


def _goes_on(choice: Any) -> bool:
    """Whether a choice says something new, once its role is taken away. Raises TypeError for a thought."""
    if "delta" not in choice:
        return bool(choice.get("text") or choice.get("finish_reason"))
    delta = choice["delta"] = {name: value for name, value in (choice["delta"] or {}).items() if name != "role"}
    if delta.get("reasoning") or delta.get("reasoning_content"):
        raise TypeError
    return any(delta.values()) or bool(choice.get("finish_reason"))


def _may_have_begun(text: str, stop: object) -> bool:
    """Whether `text` ends with the beginning of a stop string."""
    return isinstance(stop, str) and any(text.endswith(stop[:length]) for length in range(1, len(stop)))


# -- what the other engine is sent


def continued(path: str, fields: Fields, text: str, tokens: int) -> dict[str, Any] | None:
    """The fields that change where an engine is to go on after `text`, of so many tokens; None: no token is left."""
    changed: dict[str, Any] = {}
    for name in _LIMITS:
        limit = limit_of(fields.get(name))
        if limit is not None:
            changed[name] = limit - tokens
            if limit <= tokens:
                return None
    if least := limit_of(fields.get("min_tokens")):
        changed["min_tokens"] = max(0, least - tokens)
    if path == COMPLETIONS:
        changed["prompt"] = fields["prompt"] + text
    else:
        changed["messages"] = [*fields["messages"], {"role": "assistant", "content": text}]
        changed |= {"add_generation_prompt": False, "continue_final_message": True}
    return changed


def continued_body(body: bytes, fields: Fields, changed: Mapping[str, Any]) -> bytes:
    """The client's own bytes, but for what has changed."""
    owned = {name: written(value) for name, value in changed.items() if name != "messages"}
    if "messages" in changed:
        messages = (value_of(body, "messages", present=fields) or b"[]").rstrip()
        owned["messages"] = b"%b,%b]" % (messages[:-1], written(changed["messages"][-1]))
    return splice(body, owned, present=fields)
