from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.lab.bounds import hit_bounds
from router.lab.traces import Trace, TraceRequest

BLOCK = 10


def trace(*prompts: tuple[int, Sequence[int]]) -> Trace:
    """Of (input tokens, block names)."""
    requests = [TraceRequest(str(n), n, tokens, 1, blocks) for n, (tokens, blocks) in enumerate(prompts)]
    return Trace("t", BLOCK, requests)


def test_full_blocks_are_hit() -> None:
    bounds = hit_bounds(trace((25, [1, 2, 3]), (35, [1, 2, 4, 5])), capacity_tokens=1_000)
    assert bounds.infinite == bounds.pooled_lru == pytest.approx(20 / 60)


def test_the_last_token_is_recomputed() -> None:
    """Of a prompt that is cached as a whole, the last block does not count."""
    assert hit_bounds(trace((30, [1, 2, 3]), (30, [1, 2, 3])), capacity_tokens=1_000).infinite == 20 / 60
    assert hit_bounds(trace((30, [1, 2, 3]), (31, [1, 2, 3, 4])), capacity_tokens=1_000).infinite == 30 / 61


def test_a_partial_block_is_never_hit() -> None:
    again = trace((25, [1, 2, 3]), (25, [1, 2, 3]), (29, [1, 2, 3]))
    assert hit_bounds(again, capacity_tokens=1_000) == pytest.approx((40 / 79, 40 / 79))


def test_a_partial_block_takes_no_room() -> None:
    prompts = trace((15, [1, 2]), (15, [3, 4]), (15, [1, 5]))
    assert hit_bounds(prompts, capacity_tokens=20).pooled_lru == 10 / 45
    assert hit_bounds(prompts, capacity_tokens=19).pooled_lru == 0


def test_the_least_recently_used_goes_first() -> None:
    prompts = [(11, [1, 91]), (11, [2, 92]), (11, [1, 93]), (11, [3, 94])]  # room for two: 1 was used after 2
    assert hit_bounds(trace(*prompts, (11, [1, 95])), capacity_tokens=20).pooled_lru == 20 / 55
    assert hit_bounds(trace(*prompts, (11, [2, 95])), capacity_tokens=20).pooled_lru == 10 / 55
    assert hit_bounds(trace(*prompts, (11, [2, 95])), capacity_tokens=20).infinite == 20 / 55


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    prompts = trace((41, [1, 2, 3, 4, 90]), (21, [8, 9, 91]), (41, [1, 2, 3, 4, 92]))
    assert hit_bounds(prompts, capacity_tokens=50).pooled_lru == 30 / 103
    assert hit_bounds(prompts, capacity_tokens=40).pooled_lru == 20 / 103


def test_of_a_prompt_larger_than_the_cache_the_beginning_stays() -> None:
    assert hit_bounds(trace((51, range(6)), (51, range(6))), capacity_tokens=30).pooled_lru == 30 / 102


@pytest.mark.parametrize("capacity", [0, 9])
def test_a_cache_without_room(capacity: int) -> None:
    bounds = hit_bounds(trace((21, [1, 2, 3]), (21, [1, 2, 4])), capacity_tokens=capacity)
    assert bounds == pytest.approx((20 / 42, 0))


def test_no_requests() -> None:
    assert hit_bounds(trace(), capacity_tokens=100) == (0, 0)


def plainly(prompts: list[tuple[int, ...]], extra: int, blocks: int) -> float:
    """The pooled LRU again, as plain as can be: a list, most recent last."""
    held: list[tuple[int, ...]] = []
    hits = tokens = 0
    for prompt in prompts:
        names = [prompt[: depth + 1] for depth in range(len(prompt))]
        countable = (len(prompt) * BLOCK + extra - 1) // BLOCK
        hits += next((n for n, name in enumerate(names[:countable]) if name not in held), min(countable, len(names)))
        tokens += len(prompt) * BLOCK + extra
        held = [name for name in held if name not in names] + names[::-1]
        held = held[max(0, len(held) - blocks) :]
    return hits * BLOCK / tokens


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=25),
    st.sampled_from([0, 1, 9]),
    st.integers(0, 12),
)
def test_it_agrees_with_a_plain_cache(prompts: list[tuple[int, ...]], extra: int, blocks: int) -> None:
    numbers: dict[tuple[int, ...], int] = {}
    requests = [
        (
            len(prompt) * BLOCK + extra,
            [numbers.setdefault(prompt[: depth + 1], len(numbers)) for depth in range(len(prompt))],
        )
        for prompt in prompts
    ]
    bounds = hit_bounds(trace(*requests), capacity_tokens=blocks * BLOCK)
    assert bounds.pooled_lru == pytest.approx(plainly(prompts, extra, blocks))
    assert bounds.infinite == pytest.approx(plainly(prompts, extra, 10**6))
