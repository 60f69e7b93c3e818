"""Anthropic's Messages for an engine that has only chat: the request there, the answer back, whole or as a stream.

What a chat has no word for (documents, tools of Anthropic's own) is refused. Left out are cache marks, which change no
answer, and the thoughts of earlier turns, which engines want back in no common form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from router.errors import BadRequest
from router.serving.apis.api import Fields, Translation, written
from router.serving.apis.chat_chunks import ChatChunks, thought_of
from router.serving.prompt.as_chat import chat_of_messages
from router.serving.prompt.reason import Unreadable
from router.serving.sse import EventRelay
from router.serving.usage import parse_object, read_usage

_SAME = ("max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt", "priority")
_REFUSED = ("mcp_servers", "container", "context_management")
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


class MessagesAsChat(Translation):
    path = "/v1/chat/completions"

    def body(self, fields: Fields, served: str, owned: Mapping[str, bytes]) -> bytes:
        return chat_body(fields, served, owned)

    def relay(self, fields: Fields, *, prompt_tokens: int) -> EventRelay:
        return ChatAsMessages(prompt_tokens=prompt_tokens)

    def answer(self, fields: Fields, body: bytes) -> bytes | None:
        return message_of(body)


class CountAsTokenize(MessagesAsChat):
    """What is asked is how many tokens the same chat has."""

    path = "/tokenize"

    def body(self, fields: Fields, served: str, owned: Mapping[str, bytes]) -> bytes:
        chat = _chat_of(fields)
        asked = {name: chat[name] for name in ("messages", "tools", "chat_template_kwargs") if name in chat}
        return written({"model": served, **asked, "add_generation_prompt": True})

    def answer(self, fields: Fields, body: bytes) -> bytes | None:
        count = (parse_object(body) or {}).get("count")
        return written({"input_tokens": count}) if type(count) is int else None


def chat_body(fields: Fields, served: str, owned: Mapping[str, bytes]) -> bytes:
    """Raises BadRequest."""
    chat = _chat_of(fields)
    body = {"model": served, **chat, **{field: fields[field] for field in _SAME if field in fields}}
    if fields.get("stop_sequences"):
        body["stop"] = fields["stop_sequences"]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and "disable_parallel_tool_use" in choice:
        body["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    if fields.get("stream") is True:
        body["stream_options"] = {"include_usage": True}
    return written(body | {name: orjson.loads(value) for name, value in owned.items()})


def _chat_of(fields: Fields) -> dict[str, Any]:
    """Raises BadRequest."""
    for field in _REFUSED:
        if fields.get(field):
            raise _untranslatable(field)
    try:
        chat = chat_of_messages(fields, images=True)
    except Unreadable as error:
        raise _untranslatable(error.reason) from error
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BadRequest("The messages are not what Anthropic's API describes.", param="messages") from error
    for message in chat["messages"]:
        message.pop("reasoning", None)
        message.setdefault("content", None)
    return chat


def message_of(answer: bytes) -> bytes | None:
    """A whole chat answer as a message; None if it is none."""
    chat = parse_object(answer)
    try:
        assert chat is not None
        choice = chat["choices"][0]
        said = choice["message"]
        content: list[Any] = []
        if thought := thought_of(said):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if said.get("content"):
            content.append({"type": "text", "text": said["content"]})
        content += [_tool_use(call) for call in said.get("tool_calls") or ()]
        reason, stop = _stop(choice)
        message = {**_head(chat), "content": content, "stop_reason": reason, "stop_sequence": stop}
        return written(message | {"usage": _usage(chat.get("usage"), 0)})
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError):
        return None


class ChatAsMessages(ChatChunks):
    """The chunks of a chat as Anthropic's events.

    Blocks of text and thought follow each other; a tool's call stays open to the end, since chunks may go on with any
    of several. A message begins with the tokens that we count for its prompt, and ends with the engine's own count.
    """

    __slots__ = ("_block", "_blocks", "_calls", "_stop", "_tokens")

    def __init__(self, *, prompt_tokens: int) -> None:
        super().__init__()
        self._tokens = prompt_tokens
        self._stop: tuple[str, str | None] = ("end_turn", None)
        self._blocks = 0
        self._block = ""  # the kind of the last one, if it is open
        self._calls: dict[int, int] = {}  # a chunk's index of a call → its block

    def begin(self, chunk: Mapping[str, Any]) -> None:
        message = {**_head(chunk), "content": [], "stop_reason": None, "stop_sequence": None}
        self.say(_event("message_start", message=message | {"usage": _usage(None, self._tokens)}))

    def thought(self, text: str) -> None:
        index = self._open("thinking", {"thinking": "", "signature": ""})
        self.say(_event("content_block_delta", index=index, delta={"type": "thinking_delta", "thinking": text}))

    def text(self, text: str) -> None:
        index = self._open("text", {"text": ""})
        self.say(_event("content_block_delta", index=index, delta={"type": "text_delta", "text": text}))

    def call(self, number: int, call: Mapping[str, Any], function: Mapping[str, Any]) -> None:
        index = self._calls.get(number)
        if index is None:
            self._close()
            index = self._calls[number] = self._blocks
            self._blocks += 1
            block = {"type": "tool_use", "id": call.get("id") or f"call_{index}", "name": function["name"], "input": {}}
            self.say(_event("content_block_start", index=index, content_block=block))
        if arguments := function.get("arguments"):
            delta = {"type": "input_json_delta", "partial_json": arguments}
            self.say(_event("content_block_delta", index=index, delta=delta))

    def ending(self, choice: Mapping[str, Any]) -> None:
        self._close()
        for index in self._calls.values():
            self.say(_event("content_block_stop", index=index))
        self._stop = _stop(choice)

    def last(self) -> bytes:
        reason, stop = self._stop
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = _usage(self.counts, self._tokens)
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def _open(self, kind: str, empty: dict[str, str]) -> int:
        """The block of this kind that text now goes into."""
        if self._block != kind:
            self._close()
            self._block = kind
            self.say(_event("content_block_start", index=self._blocks, content_block={"type": kind, **empty}))
            self._blocks += 1
        return self._blocks - 1

    def _close(self) -> None:
        if self._block:
            self.say(_event("content_block_stop", index=self._blocks - 1))
            self._block = ""


def _untranslatable(what: str) -> BadRequest:
    message = f"The engine of this model has no Messages API, and a chat cannot hold all of the request: {what}."
    return BadRequest(message, code="unsupported_parameter")


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), written({"type": name, **fields}))


def _head(chat: Mapping[str, Any]) -> dict[str, Any]:
    name = f"msg_{chat.get('id')}"
    return {"id": name, "type": "message", "role": "assistant", "model": chat.get("model")}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = parse_object((function.get("arguments") or "{}").encode("utf-8", "surrogatepass"))
    return {"type": "tool_use", "id": call.get("id"), "name": function["name"], "input": arguments or {}}


def _stop(choice: Mapping[str, Any]) -> tuple[str, str | None]:
    """vLLM and SGLang tell which stop string it was; others do not."""
    stop = choice.get("stop_reason") or choice.get("matched_stop")
    if choice.get("finish_reason") == "stop" and isinstance(stop, str):
        return "stop_sequence", stop
    return _STOP_REASONS.get(str(choice.get("finish_reason")), "end_turn"), None


def _usage(counts: Any, prompt_tokens: int) -> dict[str, int]:
    usage = read_usage(counts)
    if usage is None:
        return {"input_tokens": prompt_tokens, "output_tokens": 0}
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.input_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens,
    }
