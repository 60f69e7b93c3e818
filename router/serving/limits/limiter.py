"""What a request goes through: admitted when it comes, reserved for when its prompt is known, settled at its end.

Where nothing limits a caller there is no `Hold`, and nothing of this runs.
"""

from __future__ import annotations

import time
from asyncio import Future
from collections import Counter
from collections.abc import Callable, Mapping

from router.core import Caller, Outcome
from router.errors import StoreUnavailable, WarmrouteError
from router.serving.counting import as_priced, billed_counts
from router.serving.limits.book import LimitBook
from router.serving.limits.charges import Counts, CountsOf, PriceOf, cost_of, no_price
from router.serving.limits.headers import Dialect, tightest
from router.serving.limits.holds import Charge, Counters, Hold
from router.serving.limits.lengths import OutputLengths
from router.serving.limits.meters import Meter
from router.serving.pricing import UnknownCached

_UNREAD_RETRY_S = 1.0


class Limiter:
    """`admit` and `reserve` return None where it is decided, or a future; they, or it, raise RateLimited,
    BudgetExceeded, or StoreUnavailable where a limit cannot be checked. Either way `settle` is called at the end, once.
    """

    def __init__(
        self,
        book: LimitBook,
        counters: Counters,
        *,
        price_of: PriceOf = no_price,
        counts: CountsOf = billed_counts,
        unknown_cached: UnknownCached = "full_price",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`counts`: what an ended request is charged, in tokens by class. `unknown_cached`: as the ledger's.

        `clock`: wall clock.
        """
        self._book = book
        self._counters = counters
        self._price_of = price_of
        self._counts_of = counts
        self._unknown_cached = unknown_cached
        self._clock = clock
        self._lengths = OutputLengths()
        self.refused: Counter[str] = Counter()

    def hold(self, caller: Caller) -> Hold | None:
        """None: nothing limits this caller. Raises StoreUnavailable for a tenant's before any limit is known."""
        if not self._book.is_read and caller.tenant:
            raise StoreUnavailable("Your limits are not known yet; try again.", retry_after_s=_UNREAD_RETRY_S)
        limits = self._book.of(caller)
        return None if limits is None else Hold(caller, limits)

    def admit(self, hold: Hold) -> Future[None] | None:
        """One request, and one more at once."""
        requests, parallel = hold.limits.requests, hold.limits.parallel
        if not requests and not parallel:
            return None
        return self._take(hold, [(meter, 1) for meter in (*requests, *parallel)])

    def reserve(
        self,
        hold: Hold,
        model: str,
        input_tokens: int,
        *,
        output_limit: int | None,
        choices: int = 1,
        model_tokens: int | None = None,
    ) -> Future[None] | None:
        """output_limit: of each choice, as the client says; None: a length that few answers of this key exceed.
        model_tokens: what prompt and answer can have together.
        """
        tokens, money = hold.limits.tokens, hold.limits.money
        if not tokens and not money:
            return None
        if output_limit is None:
            hold.learns = choices
            output_limit = self._lengths.expected(hold.caller.key, model)
        if model_tokens is not None:
            output_limit = min(output_limit, max(0, model_tokens - input_tokens))
        counts = {"uncached_input": input_tokens, "output": output_limit * choices}
        charges: list[Charge] = [(meter, meter.weighted(counts)) for meter in tokens]
        if money:
            cost, currency = self._cost(counts, model, hold.caller)
            charges += [(meter, cost if meter.limit.currency == currency else 0) for meter in money]
        return self._take(hold, charges)

    def settle(self, hold: Hold, outcome: Outcome) -> None:
        """What it really was, instead of what was reserved. Nothing for a request that a limit refused."""
        counts: Counts = {} if hold.refused else self._counts_of(outcome)
        cost, currency = 0, ""
        if hold.limits.money:
            priced = as_priced(counts, outcome, self._unknown_cached)
            cost, currency = self._cost(priced, outcome.model, hold.caller)
        requests = 0 if hold.refused else 1
        actual = [_actual(taken.meter, requests, counts, cost, currency) for taken in hold.taken]
        self._counters.settle(hold, actual)
        if hold.learns and outcome.finish == "complete" and outcome.usage is not None:
            self._lengths.note(hold.caller.key, outcome.model, outcome.usage.output_tokens // hold.learns)

    def lines(self, hold: Hold, dialect: Dialect) -> bytes:
        """For the head of the answer: what is left of its requests and of its tokens. Once; then b""."""
        if hold.shown:
            return b""
        hold.shown = True
        now = self._clock()
        return dialect(tightest(hold.limits.requests, now), tightest(hold.limits.tokens, now), now)

    def state(self) -> dict[str, str]:
        """mode: memory, redis, or local while Redis is away."""
        figures = self._counters.figures()
        return {"mode": next(name.removeprefix("mode_") for name, value in figures.items() if value)}

    def figures(self) -> dict[str, float]:
        """`mode_memory`, `mode_redis` or `mode_local` is 1; refusals by measure."""
        refused = {f"refused_{name}_total": float(count) for name, count in self.refused.items()}
        return {**self._counters.figures(), **refused}

    def _take(self, hold: Hold, charges: list[Charge]) -> Future[None] | None:
        try:
            decided = self._counters.take(hold, charges, self._clock())
        except WarmrouteError as error:
            self._refuse(hold, error)
            raise
        if decided is not None:
            decided.add_done_callback(lambda done: self._look(hold, done))
        return decided

    def _look(self, hold: Hold, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._refuse(hold, error)

    def _refuse(self, hold: Hold, error: BaseException) -> None:
        hold.refused = True
        self.refused[getattr(error, "code", None) or "unknown"] += 1

    def _cost(self, counts: Counts, model: str, caller: Caller) -> tuple[int, str]:
        """In 1e-12 of the unit of the currency. A model without a price costs nothing."""
        price = self._price_of(model, caller.tenant)
        return (0, "") if price is None else (cost_of(counts, price), price.currency)


def _actual(meter: Meter, requests: int, counts: Mapping[str, int], cost: int, currency: str) -> int:
    measure = meter.limit.measure
    if measure == "requests":
        return requests
    if measure == "tokens":
        return meter.weighted(counts)
    if measure == "money":
        return cost if meter.limit.currency == currency else 0
    return 0
