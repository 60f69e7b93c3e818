"""The chunks of a chat, taken apart for those who say them in the events of another API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.serving.sse import DONE, TORN, EventRelay, in_band_error_of
from router.serving.usage import parse_object, read_usage

_LARGEST_CHUNK_BYTES = 1 << 20


class ChatChunks(EventRelay):
    """A subclass is told what a choice says, in order, and answers with `say`; `last` may be asked more than once.

    counts   the engine's usage object, if it has come
    started  the first chunk of the choice has come
    """

    held_bytes = _LARGEST_CHUNK_BYTES

    __slots__ = ("_finished", "_said", "counts", "started")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Any = None
        self.started = False
        self._finished = False
        self._said: list[bytes] = []

    def say(self, event: bytes) -> None:
        self._said.append(event)

    # -- what a choice says

    def begin(self, chunk: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def thought(self, text: str) -> None:
        raise NotImplementedError

    def text(self, text: str) -> None:
        raise NotImplementedError

    def call(self, number: int, call: Mapping[str, Any], function: Mapping[str, Any]) -> None:
        """A part of a tool's call. `number` tells the calls apart; the first part has the names."""
        raise NotImplementedError

    def ending(self, choice: Mapping[str, Any]) -> None:
        """`choice`: with its finish reason."""
        raise NotImplementedError

    def last(self) -> bytes:
        """The event, or events, that end the stream."""
        raise NotImplementedError

    # -- the stream

    @property
    def complete(self) -> bool:
        """As with chat, the choice's end is enough."""
        return self.error is None and (self.done or self._finished)

    def _is_plain(self, data: bytes) -> bool:
        return False

    def _begin_oversized(self) -> bytes:
        self._held.clear()
        self.error = {"message": "a chunk that is too large", "code": 500}
        return b""

    def _read(self, event: bytes, payload: bytes) -> bytes:
        if payload.strip() == DONE:
            self.done = self._finished
            return b""
        chunk = parse_object(payload)
        if chunk is None:
            self.error = TORN if payload.startswith(b"{") else None
            return b""
        self.error = in_band_error_of(chunk)
        if self.error is not None:
            return b""
        self._said.clear()
        try:
            self._chunk(chunk)
        except (AttributeError, IndexError, KeyError, TypeError):
            self.error = {"message": "a chunk of an unexpected shape", "code": 500}
            return b""
        self.events += max(0, len(self._said) - 1)  # what is passed on counts as one already
        return b"".join(self._said)

    def _chunk(self, chunk: Mapping[str, Any]) -> None:
        if chunk.get("usage"):
            self.counts = chunk["usage"]
            self.take_usage(read_usage(self.counts))
        if chunk.get("choices") and not self._finished:
            self.first_token = True
            if not self.started:
                self.started = True
                self.begin(chunk)
            choice = chunk["choices"][0]
            self._delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self._finished = True
                self.ending(choice)
        if self._finished:
            self.tail = self.last()

    def _delta(self, delta: Mapping[str, Any]) -> None:
        if thought := thought_of(delta):
            self.thought(thought)
        if text := delta.get("content"):
            self.text(text)
        for call in delta.get("tool_calls") or ():
            self.call(call.get("index", 0), call, call.get("function") or {})


def thought_of(said: Mapping[str, Any]) -> Any:
    """vLLM and others call it `reasoning`, SGLang and others `reasoning_content`."""
    return said.get("reasoning") or said.get("reasoning_content")
