"""How an engine turns an OpenAI chat body into what its template sees.

Engines normalise messages and tools before they render them, each in its own way, and every added default or dropped
field shifts the tokens. What is written here was read off vLLM 0.32 and SGLang 0.5.23 and is proven, model by model,
against the engine's own /tokenize (`parity.py`). Where an engine's reading is not known, `Unreadable` is raised:
no key is better than a wrong one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from router.serving.prompt.reason import Unreadable
from router.serving.prompt.template import ChatTemplate, ChatTemplates

Body = Mapping[str, Any]
Message = dict[str, Any]

# Fields that change the prompt in a way that is not reproduced here, and the values that mean "not asked for".
_CHANGES_PROMPT = (
    ("chat_template", "the client brings its own chat template"),
    ("truncate_prompt_tokens", "the engine truncates the prompt"),
    ("kv_transfer_params", "the prompt's tokens come from another engine"),
    ("prompt_embeds", "the prompt is embeddings"),
    ("suffix", "a suffix is filled in"),
    ("prompt_logprobs", "with prompt_logprobs the engine computes everything again"),
)
# Arguments of apply_chat_template itself: as template variables they would not reach the template.
_NOT_VARIABLES = frozenset(
    {
        *("messages", "conversation", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
SHAPING_FIELDS = frozenset(
    {
        *(field for field, _ in _CHANGES_PROMPT),
        *("input_ids", "tools", "documents", "chat_template_kwargs", "reasoning_effort"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    }
)
"""All fields of a chat body, beside its messages, that may change the prompt."""
_BILLING_HEADER = "x-anthropic-billing-header"


class Reading(msgspec.Struct, frozen=True):
    """What goes into the template, and which one."""

    template: ChatTemplate
    messages: Sequence[Message]
    tools: Sequence[Any] | None
    documents: Sequence[Any] | None
    variables: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool

    def render(self) -> str:
        return self.template.render(
            self.messages,
            tools=self.tools,
            documents=self.documents,
            variables=self.variables,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class Dialect(Protocol):
    name: str
    system_marks: tuple[str, ...]
    """Texts in a system message that make this engine change it."""
    appends_continued: bool
    """The text of a message to be continued is put behind the prompt, past the template."""

    def read(self, body: Body, templates: ChatTemplates, defaults: Mapping[str, Any]) -> Reading:
        """`defaults`: the template variables the server was started with. Raises `Unreadable`."""
        ...


def refuse_unknown_prompts(body: Body) -> None:
    """Raises `Unreadable` for fields, in any kind of body, that change the prompt in ways not reproduced here."""
    for field, reason in _CHANGES_PROMPT:
        if body.get(field) is not None:
            raise Unreadable(reason)


class Plain:
    """Servers that hand messages and tools to the template as they came (transformers serve, llama.cpp)."""

    name = "plain"
    system_marks: tuple[str, ...] = ()
    appends_continued = False

    def read(self, body: Body, templates: ChatTemplates, defaults: Mapping[str, Any]) -> Reading:
        messages = _messages_of(body)
        tools = self.tools(body)
        template = templates.pick(tools)
        variables = _variables(body, defaults)
        continues = body.get("continue_final_message") is True
        generation = body.get("add_generation_prompt")
        return Reading(
            template=template,
            messages=self.messages(messages, template, continues=continues),
            tools=tools,
            documents=body.get("documents"),
            variables=variables,
            add_generation_prompt=True if generation is None else bool(generation),
            continue_final_message=continues,
        )

    def messages(self, messages: Sequence[Message], template: ChatTemplate, *, continues: bool) -> Sequence[Message]:
        for message in messages:
            if not isinstance(message.get("content"), str | None):
                _texts(message["content"])  # refuses what is not text
        return messages

    def tools(self, body: Body) -> Sequence[Any] | None:
        return body.get("tools")


class VLLM(Plain):
    """vLLM 0.32: `renderers/chat_utils.py`, `renderers/hf.py`, `ChatCompletionRequest.build_chat_params`."""

    name = "vllm"
    system_marks: tuple[str, ...] = (_BILLING_HEADER,)

    def messages(self, messages: Sequence[Message], template: ChatTemplate, *, continues: bool) -> Sequence[Message]:
        parts = template.iterates_content
        read = [_vllm_message(message, parts=parts) for message in messages]
        if not template.knows_developer and any(message["role"] == "developer" for message in read):
            read = _one_system_message(read)
        return read

    def tools(self, body: Body) -> Sequence[Any] | None:
        tools = body.get("tools")
        return None if tools is None else [_vllm_tool(tool) for tool in tools]


class SGLang(Plain):
    """SGLang 0.5.23: `entrypoints/openai/serving_chat.py`, `parser/jinja_template_utils.py`."""

    name = "sglang"
    appends_continued = True

    def messages(self, messages: Sequence[Message], template: ChatTemplate, *, continues: bool) -> Sequence[Message]:
        if continues:
            raise Unreadable("continue_final_message is tokenized apart by this engine")
        source = template.source
        parts = template.iterates_content or any(word in source for word in ("image", "audio", "video", "vision"))
        return [_sglang_message(message, parts=parts) for message in messages]

    def tools(self, body: Body) -> Sequence[Any] | None:
        tools, choice = body.get("tools"), body.get("tool_choice")
        if not tools or choice == "none":
            return None
        if isinstance(choice, dict):
            name = choice.get("function", {}).get("name")
            tools = [tool for tool in tools if tool.get("function", {}).get("name") == name]
        return [_sglang_tool(tool) for tool in tools]


DIALECTS: tuple[Dialect, ...] = (VLLM(), SGLang(), Plain())


# ---------------------------------------------------------------------------------------------------------------------
# Both


def _messages_of(body: Body) -> Sequence[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unreadable("no messages")
    for message in messages:
        if type(message) is not dict or type(message.get("role")) is not str:
            raise Unreadable("a message without a role")
    return messages


def _variables(body: Body, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    given = body.get("chat_template_kwargs")
    effort = body.get("reasoning_effort")
    if given is None and effort is None:
        return defaults
    if given is not None and (not isinstance(given, dict) or not _NOT_VARIABLES.isdisjoint(given)):
        raise Unreadable("chat_template_kwargs that are not template variables")
    variables = {**defaults, **(given or {})}
    if effort is not None:
        if "enable_thinking" not in (given or {}):
            variables["enable_thinking"] = effort != "none"
        variables["reasoning_effort"] = effort
    for own in ("add_generation_prompt", "continue_final_message"):
        variables.pop(own, None)  # the body's own field, or its default, wins
    if body.get("documents") is not None:
        variables.pop("documents", None)
    return variables


def _text_of(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text"):
        text = part.get("text")
    elif kind in ("refusal", "thinking"):
        text = part.get(kind)
    else:
        raise Unreadable("content that is not text")
    if part.get("uuid") is not None or not isinstance(text, str | None):
        raise Unreadable("a text part that is not plain text")
    return text


def _texts(content: Any) -> list[str]:
    if not isinstance(content, list):
        raise Unreadable("content that is neither text nor a list of parts")
    return [text for part in content if (text := _text_of(part)) is not None]


def _parsed_arguments(arguments: Any, *, lenient: bool) -> Any:
    """Templates want tool-call arguments as an object; clients send them as JSON in a string."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError as error:
        if lenient:
            return {}
        raise Unreadable("tool-call arguments that are not JSON") from error


# ---------------------------------------------------------------------------------------------------------------------
# vLLM


def _vllm_message(message: Message, *, parts: bool) -> Message:
    role, content = message["role"], message.get("content")
    if not parts and len(message) == 2 and type(content) is str and role != "system":
        return message  # by far the most common case, and nothing to change
    read: Message = {"role": role, "content": _vllm_content(role, content, parts=parts)}
    if role == "assistant":
        _add_vllm_answer(read, message)
    elif role == "tool":
        if "tool_call_id" in message:
            read["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        read["tools"] = message.get("tools")
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            read[field] = message[field]
    return read


def _vllm_content(role: str, content: Any, *, parts: bool) -> Any:
    if content is None:
        content = []
    elif isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if role == "system":
        content = _without_billing_header(content)
    texts = _texts(content)
    if not parts:
        return "\n".join(text for text in texts if text)
    if role == "tool":
        return "\n".join(texts)
    pairs = [(part, text) for part in content if (text := _text_of(part)) is not None]
    return [{**(part if isinstance(part, dict) else {}), "type": "text", "text": text} for part, text in pairs]


def _without_billing_header(content: Sequence[Any]) -> list[Any]:
    """vLLM drops a client's billing line from system texts, since it differs in every request."""
    kept = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str) and text.startswith(_BILLING_HEADER):
            text = text.partition("\n")[2]
            part = text if isinstance(part, str) else {**part, "text": text}
        kept.append(part)
    return kept


def _add_vllm_answer(read: Message, message: Message) -> None:
    calls = message.get("tool_calls")
    if calls:
        read["tool_calls"] = [_vllm_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        read["reasoning"] = read["reasoning_content"] = reasoning


def _vllm_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        raise Unreadable("a tool call that is not a function call")
    arguments = _parsed_arguments(function["arguments"] or "{}", lenient=True)
    # The order is that of vLLM's own type, which some templates print.
    ordered = {"id": call.get("id"), "function": {"arguments": {}, "name": function.get("name")}}
    ordered["function"] |= {**function, "arguments": arguments if isinstance(arguments, dict) else {}}
    return (
        ordered
        | {"type": call.get("type", "function")}
        | {k: v for k, v in call.items() if k not in ("id", "function")}
    )


def _vllm_tool(tool: Any) -> Message:
    """A dump of vLLM's model: defaults filled in, unknown fields gone, in the model's order."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise Unreadable("a tool that is not a function")
    dumped = {field: function.get(field) for field in ("name", "description", "parameters")}
    deferred = function.get("defer_loading", tool.get("defer_loading"))
    if function.get("strict") is not None:
        dumped["strict"] = function["strict"]
    if deferred is not None:
        dumped["defer_loading"] = deferred
    read = {"type": "function", "function": dumped}
    if tool.get("defer_loading") is not None:
        read["defer_loading"] = tool["defer_loading"]
    return read


def _one_system_message(messages: Sequence[Message]) -> list[Message]:
    """For templates that do not know developers: they become the system, and all system texts move to the front."""
    others: list[Message] = []
    texts: list[str] = []
    in_place = True
    for at, message in enumerate(messages):
        if message["role"] not in ("system", "developer"):
            others.append(message)
            continue
        in_place = in_place and at == 0
        content = message["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        if text:
            texts.append(text)
    if in_place:
        first = {k: v for k, v in messages[0].items() if k != "tools"} | {"role": "system"}
        return [first, *others]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


# ---------------------------------------------------------------------------------------------------------------------
# SGLang


def _sglang_message(message: Message, *, parts: bool) -> Message:
    content = message.get("content")
    if len(message) == 2 and type(content) is str:
        return message
    read = {field: value for field, value in message.items() if value is not None}
    if content is None:
        read["content"] = ""
    elif not isinstance(content, str):
        texts = _texts(content)
        if any(not isinstance(part, dict) or part["type"] not in ("text", "input_text") for part in content):
            raise Unreadable("content parts that this engine drops")
        read["content"] = [{"type": "text", "text": text} for text in texts] if parts else " ".join(texts)
    calls = read.get("tool_calls")
    if message["role"] == "assistant" and isinstance(calls, list):
        read["tool_calls"] = [_sglang_call(call) for call in calls]
    return read


def _sglang_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise Unreadable("a tool call that is not a function call")
    parsed = _parsed_arguments(function.get("arguments"), lenient=False)
    return {**call, "function": {**function, "arguments": parsed}}


def _sglang_tool(tool: Any) -> Message:
    """The client's fields in the client's order; defaults that it left out follow."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or "parameters" not in function:
        raise Unreadable("a tool without parameters")
    return {
        "type": tool.get("type", "function"),
        "function": function if "description" in function else {**function, "description": None},
        "defer_loading": tool.get("defer_loading"),
    }
