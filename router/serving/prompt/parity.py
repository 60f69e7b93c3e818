"""Are our tokens the engine's? Asked at the start with probes, and all the time by comparing lengths."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from router.errors import EngineError
from router.serving.prompt.dialect import DIALECTS, Dialect
from router.serving.prompt.reason import Unreadable

log = logging.getLogger(__name__)

_IN_A_ROW = 3
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"


class Parity(msgspec.Struct, frozen=True):
    """Whether a model's prompts are read as its engine reads them."""

    state: Literal["UNCHECKED", "EXACT", "DEGRADED"] = "UNCHECKED"
    reason: str = "not compared with an engine yet"
    probe: str | None = None  # the first that differs
    position: int | None = None  # its first token that differs
    compared: int = 0  # probes that both sides could read
    dialect: str = ""

    def log(self, model: str) -> None:
        if self.state == "DEGRADED":
            log.warning("parity of %s: DEGRADED, %s", model, self.reason)
        else:
            log.info("parity of %s: %s, %s", model, self.state, self.reason)


class Checked(Protocol):
    """What a check needs of `ModelPrompts`."""

    model: str
    parity: Parity

    @property
    def dialect(self) -> Dialect | None: ...

    def token_ids(self, path: str, body: Mapping[str, Any], dialect: Dialect) -> list[int]: ...

    def settle(self, parity: Parity, dialect: Dialect | None = None) -> None: ...


async def check(prompts: Checked, engine_tokenize: Callable[[str, Mapping[str, Any]], Awaitable[list[int]]]) -> Parity:
    """Compares all probes, in each dialect until one agrees throughout, and settles the outcome.

    A probe that either side refuses proves nothing and is left out.
    """
    before = prompts.parity
    expected: dict[str, list[int]] = {}
    refusals: set[str] = set()
    for name, path, body in PROBES:
        try:
            expected[name] = await engine_tokenize(path, body)
        except EngineError as error:
            refusals.add(type(error).__name__)
    own = prompts.dialect
    if not expected:
        found = Parity("UNCHECKED", f"the engine does not tokenize: {', '.join(sorted(refusals))}")
        prompts.settle(found)
    elif own is None:
        found = Parity("DEGRADED", "no tokenizer or chat template here")
        prompts.settle(found)
    else:
        found, dialect = await asyncio.to_thread(_best, prompts, expected, own)
        prompts.settle(found, dialect)
    if found != before:
        found.log(prompts.model)
    return found


def _best(prompts: Checked, expected: Mapping[str, Sequence[int]], own: Dialect) -> tuple[Parity, Dialect]:
    first = compare(prompts, expected, own)
    if first.state == "EXACT":
        return first, own
    for dialect in DIALECTS:
        if dialect.name != own.name and (found := compare(prompts, expected, dialect)).state == "EXACT":
            return found, dialect
    return first, own


def compare(prompts: Checked, expected: Mapping[str, Sequence[int]], dialect: Dialect) -> Parity:
    """One dialect against the engine's ids of some probes."""
    compared = 0
    for name, path, body in PROBES:
        theirs = expected.get(name)
        if theirs is None:
            continue
        try:
            ours = prompts.token_ids(path, body, dialect)
        except Unreadable:
            continue
        compared += 1
        at = first_difference(ours, theirs)
        if at is not None:
            reason = f"probe {name!r} differs from token {at} on ({len(ours)} tokens here, {len(theirs)} there)"
            return Parity("DEGRADED", reason, name, at, compared, dialect.name)
    if not compared:
        return Parity("DEGRADED", "no probe could be read here", dialect=dialect.name)
    return Parity("EXACT", f"{compared} probes agree", compared=compared, dialect=dialect.name)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    for at, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return at
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


class Watch:
    """Says so when the engine's counts differ from ours several times in a row."""

    def __init__(self) -> None:
        self._differing = 0

    def observe(self, ours: int, theirs: int) -> Parity | None:
        if ours == theirs:
            self._differing = 0
            return None
        self._differing += 1
        if self._differing != _IN_A_ROW:
            return None
        return Parity(
            "DEGRADED", f"the engine counts {theirs} tokens where we count {ours}, {_IN_A_ROW} times in a row"
        )


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city <now & later>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
_SYSTEM = {"role": "system", "content": "You are a terse assistant."}
_ASK = {"role": "user", "content": "What is the weather in Oslo?"}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "n": 1}'},
        }
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"temp": -4.5, "text": "Snø ❄️"}'}
_SCRIPTS = (
    "naïve Å e\u0301 你好，世界。こんにちは 안녕 привет مرحبا שלום नमस्ते 🙂👨‍👩‍👧🇫🇮\n\n  c:\n\tif a != b:  # 12.5e-7\r\n"
)


def _chat(*messages: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


PROBES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("user", CHAT, _chat(_ASK)),
    ("system and user", CHAT, _chat(_SYSTEM, _ASK)),
    (
        "many turns",
        CHAT,
        _chat(_SYSTEM, _ASK, {"role": "assistant", "content": " Cold. "}, {"role": "user", "content": "And now?"}),
    ),
    ("scripts", CHAT, _chat({"role": "user", "content": _SCRIPTS})),
    ("tools", CHAT, _chat(_SYSTEM, _ASK, tools=_TOOLS)),
    ("tool call and result", CHAT, _chat(_ASK, _CALL, _RESULT, tools=_TOOLS)),
    ("developer", CHAT, _chat({"role": "developer", "content": "Be brief."}, _ASK)),
    (
        "parts",
        CHAT,
        _chat({"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}),
    ),
    ("empty answer", CHAT, _chat(_ASK, {"role": "assistant", "content": None}, _ASK)),
    ("reasoning", CHAT, _chat(_ASK, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nCold."}, _ASK)),
    ("thinking off", CHAT, _chat(_ASK, chat_template_kwargs={"enable_thinking": False})),
    ("thinking on", CHAT, _chat(_ASK, chat_template_kwargs={"enable_thinking": True})),
    ("no generation prompt", CHAT, _chat(_ASK, add_generation_prompt=False)),
    (
        "continued",
        CHAT,
        _chat(
            _ASK, {"role": "assistant", "content": "It is"}, add_generation_prompt=False, continue_final_message=True
        ),
    ),
    ("completion", COMPLETION, {"prompt": "Once upon a time, " + _SCRIPTS}),
)
"""(name, path, body without a model): what goes wrong between gateways and engines, one thing each."""
