"""What a client asks of the simulated engine, and how vLLM 0.32 says no."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from router.lab.chat import Unrenderable


class Rejected(Exception):
    """An answer other than 200. `body` is what vLLM sends, as far as recorded."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(str(body))
        self.status = status
        self.body = body


def refused(
    message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None, value: Any = None
) -> Rejected:
    """The engine's own error. A named parameter is repeated in the message."""
    if param is not None:
        message += f" (parameter={param}{'' if value is None else f', value={value}'})"
    return Rejected(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})


def invalid(kind: str, where: str, message: str) -> Rejected:
    """An error of the validation in front of the engine."""
    text = f"1 validation error:\n  {{'type': {kind!r}, 'loc': {where!r}, 'msg': {message!r}}}"
    return Rejected(400, {"error": {"message": text, "type": "Bad Request", "param": where, "code": 400}})


def unknown_model(model: str, served: list[str]) -> Rejected:
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(served)}."
    return Rejected(404, {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}})


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Conversation(msgspec.Struct):
    """What names a model and makes a prompt of messages. Unknown fields are ignored, as by vLLM."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def variables(self) -> dict[str, Any]:
        """What the template sees beside messages and tools."""
        return self.chat_template_kwargs or {}


class Call(Conversation):
    """The body of a chat or completion request."""

    prompt: str | list[Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    n: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    echo: bool = False
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None

    def variables(self) -> dict[str, Any]:
        effort = self.reasoning_effort
        said = {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}
        named = {"documents": self.documents} if self.documents is not None else {}
        return {**said, **(self.chat_template_kwargs or {}), **named}

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def top(self) -> int | None:
        """Alternatives of each token, None: no log probabilities. A chat asks by flag, a completion by number."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return (self.top_logprobs or 0) if self.logprobs is True else self.logprobs


class Tokenize(Conversation):
    """The body of /tokenize: a text or a conversation."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class Detokenize(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


_MOST_CHOICES = 16_384  # VLLM_MAX_N_SEQUENCES
_call = msgspec.json.Decoder(Call).decode
_tokenize = msgspec.json.Decoder(Tokenize).decode
_detokenize = msgspec.json.Decoder(Detokenize).decode


def read_call(body: bytes, *, chat: bool) -> Call:
    """Raises Rejected as vLLM would, before it looks at the model's limits."""
    call: Call = _decoded(_call, body)
    if chat and call.messages is None:
        raise invalid("missing", "body.messages", "Field required")
    if not chat and not call.prompt:
        raise refused("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    _check_sampling(call)
    _check_options(call)
    return call


def read_tokenize(body: bytes) -> Tokenize:
    wanted: Tokenize = _decoded(_tokenize, body)
    if wanted.prompt is None and wanted.messages is None:
        raise invalid("missing", "body.prompt", "Field required")
    return wanted


def read_detokenize(body: bytes) -> Detokenize:
    wanted: Detokenize = _decoded(_detokenize, body)
    return wanted


def unrenderable(error: Unrenderable, model: str) -> Rejected:
    return refused(str(error).replace("{model}", model))


def _decoded(decode: Any, body: bytes) -> Any:
    if not body:
        raise invalid("missing", "body", "Field required")
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise invalid("value_error", "body" + path.rstrip("`"), message) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid("json_invalid", "body", "JSON decode error") from error


def _check_sampling(call: Call) -> None:
    limit = call.output_limit
    if limit is not None and limit < 1:
        raise refused(f"max_tokens must be at least 1, got {limit}.", param="max_tokens", value=limit)
    if call.temperature is not None and call.temperature < 0:
        heat = call.temperature
        raise refused(f"temperature must be non-negative, got {heat}.", param="temperature", value=heat)
    if call.top_p is not None and not 0 < call.top_p <= 1:
        raise refused(f"top_p must be in (0, 1], got {call.top_p}.", param="top_p", value=call.top_p)
    if call.n is not None and call.n < 1:
        raise refused(f"n must be at least 1, got {call.n}.")
    if call.n is not None and call.n > _MOST_CHOICES:
        raise refused(f"n must be at most {_MOST_CHOICES}.")
    if call.top is not None and call.top > 20:
        message = f"Requested sample logprobs of {call.top}, which is greater than max allowed: 20"
        raise refused(message, param="logprobs", value=call.top)


def _check_options(call: Call) -> None:
    if call.stream_options is not None and not call.stream:
        raise refused("Stream options can only be defined when `stream=True`.", param="stream_options")
    if call.cache_salt is not None and not call.cache_salt:
        raise refused("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    if call.tool_choice not in (None, "none") and not call.tools:
        raise refused("When using `tool_choice`, `tools` must be set.", param="tool_choice")
    wanted = call.response_format or {}
    if wanted.get("type") == "json_schema" and not wanted.get("json_schema"):
        message = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
        raise refused(message, param="response_format")


def wanted_tool(call: Call) -> Mapping[str, Any] | None:
    """The function that the client insists on. Raises Rejected for one it did not declare."""
    if not call.tools or call.tool_choice in (None, "none", "auto"):
        return None
    functions: list[Mapping[str, Any]] = [tool["function"] for tool in call.tools if tool.get("function")]
    if isinstance(call.tool_choice, dict):
        name = (call.tool_choice.get("function") or {}).get("name")
        functions = [function for function in functions if function.get("name") == name]
    if not functions or not isinstance(functions[0].get("name"), str):
        raise refused("The tool specified in `tool_choice` does not match any of the specified `tools`")
    return functions[0]
