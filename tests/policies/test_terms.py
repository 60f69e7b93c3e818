"""Each term of a cost alone, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from policies import terms
from router.core import Candidate, Rates, Snapshot

RATES = Rates(c0_ms=5, c1_ms=0.02, c2_ms=1e-6, c3_ms=4e-5, c4_ms=0.01, host_ms=0.002, disk_ms=0.02, remote_ms=0.01)


def candidate(**rest: Any) -> Candidate:
    return Candidate("a", 0, rates=RATES, **rest)


def snapshot(tokens: int, output_tokens: int = 100) -> Snapshot:
    return Snapshot(at=0.0, tokens=tokens, candidates=(), output_tokens=output_tokens)


@pytest.mark.parametrize(
    ("tokens", "hit", "expected"),
    [
        (10_000, 0, 0.02 * 10_000 + 1e-6 * 10_000 * 5_000),
        (10_000, 9_000, 0.02 * 1_000 + 1e-6 * 1_000 * 9_500),
        (10_000, 9_999, 0.02 + 1e-6 * 9_999.5),
    ],
)
def test_prefill(tokens: int, hit: int, expected: float) -> None:
    held = {"gpu": hit} if hit else {}
    assert terms.prefill_ms(snapshot(tokens), candidate(hit_tokens=hit, held_tokens=held)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("held", "hit", "expected"),
    [
        ({}, 0, 0),
        ({"gpu": 1000}, 1000, 0),
        ({"gpu": 1000, "host": 3000}, 3000, 2000 * 0.002),
        ({"gpu": 1000, "host": 3000}, 2000, 1000 * 0.002),  # no more than is reused
        ({"gpu": 1000, "host": 3000}, 900, 0),
        ({"gpu": 0, "host": 1000, "disk": 1500, "remote": 2500}, 2500, 1000 * 0.002 + 500 * 0.02 + 1000 * 0.01),
        ({"gpu": 1000, "host": 1000}, 1000, 0),
    ],
)
def test_tier_load(held: dict[str, int], hit: int, expected: float) -> None:
    assert terms.tier_load_ms(candidate(held_tokens=held, hit_tokens=hit)) == pytest.approx(expected)


def test_prefill_includes_the_load_of_slower_tiers() -> None:
    held = candidate(held_tokens={"gpu": 0, "host": 9_000}, hit_tokens=9_000)
    alone = candidate(held_tokens={"gpu": 9_000}, hit_tokens=9_000)
    assert terms.prefill_ms(snapshot(10_000), held) - terms.prefill_ms(snapshot(10_000), alone) == pytest.approx(18)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, 0),
        ({"booked_prefill_ms": 70.0, "booked_requests": 4}, 70),
        ({"booked_prefill_ms": 70.0, "booked_requests": 4, "waiting": 4}, 70),  # those waiting are ours
        ({"booked_prefill_ms": 70.0, "booked_requests": 4, "waiting": 6}, 70 + 2 * 20.5),
        ({"booked_prefill_ms": 70.0, "booked_requests": 4, "waiting": 6, "load_age_s": 60.0}, 70),  # old news
    ],
)
def test_queue(state: dict[str, Any], expected: float) -> None:
    assert terms.queue_ms(snapshot(1000), candidate(**state)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, 0),
        ({"booked_requests": 5, "booked_prefills": 2}, 3),
        ({"booked_requests": 5, "booked_prefills": 2, "running": 9}, 9),
        ({"booked_requests": 5, "booked_prefills": 2, "running": 9, "load_age_s": 60.0}, 3),
    ],
)
def test_neighbours_are_those_who_decode(state: dict[str, Any], expected: int) -> None:
    assert terms.decoding(candidate(**state)) == expected
    assert terms.neighbours_ms(10.0, expected) == pytest.approx(10.0 * expected)


def test_decode_is_the_expected_output_times_a_step() -> None:
    step = 5 + 4e-5 * 51_000 + 0.01 * 5
    cost = terms.decode_ms(snapshot(1000, output_tokens=100), candidate(), pinned=50_000, decoding=4)
    assert cost == pytest.approx(100 * step)


def test_every_sequence_reads_its_context_be_it_shared_or_not() -> None:
    shared = candidate(booked_kv_tokens=90_000)
    step = 5 + 4e-5 * 91_000 + 0.01 * 5
    assert terms.decode_ms(snapshot(1000), shared, pinned=50_000, decoding=4) == pytest.approx(100 * step)


def test_an_answer_makes_the_steps_of_all_who_are_booked_there_longer() -> None:
    """100 tokens × (c3 × 1,000 + c4) ms × 30 requests, decoding or not."""
    there = candidate(booked_requests=30, booked_prefills=25)
    assert (there.rates.c3_ms, there.rates.c4_ms) == (4e-5, 0.01)
    assert terms.crowding_ms(snapshot(1000, output_tokens=100), there) == pytest.approx(150.0)
    assert terms.crowding_ms(snapshot(1000, output_tokens=100), candidate()) == 0.0


def test_what_is_pinned_the_engine_knows_best() -> None:
    assert terms.pinned_tokens(candidate(booked_kv_tokens=50_000, kv_usage=0.5, capacity_tokens=200_000)) == 100_000
    assert terms.pinned_tokens(candidate(booked_kv_tokens=150_000, kv_usage=0.5, capacity_tokens=200_000)) == 100_000
    assert terms.pinned_tokens(candidate(booked_kv_tokens=150_000, capacity_tokens=200_000)) == 150_000
    old = candidate(booked_kv_tokens=50_000, kv_usage=0.5, capacity_tokens=200_000, load_age_s=60.0)
    assert terms.pinned_tokens(old) == 50_000


@pytest.mark.parametrize(
    ("state", "over"),
    [
        ({}, 0),  # capacity unknown
        ({"capacity_tokens": 100_000, "booked_kv_tokens": 98_900}, 0),
        ({"capacity_tokens": 100_000, "booked_kv_tokens": 99_900}, 1_000),
        ({"capacity_tokens": 100_000, "kv_usage": 1.0}, 1_100),
        ({"capacity_tokens": 100_000, "booked_kv_tokens": 900_000}, 100_000),  # all of it, at most
    ],
)
def test_memory_is_what_does_not_fit_computed_again(state: dict[str, Any], over: int) -> None:
    expected = RATES.prefill_ms(over, 100_000) if over else 0
    there = candidate(**state)
    cost = terms.memory_ms(snapshot(1000, output_tokens=100), there, pinned=terms.pinned_tokens(there))
    assert cost == pytest.approx(expected)


SENT = {"hit_tokens": 4000, "expected_tokens": 3000, "booked_prefills": 1}
WORKS = {"booked_prefills": 1}


@pytest.mark.parametrize(
    ("states", "copied"),
    [
        ([], 0),
        ([{}, {}], 0),
        ([{"hit_tokens": 1000}, {"hit_tokens": 3000}], 3000),
        ([SENT, {}], 1000),  # one of two has nothing to do: what is only under way does not count
        ([SENT, WORKS], 4000),
        ([SENT, WORKS, {}], 4000),
        ([SENT, WORKS, {}, {}], 1000),
        ([SENT, {"hit_tokens": 2000}], 2000),  # but what is held does
        ([{"hit_tokens": 16_384, "expected_tokens": 16_384, "booked_prefills": 1}, {}], 0),
        ([{"hit_tokens": 16_385, "expected_tokens": 16_385, "booked_prefills": 1}, {}], 16_385),  # too long for it
    ],
)
def test_what_is_only_being_computed_is_no_copy_while_half_of_the_engines_are_idle(
    states: list[dict[str, Any]], copied: int
) -> None:
    assert terms.copied_tokens([candidate(**state) for state in states]) == copied


@pytest.mark.parametrize(("best", "hit", "missing"), [(0, 0, 0), (4000, 4000, 0), (4000, 1000, 3000), (1000, 4000, 0)])
def test_duplication_is_the_prefill_of_what_another_holds(best: int, hit: int, missing: int) -> None:
    expected = RATES.prefill_ms(missing, best) if missing else 0
    assert terms.duplication_ms(candidate(hit_tokens=hit), best) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("held", "hit", "expected"),
    [
        # 10,000 tokens; what is read: 1,000 on the GPU, 2,000 more in host memory, 1,000 more on disk
        ({"gpu": 1000, "host": 3000, "disk": 4000}, 4000, 0.02 * 6000 + 1e-6 * 6000 * 7000 + 4 + 20),
        # believed by half: 2,000 tokens, 1,000 of them out of host memory, none from the disk
        ({"gpu": 1000, "host": 3000, "disk": 4000}, 2000, 0.02 * 8000 + 1e-6 * 8000 * 6000 + 2),
        # by a fifth: not even all that lies on the GPU
        ({"gpu": 1000, "host": 3000, "disk": 4000}, 800, 0.02 * 9200 + 1e-6 * 9200 * 5400),
        # not at all
        ({"gpu": 1000, "host": 3000, "disk": 4000}, 0, 0.02 * 10_000 + 1e-6 * 10_000 * 5000),
        # a remote store holds all of it, this engine nothing
        ({"gpu": 0, "remote": 9000}, 9000, 0.02 * 1000 + 1e-6 * 1000 * 9500 + 90),
        # 9,000 on their way there: 3,000 held in host memory, the rest only just dispatched, on the GPU by then
        ({"gpu": 0, "host": 3000}, 9000, 0.02 * 1000 + 1e-6 * 1000 * 9500 + 6),
    ],
)
def test_a_shorter_hit_is_computed_more_and_loaded_less(held: dict[str, int], hit: int, expected: float) -> None:
    cost = terms.prefill_ms(snapshot(10_000), candidate(held_tokens=held, hit_tokens=hit))
    assert cost == pytest.approx(expected)


def test_the_share_of_a_step_is_less_than_the_step() -> None:
    share = terms.decode_share_ms(snapshot(1000, output_tokens=100), candidate(), decoding=4)
    assert share == pytest.approx(100 * (5 / 5 + 4e-5 * 1000 + 0.01))
    alone = terms.decode_share_ms(snapshot(1000, output_tokens=100), candidate(), decoding=0)
    assert alone == pytest.approx(terms.decode_ms(snapshot(1000), candidate(), pinned=0, decoding=0))


@pytest.mark.parametrize(("price", "expected"), [(0.0, 0.0), (3.6, 0.0002), (36.0, 0.002)])
def test_money_is_the_price_of_gpu_time(price: float, expected: float) -> None:
    """95 ms of prefill and 105 ms of decode are 200 ms: 1/18,000 of an hour."""
    there = candidate(price_per_hour=price)
    assert terms.money(snapshot(1000), there, own_prefill_ms=95.0, decoding=4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("objective", "queue", "own", "late"),
    [
        (None, 9e9, 9e9, 0),
        (1000.0, 900.0, 100.0, 0),  # just in time
        (1000.0, 900.0, 150.0, 50),
        (0.0, 0.0, 20.0, 20),
    ],
)
def test_late_is_what_comes_after_the_objective(objective: float | None, queue: float, own: float, late: float) -> None:
    asked = Snapshot(at=0.0, tokens=1000, candidates=(), ttft_slo_ms=objective)
    assert terms.late_ms(asked, queue_ms=queue, own_prefill_ms=own) == late


def test_who_is_late_comes_behind_the_highest_cost_in_the_order_of_lateness() -> None:
    highest = 700.0
    assert terms.slo_ms(0.0, cost_ms=700.0, highest_ms=highest) == 0
    by_lateness = [cost + terms.slo_ms(late, cost_ms=cost, highest_ms=highest) for cost, late in ((600, 5), (90, 6))]
    assert by_lateness == [700 + terms.SLO_GAP_MS + 5, 700 + terms.SLO_GAP_MS + 6]


@pytest.mark.parametrize(
    ("given", "said"),
    [({"queu": 1.0}, "unknown weight 'queu'"), ({"queue": -0.1}, ">= 0"), ({"queue": float("nan")}, ">= 0")],
)
def test_a_wrong_weight_is_refused_by_name(given: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        terms.weights_over({"queue": 1.0}, given)


def test_given_weights_are_laid_over_the_defaults() -> None:
    assert terms.weights_over({"queue": 1.0, "prefill": 2.0}, {"queue": 3}) == {"queue": 3, "prefill": 2.0}
