"""How fast an engine is and how much it holds, by name of model and hardware."""

from __future__ import annotations

import msgspec

from router.core import Rates


class Profile(msgspec.Struct, frozen=True):
    """One engine: step times, KV memory, and the scheduler limits vLLM takes by default on GPUs of 70 GiB or more."""

    name: str
    rates: Rates
    capacity_tokens: int
    max_batched_tokens: int = 8192
    max_num_seqs: int = 1024


def step_ms(rates: Rates, *, prefill_tokens: int, attention: float, decoding: int, context: int) -> float:
    """One engine step: c0 + c1*max(0, N - n0) + c2*attention + c3*context + c4*decoding, N = prefill_tokens + decoding.

    attention: sum of n*(p + n/2) over the prefill chunks, n new tokens after p earlier ones.
    context: tokens that the `decoding` sequences already hold, together.
    """
    over = prefill_tokens + decoding - rates.n0_tokens
    return (
        rates.c0_ms
        + (rates.c1_ms * over if over > 0 else 0.0)
        + rates.c2_ms * attention
        + rates.c3_ms * context
        + rates.c4_ms * decoding
    )


# Constants: least squares over up to 126 points per engine of the measured operator tables for vLLM 0.24 in
# `aiconfigurator-core` 0.12.0; mean error 3-4 %, at most 21 %. Capacities: 70B TP4 as llm-d measured it; the others
# are 0.9 of GPU memory, less weights and 2 GiB, by 131,072 (8B) or 327,680 (70B) bytes a token, rounded down.
PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "llama-3.1-8b-h100",
            Rates(c0_ms=6.66, c1_ms=0.01983, n0_tokens=192, c2_ms=7.95e-7, c3_ms=4.20e-5, c4_ms=0.005),
            capacity_tokens=440_000,
        ),
        Profile(
            "llama-3.1-70b-tp4-h100",
            Rates(c0_ms=15.8, c1_ms=0.0607, n0_tokens=128, c2_ms=1.00e-6, c3_ms=2.65e-5, c4_ms=0.008),
            capacity_tokens=461_376,
        ),
        Profile(
            "llama-3.1-70b-tp8-h100",
            Rates(c0_ms=10.3, c1_ms=0.0377, n0_tokens=64, c2_ms=5.02e-7, c3_ms=1.34e-5, c4_ms=0.0),
            capacity_tokens=1_330_000,
        ),
        Profile(
            "llama-3.1-8b-h200",
            Rates(c0_ms=5.22, c1_ms=0.0205, n0_tokens=192, c2_ms=8.04e-7, c3_ms=2.96e-5, c4_ms=0.006),
            capacity_tokens=890_000,
        ),
    )
}
