from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.depth import SHORT, Runs, audited, bisect, scan


def at_of(depths: list[int], holes: dict[int, int] | None = None):
    """Holder i holds the blocks before depths[i], except its hole."""
    holes = holes or {}

    def at(position: int) -> int:
        return sum(1 << i for i, depth in enumerate(depths) if position < depth and holes.get(i) != position)

    return at


def by_holder(runs: Runs, holders: int) -> list[int]:
    found: dict[int, int] = {}
    for depth, mask in runs:
        for i in range(holders):
            if mask >> i & 1:
                assert i not in found, "masks are disjoint"
                found[i] = depth
    return [found[i] for i in range(holders)]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=12), st.integers(1, 500), st.integers(0, 2**32))
def test_every_way_of_looking_finds_whole_runs(depths: list[int], end: int, dice: int) -> None:
    everybody = (1 << len(depths)) - 1
    expected = [min(depth, end) for depth in depths]
    at = at_of(depths)
    assert by_holder(scan(at, 0, end, everybody), len(depths)) == expected
    assert by_holder(bisect(at, 0, end, everybody), len(depths)) == expected
    runs, broken = audited(at, 0, end, everybody, dice=dice)
    assert (by_holder(runs, len(depths)), broken) == (expected, 0)


def test_bisection_looks_some_dozen_times_where_a_scan_would_look_thousands_of_times() -> None:
    looks = 0
    at = at_of([5000, 1234, 0, 6250])

    def counted(position: int) -> int:
        nonlocal looks
        looks += 1
        return at(position)

    runs, _ = audited(counted, 0, 6250, 0b1111, dice=1)
    assert by_holder(runs, 4) == [5000, 1234, 0, 6250]
    assert looks <= 4 * 13 + 4 * 4


def test_holders_outside_the_mask_are_not_reported() -> None:
    assert scan(at_of([3, 5]), 0, 9, 0b10) == [(5, 0b10)]


def test_a_start_is_taken_for_granted() -> None:
    assert by_holder(bisect(at_of([0, 80]), 70, 100, 0b11), 2) == [70, 80]


def test_a_hole_is_found_in_time_and_ends_the_run_there() -> None:
    at = at_of([400, 400], holes={0: 250})
    found = [
        by_holder(runs, 2)
        for dice in range(2000)
        for runs, broken in [audited(at, 0, 400, 0b11, dice=dice * 7919 << 16)]
        if broken
    ]
    assert found, "2,000 throws of 4 probes at 400 positions"
    assert all(depths == [250, 400] for depths in found)


def test_a_large_hole_is_found_at_once() -> None:
    """A head that was dropped whole, as when a bound of ours evicted it."""
    depths = [400]

    def at(position: int) -> int:
        return 0 if 10 <= position < 390 and position not in (199, 200) else at_of(depths)(position)

    runs, broken = audited(at, 0, 400, 1, dice=3)
    assert by_holder(runs, 1) == [10]
    assert broken in (0, 1)


def test_short_chains_are_exact_whatever_is_missing() -> None:
    at = at_of([SHORT], holes={0: 5})
    assert audited(at, 0, SHORT, 1, dice=0) == ([(5, 1)], 0)
