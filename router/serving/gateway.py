"""The life of a request, top to bottom."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from router.core import Ask, Booking, DeliveredSource, Finish, Outcome, Placement, Prompt
from router.errors import (
    ClientError,
    EngineTimeout,
    NoEngine,
    Quarantined,
    RoomFull,
    ShuttingDown,
    WaitedTooLong,
    WarmrouteError,
)
from router.http.messages import Request, header_lines
from router.serving.attempt import Answer, Attempt
from router.serving.call import TRACE_HEADERS, Call, read_call
from router.serving.failover import Fault, RetryBudget, Tries, fault_of
from router.serving.keep_alive import KeepAlive
from router.serving.models import Models, Named
from router.serving.openai_errors import CONTEXT_LENGTH_EXCEEDED, class_of
from router.serving.proxy import Proxy
from router.serving.quarantine import Quarantine
from router.serving.reply import Reply
from router.serving.split import choose
from router.serving.tools_order import ToolsOrder

_log = logging.getLogger(__name__)
_UNKNOWN_MODEL = "unknown"  # what a client made up never becomes a label
_OVER = "the time of the request is over"
_NOWHERE = (NoEngine, RoomFull, WaitedTooLong)

Listener = Callable[[Outcome], None]
Access = Callable[[Request], Listener]
"""Who notes a request: asked when it comes, so that it can look at the client, and told when it has ended."""


class Passage(msgspec.Struct, eq=False):
    """What has become of one request so far; at its end, its Outcome. began: monotonic. started_at: wall clock."""

    access: Listener | None
    began: float
    started_at: float
    asked_model: str = ""
    call: Call | None = None
    prompt: Prompt | None = None
    booking: Booking | None = None
    attempt: Attempt | None = None
    keep_alive: KeepAlive | None = None
    attempts: int = 0
    queue_s: float = 0.0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began

    def is_amid(self) -> bool:
        return self.attempt is not None and self.attempt.amid

    def outcome(
        self, reply: Reply, *, status: int, finish: Finish, error: str = "", retry_after_s: float | None = None
    ) -> Outcome:
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
            retry_after_s,
            self.asked_model,
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
        access: Access | None = None,
        forward_headers: Sequence[str] = (),
        tools_order: ToolsOrder | None = None,
        retry_share: float = 0.1,
        on_fault: Callable[[str, str], None] = lambda model, fault: None,
        dice: random.Random | None = None,
    ) -> None:
        """`retry_share`: of the requests, so many attempts may be made again. `on_fault`: told of a model whose engine
        failed before its first byte, and how (`failover.py`)."""
        self._models = models
        self._tools_order = tools_order
        self._place: Callable[[Ask], Booking | Awaitable[Booking]] = getattr(placement, "place_now", placement.place)
        self._progress = placement.progress
        self._release = placement.release
        self._proxy = proxy
        self._listeners = tuple(listeners)
        self._body_limit = body_limit
        self._receipts = receipts
        self._access = access
        self._forwarded = TRACE_HEADERS.union(name.encode() for name in forward_headers)
        self.budget = RetryBudget(retry_share)
        self._on_fault = on_fault
        self._quarantine = Quarantine()
        self._dice = dice or random.Random()

    async def complete(self, request: Request, reply: Reply, path: str) -> None:
        """Answer a request, as a `Run`. Cancelling that is how a client's leaving is made known.

        `path`: as engines know it.
        """
        access = None if self._access is None else self._access(request)
        passage = Passage(access, time.monotonic(), time.time())
        try:
            call = read_call(request, path, models=self._models, body_limit=self._body_limit, forwarded=self._forwarded)
            if not isinstance(call, Call):
                call = await asyncio.ensure_future(call)
            if call.named.model.split:
                passage.asked_model, call = call.named.model.name, self._of_arm(call)
            passage.call = call
            every_s = call.named.model.keep_alive_comments_s
            if every_s is not None and call.stream:
                loop = asyncio.get_running_loop()
                passage.keep_alive = KeepAlive(reply, every_s, is_amid=passage.is_amid, loop=loop)
            self.budget.requests += 1
            if self._quarantine.ended and self._quarantine.holds(call.body):
                raise _deadly()
            if self._tools_order is not None and "tools" in call.fields:
                self._tools_order.observe(call.named.model.name, call.fields["tools"])
            prompt = self._read_prompt(call)
            if not isinstance(prompt, Prompt):
                prompt = await asyncio.ensure_future(_or_unread(prompt, call))
            passage.prompt = prompt
            try:
                answer = await self._attempt(passage, call, prompt, reply)
            except WarmrouteError as error:
                answer = await self._recover(passage, call, prompt, reply, error)
        except WarmrouteError as error:
            self._fail(passage, reply, error)
        except asyncio.CancelledError:
            error_class = "reader_stalled" if reply.responder.stalled else "client_gone"
            self._end(passage, passage.outcome(reply, status=499, finish="client_gone", error=error_class))
            reply.responder.abort()  # if it was not the client that ended this, it must not wait for the rest
            raise
        except Exception as unexpected:
            _log_unexpected("serving a request", unexpected)
            self._fail(passage, reply, WarmrouteError("The gateway failed to serve the request."))
        else:
            self._end(passage, passage.outcome(reply, status=200, finish="complete"))
            answer.deliver(reply)

    def refuse(self, request: Request, reply: Reply, error: WarmrouteError) -> None:
        """Answer a request that did not come whole. It has an Outcome, as every other."""
        access = None if self._access is None else self._access(request)
        self._fail(Passage(access, time.monotonic(), time.time()), reply, error)

    def _of_arm(self, call: Call) -> Call:
        """The call as one for the model that a split chooses. Raises NoEngine while that has not joined."""
        model = call.named.model
        return call.asked_of(self._models.resolve(choose(model.split, model.name, call.session, call.fields)))

    def _read_prompt(self, call: Call) -> Prompt | Awaitable[Prompt]:
        if not call.api.reads_prompt:
            return call.api.unread_prompt(call.fields, len(call.body))
        prompts, lora = call.named.model.prompts, call.named.lora
        prepare = getattr(prompts, "prepare_now", prompts.prepare)
        try:
            prompt: Prompt | Awaitable[Prompt] = prepare(call.path, call.fields, salt=call.salt, lora=lora)
        except Exception as unexpected:
            return _unread(call, unexpected)
        return prompt

    async def _attempt(
        self, passage: Passage, call: Call, prompt: Prompt, reply: Reply, tries: Tries | None = None
    ) -> Answer:
        """Place and send. `tries`: those made before this one."""
        limits, rule = call.limits, call.named.model.failover
        asked = time.monotonic()
        exclude = tries.failed if tries is not None else ()
        try:
            booking = self._place(call.ask(reply.request_id, prompt, exclude=exclude))
            if not isinstance(booking, Booking):
                booking = await _in_time(asyncio.ensure_future(booking), call, passage)
        finally:
            passage.queue_s += time.monotonic() - asked
        passage.booking = booking
        passage.attempts += 1
        reply.receipt = self._receipt(booking, passage.attempts)
        attempt = passage.attempt = self._proxy.begin(
            call,
            booking,
            reply,
            on_first_token=self._progress,
            first_byte_s=limits.first_byte_s if rule.move_on_s is None else _first_byte_s(call, booking, tries),
            age_s=passage.age_s if limits.total_s is not None else 0.0,
        )
        try:
            return await attempt
        except BaseException:  # the client has left, or the answer is broken: either way the engine is freed
            attempt.cancel()
            raise

    # -- what failed before the first byte

    async def _recover(
        self, passage: Passage, call: Call, prompt: Prompt, reply: Reply, error: WarmrouteError
    ) -> Answer:
        """By another engine of the model, or by another model: as far as that can do no harm."""
        asked_models = {call.named.model.name}
        while True:
            try:
                return await self._attempt_again(passage, call, prompt, reply, error)
            except WarmrouteError as final:
                error = final
            named = None if reply.started else self._other_model(call, error, asked_models)
            if named is None:
                raise error
            asked_models.add(named.model.name)
            self._give_back(passage, self._failure(passage, reply, error))
            call = passage.call = call.asked_of(named)
            found = self._read_prompt(call)
            prompt = found if isinstance(found, Prompt) else await asyncio.ensure_future(_or_unread(found, call))
            passage.prompt = prompt
            try:
                return await self._attempt(passage, call, prompt, reply)
            except WarmrouteError as failed:
                error = failed

    async def _attempt_again(
        self, passage: Passage, call: Call, prompt: Prompt, reply: Reply, error: WarmrouteError
    ) -> Answer:
        """Elsewhere; where there is no other engine, later. Raises the error of the last attempt."""
        tries = Tries(call.named.model.failover, self.budget, dice=self._dice)
        while True:
            booking = passage.booking
            fault = await self._fault(call, booking, error) if booking is not None and not reply.started else None
            if fault is None or booking is None:
                raise error
            if fault is Fault.DIED and self._quarantine.note(call.body, booking.instance):
                raise _deadly()
            if not tries.again(fault, booking.instance, age_s=passage.age_s):
                raise error
            self._give_back(passage, self._failure(passage, reply, error))
            await _sleep(tries.pause_s(fault))
            try:
                return await self._attempt(passage, call, prompt, reply, tries)
            except _NOWHERE:
                wait_s = tries.wait_s(fault, error.retry_after_s, age_s=passage.age_s)
                if wait_s is None:
                    raise error from None
            except WarmrouteError as failed:
                error = failed
                continue
            await _sleep(wait_s)
            tries.failed = ()
            try:
                return await self._attempt(passage, call, prompt, reply, tries)
            except _NOWHERE:
                raise error from None
            except WarmrouteError as failed:
                error = failed

    async def _fault(self, call: Call, booking: Booking, error: WarmrouteError) -> Fault | None:
        fault = fault_of(error)
        if fault is Fault.RESET and not await asyncio.ensure_future(self._proxy.is_there(booking.instance)):
            fault = Fault.DIED
        if fault is not None:
            self._on_fault(call.named.model.name, fault)
        return fault

    def _other_model(self, call: Call, error: WarmrouteError, asked: set[str]) -> Named | None:
        """Which one is configured for such a case, and is there."""
        model = call.named.model
        names: Sequence[str] = ()
        if error.code == CONTEXT_LENGTH_EXCEEDED:
            names = model.larger
        elif not isinstance(error, (ClientError, ShuttingDown)):
            names = model.fallbacks
        for name in names:
            named = self._models.find(name)
            if named is not None and named.model.name not in asked:
                return named
        return None

    # -- the end

    def _fail(self, passage: Passage, reply: Reply, error: WarmrouteError) -> None:
        attempt = passage.attempt
        self._end(passage, self._failure(passage, reply, error, final=True))
        if not reply.started:
            reply.fail(error)
        elif attempt is not None and attempt.in_events:
            reply.break_off(error, inside=attempt.inside, events=attempt.events)
        else:
            reply.break_off(None)

    def _end(self, passage: Passage, outcome: Outcome) -> None:
        if passage.keep_alive is not None:
            passage.keep_alive.stop()
        if passage.prompt is not None and passage.call is not None and outcome.usage is not None:
            passage.call.named.model.prompts.observe(passage.prompt, outcome.usage.input_tokens)
        self._give_back(passage, outcome)
        listeners = self._listeners if passage.access is None else (*self._listeners, passage.access)
        for listener in listeners:
            try:
                listener(outcome)
            except Exception as unexpected:  # whoever watches must not break what it watches
                _log_unexpected("recording an outcome", unexpected)

    def _give_back(self, passage: Passage, outcome: Outcome) -> None:
        booking, passage.booking, passage.attempt = passage.booking, None, None
        if booking is not None:
            self._release(booking.id, outcome)

    def _failure(self, passage: Passage, reply: Reply, error: WarmrouteError, *, final: bool = False) -> Outcome:
        answered = final and isinstance(error, ClientError) and not reply.started
        return passage.outcome(
            reply,
            status=reply.status if final and reply.status else reply.api.status(error),
            finish="complete" if answered else "upstream_failed",
            error=class_of(error),
            retry_after_s=error.retry_after_s,
        )

    def _receipt(self, booking: Booking, attempts: int) -> bytes:
        predicted = b"\r\nx-warmroute-predicted-tokens: %d" % booking.predicted_hit_tokens
        if attempts > 1:
            predicted += b"\r\nx-warmroute-attempts: %d" % attempts
        if not self._receipts:
            return predicted
        return predicted + header_lines(((b"x-warmroute-instance", booking.instance.encode("latin-1", "replace")),))


def _first_byte_s(call: Call, booking: Booking, tries: Tries | None) -> float:
    """How long a first byte is waited for: less where there is another engine, or model, to go to."""
    model = call.named.model
    limit, rule = call.limits.first_byte_s, model.failover
    if rule.move_on_s is None or rule.move_on_s >= limit or Fault.SILENT not in rule.retry_on:
        return limit
    attempts_left = rule.attempts - 1 if tries is None else tries.left
    failed = () if tries is None else tries.failed
    elsewhere = attempts_left > 0 and not set(failed).issuperset(booking.attempts_left)
    return rule.move_on_s if elsewhere or model.fallbacks else limit


async def _in_time(booking: asyncio.Future[Booking], call: Call, passage: Passage) -> Booking:
    """Raises EngineTimeout for a request that is still in line when its time is over."""
    total_s = call.limits.total_s
    if total_s is None:
        return await booking
    timer = asyncio.get_running_loop().call_later(max(0.0, total_s - passage.age_s), booking.cancel, _OVER)
    try:
        return await booking
    except asyncio.CancelledError as cancelled:
        if cancelled.args != (_OVER,):  # but the client has left
            raise
        raise EngineTimeout("No engine was free in the time the request may take.", code="total_timeout") from None
    finally:
        timer.cancel()


async def _sleep(seconds: float) -> None:
    if seconds > 0:
        await asyncio.ensure_future(asyncio.sleep(seconds))


def _deadly() -> Quarantined:
    return Quarantined("Engines that took this request died. It is not given to another.")


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
