"""Answers in vLLM 0.32's two shapes: chat and text completion, whole and streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from router.lab.chat import Reply

DONE = b"data: [DONE]\n\n"
FINGERPRINT = "vllm-0.32.0-sim"


def sse(event: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(event)


class Shape(ABC):
    """What chat and completion answers share. One per HTTP request.

    top: alternatives to show of each token; None: no log probabilities. prompt_ids: of each choice, None unless asked
    for. echoed: the text that comes before each choice.
    """

    object = ""
    chunk_object = ""
    counts_created = False  # whether usage tells how many prompt tokens were put into the cache

    def __init__(
        self,
        id: str,
        *,
        created: int,
        model: str,
        top: int | None,
        prompt_ids: Sequence[Sequence[int]] | None,
        echoed: Sequence[str],
    ) -> None:
        self.id = id
        self._created = created
        self._model = model
        self._top = top
        self._prompt_ids = prompt_ids
        self._echoed = echoed
        self._chunk_head = b"data: " + orjson.dumps(self._chunk([]))[:-2]  # up to the "[" of choices

    @abstractmethod
    def choice(self, index: int, reply: Reply, finish: str, count: int) -> dict[str, Any]:
        """One entry of `choices` of a whole answer, made of the first `count` tokens."""

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """What a stream says before the first token of a choice."""

    @abstractmethod
    def tokens(self, index: int, reply: Reply, start: int, end: int, *, finish: str | None) -> bytes:
        """The chunk of tokens start .. end-1."""

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return orjson.dumps(
            {
                "id": self.id,
                "object": self.object,
                "created": self._created,
                "model": self._model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage,
                **self._whole_extra(),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        details = usage["prompt_tokens_details"]
        if details is not None:  # streams leave out what is null
            usage = {**usage, "prompt_tokens_details": {k: v for k, v in details.items() if v is not None}}
        usage = {name: value for name, value in usage.items() if value is not None}
        return sse({**self._chunk([]), "usage": usage, "system_fingerprint": FINGERPRINT})

    def _chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        chunk = {"id": self.id, "object": self.chunk_object, "created": self._created, "model": self._model}
        return {**chunk, "choices": choices, **more}

    def _whole_extra(self) -> dict[str, Any]:
        return {}

    def _ids(self, ids: Sequence[int]) -> Sequence[int] | None:
        return None if self._prompt_ids is None else list(ids)

    def _ids_of_prompt(self, index: int) -> list[int] | None:
        return None if self._prompt_ids is None else list(self._prompt_ids[index])


class ChatShape(Shape):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    counts_created = True

    def choice(self, index: int, reply: Reply, finish: str, count: int) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if reply.tool_name else "".join(reply.pieces[:count]),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        if reply.tool_name:
            message["tool_calls"] = [_tool_call(self.id, reply)]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(reply, 0, count),
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": self._ids(reply.ids[:count]),
            "routed_experts": None,
        }

    def opening(self, index: int) -> bytes:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return sse(self._chunk([choice], prompt_token_ids=self._ids_of_prompt(index), prompt_text=None))

    def tokens(self, index: int, reply: Reply, start: int, end: int, *, finish: str | None) -> bytes:
        delta = _tool_delta(self.id, reply, start, end) if reply.tool_name else None
        if delta is None:
            text = "".join(reply.pieces[start:end])
            if finish is None and self._top is None and self._prompt_ids is None:  # nearly all chunks there are
                return _PLAIN_CHUNK % (self._chunk_head, index, orjson.dumps(text))
            delta = {"content": text}
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(reply, start, end),
            "finish_reason": finish,
            "token_ids": self._ids(reply.ids[start:end]),
        }
        if finish is None:
            return sse(self._chunk([choice]))
        return sse(self._chunk([{**choice, "stop_reason": None}], system_fingerprint=FINGERPRINT))

    def _logprobs(self, reply: Reply, start: int, end: int) -> dict[str, Any] | None:
        if self._top is None:
            return None
        return {"content": [_chat_logprob(piece, self._top) for piece in reply.pieces[start:end]]}

    def _whole_extra(self) -> dict[str, Any]:
        return {"prompt_logprobs": None, "prompt_token_ids": self._ids_of_prompt(0), "prompt_text": None}


class CompletionShape(Shape):
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, reply: Reply, finish: str, count: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echo(index) + "".join(reply.pieces[:count]),
            "logprobs": self._logprobs(reply, 0, count),
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": self._ids(reply.ids[:count]),
            "prompt_logprobs": None,
            "prompt_token_ids": self._ids_of_prompt(index),
            "routed_experts": None,
        }

    def opening(self, index: int) -> bytes:
        return b""

    def tokens(self, index: int, reply: Reply, start: int, end: int, *, finish: str | None) -> bytes:
        choice = {
            "index": index,
            "text": (self._echo(index) if start == 0 else "") + "".join(reply.pieces[start:end]),
            "logprobs": self._logprobs(reply, start, end),
            "finish_reason": finish,
            "stop_reason": None,
            "prompt_token_ids": self._ids_of_prompt(index) if start == 0 else None,
            "token_ids": self._ids(reply.ids[start:end]),
        }
        return sse(self._chunk([choice]))

    def _echo(self, index: int) -> str:
        return self._echoed[index] if self._echoed else ""

    def _logprobs(self, reply: Reply, start: int, end: int) -> dict[str, Any] | None:
        if self._top is None:
            return None
        pieces, before = reply.pieces[start:end], len("".join(reply.pieces[:start]))
        offsets = [before + len("".join(pieces[:n])) for n in range(len(pieces))]
        return {
            "text_offset": offsets,
            "token_logprobs": [_LOGPROB] * len(pieces),
            "tokens": pieces,
            "top_logprobs": [{piece: _LOGPROB} for piece in pieces],
        }


# A chat chunk of one token, where neither log probabilities nor ids are asked for.
_PLAIN_CHUNK = b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
_LOGPROB = -0.5  # of every token: nothing is sampled here


def _chat_logprob(piece: str, top: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"token": piece, "logprob": _LOGPROB, "bytes": list(piece.encode())}
    others = [{"token": f" other{n}", "logprob": _LOGPROB - n, "bytes": list(b" other%d" % n)} for n in range(1, top)]
    return {**entry, "top_logprobs": [dict(entry), *others] if top else []}


def _tool_call(id: str, reply: Reply) -> dict[str, Any]:
    function = {"name": reply.tool_name, "arguments": reply.tool_arguments}
    return {"id": f"chatcmpl-tool-{id[-16:]}", "type": "function", "function": function}


def _tool_delta(id: str, reply: Reply, start: int, end: int) -> dict[str, Any]:
    """The name with the first token, the arguments spread evenly over the others."""
    call: dict[str, Any] = {"index": 0, "function": {}}
    if start == 0:
        call = {**_tool_call(id, reply), "index": 0, "function": {"name": reply.tool_name}}
    rest = max(1, len(reply.ids) - 1)
    size = len(reply.tool_arguments)
    fragment = reply.tool_arguments[max(0, start - 1) * size // rest : max(0, end - 1) * size // rest]
    if fragment:
        call["function"]["arguments"] = fragment
    if start and not fragment:
        return {}
    return {"content": None, "tool_calls": [call]} if start == 0 else {"tool_calls": [call]}
