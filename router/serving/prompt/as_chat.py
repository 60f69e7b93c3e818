"""Bodies of Anthropic's Messages and OpenAI's Responses as the chat that an engine makes of them.

Read off vLLM 0.32 (`entrypoints/anthropic/serving.py`, `entrypoints/openai/responses/utils.py`); SGLang 0.5.23 does the
same with text. Where engines or their versions differ (images, tools of Responses, reasoning that comes back),
`Unreadable` is raised, and the prompt is keyed by `spelled` instead: by its own text, which no engine's events show,
but which begins the same in each turn of a conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from xxhash import xxh3_64_hexdigest

from router.serving.prompt.reason import Unreadable

Body = Mapping[str, Any]
Message = dict[str, Any]

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

_BILLING_HEADER = "x-anthropic-billing-header"  # differs in every request; vLLM drops the block
_SEPARATOR, _COLON = "\x1e", "\x1f"
_SMALL_CHARS = 512
_FILES = frozenset(("data", "url", "image_url", "file_data", "encrypted_content"))
_NOT_SPELLED = frozenset(("cache_control", "id", "status", "signature"))
"""What a client moves or makes up between turns: Anthropic's cache marks wander to the last message."""


def as_chat(path: str, body: Body) -> Message:
    """What makes the prompt of a chat body.

    Raises `Unreadable`, and what code that reads JSON raises for a number where a list belongs.
    """
    return chat_of_messages(body, images=False) if path == MESSAGES else _chat_of_responses(body)


def spelled(path: str, body: Body) -> Iterator[tuple[str, str]]:
    """(role, text) of all that makes the prompt, in the order in which it grows."""
    tools = body.get("tools")
    if tools:
        yield "tools", _text_of(tools)
    system = body.get("system") if path == MESSAGES else body.get("instructions")
    if system:
        yield "system", _text_of(_without_billing_header(system))
    items = body.get("messages") if path == MESSAGES else body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Unreadable("no messages")
    for item in items:
        role = item.get("role")
        if isinstance(role, str):
            yield role, _text_of(item.get("content"))
        else:
            yield str(item.get("type")), _text_of(item)


def joined(role: str, text: str) -> str:
    return f"{_SEPARATOR}{role}{_COLON}{text}"


def characters_in(body: Body, at_most: float) -> int:
    """About how much there is to read, counted only until it is more than `at_most`."""
    count, rest = 0, [body.get(field) for field in ("tools", "system", "instructions", "messages", "input")]
    while rest and count <= at_most:
        value = rest.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, list):
            rest += value
        count += 16
    return count


# ---------------------------------------------------------------------------------------------------------------------
# Messages


def chat_of_messages(body: Body, *, images: bool) -> Message:
    """The same of Messages, with their images if those are wanted."""
    chat: list[Message] = []
    system = _system_text(body.get("system"))
    if system:
        chat.append({"role": "system", "content": system})
    for message in body["messages"]:
        if message["role"] not in ("user", "assistant"):
            raise Unreadable("a system message among the others")
        chat += _chat_of_message(message["role"], message["content"], images=images)
    request: Message = {"messages": chat}
    if body.get("tools") is not None:
        request["tools"] = [_chat_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if choice is not None:
        request["tool_choice"] = _chat_tool_choice(choice)
    if body.get("chat_template_kwargs") is not None:
        request["chat_template_kwargs"] = body["chat_template_kwargs"]
    effort = (body.get("output_config") or {}).get("effort")
    if effort is not None:
        request["reasoning_effort"] = effort
    return request


def _system_text(system: Any) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "".join(_plain_text(block) for block in _without_billing_header(system))


def _chat_of_message(role: str, content: Any, *, images: bool) -> list[Message]:
    """The results of tools are messages of their own and come before what a user says beside them."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = []
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for block in content:
        kind = block["type"]
        if kind == "text":
            parts += [{"type": "text", "text": block["text"]}] if block["text"] else []
        elif kind == "image" and images:
            parts.append(_image(block["source"]))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_chat_call(block["id"], block["name"], json.dumps(block.get("input") or {})))
        elif kind == "tool_result" and role == "user":
            results += _results(block["tool_use_id"], block.get("content"), images=images)
        elif kind == "thinking" and role == "assistant":
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            raise Unreadable("content that is not text")
    message: Message = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return results if role == "user" and not parts else [*results, message]


def _results(call: str, content: Any, *, images: bool) -> list[Message]:
    """What a tool gave back; its images follow in a message of the user's."""
    blocks: Any = content or []
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    pictures = [_image(block["source"]) for block in blocks if images and block["type"] == "image"]
    texts = [_plain_text(block) for block in blocks if not (images and block["type"] == "image")]
    result = {"role": "tool", "tool_call_id": call, "content": "\n".join(texts)}
    return [result, {"role": "user", "content": pictures}] if pictures else [result]


def _image(source: Message) -> Message:
    if source["type"] == "url":
        url = source["url"]
    elif source["type"] == "base64":
        url = f"data:{source['media_type']};base64,{source['data']}"
    else:
        raise Unreadable("an image that is stored elsewhere")
    return {"type": "image_url", "image_url": {"url": url}}


def _chat_tool(tool: Message) -> Message:
    if tool.get("type", "custom") != "custom":
        raise Unreadable("a tool of Anthropic's own")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    if tool.get("defer_loading") is not None:
        function["defer_loading"] = tool["defer_loading"]
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Message) -> Any:
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    return {"any": "required"}.get(choice["type"], choice["type"])


# ---------------------------------------------------------------------------------------------------------------------
# Responses


def _chat_of_responses(body: Body) -> Message:
    if body.get("tools") or body.get("prompt") or body.get("reasoning"):
        raise Unreadable("tools, reasoning and stored prompts of Responses are read differently by each version")
    chat: list[Message] = []
    if body.get("instructions") is not None:
        chat.append({"role": "system", "content": body["instructions"]})
    if isinstance(body["input"], str):
        return {"messages": [*chat, {"role": "user", "content": body["input"]}]}
    for item in body["input"]:
        if item.get("type", "message") != "message":
            raise Unreadable("an item that is no message")
        content = item["content"]
        if item["role"] == "assistant" and not isinstance(content, str):
            (part,) = content
            content = _plain_text(part)
        chat.append({"role": item["role"], "content": content})
    return {"messages": chat}


# ---------------------------------------------------------------------------------------------------------------------
# Both


def _chat_call(name_of_call: str, function: str, arguments: str) -> Message:
    return {"id": name_of_call, "type": "function", "function": {"name": function, "arguments": arguments}}


def _plain_text(block: Message) -> str:
    if block["type"] not in ("text", "output_text", "input_text") or not isinstance(block["text"], str):
        raise Unreadable("content that is not text")
    text: str = block["text"]
    return text


def _without_billing_header(system: Any) -> Any:
    if not isinstance(system, list):
        return system
    return [block for block in system if not str(block.get("text", "")).startswith(_BILLING_HEADER)]


def _text_of(value: Any) -> str:
    """Text as it is; what is not text by its JSON, images and files in it by a digest."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_text_of(each) for each in value)
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        text: str = value["text"]
        return text
    try:
        return orjson.dumps(_small(value)).decode()
    except TypeError:  # half a surrogate pair, an integer beyond 64 bits
        return repr(value)


def _small(value: Any, field: str = "") -> Any:
    if isinstance(value, str) and len(value) > _SMALL_CHARS and field in _FILES:
        return xxh3_64_hexdigest(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, list):
        return [_small(each) for each in value]
    if isinstance(value, dict):
        return {name: _small(each, name) for name, each in value.items() if name not in _NOT_SPELLED}
    return value
