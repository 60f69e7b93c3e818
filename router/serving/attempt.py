"""One attempt at an answer: what an engine says, on its way to the client.

    head ── other than 200 ────────────> gathered; an error in the client's dialect
         ── 200, text/event-stream ────> relayed event by event (`sse.py`)
         ── 200, anything else ────────> gathered and sent whole; past a bound, passed on as it comes

An answer that has begun is never begun again, and a broken one never ends as if whole.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator
from typing import Protocol

import zstandard

from router.core import Usage
from router.errors import EngineError, EngineProtocolError, WarmrouteError
from router.http.messages import Header
from router.serving.call import Call
from router.serving.deadlines import Deadlines
from router.serving.encoding import Decoder, response_decoder
from router.serving.engines import Exchange
from router.serving.openai_errors import engine_answer_error, in_band_error
from router.serving.reply import JSON, Reply, content_lines
from router.serving.sse import SseRelay
from router.serving.usage import find_usage, usage_of_answer

_WHOLE_BYTES = 8 << 20  # an answer larger than this is not gathered
_ERROR_BYTES = 64 * 1024  # nobody needs more of an engine's error
_USAGE_TAIL_BYTES = 64 * 1024  # where the usage of an answer that was not gathered is looked for


class Answer(Protocol):
    """What is left to write once the outcome is known."""

    def deliver(self, reply: Reply) -> None: ...


class WholeAnswer:
    __slots__ = ("_body", "_content", "_usage")

    def __init__(self, content: bytes, body: bytes, usage: Usage | None) -> None:
        self._content = content
        self._body = body
        self._usage = usage

    def deliver(self, reply: Reply) -> None:
        usage = self._usage
        if usage is not None and usage.cached_tokens is not None:
            reply.receipt += b"\r\nx-warmroute-cached-tokens: %d" % usage.cached_tokens
        reply.whole(200, self._content, self._body)


class StreamEnd:
    """The end of a stream that has been passed on: its last event, which the client takes for the end."""

    __slots__ = ("_tail",)

    def __init__(self, tail: bytes = b"") -> None:
        self._tail = tail

    def deliver(self, reply: Reply) -> None:
        if not reply.started:  # an engine may say nothing but [DONE]
            reply.start()
        reply.finish(self._tail)


class Attempt:
    """Receives an engine's answer (`router/http` calls it). Awaited, it gives an Answer or raises a WarmrouteError.

    exchange        the engine's side, set when it begins
    on_done         called when there is something to give (`run.py`)
    first_token_at  monotonic time of a stream's first token
    events          whole events the client was sent
    usage           the engine's own count, as far as it came
    """

    __slots__ = (
        "_answer", "_booking_id", "_call", "_content", "_deadlines", "_decoder", "_gathered", "_on_first_token",
        "_relay", "_reply", "_retry_after", "_size", "_status", "_usage", "exchange", "first_token_at", "on_done",
    )  # fmt: skip

    exchange: Exchange

    def __init__(
        self,
        call: Call,
        reply: Reply,
        booking_id: int,
        *,
        on_first_token: Callable[[int], None],
        deadlines: Deadlines,
    ) -> None:
        self.on_done: Callable[[], None] | None = None
        self.first_token_at: float | None = None
        self._call = call
        self._reply = reply
        self._booking_id = booking_id
        self._on_first_token = on_first_token
        self._deadlines = deadlines
        self._answer: Answer | Exception | None = None
        self._status = 0
        self._content = JSON
        self._retry_after: bytes | None = None
        self._decoder: Decoder | None = None
        self._relay: SseRelay | None = None  # if the answer is an event stream
        self._gathered: list[bytes] = []
        self._size = 0
        self._usage: Usage | None = None

    def __await__(self) -> Generator[Attempt, None, Answer]:
        if self._answer is None:
            yield self
        answer = self._answer
        assert answer is not None, "whoever waits is woken by the answer"
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def usage(self) -> Usage | None:
        return self._usage if self._relay is None else self._relay.usage

    @property
    def events(self) -> int:
        return 0 if self._relay is None else self._relay.events

    @property
    def in_events(self) -> bool:
        """The client is being sent events, so that an error can be said as one."""
        return self._relay is not None

    @property
    def inside(self) -> bool:
        """The client has part of an event."""
        return self._relay is not None and self._relay.inside

    def cancel(self, error: WarmrouteError | None = None) -> None:
        """Free the engine at once. `error`: why, for whoever waits for the answer."""
        self._deadlines.clear(self)
        self.exchange.cancel()
        if error is not None:
            self._end(error)

    # -- the engine's connection

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        for name, value in headers:
            if name == b"content-type":
                if value != b"application/json":
                    self._take_content_type(value)
            elif name == b"content-encoding":
                self._decode(value)
            elif name == b"retry-after":
                self._retry_after = value

    def on_data(self, data: bytes) -> None:
        try:
            self._take(data)
        except Exception as mistake:
            self._give_up(mistake)

    def on_end(self) -> None:
        try:
            self._take_end()
        except Exception as mistake:
            self._give_up(mistake)

    def _give_up(self, mistake: Exception) -> None:
        """Ours. Raised here it would end the engine's connection, and leave the client waiting for ever."""
        self.cancel()
        self._end(mistake)

    def _take(self, data: bytes) -> None:
        if self._decoder is not None:
            try:
                data = self._decoder.decompress(data)
            except (zlib.error, zstandard.ZstdError) as error:
                self.cancel(EngineProtocolError("The engine's compressed answer is corrupt.", detail=repr(error)))
                return
        if self._relay is None:
            self._gather(data)
        else:
            self._relay_events(self._relay, data)

    def _take_end(self) -> None:
        relay = self._relay
        if relay is not None or not self._size:
            self._deadlines.clear(self)
        if self._answer is not None:
            return
        if relay is None:
            self._end_whole()
            return
        rest = relay.end()
        if rest:
            self._pass_on(rest)
        self._end_of_stream(relay, EngineProtocolError("The engine's answer ended early."))

    def on_error(self, error: EngineError) -> None:
        self._deadlines.clear(self)
        if self._relay is None:
            self._end(error)
        else:
            self._end_of_stream(self._relay, error)

    def _take_content_type(self, value: bytes) -> None:
        self._content = content_lines(value)
        if self._status == 200 and value.startswith(b"text/event-stream"):
            self._relay = SseRelay(hide_usage=not self._call.wants_usage, choices=self._call.choices)

    def _decode(self, coding: bytes) -> None:
        try:
            self._decoder = response_decoder(coding)
        except EngineProtocolError as error:
            self.cancel(error)

    def _end(self, answer: Answer | Exception) -> None:
        """The first answer counts. Whoever waits goes on from here, so this is the last thing done in a call."""
        if self._answer is None:
            self._answer = answer
            on_done, self.on_done = self.on_done, None
            if on_done is not None:
                on_done()

    def _start(self, *content: bytes) -> None:
        """A client that reads slowly makes the engine's connection wait, so that nothing piles up here."""
        responder = self._reply.responder
        responder.on_pause, responder.on_resume = self.exchange.pause, self.exchange.resume
        self._reply.start(*content)

    # -- an event stream

    def _relay_events(self, relay: SseRelay, data: bytes) -> None:
        passed = relay.feed(data)
        if self.first_token_at is None and relay.first_token:
            self.first_token_at = time.monotonic()
            self._deadlines.clear(self)
            self._on_first_token(self._booking_id)
        if passed:
            self._pass_on(passed)
        if relay.done or relay.error is not None:
            self._ended_by_engine(relay)

    def _pass_on(self, events: bytes) -> None:
        reply = self._reply
        if not reply.started:
            self._start()
        reply.write(events)

    def _ended_by_engine(self, relay: SseRelay) -> None:
        if self._answer is not None:
            return
        if relay.error is not None:
            self.cancel(in_band_error(relay.error))
        else:
            self._deadlines.set_drain(self)
            self._end(StreamEnd(relay.tail))

    def _end_of_stream(self, relay: SseRelay, error: EngineError) -> None:
        """The engine's connection has no more; `error` unless the answer was whole before."""
        if relay.complete:
            self._end(StreamEnd(relay.tail))
        elif relay.error is not None:
            self._end(in_band_error(relay.error))
        else:
            self._end(error)

    # -- a whole answer

    def _gather(self, data: bytes) -> None:
        if not self._size:
            self._deadlines.clear(self)
        self._size += len(data)
        if self._reply.started:
            self._reply.write(data)
            self._gathered = [b"".join((*self._gathered, data))[-_USAGE_TAIL_BYTES:]]
        elif self._status == 200 or self._size <= _ERROR_BYTES:
            self._gathered.append(data)
            if self._size > _WHOLE_BYTES:
                self._stop_gathering()

    def _stop_gathering(self) -> None:
        body = b"".join(self._gathered)
        self._start(self._content)
        self._reply.write(body)
        self._gathered = [body[-_USAGE_TAIL_BYTES:]]

    def _end_whole(self) -> None:
        body = b"".join(self._gathered)
        if self._status != 200:
            self._end(engine_answer_error(self._status, body, self._retry_after))
        elif self._reply.started:
            self._usage = find_usage(body)
            self._end(StreamEnd())
        else:
            self._usage = usage_of_answer(body)
            self._end(WholeAnswer(self._content, body, self._usage))
