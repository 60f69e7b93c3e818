"""Who fills the engines' memory, and how long answers will be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.tenant_memory import TenantMemory


def here(*tenants: str, at: float = 0.0) -> TenantMemory:
    memory = TenantMemory()
    for tenant in tenants:
        memory.came(tenant, at)
    return memory


# --- who holds most


def test_alone_nobody_is_ahead() -> None:
    memory = here("a")
    memory.hold("a", 1_000)
    assert memory.lead("a") == 1.0


def test_while_nothing_is_held_nobody_is_ahead() -> None:
    memory = here("a", "b")
    assert (memory.lead("a"), memory.lead("b")) == (1.0, 1.0)


def test_ahead_is_who_holds_more_than_the_mean_of_those_who_are_here() -> None:
    memory = here("a", "b", "c", "d")
    for tenant, tokens in (("a", 400), ("b", 400), ("c", 200)):
        memory.hold(tenant, tokens)
    assert [memory.lead(tenant) for tenant in "abcde"] == [1.6, 1.6, 0.8, 0.0, 0.0]


def test_whoever_has_sent_nothing_for_ten_minutes_is_not_here() -> None:
    memory = here("a", "b")
    memory.hold("a", 1_000)
    memory.came("a", 600.0)
    assert memory.lead("a") == 2.0
    memory.came("a", 600.5)
    assert memory.lead("a") == 1.0


def test_what_is_over_is_held_no_more() -> None:
    memory = here("a", "b")
    memory.hold("a", 700)
    memory.hold("b", 300)
    memory.free("a", 700)
    assert (memory.lead("a"), memory.lead("b")) == (0.0, 2.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1_000))))
def test_after_any_storm_nothing_is_held(requests: list[tuple[str, int]]) -> None:
    memory = here("a", "b", "c")
    for tenant, tokens in requests:
        memory.hold(tenant, tokens)
    for tenant, tokens in reversed(requests):
        memory.free(tenant, tokens)
    assert (memory._held, memory._total) == ({}, 0)


# --- how long answers are


def test_an_unknown_tenants_answers_may_be_as_long_as_it_says_up_to_1024_tokens() -> None:
    memory = TenantMemory()
    assert [memory.answer_tokens("a", limit) for limit in (None, 100, 800, 50_000)] == [256, 100, 800, 1_024]


def test_a_tenants_answers_are_as_long_as_those_before_and_no_longer_than_it_allows() -> None:
    memory = TenantMemory()
    for _ in range(200):
        memory.answered("a", 300)
    for _ in range(14):  # about half of the mean is theirs
        memory.answered("a", 500)
    assert memory.answer_tokens("a", None) == pytest.approx(400, abs=10)
    assert memory.answer_tokens("a", 50_000) == memory.answer_tokens("a", None)
    assert memory.answer_tokens("a", 90) == 90
    assert memory.answer_tokens("b", None) == 256


def test_neither_tenants_nor_their_answers_pile_up() -> None:
    memory = TenantMemory()
    for number in range(10_100):
        memory.came(f"t{number}", 0.0)
        memory.answered(f"t{number}", 700)
    assert (len(memory._here), len(memory._answers)) == (10_000, 10_000)
    assert (memory.answer_tokens("t99", None), memory.answer_tokens("t100", None)) == (256, 700)
