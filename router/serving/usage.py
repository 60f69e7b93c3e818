"""What an engine says it did: the `usage` object, in whole answers and in stream events.

Three shapes, told apart by their names. OpenAI's chat, completions and embeddings: `prompt_tokens`. Its Responses:
`input_tokens`, cached ones among them. Anthropic's Messages: `input_tokens` that were neither read from the cache nor
written to it, with those two beside it. An input of ours is all there is to read, cached or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import orjson

from router.core import Usage
from router.serving.splice import value_end

_PARSED_WHOLE_BYTES = 64 * 1024  # a larger answer is searched for its usage object, not parsed: 1 MiB takes 3 ms


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None


class _Counts(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct, gc=False):
    usage: _Counts | None = None


_read_answer = msgspec.json.Decoder(_Answer).decode


def read_usage(usage: object) -> Usage | None:
    """Three states of the cached count are kept apart: a number, zero, and None where the engine does not tell.

    A cached count above the prompt is taken as the prompt: no engine can reuse more than it was sent.
    """
    if not isinstance(usage, dict):
        return None
    if "input_tokens" in usage:
        return _usage_of_input(usage)
    prompt, output = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if prompt is None and output is None:
        prompt = _count(usage.get("total_tokens"))  # all that rerankers say
    details = usage.get("prompt_tokens_details")
    return _usage(prompt, output, _count(details.get("cached_tokens")) if isinstance(details, dict) else None)


def _usage_of_input(usage: dict[str, Any]) -> Usage | None:
    """Responses, Messages."""
    prompt, output = _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))
    details = usage.get("input_tokens_details")
    if isinstance(details, dict):
        return _usage(prompt, output, _count(details.get("cached_tokens")))
    cached, written = _count(usage.get("cache_read_input_tokens")), _count(usage.get("cache_creation_input_tokens"))
    return _usage((prompt or 0) + (cached or 0) + (written or 0), output, cached) if prompt is not None else None


def _usage(prompt: int | None, output: int | None, cached: int | None) -> Usage | None:
    if prompt is None and output is None:
        return None
    if cached is not None and prompt is not None:
        cached = min(cached, prompt)
    return Usage(prompt or 0, output or 0, cached)


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
    if counts.prompt_tokens is None:
        return _usage_of_odd_answer(body)
    details = counts.prompt_tokens_details
    return _usage(counts.prompt_tokens, counts.completion_tokens, details.cached_tokens if details else None)


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
    return value if type(value) is int and value >= 0 else None
