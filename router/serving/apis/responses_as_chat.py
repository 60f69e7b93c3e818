"""OpenAI's Responses for an engine that has only chat: the request there, the answer back, whole or as a stream.

What a chat has no word for (tools that OpenAI runs, files, custom tools) is refused. Left out are reasoning items that
come back, which engines want in no common form, and what only tells OpenAI's servers what to keep.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import orjson

from router.errors import BadRequest
from router.serving.apis.api import Fields, Translation
from router.serving.apis.chat_chunks import ChatChunks, thought_of
from router.serving.sse import EventRelay
from router.serving.usage import parse_object, read_usage

_SAME = ("temperature", "top_p", "parallel_tool_calls", "stream", "cache_salt", "priority", "seed", "user")
_ECHOED = ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "text", "reasoning", "user")
_TEXTS = frozenset(("input_text", "output_text", "text"))
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesAsChat(Translation):
    path = "/v1/chat/completions"

    def body(self, fields: Fields, served: str, owned: Mapping[str, bytes]) -> bytes:
        return chat_body(fields, served, owned)

    def relay(self, fields: Fields, *, prompt_tokens: int) -> EventRelay:
        return ChatAsResponse(fields)

    def answer(self, fields: Fields, body: bytes) -> bytes | None:
        return response_of(fields, body)


# ---------------------------------------------------------------------------------------------------------------------
# The request


def chat_body(fields: Fields, served: str, owned: Mapping[str, bytes]) -> bytes:
    """Raises BadRequest."""
    if fields.get("prompt"):
        raise _untranslatable("a stored prompt")
    try:
        body: dict[str, Any] = {"model": served, "messages": _messages(fields), **_settings(fields)}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BadRequest("The input is not what OpenAI's Responses API describes.", param="input") from error
    body |= {name: orjson.Fragment(value) for name, value in owned.items()}
    try:
        return orjson.dumps(body)
    except TypeError:  # half a surrogate pair, an integer beyond 64 bits
        return json.dumps(body | {name: json.loads(value) for name, value in owned.items()}).encode()


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if fields.get("instructions") is not None:
        messages.append({"role": "system", "content": fields["instructions"]})
    items = fields["input"]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            _calls_of(messages).append({"id": item["call_id"], "type": "function", "function": function})
        elif kind == "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else "\n".join(_text(part) for part in output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif kind != "reasoning":
            raise _untranslatable("an item that is neither a message nor a function's call")
    return messages


def _calls_of(messages: list[dict[str, Any]]) -> list[Any]:
    """Calls that follow each other, or what the model said before them, are one message of a chat."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    calls: list[Any] = messages[-1].setdefault("tool_calls", [])
    return calls


def _content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image" and part.get("image_url"):
        image = {"url": part["image_url"]}
        if part.get("detail"):
            image["detail"] = part["detail"]
        return {"type": "image_url", "image_url": image}
    return {"type": "text", "text": _text(part)}


def _text(part: Mapping[str, Any]) -> Any:
    if part["type"] == "refusal":
        return part["refusal"]
    if part["type"] not in _TEXTS:
        raise _untranslatable("content that is neither text nor an image")
    return part["text"]


def _settings(fields: Fields) -> dict[str, Any]:
    settings = {field: fields[field] for field in _SAME if fields.get(field) is not None}
    if fields.get("max_output_tokens") is not None:
        settings["max_tokens"] = fields["max_output_tokens"]
    if fields.get("tools"):
        settings["tools"] = [_tool(tool) for tool in fields["tools"]]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise _untranslatable("a choice of tools that is not one function")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    if choice is not None:
        settings["tool_choice"] = choice
    effort = (fields.get("reasoning") or {}).get("effort")
    if effort is not None:
        settings["reasoning_effort"] = effort
    form = (fields.get("text") or {}).get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type"}
        settings["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form["type"] != "text":
        settings["response_format"] = form
    if fields.get("stream") is True:
        settings["stream_options"] = {"include_usage": True}
    return settings


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _untranslatable("a tool that is not a function")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _untranslatable(what: str) -> BadRequest:
    message = f"The engine of this model has no Responses API, and a chat cannot hold all of the request: {what}."
    return BadRequest(message, code="unsupported_parameter")


# ---------------------------------------------------------------------------------------------------------------------
# The answer


def response_of(fields: Fields, answer: bytes) -> bytes | None:
    """A whole chat answer as a response; None if it is none."""
    chat = parse_object(answer)
    try:
        assert chat is not None
        choice = chat["choices"][0]
        said = choice["message"]
        name = str(chat.get("id"))
        output: list[dict[str, Any]] = []
        if thought := thought_of(said):
            output.append(_reasoning(f"rs_{name}", thought))
        if said.get("content"):
            output.append(_message(f"msg_{name}", said["content"]))
        for number, call in enumerate(said.get("tool_calls") or ()):
            function = call["function"]
            output.append(_call(f"fc_{name}_{number}", call.get("id"), function["name"], function.get("arguments")))
        return orjson.dumps(_response(fields, chat, output, choice.get("finish_reason"), chat.get("usage")))
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError):
        return None


class ChatAsResponse(ChatChunks):
    """The chunks of a chat as the typed events of a response. Each item is said as it begins, grows and ends.

    Text and reasoning follow each other; the calls of functions stay open to the end, since chunks may go on with any.
    """

    __slots__ = ("_calls", "_chat", "_fields", "_finish", "_open", "_output", "_sequence", "_text")

    def __init__(self, fields: Fields) -> None:
        super().__init__()
        self._fields = fields
        self._chat: Mapping[str, Any] = {}
        self._output: list[dict[str, Any]] = []  # items as they will be when they have ended
        self._open = ""  # the type of the last one, if text goes on there
        self._text: list[str] = []  # of that one
        self._calls: dict[int, tuple[int, list[str]]] = {}  # a chunk's index of a call → its item, its arguments
        self._finish: Any = None
        self._sequence = 0

    def begin(self, chunk: Mapping[str, Any]) -> None:
        self._chat = {"id": chunk.get("id"), "model": chunk.get("model"), "created": chunk.get("created")}
        for name in ("response.created", "response.in_progress"):
            self._tell(name, response=_response(self._fields, self._chat, [], None, None, status="in_progress"))

    def thought(self, text: str) -> None:
        at = self._open_item("reasoning")
        self._text.append(text)
        self._tell("response.reasoning_text.delta", **at, delta=text)

    def text(self, text: str) -> None:
        at = self._open_item("message")
        self._text.append(text)
        self._tell("response.output_text.delta", **at, delta=text, logprobs=[])

    def call(self, number: int, call: Mapping[str, Any], function: Mapping[str, Any]) -> None:
        if number not in self._calls:
            self._close_item()
            index = len(self._output)
            item = _call(f"fc_{self._chat.get('id')}_{index}", call.get("id") or f"call_{index}", function["name"], "")
            self._calls[number] = index, []
            self._output.append(item)
            self._tell("response.output_item.added", output_index=index, item=item | {"status": "in_progress"})
        index, arguments = self._calls[number]
        if more := function.get("arguments"):
            arguments.append(more)
            at = {"item_id": self._output[index]["id"], "output_index": index}
            self._tell("response.function_call_arguments.delta", **at, delta=more)

    def ending(self, choice: Mapping[str, Any]) -> None:
        self._close_item()
        for index, arguments in self._calls.values():
            item = self._output[index]
            item["arguments"] = "".join(arguments)
            at = {"item_id": item["id"], "output_index": index}
            said = {"name": item["name"], "arguments": item["arguments"]}
            self._tell("response.function_call_arguments.done", **at, **said)
            self._tell("response.output_item.done", output_index=index, item=item)
        self._finish = choice["finish_reason"]

    def last(self) -> bytes:
        response = _response(self._fields, self._chat, self._output, self._finish, self.counts)
        return _written(f"response.{response['status']}", self._sequence, {"response": response})

    def _tell(self, name: str, /, **fields: Any) -> None:
        self.say(_written(name, self._sequence, fields))
        self._sequence += 1

    def _open_item(self, kind: str) -> dict[str, Any]:
        """Where in the output text of this kind now goes."""
        if self._open != kind:
            self._close_item()
            self._open = kind
            index, name = len(self._output), f"{'msg' if kind == 'message' else 'rs'}_{self._chat.get('id')}_"
            item = _message(f"{name}{index}", "") if kind == "message" else _reasoning(f"{name}{index}", "")
            self._output.append(item)
            empty = item | {"status": "in_progress", "content": []}
            self._tell("response.output_item.added", output_index=index, item=empty)
            self._tell("response.content_part.added", **self._at(), part=item["content"][0])
        return self._at()

    def _at(self) -> dict[str, Any]:
        index = len(self._output) - 1
        return {"item_id": self._output[index]["id"], "output_index": index, "content_index": 0}

    def _close_item(self) -> None:
        if not self._open:
            return
        at, item = self._at(), self._output[-1]
        kind = "output_text" if self._open == "message" else "reasoning_text"
        part = item["content"][0]
        part["text"] = "".join(self._text)
        more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        self._tell(f"response.{kind}.done", **at, text=part["text"], **more)
        self._tell("response.content_part.done", **at, part=part)
        self._tell("response.output_item.done", output_index=at["output_index"], item=item)
        self._open = ""
        self._text = []


def _written(name: str, sequence: int, fields: Mapping[str, Any]) -> bytes:
    event = {"type": name, "sequence_number": sequence, **fields}
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(event))


def _message(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": content}


def _reasoning(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": name, "type": "reasoning", "status": "completed", "summary": [], "content": content}


def _call(name: str, call: Any, function: Any, arguments: Any) -> dict[str, Any]:
    said = {"call_id": call, "name": function, "arguments": arguments or ""}
    return {"id": name, "type": "function_call", "status": "completed", **said}


def _response(
    fields: Fields, chat: Mapping[str, Any], output: list[dict[str, Any]], finish: Any, counts: Any, *, status: str = ""
) -> dict[str, Any]:
    reason = _INCOMPLETE.get(str(finish))
    response = {
        "id": f"resp_{chat.get('id')}",
        "object": "response",
        "created_at": chat.get("created") or int(time.time()),
        "status": status or ("incomplete" if reason else "completed"),
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "model": chat.get("model"),
        "output": output,
        "parallel_tool_calls": fields.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "store": False,
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools") or [],
        "usage": _usage(counts),
    }
    return response | {field: fields.get(field) for field in _ECHOED}


def _usage(counts: Any) -> dict[str, Any] | None:
    usage = read_usage(counts)
    if usage is None:
        return None
    details = counts.get("completion_tokens_details")
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning or 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
