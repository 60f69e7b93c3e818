"""One HTTP request on its way through the engine: what its steps bring becomes chunks, or one whole answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from router.http.responder import Responder
from router.lab.answers import DONE, Shape, sse
from router.lab.chat import Reply
from router.lab.engine import EngineRequest

JSON = ((b"content-type", b"application/json"),)
_EVENT_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)
CRASHED = {
    "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}


class Choice:
    """One answer of a session: an engine request, what it will say, and how much of that was delivered."""

    __slots__ = ("delivered", "finish", "first_at", "index", "last_at", "reply", "request", "session")

    def __init__(self, session: Session, index: int, request: EngineRequest, reply: Reply) -> None:
        self.session = session
        self.index = index
        self.request = request
        self.reply = reply
        self.delivered = 0
        self.finish: str | None = None
        self.first_at: float | None = None
        self.last_at = 0.0

    def deliver(self, tokens: int) -> None:
        """So many more tokens have come."""
        start = self.delivered
        self.delivered = end = start + tokens
        if end == len(self.reply.ids):
            self.finish = self.reply.finish
        session = self.session
        if not session.streams:
            return
        if start == 0:
            session.out.append(session.shape.opening(self.index))
        session.out.append(session.shape.tokens(self.index, self.reply, start, end, finish=self.finish))


class Session:
    """One HTTP request: a whole answer or a stream, of one choice or several."""

    def __init__(
        self,
        shape: Shape,
        responder: Responder,
        *,
        streams: bool,
        include_usage: bool,
        report_cached: bool,
        began: float,
    ) -> None:
        self.shape = shape
        self.responder = responder
        self.streams = streams
        self.began = began
        self.choices: list[Choice] = []
        self.out: list[bytes] = []  # chunks of the step in hand
        self._include_usage = include_usage
        self._report_cached = report_cached
        self._block_size = 0
        self._prompts = 1

    def open(
        self, requests: Sequence[EngineRequest], replies: Sequence[Reply], *, block_size: int, prompts: int
    ) -> None:
        """`prompts`: how many there are, each with as many choices."""
        self._block_size = block_size
        self._prompts = prompts
        for index, (request, reply) in enumerate(zip(requests, replies, strict=True)):
            self.choices.append(Choice(self, index, request, reply))
        if self.streams:
            self.responder.start(200, _EVENT_STREAM)

    def flush(self) -> None:
        """Sends what the step brought, in one write; ends the answer when every choice is over."""
        over = all(choice.finish is not None for choice in self.choices)
        if self.streams:
            if over and self._include_usage:
                self.out.append(self.shape.usage_chunk(self._usage()))
            if over:
                self.out.append(DONE)
            self.responder.write(b"".join(self.out))
            self.out.clear()
            if over:
                self.responder.finish()
        elif over:
            self.responder.send(200, JSON, self.shape.whole([self._whole(c) for c in self.choices], self._usage()))

    def fail(self, error: Mapping[str, Any] = CRASHED) -> None:
        """The engine died: in mid-stream vLLM says so in the stream, and ends it in order."""
        if self.streams:
            self.responder.write(sse({"error": error}) + DONE)
            self.responder.finish()
        else:
            self.responder.send(500, JSON, orjson.dumps({"error": error}))

    def _whole(self, choice: Choice) -> dict[str, Any]:
        assert choice.finish is not None
        return self.shape.choice(choice.index, choice.reply, choice.finish, choice.delivered)

    def _usage(self) -> dict[str, Any]:
        per_prompt = len(self.choices) // self._prompts
        firsts = [choice.request for choice in self.choices[::per_prompt]]
        prompt = sum(request.prompt_tokens for request in firsts)
        cached = sum(request.cached_tokens or 0 for request in firsts)
        completion = sum(choice.delivered for choice in self.choices)
        details = {
            "cached_tokens": cached,
            "created_cache_tokens": self._created(firsts) if self.shape.counts_created else None,
            "multimodal_tokens": None,
        }
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": details if self._report_cached else None,
            "completion_tokens_details": None,
        }

    def _created(self, requests: Sequence[EngineRequest]) -> int:
        size = self._block_size
        return sum(max(0, r.prompt_tokens // size * size - (r.cached_tokens or 0)) for r in requests)
