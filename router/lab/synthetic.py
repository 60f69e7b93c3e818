"""Workloads made to a recipe, for what recorded traces do not show: each puts one property of a router to the test.

Arrivals are Poisson at `per_s`. Blocks are 512 tokens unless said otherwise. The same arguments and seed give the same
trace.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, repeat, takewhile

from router.lab.trace_request import Trace, TraceRequest

BLOCK_SIZE = 512
LONGEST_INPUT = 100_000
"""Tokens. A lognormal now and then gives a prompt that no engine could hold."""


def zero_reuse(
    requests: int,
    per_s: float,
    *,
    mean_input: int = 6_000,
    sigma: float = 1.0,
    output_tokens: int = 200,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
) -> Trace:
    """No two prompts share anything: a cache-aware router must not be worse here than one that only balances load.

    Input lengths are lognormal with that mean; `sigma` 1 is about what Mooncake's conversations have.
    """
    rng, made = random.Random(seed), _Requests(block_size)
    for at in islice(_poisson(rng, per_s), requests):
        made.add(at, _lognormal(rng, mean_input, sigma), output_tokens)
    return made.trace("zero_reuse")


def one_hot_prefix(
    requests: int,
    per_s: float,
    *,
    share: float = 0.9,
    prefix_tokens: int = 8_192,
    output_tokens: int = 200,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
) -> Trace:
    """`share` of the requests begin alike, and all have 500 to 2,000 tokens of their own behind that.

    Who follows the longest match piles them all onto one engine. The others are as long, but nobody else's.
    """
    rng, made = random.Random(seed), _Requests(block_size)
    hot = made.names(prefix_tokens // block_size)
    for at in islice(_poisson(rng, per_s), requests):
        prefix = hot if rng.random() < share else ()
        made.add(at, prefix_tokens + rng.randint(500, 2_000), output_tokens, prefix)
    return made.trace("one_hot_prefix")


def many_groups(
    requests: int,
    per_s: float,
    *,
    groups: int = 150,
    prefix_tokens: int = 6_000,
    tail_tokens: int = 1_200,
    output_tokens: int = 1_000,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
) -> Trace:
    """Each request belongs to one of many groups with a prefix each, drawn evenly: more prefixes than one engine holds.

    After llm-d's benchmark of precise prefix routing (llm-d-kv-cache, benchmarking/73-capacity): 150 groups, 6,000
    tokens of system prompt, 1,200 of question, 1,000 of answer; there with 5 prompts a group, here each once.
    """
    rng, made = random.Random(seed), _Requests(block_size)
    prefixes = [made.names(prefix_tokens // block_size) for _ in range(groups)]
    for at in islice(_poisson(rng, per_s), requests):
        made.add(at, prefix_tokens + tail_tokens, output_tokens, rng.choice(prefixes))
    return made.trace("many_groups")


def best_of_bursts(
    bursts: int,
    per_s: float,
    *,
    n: int = 8,
    output_tokens: int = 200,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
) -> Trace:
    """`n` requests with the same prompt of 4,000 to 16,000 tokens at the same instant, `per_s` such bursts.

    Nothing is cached when the second of them is placed: only who remembers what it sent can put them together.
    """
    rng, made = random.Random(seed), _Requests(block_size)
    for at in islice(_poisson(rng, per_s), bursts):
        input_tokens = rng.randint(4_000, 16_000)
        prompt = made.names(-(-input_tokens // block_size))
        for _ in range(n):
            made.add(at, input_tokens, output_tokens, prompt)
    return made.trace("best_of_bursts")


def two_tenants(
    seconds: float,
    per_s: float,
    *,
    ratio: float = 10.0,
    prefill_heavy: bool = True,
    block_size: int = BLOCK_SIZE,
    seed: int = 0,
) -> Trace:
    """Tenants "large" and "small", alike but for their load: `large` sends `ratio` times as much of the `per_s` in all.

    prefill_heavy: long prompts (lognormal, mean 8,000 tokens) with 50 tokens of answer; else prompts of mean 500 with
    800. Nothing is shared, so that waiting is all that one can do to the other.
    """
    mean_input, output_tokens = (8_000, 50) if prefill_heavy else (500, 800)
    rng, made = random.Random(seed), _Requests(block_size)
    for at in takewhile(lambda at: at < seconds, _poisson(rng, per_s)):
        tenant = "large" if rng.random() * (ratio + 1) < ratio else "small"
        made.add(at, _lognormal(rng, mean_input, 1.0), output_tokens, tenant=tenant)
    return made.trace("two_tenants_prefill" if prefill_heavy else "two_tenants_decode")


class _Requests:
    """Requests so far, and the next block name that nobody has."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._next_name = 0
        self._made: list[TraceRequest] = []

    def names(self, count: int) -> range:
        """New block names."""
        names = range(self._next_name, self._next_name + count)
        self._next_name = names.stop
        return names

    def add(
        self, at: float, input_tokens: int, output_tokens: int, prefix: Sequence[int] = (), *, tenant: str = ""
    ) -> None:
        """A request whose prompt begins with the blocks `prefix`; the rest is its own."""
        own = self.names(-(-input_tokens // self._block_size) - len(prefix))
        blocks = array("Q", [*prefix, *own]) if prefix else own
        id = str(len(self._made) + 1)
        self._made.append(TraceRequest(id, at, input_tokens, output_tokens, blocks, tenant=tenant))

    def trace(self, name: str) -> Trace:
        return Trace(name, self._block_size, self._made)


def _poisson(rng: random.Random, per_s: float) -> Iterator[float]:
    """Times of arrivals in seconds, without end."""
    return accumulate(map(rng.expovariate, repeat(per_s)))


def _lognormal(rng: random.Random, mean: float, sigma: float) -> int:
    """Tokens, 1 to LONGEST_INPUT."""
    drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return min(max(1, round(drawn)), LONGEST_INPUT)
