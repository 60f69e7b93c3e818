"""Other people's rules: decisions worked out by hand from the formula of the source, and its special branch."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from policies.aibrix_prefix import AibrixPrefix
from policies.chwbl import Chwbl
from policies.dynamo import Dynamo
from policies.least_requests import LeastRequests
from policies.llmd import Llmd
from policies.loadaware import LoadAware
from policies.power_of_two import PowerOfTwo
from policies.ramjet import Ramjet
from policies.random_choice import RandomChoice
from policies.sglang_cache_aware import SglangCacheAware
from router.core import Candidate, Policy, Prompt, Snapshot
from router.routing.brain import _prefix

States = Sequence[dict[str, Any]]


def policy(kind: Any, **weights: float) -> Policy:
    made: Policy = kind(weights, random.Random(3))
    return made


def shot(states: States, *, tokens: int = 1000, **rest: Any) -> Snapshot:
    candidates = tuple(Candidate("abcdefgh"[i], 0, **state) for i, state in enumerate(states))
    return Snapshot(at=0.0, tokens=tokens, candidates=candidates, **rest)


def values(chooser: Policy, snapshot: Snapshot) -> list[float]:
    costs = chooser.costs(snapshot)
    assert {cost.unit for cost in costs} == {"rank"}
    return [cost.value for cost in costs]


def best(chooser: Policy, snapshot: Snapshot) -> str:
    costs = values(chooser, snapshot)
    return snapshot.candidates[costs.index(min(costs))].instance


def busy(requests: int, hit: int = 0, **rest: Any) -> dict[str, Any]:
    return {"booked_requests": requests, "hit_tokens": hit, **rest}


ALL = [
    *(RandomChoice, LeastRequests, PowerOfTwo, Chwbl, SglangCacheAware),
    *(Llmd, Dynamo, LoadAware, AibrixPrefix, Ramjet),
]


@pytest.mark.parametrize("kind", ALL)
def test_a_weight_the_source_does_not_have_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="unknown weight"):
        policy(kind, affinity=1.0)


# --- random, least_requests, power_of_two


def test_random_goes_everywhere_alike() -> None:
    chooser, snapshot = policy(RandomChoice), shot([busy(9, 999), busy(0), busy(0)])
    picks = Counter(best(chooser, snapshot) for _ in range(600))
    assert all(160 <= picks[name] <= 240 for name in "abc")  # 200 each; the deviation is 12


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([busy(3, 999), busy(2)], [3, 2]),  # blind to caches
        ([busy(1, running=9, waiting=9), busy(1)], [1, 1]),  # and to what the engine says
    ],
)
def test_least_requests(states: States, expected: list[float]) -> None:
    assert values(policy(LeastRequests), shot(states)) == expected


def test_power_of_two_never_takes_the_busiest_and_ranks_all() -> None:
    chooser, snapshot = policy(PowerOfTwo), shot([busy(0), busy(5), busy(9)])
    picks = Counter(best(chooser, snapshot) for _ in range(600))
    # of the pairs ab, ac, bc, equally likely, a wins two and b one
    assert picks["c"] == 0
    assert 340 <= picks["a"] <= 460
    assert 140 <= picks["b"] <= 260
    assert sorted(values(chooser, snapshot)) == [0, 1, 2]


def test_power_of_two_with_equal_loads_is_random_and_with_one_candidate_certain() -> None:
    chooser = policy(PowerOfTwo)
    assert {best(chooser, shot([busy(4), busy(4)])) for _ in range(30)} == {"a", "b"}
    assert values(chooser, shot([busy(4)])) == [0]


# --- chwbl


def owner_of(prefix: int, states: States) -> str:
    return best(policy(Chwbl), shot(states, prefix=prefix))


def test_chwbl_prompts_that_begin_alike_stay_together_and_others_spread() -> None:
    idle = [busy(0)] * 4
    owners = {prefix: owner_of(prefix, idle) for prefix in range(1, 401)}
    assert all(70 <= list(owners.values()).count(name) <= 130 for name in "abcd")  # 100 each; the deviation is 9
    three = {prefix: owner_of(prefix, idle[:3]) for prefix in owners}
    assert all(three[prefix] == name for prefix, name in owners.items() if name != "d")  # only d's own have moved


@pytest.mark.parametrize(
    ("on_owner", "on_others", "stays"),
    [
        (0, 0, True),
        (1, 0, False),  # bound 1.25 · (1 + 1) / 4 = 0.625
        (6, 0, False),  # 1.25 · (6 + 1) / 4 = 2.2
        (6, 5, True),  # 1.25 · (21 + 1) / 4 = 6.9
        (7, 5, True),  # 1.25 · (22 + 1) / 4 = 7.2
        (10, 7, True),  # 1.25 · (31 + 1) / 4 = 10: up to and including
        (8, 5, False),  # 1.25 · (23 + 1) / 4 = 7.5
    ],
)
def test_chwbl_over_the_bound_the_next_in_hash_order_takes_over(on_owner: int, on_others: int, stays: bool) -> None:
    order = values(policy(Chwbl), shot([busy(0)] * 4, prefix=77))
    states = [busy(on_owner if place == 0 else on_others) for place in order]
    costs = values(policy(Chwbl), shot(states, prefix=77))
    assert costs == (order if stays else [place - 1 if place else 3 for place in order])


def test_chwbl_with_everybody_over_the_bound_the_first_takes_it() -> None:
    order = values(policy(Chwbl), shot([busy(0)] * 3, prefix=77))
    # with a factor of 0.5 the bound is 0.5 · (12 + 1) / 3 = 2.2, below all of them
    assert values(policy(Chwbl, load_factor=0.5), shot([busy(4)] * 3, prefix=77)) == order


def test_a_prompt_is_named_by_its_first_block_else_by_its_first_text() -> None:
    blocks, texts = array("Q", [11, 12]), ((21, 40), (22, 90))
    for keys, text_keys, expected in [
        ({16: blocks, 64: blocks[1:]}, texts, 11),
        ({16: array("Q"), 64: array("Q")}, texts, 21),
        ({}, texts, 21),
        ({16: array("Q")}, (), 0),
    ]:
        assert _prefix(Prompt(100, 40, keys, text_keys)) == expected


def test_chwbl_a_prompt_without_a_name_goes_to_the_fewest_requests() -> None:
    assert values(policy(Chwbl), shot([busy(3), busy(1), busy(2)])) == [3, 1, 2]


# --- sglang_cache_aware


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([busy(0), busy(50, 301)], [1, 0]),  # .301 > .3: there, whatever its load
        ([busy(0), busy(50, 300)], [0, 50]),  # .3 is not more than .3
        ([busy(2, 500), busy(1, 800), busy(0, 800)], [3, 0, 0]),  # the tree names any one of equal matches
        ([busy(0), busy(65, 999)], [0, 65]),  # out of balance: 65 - 0 > 64 and 65 > 1.5 · 0
        ([busy(0), busy(64, 999)], [1, 0]),  # 64 - 0 is not more than 64
        ([busy(131), busy(196, 999)], [132, 0]),  # 65 > 64, but 196 <= 1.5 · 131 = 196.5
        ([busy(130), busy(196, 999)], [130, 196]),  # 66 > 64 and 196 > 1.5 · 130 = 195
    ],
)
def test_sglang_cache_aware(states: States, expected: list[float]) -> None:
    assert values(policy(SglangCacheAware), shot(states)) == expected


def test_sglang_thresholds_are_the_operators() -> None:
    states = [busy(0), busy(5, 200)]
    assert best(policy(SglangCacheAware), shot(states)) == "a"
    assert best(policy(SglangCacheAware, cache_threshold=0.1), shot(states)) == "b"
    assert best(policy(SglangCacheAware, cache_threshold=0.1, balance_abs=4), shot(states)) == "a"


# --- llmd


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # scores 0 + 1 + 1 = 2 and 2 · .8 + 0 + 1 = 2.6, of 4
        ([{"waiting": 1}, {"waiting": 2, "hit_tokens": 800}], [2, 1.4]),
        # 0 + 1 + .9 = 1.9 against 2 · .4 + 0 + .5 = 1.3
        ([{"kv_usage": 0.1}, {"waiting": 1, "hit_tokens": 400, "kv_usage": 0.5}], [2.1, 2.7]),
        # equal queues score 1, however long: 1 + .1 and 1 + .9
        ([{"waiting": 7, "kv_usage": 0.9}, {"waiting": 7, "kv_usage": 0.1}], [2.9, 2.1]),
        # queues 0, 1, 4 score 1, .75, 0
        ([{"waiting": 0}, {"waiting": 1}, {"waiting": 4}], [2, 2.25, 3]),
        # 500 tokens on the GPU and 300 more in host memory: 500 + .8 · 300 = 740 of 1000
        ([{"hit_tokens": 800, "held_tokens": {"gpu": 500, "host": 900}}], [2 * 0.26]),
        # 400 on the GPU, 200 of those in host memory believed, 200 only just dispatched: 400 + .8 · 200 + 200 = 760
        ([{"hit_tokens": 800, "expected_tokens": 200, "held_tokens": {"gpu": 400, "host": 900}}], [2 * 0.24]),
    ],
)
def test_llmd(states: States, expected: list[float]) -> None:
    assert values(policy(Llmd), shot(states)) == pytest.approx(expected)


def test_llmd_the_weights_of_another_profile() -> None:
    states = [{"waiting": 1}, {"waiting": 2, "hit_tokens": 800}]
    assert best(policy(Llmd), shot(states)) == "b"
    assert best(policy(Llmd, queue=2.0), shot(states)) == "a"  # 2 + 1 against 1.6 + 0 + 1


# --- dynamo


def test_dynamo_worked_out() -> None:
    states = [
        # (0 + 1600 - 0) / 16 + (0 + 1600) / 16 = 100 + 100
        busy(0),
        # (800 + 1600 - 1280) / 16 + (2400 + 1600) / 16 = 70 + 250
        busy(2, 1280, booked_prefill_tokens=800, booked_kv_tokens=2400),
        # (0 + 1600 - 1440) / 16 + (640 + 1600) / 16 = 10 + 140
        busy(1, 1440, booked_kv_tokens=640),
    ]
    snapshot = shot(states, tokens=1600)
    assert values(policy(Dynamo), snapshot) == [200, 320, 150]
    assert policy(Dynamo).costs(snapshot)[1].parts == {"prefill": 70, "decode": 250, "requests": 0}
    assert values(policy(Dynamo, requests=60.0), snapshot) == [200, 440, 210]  # and 60 blocks a request
    assert values(policy(Dynamo, prefill=0.0), snapshot) == [100, 250, 140]


@pytest.mark.parametrize(
    ("held", "expected_tokens", "credit"),
    [
        ({"gpu": 1280}, 0, 1280),
        ({"gpu": 320, "host": 1280}, 0, 320 + 0.75 * 960),
        ({"gpu": 320, "disk": 640, "remote": 1280}, 0, 320 + 0.25 * 320 + 0.5 * 640),
        ({"gpu": 320, "host": 9999}, 0, 320 + 0.75 * 960),  # no more than is reused
        ({"gpu": 320}, 960, 1280),  # only just dispatched
        ({"gpu": 320, "host": 1280}, 640, 320 + 0.75 * 320 + 640),  # half of it
    ],
)
def test_dynamo_credit_by_tier(held: dict[str, int], expected_tokens: int, credit: float) -> None:
    state = {"hit_tokens": 1280, "held_tokens": held, "expected_tokens": expected_tokens}
    assert values(policy(Dynamo), shot([state], tokens=1600)) == [pytest.approx((1600 - credit) / 16 + 100)]


def test_dynamo_prefill_is_never_less_than_nothing_and_its_credit_can_fade() -> None:
    assert values(policy(Dynamo, overlap=4.0), shot([busy(0, 1280)], tokens=1600)) == [100]
    # a backlog of one prompt above the least, with a decay of 1, halves the credit: 3200 - 640
    states = [busy(0), busy(1, 1280, booked_prefill_tokens=1600)]
    assert values(policy(Dynamo, overlap_decay=1.0), shot(states, tokens=1600)) == [200, 160 + 100]


# --- loadaware


@pytest.mark.parametrize(
    ("states", "beta", "expected"),
    [
        # mean 2: scores .8 - (3 - 2) / 2 = .3 and 0 - (1 - 2) / 2 = .5; at most 1 + .5 = 1.5
        ([busy(3, 800), busy(1)], 1.0, [1.2, 1.0]),
        # the same at half the exchange rate: .8 - .25 = .55 and .25, of 1.25
        ([busy(3, 800), busy(1)], 0.5, [0.7, 1.0]),
        # mean 5, ± .2: .5 - .2 = .3 and .2, of 1.2
        ([busy(6, 500), busy(4)], 1.0, [0.9, 1.0]),
        # a fleet nearly idle: the mean .25 counts as 1, so .9 - .75 = .15 and .25, of 1.25
        ([busy(1, 900), busy(0), busy(0), busy(0)], 1.0, [1.1, 1.0, 1.0, 1.0]),
    ],
)
def test_loadaware(states: States, beta: float, expected: list[float]) -> None:
    assert values(policy(LoadAware, beta=beta), shot(states)) == pytest.approx(expected)


# --- aibrix_prefix


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # 17 - 1 is not more than 16; mean 9, σ 11.3, limit 31.6: highest match. (100 - 90) · 18 + 17 and 100 · 18 + 1
        ([busy(17, 900), busy(1)], [197, 1801]),
        # 18 - 1 is: only the least busy counts, and of those who has the match. 100 · 19 + 18, + 1, 60 · 19 + 1
        ([busy(18, 900), busy(1), busy(1, 400)], [1918, 1901, 1141]),
        # equal percentages (.909 and .901 are 90 %): fewer running. 10 · 5 + 4 and 10 · 5 + 2
        ([busy(4, 909), busy(2, 901)], [54, 52]),
        # seven idle and one with 12: mean 1.5, σ = √(126 / 7) = 4.24, limit 9.99: its match does not count
        ([busy(12, 900)] + [busy(0)] * 7, [1312] + [1300] * 7),
        # then the next best, where it is not too busy: 70 · 13 + 0
        ([busy(12, 900), busy(0, 300)] + [busy(0)] * 6, [1312, 910] + [1300] * 6),
        # with 9 more on the others' side: mean 2.63, σ = √(169.9 / 7) = 4.93, limit 12.5: it does
        ([busy(12, 900), busy(9)] + [busy(0)] * 6, [142, 1309] + [1300] * 6),
        # nobody holds anything: fewest running
        ([busy(3), busy(2)], [403, 402]),
        ([busy(3, 500)], [203]),
    ],
)
def test_aibrix_prefix(states: States, expected: list[float]) -> None:
    assert values(policy(AibrixPrefix), shot(states)) == expected


# --- ramjet


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        # W = 10 units: scores 10 - 4 · 2 = 2 and 0; costs 0 + 8 and 10
        ([busy(2, 5120), busy(0)], [8, 10]),
        # three requests: 10 - 12 = -2
        ([busy(3, 5120), busy(0)], [12, 10]),
        # 16,384 tokens to prefill are two more requests: 4 · (1 + 2)
        ([busy(1, 5120, booked_prefill_tokens=16_384), busy(0)], [12, 10]),
        # the cap: 100 units ahead count as 32, so nine requests (36) outweigh them, seven (28) don't
        ([busy(9, 51_200), busy(0)], [36, 32]),
        ([busy(7, 51_200), busy(0)], [28, 32]),
        # differences near the leader survive it: 100 units with two requests, 90 with one
        ([busy(1, 46_080), busy(2, 51_200)], [10 + 4, 8]),
        # whole units: 1,023 tokens are one
        ([busy(0, 1023), busy(0, 512)], [0, 0]),
    ],
)
def test_ramjet(states: States, expected: list[float]) -> None:
    assert values(policy(Ramjet), shot(states, tokens=60_000)) == pytest.approx(expected, abs=1e-6)


def test_ramjet_of_equal_scores_the_deeper_overlap_wins() -> None:
    states = [busy(0), busy(1, 2048)]  # 4 units behind, or 4 · 1 request
    assert values(policy(Ramjet), shot(states, tokens=4000)) == pytest.approx([4, 4])
    assert best(policy(Ramjet), shot(states, tokens=4000)) == "b"
