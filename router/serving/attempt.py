"""One attempt at an answer: what an engine says, on its way to the client.

    head ── other than 200 ────────────> gathered; an error in the client's dialect
         ── 200, text/event-stream ────> relayed event by event (`sse.py`)
         ── 200, anything else ────────> gathered and sent whole; past a bound, passed on as it comes

An answer that has begun is never begun again, and a broken one never ends as if whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

import msgspec

from router.core import Usage
from router.errors import EngineError, EngineProtocolError, WarmrouteError
from router.http.messages import Header
from router.serving.apis import Translation
from router.serving.call import Call
from router.serving.deadlines import Watch
from router.serving.encoding import GZIP_MAGIC, CorruptAnswer, Decoder, response_decoder
from router.serving.engines import Exchange
from router.serving.openai_errors import engine_answer_error, in_band_error, lacks_route
from router.serving.reply import JSON, Reply, content_lines
from router.serving.sse import EventRelay
from router.serving.usage import find_usage, parse_object, usage_of_answer

_WHOLE_BYTES = 8 << 20  # an answer larger than this is not gathered
_ERROR_BYTES = 64 * 1024  # nobody needs more of an engine's error
_TRANSLATED_BYTES = 1 << 20  # parsed and written again within some milliseconds; no chat is that long
_NOTHING = b":\n\n"
_USAGE_TAIL_BYTES = 64 * 1024  # where the usage of an answer that was not gathered is looked for


class Answer(Protocol):
    """What is left to write once the outcome is known."""

    def deliver(self, reply: Reply) -> None: ...


class WholeAnswer(msgspec.Struct, eq=False):
    _content: bytes
    _body: bytes
    _usage: Usage | None

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


class _Otherwise(NamedTuple):
    """How a request is sent by way of another route."""

    translation: Translation
    send: Callable[[Translation], None]
    prompt_tokens: int
    lacks: set[str]  # of the engine


class Attempt:
    """Receives an engine's answer (`router/http` calls it). Awaited, it gives an Answer or raises a WarmrouteError.

    exchange        the engine's side, set when it begins
    translation     if the engine has only another route
    watch           over its time, set when it begins
    received        bytes of the answer so far
    on_done         called when there is something to give (`run.py`)
    first_token_at  monotonic time of a stream's first token
    events          whole events the client was sent
    usage           the engine's own count, as far as it came
    """

    __slots__ = (
        "_answer", "_booking_id", "_call", "_content", "_decoder", "_gathered", "_on_first_token", "_otherwise",
        "_passes", "_relay", "_reply", "_retry_after", "_size", "_status", "_usage", "exchange", "first_token_at",
        "on_done", "received", "translation", "watch",
    )  # fmt: skip

    exchange: Exchange
    watch: Watch

    def __init__(
        self,
        call: Call,
        reply: Reply,
        booking_id: int,
        *,
        on_first_token: Callable[[int], None],
    ) -> None:
        self.on_done: Callable[[], None] | None = None
        self.first_token_at: float | None = None
        self._call = call
        self._reply = reply
        self._booking_id = booking_id
        self._on_first_token = on_first_token
        self._answer: Answer | Exception | None = None
        self._status = 0
        self._content = JSON
        self._retry_after: bytes | None = None
        self._decoder: Decoder | None = None
        self._relay: EventRelay | None = None  # if the answer is an event stream
        self._gathered: list[bytes] = []
        self._passes = False  # an answer that is not gathered any more
        self._size = 0
        self._usage: Usage | None = None
        self.received = 0
        self.translation: Translation | None = None
        self._otherwise: _Otherwise | None = None

    def translate(
        self,
        translation: Translation,
        send: Callable[[Translation], None],
        prompt_tokens: int,
        *,
        lacks: set[str],
        at_once: bool = False,
    ) -> None:
        """The engine may not have the route; if it is one of those it `lacks`, it is not even asked. Before it begins.

        `at_once`: it is not asked in any case.

        `send` is called again, once, if the engine says so itself.
        """
        self._otherwise = _Otherwise(translation, send, prompt_tokens, lacks)
        if at_once or self._call.path in lacks:
            self.translation = translation

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
    def events_after_usage(self) -> int:
        return 0 if self._relay is None else self._relay.events_after_usage

    @property
    def held_back(self) -> bool:
        """The client reads so slowly that the engine is not read from."""
        return self.exchange.paused

    @property
    def in_events(self) -> bool:
        """The client is being sent events, so that an error can be said as one."""
        return self._relay is not None

    @property
    def amid(self) -> bool:
        """Something has come that the client has not got: part of an event, or of an answer that is sent whole."""
        return self._size > 0 if self._relay is None else self._relay.amid

    @property
    def inside(self) -> bool:
        """The client has part of an event."""
        return self._relay is not None and self._relay.inside

    def cancel(self, error: WarmrouteError | None = None) -> None:
        """Free the engine at once. `error`: why, for whoever waits for the answer."""
        self.watch.end()
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
        self.received += len(data)
        try:
            if self._decoder is not None:
                decoded = self._decoded(self._decoder, data)
                if decoded is None:
                    return
                data = decoded
            if self._relay is not None:
                self._relay_events(self._relay, data)
            else:
                self._gather(data)
        except Exception as mistake:
            self._give_up(mistake)

    def on_end(self) -> None:
        self.watch.end()
        if self._answer is not None:
            return
        try:
            if self._relay is None:
                self._end_whole()
            else:
                self._end_events(self._relay)
        except Exception as mistake:
            self._give_up(mistake)

    def _give_up(self, mistake: Exception) -> None:
        """Ours. Raised here it would end the engine's connection, and leave the client waiting for ever."""
        self.cancel()
        self._end(mistake)

    def _decoded(self, decoder: Decoder, data: bytes) -> bytes | None:
        """None: it is corrupt, and this attempt is over."""
        try:
            return decoder.decompress(data)
        except CorruptAnswer as error:
            self.cancel(EngineProtocolError("The engine's compressed answer is corrupt.", detail=str(error)))
            return None

    def _end_events(self, relay: EventRelay) -> None:
        rest = relay.end()
        if rest:
            self._pass_on(relay, rest)
        self._end_of_stream(relay, EngineProtocolError("The engine's answer ended early."))

    def on_error(self, error: EngineError) -> None:
        self.watch.end()
        if self._relay is None:
            self._end(error)
        else:
            self._end_of_stream(self._relay, error)

    def _take_content_type(self, value: bytes) -> None:
        self._content = content_lines(value)
        if self._status == 200 and value.startswith(b"text/event-stream"):
            if self.translation is not None and self._otherwise is not None:
                self._relay = self.translation.relay(self._call.fields, prompt_tokens=self._otherwise.prompt_tokens)
            else:
                self._relay = self._call.relay()
            if self._reply.started:  # by an engine that this one goes on for
                self._hold_back()

    def _decode(self, coding: bytes) -> None:
        try:
            self._decoder = response_decoder(coding)
        except EngineProtocolError as error:
            self.cancel(error)

    def _end(self, answer: Answer | Exception) -> None:
        """The first answer counts. Whoever waits goes on from here, so this is the last thing done in a call."""
        if self._answer is None:
            self._answer = answer
            self._otherwise = None  # holds this attempt
            on_done, self.on_done = self.on_done, None
            if on_done is not None:
                on_done()

    def _start(self, *content: bytes) -> None:
        self._hold_back()
        self._reply.start(*content)

    def _hold_back(self) -> None:
        """A client that reads slowly makes the engine's connection wait, so that nothing piles up here."""
        responder = self._reply.responder
        responder.on_pause, responder.on_resume = self.exchange.pause, self.exchange.resume
        if responder.paused:
            self.exchange.pause()
        responder.on_probe = self._probe if self._relay is not None else None

    def _probe(self) -> None:
        if not self.inside:  # between two events a comment is nothing
            self._reply.responder.write(_NOTHING)

    # -- an event stream

    def _relay_events(self, relay: EventRelay, data: bytes) -> None:
        passed = relay.feed(data)
        if self.first_token_at is None and relay.first_token:
            self.first_token_at = time.monotonic()
            self.watch.begun()
            self._on_first_token(self._booking_id)
        if passed:
            self._pass_on(relay, passed)
        if relay.done or relay.error is not None:
            self._ended_by_engine(relay)

    def _pass_on(self, relay: EventRelay, events: bytes) -> None:
        reply = self._reply
        if not reply.started:
            if not (relay.events or relay.inside):  # an engine's own comments begin no answer, either
                self._hold_back()
                reply.comment(events)
                return
            self._start()
        reply.responder.write(events)

    def _ended_by_engine(self, relay: EventRelay) -> None:
        if self._answer is not None:
            return
        if relay.error is not None:
            self.cancel(in_band_error(relay.error))
        else:
            self.watch.drain()
            self._end(StreamEnd(relay.tail))

    def _end_of_stream(self, relay: EventRelay, error: EngineError) -> None:
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
            self.watch.begun()
        if self._status == 200 and self._reply.responder.started and not self._passes:  # a stream is open already
            self.cancel(EngineProtocolError("The engine answered with something else than a stream."))
            return
        self._size += len(data)
        if self._passes:
            self._reply.responder.write(data)
            self._gathered = [b"".join((*self._gathered, data))[-_USAGE_TAIL_BYTES:]]
        elif self._status == 200 or self._size <= _ERROR_BYTES:
            self._gathered.append(data)
            if self.translation is not None:
                if self._size > _TRANSLATED_BYTES:
                    self.cancel(EngineProtocolError("The engine's answer is too large to be translated."))
            elif self._size > _WHOLE_BYTES or (self._status == 200 and not self._call.api.gathers):
                self._stop_gathering()

    def _stop_gathering(self) -> None:
        body = b"".join(self._gathered)
        self._passes = True
        self._start(self._content)
        self._reply.responder.write(body)
        self._gathered = [body[-_USAGE_TAIL_BYTES:]]

    def _unfolded(self, body: bytes) -> bytes:
        """Of an answer that was compressed on its way without a word of it."""
        self._decode(b"gzip")
        self._gathered, self._size = [], 0
        self.on_data(body)
        return b"".join(self._gathered)

    def _end_whole(self) -> None:
        body = b"".join(self._gathered)
        if body.startswith(GZIP_MAGIC) and self._decoder is None and b"json" in self._content:
            body = self._unfolded(body)
        if self._decoder is not None and not self._decoder.whole:
            self._end(EngineProtocolError("The engine's compressed answer was cut short."))
        elif self._status != 200:
            if self._otherwise is None or self.translation is not None or not self._send_otherwise(body):
                self._end(engine_answer_error(self._status, body, self._retry_after))
        elif self._passes:
            self._usage = find_usage(body)
            self._end(StreamEnd())
        else:
            usage = self._usage = usage_of_answer(body)
            translation = self.translation
            self._end(WholeAnswer(self._content, body, usage) if translation is None else self._told(translation, body))

    def _told(self, translation: Translation, body: bytes) -> Answer | WarmrouteError:
        translated = translation.answer(self._call.fields, body)
        if translated is None:
            return EngineProtocolError("The engine's answer is not what its API describes.")
        return WholeAnswer(self._content, translated, self._usage)

    def _send_otherwise(self, error: bytes) -> bool:
        """Once more, by way of the other route, if the engine says that it lacks this one."""
        otherwise = self._otherwise
        if otherwise is None or not lacks_route(self._status, parse_object(error)):
            return False
        otherwise.lacks.add(self._call.path)
        self.translation = otherwise.translation
        self._status, self._content, self._retry_after, self._decoder = 0, JSON, None, None
        self._gathered, self._size = [], 0
        try:
            otherwise.send(self.translation)
        except WarmrouteError as untranslatable:
            self._end(untranslatable)
        return True
