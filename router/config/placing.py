"""The sections of placement: policy, waiting room, index, prompts."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field

from router.config.section import Section
from router.config.values import GIB, MIB, Milliseconds, Seconds, Size, Text, Tokens, Weight


class PolicyChoice(Section):
    """Who gets a request."""

    name: Text = "kv_aware"
    """The name of an installed policy, or module:attr."""
    weights: dict[str, Weight] = Field(default_factory=dict)
    """The policy's weights by name, 0 or more; what is not given keeps the policy's own."""
    ttft_slo_s: Seconds | None = None
    """Objective for the time to first token, seconds: engines predicted to meet it come before all others, for
    policies that look at it (kv_aware does). None by default."""
    ttft_slo_per_1k_tokens_ms: Milliseconds = 0.0
    """What 1,000 tokens of prompt add to ttft_slo_s, ms. SMetric takes 1 s and 62.5 ms."""
    shadow: tuple[Text, ...] = ()
    """Policies that are scored on the same decisions and never act, with their own weights: how often they would have
    chosen otherwise, and what the choice cost in their eyes, is in the metrics (warmroute_shadow_*)."""


class WaitingRoom(Section):
    """Where requests wait until an engine has room for them, in the order that serves all of them soonest."""

    enabled: bool = True
    """false: every request goes to an engine as it arrives, and waits there. The weights of kv_aware are chosen for the
    room; without it neighbours: 1 serves better under heavy load, and worse under light."""
    free_tokens: Tokens = 2_048
    """An engine takes more while fewer uncached prompt tokens of ours are on their way to their first token there."""
    head_start_max_s: Seconds = 50.0
    """Short prompts go before long ones, but nothing that arrives later than this overtakes a request; under heavy
    overload more. Seven tenths of wait_s at most."""
    gap_s: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.1
    """While others wait and answers come slowly, an engine rests between two prefills, so long at most, so that those
    who decode there move on. 0: never; first tokens come sooner, further ones more slowly."""
    wait_s: Seconds = 600.0
    """A request that is not placed by then is refused; one that could not be, at once, with Retry-After."""
    max_requests: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    """So many may wait; further ones are refused."""
    max_bytes: Size = ByteSize(GIB)
    """So many bytes of bodies may wait; further ones are refused."""


class Index(Section):
    """The memory of who holds what."""

    max_bytes: Size = ByteSize(GIB)
    """Hard bound of its memory; beyond it the oldest entries go."""
    save_every_s: Seconds = 60.0
    """How often it is written to state_dir, so that a restart starts warm."""


class PromptReading(Section):
    """Turning prompts into block keys."""

    memo_bytes: Size = ByteSize(256 * MIB)
    """Memory for token ids of text seen before."""
    wait_ms: Milliseconds = 300.0
    """How long a request waits for the tokens of text that an engine may hold, from our thread or the engine, before
    it is placed without them."""
