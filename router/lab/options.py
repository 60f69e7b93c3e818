"""How a simulated engine is set up."""

from __future__ import annotations

from pathlib import Path

import msgspec

from router.lab.chat import DEMO_MODEL
from router.lab.engine import Order
from router.lab.profiles import PROFILES, Profile


class SimEngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Port 0 is any free one; a port of None switches that service off. Limits of None are the profile's.

    speed: virtual milliseconds a real millisecond. output_tokens: answers end by themselves after half to one and a
    half of this, drawn from the seed and the prompt, unless the client's limit comes first or it sets `ignore_eos`.
    """

    model: str = "demo"
    profile: str = "llama-3.1-8b-h100"
    host: str = "127.0.0.1"
    port: int = 0
    speed: float = 1.0
    block_size: int = 16
    capacity_tokens: int | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_model_tokens: int | None = None  # the longest prompt and answer together
    max_queued: int | None = None  # requests that wait before further ones get a 503; None: no limit
    order: Order = "first_come"
    events_port: int | None = 0
    replay_port: int | None = 0
    buffer_steps: int = 10_000
    api_key: str | None = None
    loras: tuple[str, ...] = ()
    report_cached: bool = True  # vLLM: --enable-prompt-tokens-details
    output_tokens: int = 128
    seed: int = 0
    tokenizer: Path = DEMO_MODEL

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ValueError(f"unknown profile {self.profile!r}: {', '.join(PROFILES)}")
        if self.speed <= 0 or self.output_tokens < 2:
            raise ValueError("speed must be positive, output_tokens at least 2")

    @property
    def engine(self) -> Profile:
        return PROFILES[self.profile]
