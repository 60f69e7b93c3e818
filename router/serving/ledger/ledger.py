"""The gateway's side of the ledger: what it is told goes to the spool."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from router.core import Booking, Caller, Outcome, Prompt
from router.errors import Forbidden, StoreUnavailable
from router.serving.call import Call
from router.serving.ledger.records import End, Mark, Seen
from router.serving.ledger.spool import Spool
from router.serving.pricing import Prices
from router.serving.reply import Reply

_log = logging.getLogger("warmroute")

_UNKNOWN_LIMIT = 4096
"""Tokens an answer may have where neither the request nor the model says so, until a longer one has been seen."""
_FULL_S = 5.0
_MODELS = 1000  # whose longest answers are remembered


class EngineThere(NamedTuple):
    """An engine, whether or not it has anything to do. `per_hour`: what it costs, by the configuration."""

    instance: str
    per_hour: float | None
    ranks: int
    capacity_tokens: int  # of its KV cache, all ranks; 0: unknown


class Ledger:
    """Its methods are called on the loop and take microseconds. All but `admit` raise nothing: no request that is being
    served fails for its bill.

    prices: models that have none in them are not served to keys. None: they are.

    lost  records that could not be written at all
    """

    def __init__(self, spool: Spool, *, prices: Prices | None = None) -> None:
        self.lost = 0
        self._spool = spool
        self._prices = prices
        self._seen: dict[str, float] = {}  # when an engine was there, the last time
        self._longest: dict[str, int] = {}  # answer seen, by model

    def admit(self, call: Call) -> None:
        """Raises StoreUnavailable where a further request could not be billed, Forbidden where it has to have a price
        and has none."""
        if self._spool.full:
            raise StoreUnavailable("Requests cannot be accounted for at the moment; try again.", retry_after_s=_FULL_S)
        if self._prices is not None and call.caller.key and not self._prices.known:
            raise StoreUnavailable("Prices are not known yet; try again.", retry_after_s=_FULL_S)
        if not self.may_bill(call.caller, model := call.named.model.name):
            raise Forbidden(f"The model {model!r} has no price.", param="model", code="model_without_price")

    def may_bill(self, caller: Caller, model: str) -> bool:
        """Whether it has a price, where it has to have one."""
        return self._prices is None or not caller.key or self._prices.now(model, caller.tenant) is not None

    def dispatched(
        self,
        call: Call,
        prompt: Prompt,
        booking: Booking,
        reply: Reply,
        *,
        started_at: float,
        asked_model: str,
        attempts: int,
        queue_s: float,
    ) -> None:
        """A request is about to be sent to the engine that was booked."""
        try:
            caller, model = call.caller, call.named.model.name
            self._spool.append(
                Mark(
                    reply.serial,
                    reply.request_id,
                    started_at,
                    caller.tenant,
                    caller.project,
                    caller.key,
                    model,
                    asked_model,
                    call.path,
                    booking.instance,
                    call.stream,
                    attempts,
                    prompt.tokens,
                    self._output_bound(call, prompt),
                    call.end_user,
                    call.tags,
                    booking.best_hit_tokens,
                    booking.predicted_hit_tokens,
                    queue_s,
                    booking.rates,
                )
            )
        except Exception as unexpected:
            self._note_lost(unexpected)

    def ended(self, outcome: Outcome) -> None:
        """A listener of the gateway's."""
        if not outcome.attempts and (self._spool.full or not outcome.route):
            return  # never sent: refused since nothing more can be kept, or before it was known what is asked
        usage, caller = outcome.usage, outcome.caller
        if usage is not None and usage.output_tokens > self._longest.get(outcome.model, _UNKNOWN_LIMIT):
            self._remember_longest(outcome.model, usage.output_tokens)
        try:
            self._spool.append(
                End(
                    outcome.serial or outcome.request_id,
                    outcome.request_id,
                    outcome.started_at,
                    caller.tenant,
                    caller.project,
                    caller.key,
                    outcome.model,
                    outcome.asked_model,
                    outcome.route,
                    outcome.instance,
                    outcome.stream,
                    outcome.status,
                    outcome.finish,
                    outcome.error,
                    outcome.attempts,
                    msgspec.structs.astuple(usage) if usage is not None else None,
                    outcome.input_tokens,
                    outcome.events,
                    outcome.events_after_usage,
                    outcome.billable,
                    outcome.best_hit_tokens,
                    outcome.predicted_hit_tokens,
                    outcome.queue_s,
                    outcome.ttft_s,
                    outcome.took_s,
                    outcome.end_user,
                    outcome.tags,
                    outcome.blind_hit_tokens,
                )
            )
        except Exception as unexpected:
            self._note_lost(unexpected)

    def seen(self, engines: Iterable[EngineThere], now: float) -> None:
        """Every minute: the engines that there are. `now`: wall clock."""
        there: dict[str, float] = {}
        for engine in engines:
            per_hour = None if engine.per_hour is None else str(engine.per_hour)
            since = self._seen.get(engine.instance, now)
            self._spool.append(Seen(since, now, engine.instance, per_hour, engine.ranks, engine.capacity_tokens))
            there[engine.instance] = now
        self._seen = there

    def measure(self) -> None:
        try:
            self._spool.measure()
        except OSError as error:
            _log.error("the ledger's spool cannot be looked at: %s", error.strerror)

    def figures(self) -> dict[str, float]:
        return {
            "spool_bytes": self._spool.waiting_bytes,
            "spool_held_bytes": self._spool.held_bytes,
            "spool_full": float(self._spool.full),
            "spool_lost_total": self.lost,
        }

    def _output_bound(self, call: Call, prompt: Prompt) -> int:
        limit = call.output_limit
        if limit is None:
            longest = call.named.model.max_model_tokens
            if longest is not None:
                limit = max(0, longest - prompt.tokens)
            else:
                limit = self._longest.get(call.named.model.name, _UNKNOWN_LIMIT)
        return limit * call.choices

    def _remember_longest(self, model: str, tokens: int) -> None:
        if model in self._longest or len(self._longest) < _MODELS:
            self._longest[model] = tokens

    def _note_lost(self, unexpected: Exception) -> None:
        self.lost += 1
        _log.error("a record of the ledger is lost: %s", type(unexpected).__name__)
