"""What an engine says it did: the `usage` object, in whole answers and in stream events.

The shapes, told apart by their names. What they call input is all of it, but for Anthropic.

    OpenAI, vLLM, SGLang, Mistral   prompt_tokens, completion_tokens; parts in prompt_tokens_details.cached_tokens and
                                    .cache_write_tokens (GPT-5.6 and later), completion_tokens_details.reasoning_tokens;
                                    vLLM writes prompt_tokens_details.created_cache_tokens, SGLang reasoning_tokens
    OpenAI's Responses              input_tokens, output_tokens; parts in input_tokens_details, output_tokens_details
    Anthropic's Messages            input_tokens that were neither read from the cache nor written to it; beside it
                                    cache_read_input_tokens, cache_creation_input_tokens, and the latter's parts in
                                    cache_creation.ephemeral_5m_input_tokens and .ephemeral_1h_input_tokens
    DeepSeek                        prompt_tokens = prompt_cache_hit_tokens + prompt_cache_miss_tokens
    Gemini                          promptTokenCount, of it cachedContentTokenCount; toolUsePromptTokenCount beside it;
                                    candidatesTokenCount, and beside it thoughtsTokenCount

Sources: the providers' API references; recordings of the engines in tests/router/serving/recordings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import orjson

from router.core import Usage
from router.serving.splice import value_end

_PARSED_WHOLE_BYTES = 64 * 1024  # a larger answer is searched for its usage object, not parsed: 1 MiB takes 3 ms
_RAW_CHARS = 4096
_MOST_TOKENS = 2**31 - 1
"""A larger count is no count: it would spoil sums."""
_MEDIA = ("audio_tokens", "image_tokens", "video_tokens")
_GEMINI_MEDIA = frozenset(("AUDIO", "IMAGE", "VIDEO"))

_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None
    cache_write_tokens: _Count | None = None
    created_cache_tokens: _Count | None = None
    audio_tokens: _Count | None = None
    image_tokens: _Count | None = None


class _Counts(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: dict[str, Any] | None = None
    reasoning_tokens: _Count | None = None
    prompt_cache_hit_tokens: _Count | None = None
    cached_tokens: _Count | None = None


class _Answer(msgspec.Struct, gc=False):
    usage: _Counts | None = None


_read_answer = msgspec.json.Decoder(_Answer).decode

# What vLLM says of an ordinary request: nothing of it has parts but the input.
_PLAIN = frozenset(("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"))
_PLAIN_DETAILS = frozenset(("cached_tokens",))


def read_usage(usage: object) -> Usage | None:
    """Three states of the cached count are kept apart: a number, zero, and None where the engine does not tell.

    Parts that are more than the whole are cut, and the usage is marked `doubtful`: no engine can reuse more than it was
    sent.
    """
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    if not usage.keys() <= _PLAIN or (isinstance(details, dict) and not details.keys() <= _PLAIN_DETAILS):
        return _read_parts(usage)
    prompt, output = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if prompt is None and output is None:
        prompt = _count(usage.get("total_tokens"))  # all that rerankers say
    return _usage(prompt, output, _count(details.get("cached_tokens")) if isinstance(details, dict) else None)


def _usage(prompt: int | None, output: int | None, cached: int | None) -> Usage | None:
    if prompt is None and output is None:
        return None
    if cached is not None and prompt is not None and cached > prompt:
        return Usage(prompt, output or 0, prompt, doubtful=True)
    return Usage(prompt or 0, output or 0, cached)


# ---------------------------------------------------------------------------------------------------------------------
# Shapes with more parts


def _read_parts(usage: dict[str, Any]) -> Usage | None:
    if "promptTokenCount" in usage:
        return _gemini(usage)
    if "input_tokens" not in usage:
        return _chat(usage)
    return _messages(usage) if usage.keys().isdisjoint(_RESPONSES) else _responses(usage)


_RESPONSES = frozenset(("input_tokens_details", "output_tokens_details"))


def _chat(usage: dict[str, Any]) -> Usage | None:
    prompt, output = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if prompt is None and output is None:
        prompt = _count(usage.get("total_tokens"))
    into, out = _details(usage, "prompt_tokens_details"), _details(usage, "completion_tokens_details")
    return _in_parts(
        usage,
        prompt,
        output,
        _first(into.get("cached_tokens"), usage.get("prompt_cache_hit_tokens"), usage.get("cached_tokens")),
        written=_first(into.get("cache_write_tokens"), into.get("created_cache_tokens")) or 0,
        media_input=_sum(into, _MEDIA),
        reasoning=_first(out.get("reasoning_tokens"), usage.get("reasoning_tokens")) or 0,
        media_output=_sum(out, _MEDIA),
    )


def _responses(usage: dict[str, Any]) -> Usage | None:
    into, out = _details(usage, "input_tokens_details"), _details(usage, "output_tokens_details")
    return _in_parts(
        usage,
        _count(usage.get("input_tokens")),
        _count(usage.get("output_tokens")),
        _count(into.get("cached_tokens")),
        written=_count(into.get("cache_write_tokens")) or 0,
        media_input=_sum(into, _MEDIA),
        reasoning=_count(out.get("reasoning_tokens")) or 0,
        media_output=_sum(out, _MEDIA),
    )


def _messages(usage: dict[str, Any]) -> Usage | None:
    prompt, output = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    if prompt is None:
        return None
    cached, kept = _count(usage.get("cache_read_input_tokens")), _details(usage, "cache_creation")
    for_5m, for_1h = (_count(kept.get(f"ephemeral_{time}_input_tokens")) or 0 for time in ("5m", "1h"))
    written = max(_count(usage.get("cache_creation_input_tokens")) or 0, for_5m + for_1h)
    return _in_parts(
        usage,
        prompt + (cached or 0) + written,
        output,
        cached,
        written_5m=for_5m,
        written_1h=for_1h,
        written=written - for_5m - for_1h,
    )


def _gemini(usage: dict[str, Any]) -> Usage | None:
    prompt, output = _count(usage.get("promptTokenCount")), _count(usage.get("candidatesTokenCount"))
    thoughts = _count(usage.get("thoughtsTokenCount")) or 0
    if prompt is not None:
        prompt += _count(usage.get("toolUsePromptTokenCount")) or 0
    return _in_parts(
        usage,
        prompt,
        (output or 0) + thoughts,
        _count(usage.get("cachedContentTokenCount")),
        media_input=_gemini_media(usage.get("promptTokensDetails")),
        reasoning=thoughts,
        media_output=_gemini_media(usage.get("candidatesTokensDetails")),
    )


def _in_parts(
    usage: dict[str, Any],
    prompt: int | None,
    output: int | None,
    cached: int | None,
    *,
    written_5m: int = 0,
    written_1h: int = 0,
    written: int = 0,
    media_input: int = 0,
    reasoning: int = 0,
    media_output: int = 0,
) -> Usage | None:
    """A cached picture is cached: it is not counted as a picture, too."""
    if prompt is None and output is None:
        return None
    whole_in, whole_out = prompt or 0, output or 0
    read, written_5m, written_1h, written_else, media_in = _fitted(
        whole_in, (cached or 0, written_5m, written_1h, written, media_input)
    )
    thought, media_out = _fitted(whole_out, (reasoning, media_output))
    cut = read + written_else < (cached or 0) + written or thought + media_out < reasoning + media_output
    more = (written_5m, written_1h, written_else, media_in, thought, media_out, cut)
    return Usage(whole_in, whole_out, None if cached is None else read, *more, _raw(usage) if any(more) else "")


def _fitted(whole: int, parts: Iterable[int]) -> list[int]:
    """Parts of a whole, the first first: together never more than it."""
    fitted = []
    for part in parts:
        fitted.append(min(part, whole))
        whole -= fitted[-1]
    return fitted


def _raw(usage: dict[str, Any]) -> str:
    try:
        raw = orjson.dumps(usage).decode()
    except (TypeError, ValueError):  # half a surrogate pair, an integer beyond 64 bits
        raw = json.dumps(usage)
    return raw if len(raw) <= _RAW_CHARS else ""


def _details(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    details = usage.get(name)
    return details if isinstance(details, dict) else {}


def _first(*values: object) -> int | None:
    """The first that is a count."""
    return next((count for value in values if (count := _count(value)) is not None), None)


def _sum(details: Mapping[str, Any], names: Iterable[str]) -> int:
    return sum(_count(details.get(name)) or 0 for name in names)


def _gemini_media(details: object) -> int:
    rows = details if isinstance(details, list) else []
    media = [row for row in rows if isinstance(row, dict) and row.get("modality") in _GEMINI_MEDIA]
    return sum(_count(row.get("tokenCount")) or 0 for row in media)


# ---------------------------------------------------------------------------------------------------------------------
# Whole answers


def usage_of_answer(body: bytes) -> Usage | None:
    """The usage of a whole (not streamed) answer."""
    if len(body) > _PARSED_WHOLE_BYTES:
        return find_usage(body)
    try:
        counts = _read_answer(body).usage  # nothing else of the answer is built
    except (msgspec.DecodeError, RecursionError):
        return _usage_of_odd_answer(body)
    if counts is None:
        return None
    prompt, details = counts.prompt_tokens, counts.prompt_tokens_details
    if (
        prompt is None
        or counts.reasoning_tokens  # or other parts beside the cached ones
        or counts.completion_tokens_details is not None
        or counts.prompt_cache_hit_tokens is not None
        or counts.cached_tokens is not None
    ):
        return _usage_of_odd_answer(body)
    if details is None:
        return Usage(prompt, counts.completion_tokens or 0)
    if details.cache_write_tokens or details.created_cache_tokens or details.audio_tokens or details.image_tokens:
        return _usage_of_odd_answer(body)
    return _usage(prompt, counts.completion_tokens, details.cached_tokens)


def _usage_of_odd_answer(body: bytes) -> Usage | None:
    """Of another API; or a count may be no number, a string half a character, a list very deep: what is read counts."""
    answer = parse_object(body)
    return read_usage(answer.get("usage")) if answer is not None else None


def find_usage(body: bytes) -> Usage | None:
    """The last `"usage": {…}` in `body` that reads as one. JSON strings escape their quotes: text cannot pose as it."""
    end = len(body)
    while (at := body.rfind(b'"usage"', 0, end)) >= 0:
        usage = read_usage(_object_after(body, at + len(b'"usage"')))
        if usage is not None:
            return usage
        end = at
    return None


def parse_object(data: bytes) -> dict[str, Any] | None:
    """A JSON object as a dict; None for anything else. Lone surrogates are accepted."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def _object_after(body: bytes, position: int) -> Mapping[str, Any] | None:
    rest = body[position : position + 64].lstrip()
    if not rest.startswith(b":") or not rest[1:].lstrip().startswith(b"{"):
        return None
    start = body.index(b"{", position)
    try:
        return parse_object(body[start : value_end(body, start)])
    except ValueError:
        return None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None
