"""A model as far as text goes: its chat template, its tokenizer, and something to say.

What it says is made of words first and tokenized then, so that the next turn, which renders that text again, has the
same token ids and finds the answer's blocks in the cache, as with a real engine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

DEMO_MODEL = Path(__file__).parent / "demo_model"

_WORDS = """
    the a this every another engine request cache block prompt token model answer question city river team garden
    customer report system table number window letter summer winter morning music water light road market bridge
    reads writes finds keeps moves sends builds opens counts follows and or but then while because after before
    quickly slowly again never always often with from into over under small large quiet early late new old
"""


class Unrenderable(ValueError):
    """A conversation that this model cannot read. The message is for the client."""


class Reply(msgspec.Struct):
    """An answer, token by token: the text of token i is pieces[i]."""

    ids: list[int]
    pieces: list[str]
    finish: str  # stop, length or tool_calls
    tool_name: str | None = None
    tool_arguments: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ChatModel:
    """Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a directory, as Hugging Face does.

    Raises OSError or ValueError when they are missing or unusable.
    """

    def __init__(self, directory: Path = DEMO_MODEL) -> None:
        config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
        template = directory / "chat_template.jinja"
        source = template.read_text("utf-8") if template.is_file() else config.get("chat_template")
        if not isinstance(source, str):
            raise ValueError(f"no chat template in {directory}")
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._specials = {name: _content(config[name]) for name in config if name.endswith("_token") and config[name]}
        self._knows_developer = "developer" in source
        self._template = _environment().from_string(source)
        self.eos = self._specials.get("eos_token", "")
        self._eos_id: int | None = self._tokenizer.token_to_id(self.eos)
        self.vocabulary_size = self._tokenizer.get_vocab_size()
        self._first = [self._split(word) for word in _WORDS.split()]
        self._further = [self._split(" " + word) for word in _WORDS.split()]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt's text, with messages and tools normalised as vLLM 0.32 does before it renders them."""
        if not messages:
            raise Unrenderable("Cannot apply chat template to an empty conversation. Provide at least one message.")
        try:
            read = [_message(message, knows_developer=self._knows_developer) for message in messages]
            text = self._template.render(
                {
                    **self._specials,
                    "documents": None,
                    **(variables or {}),
                    "messages": read,
                    "tools": [_tool(tool) for tool in tools] if tools else None,
                    "add_generation_prompt": add_generation_prompt and not continue_final_message,
                }
            )
        except Unrenderable:
            raise
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise Unrenderable(str(error)) from error
        return _cut_after(text, str(read[-1]["content"])) if continue_final_message else text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        return [self._tokenizer.id_to_token(id) or "" for id in ids]

    def say(self, seed: int, *, at_most: int, stop_after: int | None) -> Reply:
        """Pseudo words: the same seed, the same words. Ends by itself after `stop_after` tokens (None: never)."""
        length = at_most if stop_after is None or self._eos_id is None else min(at_most, stop_after)
        dice = random.Random(seed)
        ids: list[int] = []
        pieces: list[str] = []
        while len(ids) < length:
            words = self._further if ids else self._first
            chosen = words[int(dice.random() * len(words))]
            left = length - len(ids)
            if len(chosen[0]) > left:
                chosen = min(words, key=_tokens_in)  # nothing shorter: the answer ends inside a word
            ids += chosen[0][:left]
            pieces += chosen[1][:left]
        if length == at_most or self._eos_id is None:
            return Reply(ids, pieces, "length")
        return Reply([*ids, self._eos_id], [*pieces, ""], "stop")

    def call(self, prompt: str, messages: Sequence[Mapping[str, Any]], tool: Mapping[str, Any], **render: Any) -> Reply:
        """A call of `tool` with made-up arguments, spelled as the template will spell it in the next turn."""
        name, arguments = tool["name"], json.dumps(made_up(tool.get("parameters") or {}))
        call = {"type": "function", "id": "0", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self.render([*messages, turn], add_generation_prompt=False, **render)
        spoken = text[len(prompt) :] if text.startswith(prompt) else arguments
        ids, pieces = self._split(spoken.partition(self.eos)[0] if self.eos else spoken)
        if self._eos_id is not None:
            ids, pieces = [*ids, self._eos_id], [*pieces, ""]
        return Reply(ids, pieces, "tool_calls", name, arguments)

    def _split(self, text: str) -> tuple[list[int], list[str]]:
        """Ids, and the text each of them ends: spans, since some decoders drop the space a lone token begins with."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        pieces, start = [], 0
        for _, end in encoding.offsets:
            pieces.append(text[start:end])
            start = max(start, end)
        return list(encoding.ids), pieces


def made_up(schema: Mapping[str, Any]) -> Any:
    """The simplest value that a JSON schema allows, as far as enum, type, properties and required tell."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties") or {}
        wanted = schema.get("required") or list(properties)
        return {name: made_up(properties.get(name) or {"type": "string"}) for name in wanted}
    values: dict[str, Any] = {"string": "Oslo", "integer": 1, "number": 1.5, "boolean": True, "array": []}
    return values.get(kind)


def _tokens_in(word: tuple[list[int], list[str]]) -> int:
    return len(word[0])


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _content(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _message(message: Mapping[str, Any], *, knows_developer: bool) -> dict[str, Any]:
    role = message.get("role", "")
    read = {**message, "role": "system" if role == "developer" and not knows_developer else role}
    read["content"] = _text(message.get("content"))
    if message.get("tool_calls"):
        read["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return read


def _text(content: Any) -> str:
    """Content parts are joined by line breaks for templates that take text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in content]
    if any(part.get("type") not in ("text", "input_text", "output_text", "refusal") for part in parts):
        raise Unrenderable("{model} is not a multimodal model")
    return "\n".join(text for part in parts if (text := part.get("text") or part.get("refusal")))


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments come as JSON in a string; templates want the object."""
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM dumps its own type: these fields in this order, unknown ones gone, defaults filled in."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise Unrenderable("a tool without a function")
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        fields["strict"] = function["strict"]
    return {"type": "function", "function": fields}


def _cut_after(text: str, content: str) -> str:
    at = text.rfind(content.strip())
    if at < 0:
        raise Unrenderable("continue_final_message is set but the final message does not appear in the rendered chat")
    return text[: at + len(content.strip())]
