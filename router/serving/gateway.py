"""The life of a request, top to bottom."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence

from router.core import Ask, Booking, DeliveredSource, Finish, Outcome, Placement, Prompt
from router.errors import (
    ClientError,
    EngineTlsError,
    EngineUnreachable,
    NoEngine,
    RoomFull,
    WaitedTooLong,
    WarmrouteError,
)
from router.http.messages import header_lines
from router.serving.attempt import Answer, Attempt
from router.serving.call import Call, HttpRequest, read_call
from router.serving.models import Models
from router.serving.openai_errors import class_of
from router.serving.proxy import Proxy
from router.serving.reply import Reply
from router.serving.tools_order import ToolsOrder

_log = logging.getLogger(__name__)
_UNKNOWN_MODEL = "unknown"  # what a client made up never becomes a label

Listener = Callable[[Outcome], None]


class Passage:
    """What has become of one request so far; at its end, its Outcome."""

    __slots__ = ("attempt", "attempts", "began", "booking", "call", "prompt", "queue_s", "started_at")

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.started_at = time.time()
        self.call: Call | None = None
        self.prompt: Prompt | None = None
        self.booking: Booking | None = None
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.queue_s = 0.0

    def outcome(self, reply: Reply, *, status: int, finish: Finish, error: str = "") -> Outcome:
        call, prompt, booking, attempt = self.call, self.prompt, self.booking, self.attempt
        usage = attempt.usage if attempt is not None else None
        cached = usage.cached_tokens if usage is not None else None
        counted = usage.input_tokens if usage is not None else 0
        source: DeliveredSource = "usage" if cached is not None else "none"
        return Outcome(  # by position: two dozen keywords cost a struct five times as much
            reply.request_id,
            call.named.model.name if call is not None else _UNKNOWN_MODEL,
            "",  # tenant
            booking.instance if booking is not None else None,
            booking.rank if booking is not None else None,
            status,
            finish,
            usage,
            counted or (prompt.tokens if prompt is not None else 0),  # input_tokens
            booking.best_hit_tokens if booking is not None else 0,
            booking.predicted_hit_tokens if booking is not None else 0,
            cached,  # delivered_hit_tokens
            source,
            self.started_at,
            self.queue_s,
            attempt.first_token_at - self.began if attempt is not None and attempt.first_token_at else None,  # ttft_s
            time.monotonic() - self.began,  # took_s
            call.stream if call is not None else False,
            prompt.source if prompt is not None else "none",
            booking.policy if booking is not None else "",
            booking.alone if booking is not None else False,
            self.attempts,
            error,
            attempt.events if attempt is not None else 0,
        )


class Gateway:
    """From a parsed HTTP request to its Outcome.

    Placement and prompts that live in this process may have a `place_now` and a `prepare_now`: the same, but a plain
    result where nothing has to be waited for, else something to await. A request that never waits needs no task.

    Every request has exactly one Outcome. It is announced before the last byte of the answer is written, so that
    nothing a client has seen whole is unaccounted for. `listeners` are called on the loop and must return in
    microseconds.
    """

    def __init__(
        self,
        models: Models,
        placement: Placement,
        proxy: Proxy,
        *,
        listeners: Sequence[Listener] = (),
        body_limit: int = 64 << 20,
        receipts: bool = False,
        tools_order: ToolsOrder | None = None,
    ) -> None:
        self._models = models
        self._tools_order = tools_order
        self._place: Callable[[Ask], Booking | Awaitable[Booking]] = getattr(placement, "place_now", placement.place)
        self._progress = placement.progress
        self._release = placement.release
        self._proxy = proxy
        self._listeners = tuple(listeners)
        self._body_limit = body_limit
        self._receipts = receipts

    async def complete(self, request: HttpRequest, reply: Reply, path: str) -> None:
        """Answer a completion request, as a `Run`. Cancelling that is how a client's leaving is made known."""
        passage = Passage()
        try:
            call = read_call(request, path, models=self._models, body_limit=self._body_limit)
            if not isinstance(call, Call):
                call = await asyncio.ensure_future(call)
            passage.call = call
            if self._tools_order is not None and "tools" in call.fields:
                self._tools_order.observe(call.named.model.name, call.fields["tools"])
            prompt = self._read_prompt(call)
            if not isinstance(prompt, Prompt):
                prompt = await asyncio.ensure_future(_or_unread(prompt, call))
            passage.prompt = prompt
            try:
                answer = await self._attempt(passage, call, prompt, reply)
            except EngineUnreachable as error:
                answer = await self._attempt_elsewhere(passage, call, prompt, reply, error)
        except WarmrouteError as error:
            self._fail(passage, reply, error)
        except asyncio.CancelledError:
            self._end(passage, passage.outcome(reply, status=499, finish="client_gone", error="client_gone"))
            reply.responder.abort()  # if it was not the client that ended this, it must not wait for the rest
            raise
        except Exception as unexpected:
            _log_unexpected("serving a request", unexpected)
            self._fail(passage, reply, WarmrouteError("The gateway failed to serve the request."))
        else:
            self._end(passage, passage.outcome(reply, status=200, finish="complete"))
            answer.deliver(reply)

    def _read_prompt(self, call: Call) -> Prompt | Awaitable[Prompt]:
        prompts, lora = call.named.model.prompts, call.named.lora
        prepare = getattr(prompts, "prepare_now", prompts.prepare)
        try:
            prompt: Prompt | Awaitable[Prompt] = prepare(call.path, call.fields, salt=call.salt, lora=lora)
        except Exception as unexpected:
            return _unread(call, unexpected)
        return prompt

    async def _attempt(
        self, passage: Passage, call: Call, prompt: Prompt, reply: Reply, exclude: tuple[str, ...] = ()
    ) -> Answer:
        """Place and send."""
        asked = time.monotonic()
        try:
            booking = self._place(call.ask(reply.request_id, prompt, exclude=exclude))
            if not isinstance(booking, Booking):
                booking = await asyncio.ensure_future(booking)
        finally:
            passage.queue_s += time.monotonic() - asked
        passage.booking = booking
        passage.attempts += 1
        reply.receipt = self._receipt(booking)
        attempt = passage.attempt = self._proxy.begin(call, booking, reply, on_first_token=self._progress)
        try:
            return await attempt
        except BaseException:  # the client has left, or the answer is broken: either way the engine is freed
            attempt.cancel()
            raise

    async def _attempt_elsewhere(
        self, passage: Passage, call: Call, prompt: Prompt, reply: Reply, error: EngineUnreachable
    ) -> Answer:
        """Once more if the engine was not even reached, for then nothing has happened yet."""
        booking = passage.booking
        reached = error.code != EngineUnreachable.code and not isinstance(error, EngineTlsError)
        if booking is None or reply.started or reached:
            raise error
        self._give_back(passage, self._failure(passage, reply, error))
        try:
            return await self._attempt(passage, call, prompt, reply, exclude=(booking.instance,))
        except (NoEngine, RoomFull, WaitedTooLong):
            raise error from None

    # -- the end

    def _fail(self, passage: Passage, reply: Reply, error: WarmrouteError) -> None:
        attempt = passage.attempt
        self._end(passage, self._failure(passage, reply, error))
        if not reply.started:
            reply.fail(error)
        elif attempt is not None and attempt.in_events:
            reply.break_off(error, inside=attempt.inside)
        else:
            reply.break_off(None)

    def _end(self, passage: Passage, outcome: Outcome) -> None:
        if passage.prompt is not None and passage.call is not None and outcome.usage is not None:
            passage.call.named.model.prompts.observe(passage.prompt, outcome.usage.input_tokens)
        self._give_back(passage, outcome)
        for listener in self._listeners:
            try:
                listener(outcome)
            except Exception as unexpected:  # whoever watches must not break what it watches
                _log_unexpected("recording an outcome", unexpected)

    def _give_back(self, passage: Passage, outcome: Outcome) -> None:
        booking, passage.booking, passage.attempt = passage.booking, None, None
        if booking is not None:
            self._release(booking.id, outcome)

    def _failure(self, passage: Passage, reply: Reply, error: WarmrouteError) -> Outcome:
        answered = isinstance(error, ClientError) and not reply.started
        return passage.outcome(
            reply,
            status=reply.status if reply.started else error.status,
            finish="complete" if answered else "upstream_failed",
            error=class_of(error),
        )

    def _receipt(self, booking: Booking) -> bytes:
        predicted = b"\r\nx-warmroute-predicted-tokens: %d" % booking.predicted_hit_tokens
        if not self._receipts:
            return predicted
        return predicted + header_lines(((b"x-warmroute-instance", booking.instance.encode("latin-1", "replace")),))


async def _or_unread(prompt: Awaitable[Prompt], call: Call) -> Prompt:
    try:
        return await prompt
    except Exception as unexpected:
        return _unread(call, unexpected)


def _unread(call: Call, unexpected: Exception) -> Prompt:
    """Not knowing a prompt costs a cache hit, never the request."""
    _log_unexpected("reading a prompt", unexpected)
    return Prompt(tokens=len(call.body) // 4, known_tokens=0, keys={}, source="none", reason="unreadable")


def _log_unexpected(doing: str, unexpected: Exception) -> None:
    """The kind and the place of a mistake of ours; never its text, which may quote a prompt."""
    frames = traceback.extract_tb(unexpected.__traceback__)[-4:]
    place = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
    _log.error("%s failed: %s at %s", doing, type(unexpected).__name__, place)
