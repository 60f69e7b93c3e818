"""Traces that hold the prompts themselves. Four characters count as a token.

Good enough for prefix structure and rough lengths, and independent of any model's tokenizer; English text and code have
3 to 5 characters a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from router.lab.trace_lines import OutputTokens, at_line, produced, rows
from router.lab.trace_request import TraceRequest

CHARACTERS_PER_TOKEN = 4
DEFAULT_OUTPUT_TOKENS = 200


class _AgentRow(msgspec.Struct):
    timestamp: float  # microseconds since the epoch
    input: str
    output: str = ""
    session_id: str = ""


class _PlainRow(msgspec.Struct):
    at: float  # seconds
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    output_tokens: OutputTokens = DEFAULT_OUTPUT_TOKENS
    session: str = ""
    tenant: str = ""
    priority: int = 0


def read_lmcache(path: Path, block_size: int) -> list[TraceRequest]:
    """lmcache-agent-trace: `timestamp` in µs, `input` the whole prompt as one string, `output`, `session_id`.

    Arrivals are the recorded ones; turns are counted in their order.
    """
    return _with_turns(
        TraceRequest(
            id=str(number),
            at=row.timestamp / 1e6,
            input_tokens=tokens_of(row.input),
            output_tokens=tokens_of(row.output),
            blocks=text_blocks(row.input, block_size),
            session=row.session_id,
        )
        for number, row in rows(path, _AgentRow)
    )


def read_plain(path: Path, block_size: int) -> list[TraceRequest]:
    """One's own requests: `at` in seconds and `messages` or `prompt`.

    Optional: `output_tokens` (200), `session`, `tenant`, `priority`. Turns are counted in the order of arrival.
    """

    def requests() -> Iterable[TraceRequest]:
        for number, row in rows(path, _PlainRow):
            if (row.messages is None) == (row.prompt is None):
                raise at_line(path, number, "needs either `messages` or `prompt`")
            try:
                text = chat_text(row.messages or ()) if row.prompt is None else row.prompt
            except RecursionError as error:
                raise at_line(path, number, error) from None
            yield TraceRequest(
                id=str(number),
                at=row.at,
                input_tokens=tokens_of(text),
                output_tokens=produced(row.output_tokens),
                blocks=text_blocks(text, block_size),
                session=row.session,
                tenant=row.tenant,
                priority=row.priority,
            )

    return _with_turns(requests())


def text_blocks(text: str, block_size: int) -> array[int]:
    """A name for each whole block of `block_size` tokens: xxh3_64 of its characters, seeded with the name before it."""
    width = block_size * CHARACTERS_PER_TOKEN
    names, name = array("Q"), 0
    for start in range(0, len(text) - width + 1, width):
        name = xxh3_64_intdigest(text[start : start + width].encode(), name)
        names.append(name)
    return names


def tokens_of(text: str) -> int:
    return max(1, len(text) // CHARACTERS_PER_TOKEN)


def chat_text(messages: Iterable[dict[str, Any]]) -> str:
    """The messages one behind the other, so that a longer conversation begins with the text of a shorter one."""
    return "".join(f"{message.get('role', '')}\n{_content(message)}\n" for message in messages)


def _content(message: dict[str, Any]) -> str:
    """The text of a message; what is no plain text (parts, tool calls, names) as JSON."""
    content = message.get("content")
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    text = content if isinstance(content, str) else "" if content is None else msgspec.json.encode(content).decode()
    return text + (msgspec.json.encode(rest).decode() if rest else "")


def _with_turns(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    ordered = sorted(requests, key=lambda request: request.at)
    turns: dict[str, count[int]] = {}
    for request in ordered:
        if request.session:
            request.turn = next(turns.setdefault(request.session, count(1)))
    return ordered
