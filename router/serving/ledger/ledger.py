"""The gateway's side of the ledger: what it is told, it writes to the spool at once."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable

import msgspec

from router.core import Booking, Outcome, Prompt
from router.serving.call import Call
from router.serving.ledger.records import End, Mark, Seen
from router.serving.ledger.spool import Spool
from router.serving.reply import Reply

_log = logging.getLogger("warmroute")

_UNKNOWN_LIMIT = 4096
"""Tokens an answer may have where neither the request nor the model says so, until a longer one has been seen."""
_MODELS = 1000  # whose longest answers are remembered


class Ledger:
    """Its methods are called on the loop and take microseconds. They raise nothing: no request fails for its bill.

    lost  records that could not be written at all
    """

    def __init__(self, spool: Spool, *, pseudonym_key: bytes) -> None:
        self.lost = 0
        self._spool = spool
        self._key = pseudonym_key
        self._longest: dict[str, int] = {}  # answer seen, by model

    @property
    def full(self) -> bool:
        """No further request can be billed."""
        return self._spool.full

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
                    self._pseudonym(caller.tenant, call.end_user) if call.end_user else "",
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
        if outcome.instance is None and self._spool.full:
            return  # refused, since nothing more can be kept: nothing to bill
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
                    self._pseudonym(caller.tenant, outcome.end_user) if outcome.end_user else "",
                    outcome.tags,
                )
            )
        except Exception as unexpected:
            self._note_lost(unexpected)

    def seen(self, engines: Iterable[Seen]) -> None:
        """Every minute: the engines that there are."""
        for engine in engines:
            self._spool.append(engine)

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
            "spool_lost": self.lost,
        }

    def _output_bound(self, call: Call, prompt: Prompt) -> int:
        limit = call.api.output_limit(call.fields)
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

    def _pseudonym(self, tenant: str, end_user: str) -> str:
        return pseudonym(self._key, tenant, end_user)

    def _note_lost(self, unexpected: Exception) -> None:
        self.lost += 1
        _log.error("a record of the ledger is lost: %s", type(unexpected).__name__)


def pseudonym(key: bytes, tenant: str, end_user: str) -> str:
    """How rows name an end user: the same person is another one under another tenant."""
    said = f"{tenant}\0{end_user}".encode("utf-8", "replace")
    return hmac.digest(key, b"end-user\0" + said, "sha256").hex()[:40]


