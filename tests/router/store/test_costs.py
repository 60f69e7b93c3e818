from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.store.costs import Work, divide

HOUR_MS = 3_600_000.0
WORK = st.builds(Work, st.floats(0, 1e7), st.floats(0, 1e12))


@given(
    cost=st.integers(0, 10**18),
    works=st.lists(WORK, max_size=20),
    ranks=st.integers(1, 8),
    capacity=st.integers(0, 10**7),
)
def test_parts_and_what_is_idle_are_the_cost(cost: int, works: list[Work], ranks: int, capacity: int) -> None:
    parts = divide(cost, works, ranks=ranks, capacity_tokens=capacity)
    assert len(parts) == len(works)
    assert all(part >= 0 for part in parts)
    assert cost - sum(parts) >= 0


def test_an_hour_is_divided_by_time() -> None:
    works = [Work(HOUR_MS / 4, 0.0), Work(HOUR_MS / 2, 0.0)]
    assert divide(1000, works, ranks=1, capacity_tokens=0) == [250, 500]
    assert divide(1000, works, ranks=2, capacity_tokens=0) == [125, 250]


def test_who_fills_the_memory_pays_for_it() -> None:
    works = [Work(HOUR_MS / 10, 0.5 * 1000 * 3600), Work(HOUR_MS / 10, 0.0)]
    assert divide(1000, works, ranks=1, capacity_tokens=1000) == [500, 100]


def test_more_work_than_an_hour_holds_is_scaled_down() -> None:
    works = [Work(HOUR_MS, 0.0), Work(3 * HOUR_MS, 0.0)]
    assert divide(1000, works, ranks=1, capacity_tokens=0) == [250, 750]
