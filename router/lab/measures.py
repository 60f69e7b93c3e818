"""What a replay comes to: one row of figures per policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

import msgspec

from router.lab.replay import Replayed, Served

LONG_TOKENS = 32_768
"""Prompts from here on are looked at apart: they are what a rule for short ones is paid with."""


class Objective(msgspec.Struct, frozen=True):
    """When a request was served well: TTFT up to `ttft_s` + `solo_factor` × its prefill alone, TPOT up to `tpot_s`."""

    ttft_s: float
    tpot_s: float
    solo_factor: float = 0.0

    def met(self, served: Served) -> bool:
        ttft = ttft_s(served)
        if ttft is None or served.finished_at is None:
            return False
        return ttft <= self.ttft_s + self.solo_factor * served.solo_s and tpot_s(served) <= self.tpot_s


FIXED = Objective(ttft_s=2.0, tpot_s=0.1)
SCALED = Objective(ttft_s=1.0, tpot_s=0.05, solo_factor=2.0)


class Measures(msgspec.Struct):
    """Of all requests, refused ones included where a share is given. None: nothing to measure it by."""

    policy: str
    requests: int
    refused: int
    retried: int
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    ttft_long_p90_s: float | None  # of prompts of LONG_TOKENS or more
    ttft_long_max_s: float | None
    tpot_mean_ms: float | None
    goodput: float  # share that met FIXED
    goodput_scaled: float  # share that met SCALED
    goodput_tokens: float  # FIXED, weighted by input and output tokens
    hit_rate: float  # of input tokens, as delivered
    best_hit_rate: float  # what the best candidate of each held when it was placed
    late: float  # share of uncached tokens whose request had its first token after the last arrival
    drain_s: float  # from the last arrival to the last end
    duplicate_share: float
    imbalance: float  # busy time of the busiest engine over the mean
    preemptions: int
    longest_wait_s: float  # from arrival to placement


def measure(replayed: Replayed) -> Measures:
    """Raises ValueError for a replay without requests."""
    served = replayed.served
    if not served:
        raise ValueError("no requests were replayed")
    answered = [one for one in served if one.first_token_at is not None and not one.refused]
    ttfts = sorted(_all(map(ttft_s, answered)))
    long = sorted(_all(ttft_s(one) for one in answered if one.input_tokens >= LONG_TOKENS))
    tpots = [tpot_s(one) * 1e3 for one in answered if one.output_tokens > 1]
    input_tokens = sum(one.input_tokens for one in answered) or 1
    tokens = sum(map(_tokens, served))
    last_arrival = max(one.arrived_at for one in served)
    uncached = sum(map(_uncached, answered)) or 1
    mean_busy = sum(replayed.busy_s) / len(replayed.busy_s)
    return Measures(
        policy=replayed.policy,
        requests=len(served),
        refused=sum(bool(one.refused) for one in served),
        retried=sum(one.retries for one in served),
        ttft_mean_s=_mean(ttfts),
        ttft_p50_s=quantile(ttfts, 0.5),
        ttft_p90_s=quantile(ttfts, 0.9),
        ttft_p99_s=quantile(ttfts, 0.99),
        ttft_long_p90_s=quantile(long, 0.9),
        ttft_long_max_s=long[-1] if long else None,
        tpot_mean_ms=_mean(tpots),
        goodput=sum(map(FIXED.met, served)) / len(served),
        goodput_scaled=sum(map(SCALED.met, served)) / len(served),
        goodput_tokens=sum(_tokens(one) for one in served if FIXED.met(one)) / tokens,
        hit_rate=sum(one.hit_tokens for one in answered) / input_tokens,
        best_hit_rate=sum(one.best_hit_tokens for one in answered) / input_tokens,
        late=sum(_uncached(one) for one in answered if (one.first_token_at or 0.0) > last_arrival) / uncached,
        drain_s=replayed.ended_at - last_arrival,
        duplicate_share=replayed.duplicate_share,
        imbalance=max(replayed.busy_s) / mean_busy if mean_busy else 1.0,
        preemptions=replayed.preemptions,
        longest_wait_s=max(
            [one.placed_at - one.arrived_at for one in served if one.placed_at is not None], default=0.0
        ),
    )


def ttft_s(served: Served) -> float | None:
    return None if served.first_token_at is None else served.first_token_at - served.arrived_at


def tpot_s(served: Served) -> float:
    """Seconds per further output token; 0 where there is none."""
    if served.first_token_at is None or served.finished_at is None or served.output_tokens < 2:
        return 0.0
    return (served.finished_at - served.first_token_at) / (served.output_tokens - 1)


def quantile(ordered: Sequence[float], q: float) -> float | None:
    """Of values in ascending order, by nearest rank: the least that a share of `q` (0..1) does not exceed."""
    return ordered[max(1, ceil(q * len(ordered))) - 1] if ordered else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _all(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _tokens(served: Served) -> int:
    return served.input_tokens + served.output_tokens


def _uncached(served: Served) -> int:
    return served.input_tokens - served.hit_tokens
