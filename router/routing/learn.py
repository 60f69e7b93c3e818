"""What is learned of a rank from how its requests went: one bounded factor, one decaying sum, one pair of counts."""

from __future__ import annotations

from math import exp, inf

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

PROMISE_GAIN = 0.2

RECENT_S = 100.0
"""Nine of ten reuses of an agent's prefix come within about 100 s (SMetric, arXiv 2607.08565)."""
FADE_STEP_S = 0.1
"""A thousandth of it is lost in that time: not worth an exponential for every rank and decision."""


class PrefillFactor:
    """Observed over predicted prefill time, of requests that had the rank to themselves: an EWMA; of the first
    answers of an engine nobody described, their mean.

    configured: what the operator said; None where nothing is known of the engine.
    """

    __slots__ = ("_bounds", "_observed", "configured", "prior", "rates", "value")

    def __init__(self, configured: Rates | None) -> None:
        self._bounds = CONFIGURED_BOUNDS if configured is not None else ASSUMED_BOUNDS
        self._observed = 0
        self.configured = configured
        self.prior = configured or Rates()
        self.value = 1.0
        self.rates = self.prior

    def observe(self, uncached_tokens: int, prompt_tokens: int, *, ttft_ms: float) -> None:
        predicted = self.prior.prefill_ms(uncached_tokens, prompt_tokens)
        if uncached_tokens < MEASURABLE_TOKENS or max(predicted, ttft_ms) < MEASURABLE_MS or ttft_ms <= 0:
            return
        low, high = self._bounds
        ratio = min(high, max(low, (ttft_ms - self.prior.c0_ms) / predicted))
        self._observed += 1
        gain = FACTOR_GAIN if self.configured is not None else max(FACTOR_GAIN, 1 / self._observed)
        self.value += gain * (ratio - self.value)
        self.rates = _scaled(self.prior, self.value)


def _scaled(prior: Rates, factor: float) -> Rates:
    return msgspec.structs.replace(prior, c1_ms=prior.c1_ms * factor, c2_ms=prior.c2_ms * factor)


class Recent:
    """A sum of tokens that fades with `RECENT_S`, in steps of `FADE_STEP_S`: `faded` is what `tokens` gives `until`."""

    __slots__ = ("faded", "until")

    def __init__(self) -> None:
        self.faded = 0.0
        self.until = -inf

    def add(self, tokens: int, now: float) -> None:
        self.faded = self.tokens(now) + tokens

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
