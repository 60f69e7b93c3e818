"""What a tenant that sends ten times as much does to another's first tokens, 8 engines, in virtual time."""

from __future__ import annotations

import random

from policies.kv_aware import KvAware
from router.lab import synthetic
from router.lab.fleet_model import EngineSpec
from router.lab.profiles import PROFILES
from router.lab.replay import Replay, Setup
from router.lab.traces import Trace
from router.routing.room_rule import RoomRule

FLEET = [EngineSpec(PROFILES["llama-3.1-8b-h100"], max_batched_tokens=8_192)] * 8


def p90_ttft_s(trace: Trace, tenant: str) -> float:
    done = Replay(trace, Setup(FLEET, room=RoomRule()), KvAware({}, random.Random(0)), name="kv_aware").run().served
    ttfts = [one.first_token_at - one.arrived_at for one in done if one.tenant == tenant and one.first_token_at]
    return sorted(ttfts)[int(0.9 * len(ttfts))]


def alone(trace: Trace, tenant: str) -> Trace:
    return Trace(trace.name, trace.block_size, [one for one in trace.requests if one.tenant == tenant])


def test_long_prompts_of_a_large_tenant_raise_the_small_ones_p90_by_no_more_than_15_percent() -> None:
    trace = synthetic.two_tenants(150.0, 25.0)
    assert p90_ttft_s(trace, "small") <= 1.15 * p90_ttft_s(alone(trace, "small"), "small")


def test_long_answers_of_a_large_tenant_cost_the_small_one_steps_and_no_waiting_for_memory() -> None:
    """Half as much again as the fleet can bear. 30 ms alone; a step is 30 ms long with all that decode."""
    trace = synthetic.two_tenants(30.0, 240.0, prefill_heavy=False)
    assert p90_ttft_s(trace, "large") > 10.0
    assert p90_ttft_s(trace, "small") < 0.15


def test_nor_when_the_large_one_comes_all_at_once_and_none_of_its_answers_has_been_seen() -> None:
    trace = synthetic.two_tenants(15.0, 300.0, prefill_heavy=False)
    assert p90_ttft_s(trace, "large") > 10.0
    assert p90_ttft_s(trace, "small") < 1.0
