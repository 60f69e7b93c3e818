"""What is learned of a rank from how its requests went: one bounded factor, one decaying sum, one pair of counts."""

from __future__ import annotations

from math import exp, inf
from weakref import WeakSet

import msgspec

from router.core import Rates

CONFIGURED_BOUNDS = (0.5, 2.0)
"""What an operator says of an engine is corrected so far; beyond it the configuration is to be mended."""
ASSUMED_BOUNDS = (0.02, 50.0)
"""Nobody said how fast the engine is: from a rack of B200s to a CPU, it is what it shows itself to be."""
FACTOR_GAIN = 0.1
MEASURABLE_MS = 20.0
MEASURABLE_TOKENS = 256
"""Shorter prefills say more of the network and the engine's step than of its prefill rate."""

SERVED_KEPT = 0.98
"""How much of the sums over past prefills each further one leaves: they reach back some fifty."""
SERVED_AT_LEAST = 16
"""So many prefills say how fast busy engines are; fewer may all have ended with one step."""

NOTICEABLE = 0.01
"""A change of pace by less is not worth new rates."""

DISTINCT = 0.2
"""An engine that differs from those like it by less is as fast as they are: its own few answers show no more."""

PROMISE_GAIN = 0.2

RECENT_S = 100.0
"""Nine of ten reuses of an agent's prefix come within about 100 s (SMetric, arXiv 2607.08565)."""
FADE_STEP_S = 0.1
"""A thousandth of it is lost in that time: not worth an exponential for every rank and decision."""


class Shown:
    """A ratio that follows what is observed of it. first_mean: the first observations count alike."""

    __slots__ = ("_first_mean", "observed", "value")

    def __init__(self, *, first_mean: bool) -> None:
        self._first_mean = first_mean
        self.observed = 0
        self.value = 1.0

    def add(self, ratio: float) -> None:
        self.observed += 1
        gain = max(FACTOR_GAIN, 1 / self.observed) if self._first_mean else FACTOR_GAIN
        self.value += gain * (ratio - self.value)


class Pace:
    """How long engines that are alike take for what the prior calls a millisecond of prefill.

    Shared by those of a model of which the same was said: one alone shows it too unsteadily, and a difference that is
    not there makes it look cheapest, or dearest, to every request (of 3 %, agentic sessions lost a point of hit rate).

    configured: what the operator said; None where nothing is known of them.
    value: what all of them go by. It follows `alone`, shown by requests that had an engine to themselves, times
    `busy`, which engines nobody described show while they are busy.
    """

    __slots__ = (
        "_served",
        "_sharers",
        "_took_ms",
        "_work_ms",
        "alone",
        "bounds",
        "busy",
        "configured",
        "prior",
        "rates",
        "value",
    )

    def __init__(self, configured: Rates | None) -> None:
        self.configured = configured
        self.prior = self.rates = configured or Rates()
        self.bounds = CONFIGURED_BOUNDS if configured is not None else ASSUMED_BOUNDS
        self.alone = Shown(first_mean=configured is None)
        self.busy = self.value = 1.0
        self._served = 0
        self._work_ms = self._took_ms = 0.0
        self._sharers: WeakSet[PrefillFactor] = WeakSet()

    def share(self, factor: PrefillFactor) -> None:
        self._sharers.add(factor)

    def observed(self, ratio: float) -> None:
        """Of a request that had an engine to itself."""
        self.alone.add(ratio)
        self._publish()

    def served(self, work_ms: float, took_ms: float) -> None:
        """A prefill of `work_ms` by the prior has ended on a busy rank, `took_ms` after the one before it.

        Several may end with one step, the first after all of its time and the others after none: only sums tell.
        """
        self._work_ms = self._work_ms * SERVED_KEPT + work_ms
        self._took_ms = self._took_ms * SERVED_KEPT + took_ms
        self._served += 1
        if self._served >= SERVED_AT_LEAST and self._work_ms:
            self.busy = _bounded(self._took_ms / self._work_ms, ASSUMED_BOUNDS)
            self._publish()

    def _publish(self) -> None:
        """To all at the same time: else those would differ that have heard from those that have not."""
        value = _bounded(self.busy * self.alone.value, self.bounds)
        if abs(value - self.value) > NOTICEABLE * self.value:
            self.value, self.rates = value, _scaled(self.prior, value)
            for factor in self._sharers:
                factor.follow()


class PrefillFactor:
    """Observed over predicted prefill time of one rank: the pace of those like it, unless its own is clearly another.

    value: by what the prior is multiplied.
    """

    __slots__ = ("__weakref__", "_own", "pace", "rates", "value")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.rates, self.value = pace.rates, pace.value
        self._own = Shown(first_mean=pace.configured is None)  # as `Pace.alone`
        pace.share(self)

    def observe(self, uncached_tokens: int, prompt_tokens: int, *, ttft_ms: float) -> None:
        """A request that had the rank to itself."""
        pace = self.pace
        predicted = pace.prior.prefill_ms(uncached_tokens, prompt_tokens)
        if uncached_tokens < MEASURABLE_TOKENS or max(predicted, ttft_ms) < MEASURABLE_MS or ttft_ms <= 0:
            return
        ratio = _bounded((ttft_ms - pace.prior.c0_ms) / predicted, pace.bounds) / pace.busy
        self._own.add(ratio)
        pace.observed(ratio)
        self.follow()

    def served(self, work_ms: float, took_ms: float) -> None:
        """One among others: see `Pace.served`."""
        if self.pace.configured is None:
            self.pace.served(work_ms, took_ms)

    def follow(self) -> None:
        pace, own = self.pace, self._own
        if own.observed and abs(own.value - pace.alone.value) > DISTINCT * pace.alone.value:
            self.value = _bounded(pace.busy * own.value, pace.bounds)
            self.rates = _scaled(pace.prior, self.value)
        else:
            self.value, self.rates = pace.value, pace.rates


def _bounded(value: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return min(high, max(low, value))


def _scaled(prior: Rates, factor: float) -> Rates:
    return msgspec.structs.replace(prior, c1_ms=prior.c1_ms * factor, c2_ms=prior.c2_ms * factor)


class Recent:
    """A sum of tokens that fades with `RECENT_S`, in steps of `FADE_STEP_S`: `faded` is what `tokens` gives `until`."""

    __slots__ = ("faded", "until")

    def __init__(self) -> None:
        self.faded = 0.0
        self.until = -inf

    def add(self, tokens: int, now: float) -> None:
        if now >= self.until:
            self.tokens(now)
        self.faded += tokens

    def tokens(self, now: float) -> float:
        if now >= self.until:
            self.faded *= exp((self.until - FADE_STEP_S - now) / RECENT_S)
            self.until = now + FADE_STEP_S
        return self.faded


class HitRecord:
    """Hits promised and hits delivered, in tokens, over the requests whose engine told.

    `keeps_promises` 0..1: a moving share of promises kept. An engine whose prefix cache is off, whatever it says of
    itself, is soon found out by it.
    """

    __slots__ = ("answers", "delivered_tokens", "keeps_promises", "predicted_tokens")

    def __init__(self) -> None:
        self.answers = 0
        self.predicted_tokens = 0
        self.delivered_tokens = 0
        self.keeps_promises = 1.0

    def add(self, predicted_tokens: int, delivered_tokens: int) -> None:
        self.answers += 1
        self.predicted_tokens += predicted_tokens
        self.delivered_tokens += delivered_tokens
        if predicted_tokens > 0:
            kept = min(1.0, delivered_tokens / predicted_tokens)
            self.keeps_promises += PROMISE_GAIN * (kept - self.keeps_promises)
