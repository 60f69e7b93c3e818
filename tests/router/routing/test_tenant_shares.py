"""Who has had least goes first; who has been away has neither credit nor debt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.tenant_shares import TenantShares

MOST_TENANTS = 10_000


def test_nobody_has_had_anything() -> None:
    shares = TenantShares()
    assert shares.start("a") == shares.start("b") == 0.0


def test_who_has_had_least_starts_first() -> None:
    shares = TenantShares()
    shares.serve("a", 300.0)
    shares.serve("b", 100.0)
    assert shares.start("b") == 100.0
    assert shares.start("a") == 300.0


def test_to_ask_is_free() -> None:
    shares = TenantShares()
    shares.serve("a", 300.0)
    for _ in range(3):
        assert shares.start("newcomer") == 0.0
        assert shares.start("a") == 300.0


def test_what_a_request_took_beyond_its_prefill_is_its_tenants_too() -> None:
    shares = TenantShares()
    shares.serve("a", 100.0)
    shares.charge("a", 900.0)
    assert shares.start("a") == 1_000.0
    assert shares.start("b") == 0.0  # a charge is no service: nobody else's start moves


def test_a_newcomer_gets_no_credit_for_the_past() -> None:
    """a alone: its third request starts at 200 and moves v there, so that is where the newcomer starts."""
    shares = TenantShares()
    for _ in range(3):
        shares.serve("a", 100.0)
    assert shares.start("newcomer") == 200.0
    assert shares.start("a") == 300.0


def test_who_comes_back_does_not_catch_up_and_has_nothing_to_make_good() -> None:
    shares = TenantShares()
    shares.serve("away", 100.0)
    for _ in range(10):
        shares.serve("busy", 100.0)
    assert shares.start("away") == 900.0  # the last of busy's started there
    shares.serve("away", 100.0)
    assert shares.start("away") == 1_000.0 == shares.start("busy")


def test_a_charge_for_somebody_long_gone_counts_from_now() -> None:
    shares = TenantShares()
    for _ in range(10):
        shares.serve("busy", 100.0)
    shares.charge("late", 50.0)
    assert shares.start("late") == 950.0


@given(
    st.lists(st.floats(1, 500), min_size=1, max_size=60),
    st.lists(st.floats(1, 500), min_size=1, max_size=60),
)
def test_two_that_always_have_something_waiting_get_the_same_within_one_request(
    sizes_a: list[float], sizes_b: list[float]
) -> None:
    shares, had = TenantShares(), {"a": 0.0, "b": 0.0}
    waiting = {"a": list(sizes_a), "b": list(sizes_b)}
    most = max(*sizes_a, *sizes_b)
    while all(waiting.values()):
        tenant = min(waiting, key=shares.start)
        work = waiting[tenant].pop()
        shares.serve(tenant, work)
        had[tenant] += work
        assert abs(had["a"] - had["b"]) <= most + 1e-6


def test_many_small_requests_outweigh_one_large_one_by_their_sum_only() -> None:
    shares = TenantShares()
    order: list[str] = []
    waiting = {"small": [10.0] * 100, "large": [500.0] * 2}
    while all(waiting.values()):
        tenant = min(waiting, key=shares.start)
        shares.serve(tenant, waiting[tenant].pop())
        order.append(tenant)
    assert order == ["small", "large", *["small"] * 50, "large"]  # at 500 ms each they are level; the first one begins


def test_tenants_that_come_once_are_not_remembered_for_ever() -> None:
    """None of them ever waits, so v stays where it was and all of them are ahead of it."""
    shares = TenantShares()
    for number in range(3 * MOST_TENANTS):
        shares.serve(f"t{number}", 10.0)
    assert len(shares._had) <= MOST_TENANTS


def test_those_who_have_had_most_are_the_last_to_be_forgotten() -> None:
    shares = TenantShares()
    shares.serve("greedy", 1e6)
    for number in range(3 * MOST_TENANTS):
        shares.serve(f"t{number}", 10.0)
    assert shares.start("greedy") == 1e6
