from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median

import pytest

from router.lab.bounds import hit_bounds
from router.lab.synthetic import best_of_bursts, many_groups, one_hot_prefix, two_tenants, zero_reuse
from router.lab.traces import Trace

MAKERS: dict[str, Callable[[int], Trace]] = {
    "zero_reuse": lambda seed: zero_reuse(500, 5.0, seed=seed),
    "one_hot_prefix": lambda seed: one_hot_prefix(500, 5.0, seed=seed),
    "many_groups": lambda seed: many_groups(500, 5.0, seed=seed),
    "best_of_bursts": lambda seed: best_of_bursts(60, 1.0, seed=seed),
    "two_tenants_prefill": lambda seed: two_tenants(100.0, 5.0, seed=seed),
    "two_tenants_decode": lambda seed: two_tenants(100.0, 5.0, prefill_heavy=False, seed=seed),
}


def infinite(trace: Trace) -> float:
    return hit_bounds(trace, capacity_tokens=0).infinite


@pytest.mark.parametrize("name", MAKERS)
class TestEveryTrace:
    def test_the_seed_decides_everything(self, name: str) -> None:
        assert MAKERS[name](7) == MAKERS[name](7)
        assert MAKERS[name](7) != MAKERS[name](8)

    def test_it_is_whole(self, name: str) -> None:
        trace = MAKERS[name](0)
        assert (trace.name, trace.block_size) == (name, 512)
        assert len({request.id for request in trace.requests}) == len(trace.requests)
        arrivals = [request.at for request in trace.requests]
        assert arrivals == sorted(arrivals)
        for request in trace.requests:
            assert len(request.blocks) == -(-request.input_tokens // 512)
            assert request.output_tokens >= 1
            assert request.after is None

    def test_a_name_stands_for_all_before_it(self, name: str) -> None:
        before: dict[int, int] = {}
        for request in MAKERS[name](0).requests:
            for previous, block in pairwise([-1, *request.blocks]):
                assert before.setdefault(block, previous) == previous


def test_zero_reuse() -> None:
    trace = zero_reuse(4_000, 5.0)
    lengths = [request.input_tokens for request in trace.requests]
    assert infinite(trace) == 0
    assert fmean(lengths) == pytest.approx(6_000, rel=0.05)
    assert median(lengths) == pytest.approx(6_000 * 0.6065, rel=0.08)  # exp(-1/2): lognormal with sigma 1
    assert max(lengths) <= 100_000
    assert {request.output_tokens for request in trace.requests} == {200}


def test_arrivals_are_poisson() -> None:
    trace = zero_reuse(4_000, 5.0)
    gaps = [b.at - a.at for a, b in pairwise(trace.requests)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert fmean(gap * gap for gap in gaps) == pytest.approx(2 * 0.2**2, rel=0.1)


def test_one_hot_prefix() -> None:
    trace = one_hot_prefix(2_000, 5.0)
    begins = Counter(tuple(request.blocks[:16]) for request in trace.requests)
    (_, hot), (_, next_best) = begins.most_common(2)
    assert hot == pytest.approx(1_800, rel=0.03)
    assert next_best == 1
    lengths = [request.input_tokens for request in trace.requests]
    assert min(lengths) >= 8_192 + 500
    assert max(lengths) <= 8_192 + 2_000
    assert fmean(lengths) == pytest.approx(8_192 + 1_250, rel=0.01)
    assert infinite(trace) == pytest.approx(0.9 * 8_192 / 9_442, rel=0.03)


def test_many_groups() -> None:
    trace = many_groups(3_000, 5.0)
    groups = Counter(tuple(request.blocks[:11]) for request in trace.requests)  # 6,000 tokens: 11 blocks and a bit
    assert len(groups) == 150
    assert max(groups.values()) < 45  # 20 each, give or take
    assert len({request.blocks[11] for request in trace.requests}) == 3_000
    assert {request.input_tokens for request in trace.requests} == {7_200}
    assert infinite(trace) == pytest.approx((3_000 - 150) * 11 * 512 / (3_000 * 7_200))


def test_best_of_bursts() -> None:
    trace = best_of_bursts(200, 1.0, n=8)
    assert len(trace.requests) == 1_600
    bursts = [trace.requests[start : start + 8] for start in range(0, 1_600, 8)]
    for burst in bursts:
        assert len({(request.at, request.input_tokens, tuple(request.blocks)) for request in burst}) == 1
    assert len({burst[0].at for burst in bursts}) == 200
    assert len({burst[0].blocks[0] for burst in bursts}) == 200
    lengths = [burst[0].input_tokens for burst in bursts]
    assert min(lengths) >= 4_000
    assert max(lengths) <= 16_000
    assert fmean(lengths) == pytest.approx(10_000, rel=0.1)


@pytest.mark.parametrize(("prefill_heavy", "mean_input", "output"), [(True, 8_000, 50), (False, 500, 800)])
def test_two_tenants(prefill_heavy: bool, mean_input: int, output: int) -> None:
    trace = two_tenants(1_000.0, 5.5, ratio=10, prefill_heavy=prefill_heavy)
    tenants = Counter(request.tenant for request in trace.requests)
    assert tenants["large"] == pytest.approx(5_000, rel=0.05)
    assert tenants["small"] == pytest.approx(500, rel=0.1)
    assert 990 < trace.requests[-1].at < 1_000
    for tenant in tenants:  # alike but for their load
        own = [request.input_tokens for request in trace.requests if request.tenant == tenant]
        assert fmean(own) == pytest.approx(mean_input, rel=0.15)
    assert {request.output_tokens for request in trace.requests} == {output}
    assert infinite(trace) == 0


def test_the_block_size_can_be_another() -> None:
    trace = many_groups(10, 1.0, groups=2, block_size=16)
    assert trace.block_size == 16
    assert len(set(trace.requests[0].blocks)) == 450
    assert len({tuple(request.blocks[:375]) for request in trace.requests}) == 2
