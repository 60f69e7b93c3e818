"""The life of a request, top to bottom."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from router.core import OPEN, Ask, Booking, Caller, DeliveredSource, Finish, Outcome, Placement, Prompt
from router.errors import ClientError, EngineTimeout, WarmrouteError, place_of
from router.http.messages import Request, header_lines
from router.serving.attempt import Answer, Attempt
from router.serving.beginnings import Beginnings
from router.serving.call import TRACE_HEADERS, Call, read_call
from router.serving.failover import TOTAL_TIMEOUT, Fault, RetryBudget, Tries
from router.serving.isolation.fields import FieldRules
from router.serving.keep_alive import KeepAlive
from router.serving.ledger.ledger import Ledger
from router.serving.limits.holds import Hold
from router.serving.limits.limiter import Limiter
from router.serving.models import Models
from router.serving.openai_errors import class_of
from router.serving.proxy import Proxy
from router.serving.quarantine import Quarantine
from router.serving.recovery import Recovery, deadly
from router.serving.reply import Reply
from router.serving.split import choose
from router.serving.stages import Stages
from router.serving.tools_order import ToolsOrder

_log = logging.getLogger(__name__)
_UNKNOWN_MODEL = "unknown"  # what a client made up never becomes a label
_OVER = "the time of the request is over"

Listener = Callable[[Outcome], None]
Pseudonym = Callable[[str, str], str]
"""By what name a tenant's end user is kept."""
Access = Callable[[Request], Listener]
"""Who notes a request: asked when it comes, so that it can look at the client, and told when it has ended."""


class Passage(msgspec.Struct, eq=False):
    """What has become of one request so far; at its end, its Outcome. began: monotonic. started_at: wall clock."""

    access: Listener | None
    caller: Caller
    began: float
    started_at: float
    asked_model: str = ""
    call: Call | None = None
    prompt: Prompt | None = None
    booking: Booking | None = None
    answered: Booking | None = None  # the place of a stream that broke off, and nobody goes on with
    attempt: Attempt | None = None
    hold: Hold | None = None
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
        call, prompt, booking, attempt = self.call, self.prompt, self.booking or self.answered, self.attempt
        usage = attempt.usage if attempt is not None else None
        cached = usage.cached_tokens if usage is not None else None
        counted = usage.input_tokens if usage is not None else 0
        source: DeliveredSource = "usage" if cached is not None else "none"
        return Outcome(  # by position: two dozen keywords cost a struct five times as much
            reply.request_id,
            call.named.model.name if call is not None else _UNKNOWN_MODEL,
            self.caller.tenant,
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
            call.transcript.resumed if call is not None and call.transcript is not None else 0,
            self.caller,
            call.tags if call is not None else (),
            call.end_user if call is not None else "",
            reply.serial,
            call.path if call is not None else "",
            attempt.events_after_usage if attempt is not None else 0,
            call.api.is_billed if call is not None else False,
            booking.blind_hit_tokens if booking is not None else 0,
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
        ledger: Ledger | None = None,
        field_rules: FieldRules | None = None,
        retry_share: float = 0.1,
        on_fault: Callable[[str, str], None] = lambda model, fault: None,
        limiter: Limiter | None = None,
        dice: random.Random | None = None,
        pseudonym: Pseudonym = lambda tenant, end_user: "",
    ) -> None:
        """`ledger`: keeps what every request cost. `retry_share`: of the requests, so many attempts may be made again.
        `on_fault`: told of a model whose engine failed before its first byte, and how (`failover.py`). `limiter`: None:
        there are no limits."""
        self._models = models
        self._tools_order = tools_order
        self._field_rules = field_rules or FieldRules()
        self._place: Callable[[Ask], Booking | Awaitable[Booking]] = getattr(placement, "place_now", placement.place)
        self._progress = placement.progress
        self._release = placement.release
        self._proxy = proxy
        self._ledger = ledger
        self._listeners = tuple(listeners) if ledger is None else (ledger.ended, *listeners)
        self._body_limit = body_limit
        self._receipts = receipts
        self._access = access
        self._forwarded = TRACE_HEADERS.union(name.encode() for name in forward_headers)
        self.budget = RetryBudget(retry_share)
        self._limiter = limiter
        self._quarantine = Quarantine()
        self._beginnings = Beginnings()
        self._stages = Stages()
        self._pseudonym = pseudonym
        self._recovery = Recovery(
            self, models, proxy, self._quarantine, self.budget, on_fault=on_fault, dice=dice or random.Random()
        )

    @property
    def under_way(self) -> int:
        """Requests without an Outcome as yet."""
        return self._stages.here

    async def complete(self, request: Request, reply: Reply, path: str, caller: Caller = OPEN) -> None:
        """Answer a request, as a `Run`. Cancelling that is how a client's leaving is made known.

        `path`: as engines know it.
        """
        passage = self._begin(request, caller)
        try:
            if self._limiter is not None and (decided := self._admit(self._limiter, passage)) is not None:
                await decided
            call = read_call(
                request,
                path,
                models=self._models,
                body_limit=self._body_limit,
                forwarded=self._forwarded,
                caller=caller,
                beginnings=self._beginnings,
            )
            if not isinstance(call, Call):
                call = await asyncio.ensure_future(call)
            call = self._receive(call, passage)
            self._look_at(passage, call, reply)
            prompt = self._prompt_of(call)
            if not isinstance(prompt, Prompt):
                prompt = await asyncio.ensure_future(_or_unread(prompt, call))
            passage.prompt = prompt
            if passage.hold is not None and (decided := self._reserve(passage.hold, call, prompt)) is not None:
                await decided
            self._show_limits(passage, reply)
            await self._stages.next()
            try:
                answer = await self.attempt(passage, call, prompt, reply)
            except WarmrouteError as error:
                answer = await self._recovery.recover(passage, call, prompt, reply, error)
            await self._stages.next()
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

    def refuse(self, request: Request, reply: Reply, error: WarmrouteError, caller: Caller = OPEN) -> None:
        """Answer a request that did not come whole. It has an Outcome, as every other."""
        self._fail(self._begin(request, caller), reply, error)

    def _begin(self, request: Request, caller: Caller) -> Passage:
        access = None if self._access is None else self._access(request)
        self._stages.here += 1
        return Passage(access, caller, time.monotonic(), time.time())

    def _receive(self, call: Call, passage: Passage) -> Call:
        """The call as one for the model that a split chooses. Raises NoEngine while that has not joined."""
        if call.end_user:
            call.end_user = self._pseudonym(call.caller.tenant, call.end_user)
        model = call.named.model
        if model.split:
            passage.asked_model = model.name
            call = call.asked_of(self._models.resolve(choose(model.split, model.name, call.session, call.fields)))
        passage.call = call
        return call

    def _look_at(self, passage: Passage, call: Call, reply: Reply) -> None:
        """What is seen without its prompt. Raises what a request is refused for, whatever its engines."""
        every_s = call.named.model.keep_alive_comments_s
        if every_s is not None and call.stream:
            loop = asyncio.get_running_loop()
            passage.keep_alive = KeepAlive(reply, every_s, is_amid=passage.is_amid, loop=loop)
        self.budget.requests += 1
        if self._ledger is not None:
            self._ledger.admit(call)
        caller = call.caller
        if caller.domain:
            self._field_rules.check(call.fields, call.form, caller)
        if self._quarantine.ended and self._quarantine.holds(call.body, caller.domain):
            raise deadly()
        if self._tools_order is not None and "tools" in call.fields:
            self._tools_order.observe(call.named.model.name, call.fields["tools"])

    # -- limits

    def _admit(self, limiter: Limiter, passage: Passage) -> Awaitable[None] | None:
        hold = passage.hold = limiter.hold(passage.caller)
        return None if hold is None else limiter.admit(hold)

    def _reserve(self, hold: Hold, call: Call, prompt: Prompt) -> Awaitable[None] | None:
        assert self._limiter is not None, "it has made the hold"
        model = call.named.model
        return self._limiter.reserve(
            hold,
            model.name,
            prompt.tokens,
            output_limit=call.output_limit,
            choices=call.choices,
            model_tokens=model.max_model_tokens,
        )

    def _show_limits(self, passage: Passage, reply: Reply) -> None:
        if passage.hold is not None and self._limiter is not None:
            reply.lines += self._limiter.lines(passage.hold, reply.api.limit_lines)

    async def read_prompt(self, call: Call) -> Prompt:
        prompt = self._prompt_of(call)
        return prompt if isinstance(prompt, Prompt) else await asyncio.ensure_future(_or_unread(prompt, call))

    def _prompt_of(self, call: Call) -> Prompt | Awaitable[Prompt]:
        if not call.api.reads_prompt:
            return call.api.unread_prompt(call.fields, len(call.body))
        prompts, lora = call.named.model.prompts, call.named.lora
        prepare = getattr(prompts, "prepare_now", prompts.prepare)
        try:
            prompt: Prompt | Awaitable[Prompt] = prepare(
                call.path,
                call.fields,
                domain=call.caller.domain,
                salt=call.salt,
                lora=lora,
                beginning=call.beginning,
            )
        except Exception as unexpected:
            return _unread(call, unexpected)
        return prompt

    async def attempt(
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
        await self._stages.next()
        if self._ledger is not None:
            self._ledger.dispatched(
                call,
                prompt,
                booking,
                reply,
                started_at=passage.started_at,
                asked_model=passage.asked_model,
                attempts=passage.attempts,
                queue_s=passage.queue_s,
            )
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

    def may_bill(self, caller: Caller, model: str) -> bool:
        return self._ledger is None or self._ledger.may_bill(caller, model)

    def give_back(self, passage: Passage, reply: Reply, error: WarmrouteError) -> None:
        """The place of an attempt that failed."""
        self._release_place(passage, self._failure(passage, reply, error))

    # -- the end

    def _fail(self, passage: Passage, reply: Reply, error: WarmrouteError) -> None:
        attempt = passage.attempt
        self._show_limits(passage, reply)
        self._end(passage, self._failure(passage, reply, error, final=True))
        if not reply.started:
            reply.fail(error)
        elif attempt is not None and attempt.in_events:
            reply.break_off(error, inside=attempt.inside, events=attempt.events)
        else:
            reply.break_off(None)

    def _end(self, passage: Passage, outcome: Outcome) -> None:
        self._stages.here -= 1
        if passage.keep_alive is not None:
            passage.keep_alive.stop()
        listeners: tuple[Listener, ...] = (partial(self._free, passage), *self._listeners)
        if passage.access is not None:
            listeners = (*listeners, passage.access)
        if passage.hold is not None and self._limiter is not None:
            listeners = (*listeners, partial(self._limiter.settle, passage.hold))
        for listener in listeners:
            try:
                listener(outcome)
            except Exception as unexpected:  # whoever watches must not break what it watches
                _log_unexpected("recording an outcome", unexpected)

    def _free(self, passage: Passage, outcome: Outcome) -> None:
        self._release_place(passage, outcome)
        if passage.prompt is not None and passage.call is not None and outcome.usage is not None:
            passage.call.named.model.prompts.observe(passage.prompt, outcome.usage.input_tokens)

    def _release_place(self, passage: Passage, outcome: Outcome) -> None:
        booking, passage.booking, passage.attempt = passage.booking, None, None
        if booking is not None:
            self._release(booking.id, outcome)

    def _failure(self, passage: Passage, reply: Reply, error: WarmrouteError, *, final: bool = False) -> Outcome:
        answered = final and isinstance(error, ClientError) and not reply.started
        error.__traceback__ = None  # its frames know it and the attempt: all would stay until a garbage collection
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
        raise EngineTimeout("No engine was free in the time the request may take.", code=TOTAL_TIMEOUT) from None
    finally:
        timer.cancel()


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
    _log.error("%s failed: %s", doing, place_of(unexpected))
