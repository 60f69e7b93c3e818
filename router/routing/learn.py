"""What is learned of a rank from how its requests went: one bounded factor, one decaying sum, one pair of counts."""

from __future__ import annotations

from math import exp

from router.core import Rates

FACTOR_BOUNDS = (0.5, 2.0)
"""A prior further off than this is a wrong prior, to be mended in the configuration (papers: one factor per worker)."""
FACTOR_GAIN = 0.1
MEASURABLE_MS = 20.0
"""Shorter prefills say more of the network and the engine's step than of its prefill rate."""

PROMISE_GAIN = 0.2

RECENT_S = 100.0
"""Nine of ten reuses of an agent's prefix come within about 100 s (SMetric, arXiv 2607.08565)."""


class PrefillFactor:
    """Observed over predicted prefill time: an EWMA of requests that had the rank to themselves."""

    __slots__ = ("prior", "rates", "value")

    def __init__(self, prior: Rates) -> None:
        self.prior = prior
        self.value = 1.0
        self.rates = prior

    def observe(self, uncached_tokens: int, prompt_tokens: int, *, ttft_ms: float) -> None:
        predicted = self.prior.prefill_ms(uncached_tokens, prompt_tokens)
        if predicted < MEASURABLE_MS or ttft_ms <= 0:
            return
        low, high = FACTOR_BOUNDS
        ratio = min(high, max(low, (ttft_ms - self.prior.c0_ms) / predicted))
        self.value += FACTOR_GAIN * (ratio - self.value)
        self.rates = _scaled(self.prior, self.value)


def _scaled(prior: Rates, factor: float) -> Rates:
    return Rates(
        c0_ms=prior.c0_ms,
        c1_ms=prior.c1_ms * factor,
        c2_ms=prior.c2_ms * factor,
        c3_ms=prior.c3_ms,
        c4_ms=prior.c4_ms,
        host_ms=prior.host_ms,
        disk_ms=prior.disk_ms,
        remote_ms=prior.remote_ms,
    )


class Recent:
    """A sum of tokens that fades with `RECENT_S`."""

    __slots__ = ("_at", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at = 0.0

    def add(self, tokens: int, now: float) -> None:
        self._tokens = self.tokens(now) + tokens
        self._at = now

    def tokens(self, now: float) -> float:
        return self._tokens * exp((self._at - now) / RECENT_S) if self._tokens else 0.0


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
