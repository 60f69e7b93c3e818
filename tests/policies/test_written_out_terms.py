"""`kv_aware` writes its terms out for speed: the figures have to be those of `policies/terms.py`."""

from __future__ import annotations

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import terms
from policies.kv_aware import WEIGHTS, KvAware
from router.core import Candidate, Rates, Snapshot

few = st.integers(0, 40)
tokens = st.integers(0, 200_000)
ages = st.sampled_from([0.0, terms.STALE_LOAD_S, terms.STALE_LOAD_S + 0.1, -1.0])
rates = st.builds(
    Rates,
    c0_ms=st.floats(0, 50),
    c1_ms=st.floats(0, 1),
    c2_ms=st.floats(0, 1e-4),
    c3_ms=st.floats(0, 1e-3),
    c4_ms=st.floats(0, 1),
)
held = st.sampled_from([{}, {"gpu": 3200}, {"gpu": 160, "host": 6400}, {"gpu": 0, "disk": 1600, "remote": 9600}])


@st.composite
def candidates(draw: st.DrawFn, prompt_tokens: int) -> Candidate:
    booked, hit = draw(few), draw(st.integers(0, prompt_tokens - 1))
    return Candidate(
        "a",
        0,
        hit_tokens=hit,
        expected_tokens=draw(st.just(0) | st.integers(0, hit)),
        held_tokens=draw(held),
        booked_requests=booked,
        booked_prefills=draw(st.integers(0, booked)),
        booked_prefill_ms=draw(st.floats(0, 1e5)),
        booked_kv_tokens=draw(tokens),
        running=draw(few),
        waiting=draw(few),
        kv_usage=draw(st.sampled_from([0.0, 0.3, 1.0])),
        load_age_s=draw(ages),
        capacity_tokens=draw(st.just(0) | tokens),
        recent_tokens=draw(tokens),
        rates=draw(rates),
        price_per_hour=draw(st.sampled_from([0.0, 0.9, 98.32])),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    prompt_tokens = draw(st.integers(1, 100_000))
    rows = draw(st.lists(candidates(prompt_tokens), min_size=1, max_size=4))
    return Snapshot(
        0.0,
        prompt_tokens,
        tuple(rows),
        output_tokens=draw(st.integers(0, 4_000)),
        ttft_slo_ms=draw(st.none() | st.sampled_from([0.0, 1_000.0, 30_000.0, 1e9])),
    )


def by_terms(snapshot: Snapshot, candidate: Candidate, weights: dict[str, float]) -> dict[str, float]:
    own, batch, pinned = (
        terms.prefill_ms(snapshot, candidate),
        terms.decoding(candidate),
        terms.pinned_tokens(candidate),
    )
    parts = {
        "queue": terms.queue_ms(snapshot, candidate),
        "prefill": own,
        "neighbours": terms.neighbours_ms(own, batch),
        "duplication": terms.duplication_ms(candidate, terms.copied_tokens(snapshot.candidates)),
        "crowding": terms.crowding_ms(snapshot, candidate),
        "memory": terms.memory_ms(snapshot, candidate, pinned=pinned),
        "decode": terms.decode_ms(snapshot, candidate, pinned=pinned, decoding=batch),
        "price": terms.money(snapshot, candidate, own_prefill_ms=own, decoding=batch),
    }
    return {term: weights[term] * part for term, part in parts.items()}


def with_slo(snapshot: Snapshot, rows: list[dict[str, float]]) -> list[dict[str, float]]:
    if snapshot.ttft_slo_ms is None:
        return rows
    sums = [sum(parts.values()) for parts in rows]
    added: list[dict[str, float]] = []
    for candidate, parts, cost in zip(snapshot.candidates, rows, sums, strict=True):
        queue, own = terms.queue_ms(snapshot, candidate), terms.prefill_ms(snapshot, candidate)
        late = terms.late_ms(snapshot, queue_ms=queue, own_prefill_ms=own)
        added.append(parts | {"slo": terms.slo_ms(late, cost_ms=cost, highest_ms=max(sums))})
    return added


@settings(deadline=None, max_examples=400)
@given(snapshots(), st.fixed_dictionaries({term: st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e6]) for term in WEIGHTS}))
def test_every_part_is_its_term(snapshot: Snapshot, weights: dict[str, float]) -> None:
    costs = KvAware(weights, random.Random(1)).costs(snapshot)
    by_term = with_slo(snapshot, [by_terms(snapshot, candidate, weights) for candidate in snapshot.candidates])
    names = [*WEIGHTS] if snapshot.ttft_slo_ms is None else [*WEIGHTS, "slo"]
    rounding = max(1e-6, 1e-12 * max(cost.value for cost in costs))  # the objective's part is a difference of sums
    for expected, cost in zip(by_term, costs, strict=True):
        assert list(cost.parts) == names
        assert cost.parts == pytest.approx(expected, abs=rounding)
        assert all(0 <= part < inf for part in cost.parts.values())
        assert cost.value == pytest.approx(sum(cost.parts.values()), rel=1e-12)
