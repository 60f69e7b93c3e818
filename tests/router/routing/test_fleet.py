"""Which ranks can serve a request, and why the others cannot."""

from __future__ import annotations

from typing import Any

import pytest

from router.core import Ask, EngineFacts, EventSource, Instance, Prompt, Rates
from router.routing.fleet import (
    ASSUMED_BLOCK_SIZE,
    OPEN_AT_MOST_S,
    OPEN_S,
    PROBE_S,
    SUSPECT_S,
    Fleet,
    Health,
    Rank,
)


def instance(id: str, model: str = "m", **rest: Any) -> Instance:
    return Instance(id, f"http://{id}:8000", "vllm", model, **rest)


def ask(model: str = "m", tokens: int = 100, **rest: Any) -> Ask:
    return Ask("r1", model, Prompt(tokens, tokens, {}), **rest)


def fleet_of(*instances: Instance, facts: EngineFacts | None = None) -> Fleet:
    fleet = Fleet()
    for each in instances:
        fleet.add(each, now=0.0)
        fleet.learn(each.id, facts or EngineFacts(served=()), now=0.0)
        fleet.set_health(each.id, Health.READY, "", now=0.0)
    return fleet


def ids(fleet: Fleet, request: Ask, now: float = 0.0) -> list[str]:
    return [rank.id for rank in fleet.candidates(request, now=now)[0]]


def rank(fleet: Fleet, id: str, number: int = 0) -> Rank:
    found = fleet.rank(id, number)
    assert found is not None
    return found


def test_ready_engines_of_the_model_are_candidates() -> None:
    fleet = fleet_of(instance("a"), instance("b"), instance("c", model="other"))
    assert ids(fleet, ask()) == ["a/0", "b/0"]
    assert ids(fleet, ask("other")) == ["c/0"]
    assert ids(fleet, ask("unheard of")) == []


@pytest.mark.parametrize("health", [health for health in Health if health is not Health.READY])
def test_an_engine_that_is_not_ready_is_filtered_with_the_reason(health: Health) -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    fleet.set_health("a", health, "because", now=5.0)
    ranks, filtered = fleet.candidates(ask(), now=6.0)
    assert [each.id for each in ranks] == ["b/0"]
    assert filtered == {"a/0": f"{health.value}: because"}


def test_an_engine_is_unknown_until_it_is_heard_of() -> None:
    fleet = Fleet()
    fleet.add(instance("a"), now=0.0)
    assert fleet.candidates(ask(), now=0.0) == ((), {"a/0": "unknown: not heard of yet"})


def test_health_changes_are_seen_at_once_and_reported_once() -> None:
    fleet = fleet_of(instance("a"))
    assert ids(fleet, ask()) == ["a/0"]
    assert fleet.set_health("a", Health.DOWN, "no connection", now=3.0)
    assert not fleet.set_health("a", Health.DOWN, "no connection", now=4.0)
    assert ids(fleet, ask()) == []
    assert (rank(fleet, "a").since, rank(fleet, "a").reason) == (3.0, "no connection")


def test_a_draining_engine_stays_so_whatever_its_polls_say() -> None:
    fleet = fleet_of(instance("a"))
    fleet.drain("a", "by the operator", now=1.0)
    assert not fleet.set_health("a", Health.READY, "", now=2.0)
    assert fleet.candidates(ask(), now=2.0) == ((), {"a/0": "draining: by the operator"})
    fleet.undrain("a", now=3.0)
    assert ids(fleet, ask()) == ["a/0"]
    assert rank(fleet, "a").since == 3.0


def test_an_engine_that_drains_no_more_is_what_it_has_become() -> None:
    fleet = fleet_of(instance("a"))
    fleet.trust(rank(fleet, "a"))  # some engine of the model has served
    fleet.drain("a", "by the operator", now=1.0)
    assert fleet.set_health("a", Health.DOWN, "no connection", now=2.0)
    assert not fleet.set_health("a", Health.DOWN, "no connection", now=3.0)
    assert rank(fleet, "a").health is Health.DRAINING
    fleet.undrain("a", now=4.0)
    assert (rank(fleet, "a").health, rank(fleet, "a").reason) == (Health.DOWN, "no connection")

    fleet.drain("a", "to restart it", now=5.0)
    fleet.set_health("a", Health.READY, "", now=6.0)
    fleet.undrain("a", now=7.0)
    assert rank(fleet, "a").health is Health.READY
    assert rank(fleet, "a").window == 1  # a new process begins slowly


def test_an_engine_may_be_drained_twice_for_another_reason() -> None:
    fleet = fleet_of(instance("a"))
    fleet.drain("a", "by the operator", now=1.0)
    fleet.drain("a", "removed from the configuration", now=2.0)
    assert (rank(fleet, "a").reason, rank(fleet, "a").since) == ("removed from the configuration", 1.0)
    fleet.undrain("a", now=3.0)
    assert rank(fleet, "a").health is Health.READY


def test_one_dead_rank_takes_only_itself_away() -> None:
    fleet = fleet_of(instance("a"), facts=EngineFacts(served=(), ranks=3, rank_targeting=True))
    fleet.set_health("a", Health.DOWN, "", now=1.0, rank=1)
    assert ids(fleet, ask()) == ["a/0", "a/2"]


def test_excluded_instances_are_not_tried_again_even_if_nobody_is_left() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    assert ids(fleet, ask(exclude=("a",))) == ["b/0"]
    ranks, filtered = fleet.candidates(ask(exclude=("a", "b")), now=0.0)
    assert list(ranks) == []
    assert filtered == {"a/0": "tried before", "b/0": "tried before"}


def test_long_prompts_go_where_they_fit_and_to_all_if_they_fit_nowhere() -> None:
    fleet = fleet_of(instance("big", capacity_tokens=228_000), instance("small", capacity_tokens=81_000))
    assert ids(fleet, ask(tokens=80_000)) == ["big/0", "small/0"]
    assert ids(fleet, ask(tokens=90_000)) == ["big/0"]
    assert ids(fleet, ask(tokens=900_000)) == ["big/0", "small/0"]


def test_suspects_are_avoided_for_a_while_but_serve_if_nobody_else_can() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    fleet.suspect(rank(fleet, "a"), "no first token", now=10.0)
    assert ids(fleet, ask(), now=11.0) == ["b/0"]
    assert fleet.candidates(ask(), now=11.0)[1] == {"a/0": "no first token"}
    fleet.suspect(rank(fleet, "b"), "no first token", now=11.0)
    assert ids(fleet, ask(), now=12.0) == ["a/0", "b/0"]
    assert ids(fleet, ask(), now=10.0 + SUSPECT_S) == ["a/0"]
    assert ids(fleet, ask(), now=11.0 + SUSPECT_S) == ["a/0", "b/0"]


def test_a_suspect_that_answers_is_trusted_again() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    fleet.suspect(rank(fleet, "a"), "no first token", now=10.0)
    fleet.trust(rank(fleet, "a"))
    assert ids(fleet, ask(), now=11.0) == ["a/0", "b/0"]


def test_one_public_name_over_engines_that_call_the_model_differently() -> None:
    fleet = fleet_of(instance("a", served="qwen-fp8"), instance("b"))
    fleet.learn("b", EngineFacts(served=("Qwen/Qwen3-8B", "alias")), now=0.0)
    assert rank(fleet, "a").served(None) == "qwen-fp8"
    assert rank(fleet, "b").served(None) == "Qwen/Qwen3-8B"
    assert rank(fleet, "b").served("my-lora") == "my-lora"


def test_an_engine_that_does_not_list_the_configured_name_is_filtered() -> None:
    fleet = fleet_of(instance("a", served="typo"), facts=EngineFacts(served=("right",)))
    assert fleet.candidates(ask(), now=0.0)[1] == {"a/0": "does not serve 'typo'"}


def test_an_adapter_name_is_served_by_the_engines_that_loaded_it() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    fleet.learn("a", EngineFacts(served=("m",), loras=("law",)), now=0.0)
    assert fleet.resolve("m") == ("m", None)
    assert fleet.resolve("law") == ("m", "law")
    assert fleet.resolve("nobody's") is None
    assert fleet.loras("m") == {"law"}
    assert ids(fleet, ask(lora="law")) == ["a/0"]
    assert fleet.candidates(ask(lora="law"), now=0.0)[1] == {"b/0": "does not serve the adapter 'law'"}
    assert ids(fleet, ask()) == ["a/0", "b/0"]


def test_ranks_that_can_be_targeted_are_candidates_each() -> None:
    fleet = fleet_of(instance("a"), facts=EngineFacts(served=(), ranks=3, rank_targeting=True))
    assert ids(fleet, ask()) == ["a/0", "a/1", "a/2"]
    assert rank(fleet, "a").peers == ()


def test_ranks_that_cannot_be_targeted_are_one_candidate() -> None:
    fleet = fleet_of(instance("a"), facts=EngineFacts(served=(), ranks=3))
    assert ids(fleet, ask()) == ["a/0"]
    assert [peer.id for peer in rank(fleet, "a").peers] == ["a/1", "a/2"]


def test_an_hour_of_a_rank_costs_its_share_of_the_engine() -> None:
    fleet = fleet_of(
        instance("a", price_per_hour=32.0), instance("b"), facts=EngineFacts(served=(), rank_targeting=True)
    )
    assert (rank(fleet, "a").price_per_hour, rank(fleet, "b").price_per_hour) == (32.0, 0.0)
    fleet.learn("a", EngineFacts(served=(), ranks=8, rank_targeting=True), now=1.0)
    assert [each.price_per_hour for each in fleet.ranks("a")] == [4.0] * 8
    fleet.learn("a", EngineFacts(served=(), ranks=2), now=2.0)  # a request ends up on one of two
    assert rank(fleet, "a").price_per_hour == 16.0
    fleet.add(instance("a", price_per_hour=0.0), now=3.0)
    assert rank(fleet, "a").price_per_hour == 0.0


def test_learning_of_fewer_ranks_hands_back_those_gone() -> None:
    fleet = fleet_of(instance("a"), facts=EngineFacts(served=(), ranks=3, rank_targeting=True))
    gone = fleet.learn("a", EngineFacts(served=(), ranks=1), now=1.0)
    assert [each.id for each in gone] == ["a/1", "a/2"]
    assert ids(fleet, ask()) == ["a/0"]


def test_engines_join_and_leave_at_run_time() -> None:
    fleet = fleet_of(instance("a"))
    assert ids(fleet, ask()) == ["a/0"]
    fleet.add(instance("b"), now=1.0)
    assert ids(fleet, ask()) == ["a/0"]
    fleet.set_health("b", Health.READY, "", now=1.0)
    assert ids(fleet, ask()) == ["a/0", "b/0"]
    assert [each.id for each in fleet.remove("a")] == ["a/0"]
    assert ids(fleet, ask()) == ["b/0"]
    assert fleet.remove("a") == []


def test_a_reloaded_instance_keeps_its_state_unless_it_is_another_engine() -> None:
    fleet = fleet_of(instance("a"))
    before = rank(fleet, "a")
    fleet.add(instance("a", labels={"zone": "x"}), now=1.0)
    assert rank(fleet, "a") is before
    assert before.instance.labels == {"zone": "x"}
    fleet.add(Instance("a", "http://elsewhere", "vllm", "m"), now=1.0)
    assert rank(fleet, "a") is not before
    assert ids(fleet, ask()) == []


def test_block_sizes_of_a_mixed_fleet() -> None:
    fleet = fleet_of(instance("a"), instance("b", block_size=48), instance("c", model="other"))
    assert fleet.block_sizes("m") == {48, ASSUMED_BLOCK_SIZE}
    fleet.learn("a", EngineFacts(served=(), block_size=32, sources=(EventSource(0, "tcp://a:5557"),)), now=0.0)
    assert fleet.block_sizes("m") == {32, 48}
    assert fleet.block_sizes("other") == {ASSUMED_BLOCK_SIZE}
    assert fleet.block_sizes("unheard of") == frozenset()


def test_names_made_up_by_clients_leave_nothing_behind() -> None:
    fleet = fleet_of(instance("a"))
    for number in range(100):
        fleet.candidates(ask(f"made-up-{number}"), now=0.0)
        fleet.candidates(ask(lora=f"made-up-{number}"), now=0.0)
    assert len(fleet._routable) <= 1


def test_rows_for_the_live_view() -> None:
    fleet = fleet_of(instance("a", labels={"gpu": "h100"}), facts=EngineFacts(served=("x",), version="0.32.0"))
    row = next(fleet.rows(now=2.0))
    assert (row["instance"], row["rank"], row["model"], row["served"]) == ("a", 0, "m", "x")
    assert (row["health"], row["since_s"], row["labels"], row["version"]) == ("ready", 2.0, {"gpu": "h100"}, "0.32.0")
    assert row["booked_prefill_ms"] == 0


def test_one_request_finds_out_whether_a_suspect_serves_again() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    suspect = rank(fleet, "a")
    fleet.suspect(suspect, "why", now=0.0, for_s=5.0)
    assert ids(fleet, ask(), now=4.9) == ["b/0"]
    assert ids(fleet, ask(), now=5.0) == ["a/0", "b/0"]
    fleet.probe(suspect, 5.0)
    assert ids(fleet, ask(), now=5.1) == ["b/0"], "no second one before the first is answered"
    assert ids(fleet, ask(), now=5.0 + PROBE_S) == ["a/0", "b/0"], "but for an answer that never comes"
    fleet.trust(suspect)
    assert ids(fleet, ask(), now=5.2) == ["a/0", "b/0"]


def test_a_rank_that_goes_on_failing_is_avoided_for_longer_each_time() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    failing = rank(fleet, "a")
    for times in range(10):
        now = 1000.0 * times
        fleet.open(failing, "fails", now=now)
        assert failing.suspect_until - now == min(OPEN_S * 2**times, OPEN_AT_MOST_S)
    fleet.trust(failing)
    fleet.open(failing, "fails", now=20_000.0)
    assert failing.suspect_until == 20_000.0 + OPEN_S


def test_what_is_left_of_a_fleet_of_suspects_does_not_bear_the_load_alone() -> None:
    fleet = fleet_of(*[instance(name) for name in "abcdef"])
    for name in "abcd":
        fleet.suspect(rank(fleet, name), "why", now=0.0)
    assert ids(fleet, ask(), now=1.0) == ["e/0", "f/0"], "a third"
    fleet.suspect(rank(fleet, "e"), "why", now=0.0)
    assert len(ids(fleet, ask(), now=1.0)) == 6, "a sixth"


def test_an_engine_that_comes_to_those_that_serve_starts_with_one_request_at_a_time() -> None:
    fleet = fleet_of(instance("a"))
    fleet.trust(rank(fleet, "a"))
    fleet.add(instance("new"), now=10.0)
    fleet.learn("new", EngineFacts(served=()), now=10.0)
    fleet.set_health("new", Health.READY, "", now=10.0)
    new = rank(fleet, "new")
    allowed = []
    for _ in range(8):
        new.booked.requests = 0
        while ids(fleet, ask(), now=11.0) == ["a/0", "new/0"] and new.booked.requests < 100:
            new.booked.requests += 1
        allowed.append(new.booked.requests)
        fleet.trust(new)
    assert allowed == [1, 2, 4, 8, 16, 32, 64, 100], "doubled with each first token, then as many as come"


def test_engines_that_start_together_do_not_wait_for_each_other() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    for each in fleet:
        each.booked.requests = 50
    assert ids(fleet, ask()) == ["a/0", "b/0"]


def test_an_engine_that_was_down_starts_anew() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    fleet.trust(rank(fleet, "a"))
    fleet.set_health("b", Health.DOWN, "gone", now=5.0)
    fleet.set_health("b", Health.READY, "", now=9.0)
    assert ids(fleet, ask(), now=9.0) == ["a/0", "b/0"]
    rank(fleet, "b").booked.requests = 1
    ranks, filtered = fleet.candidates(ask(), now=9.0)
    assert [each.id for each in ranks] == ["a/0"]
    assert filtered == {"b/0": "starting: as many requests as it may have for now"}


# --- who may use whom


CHAT = "/v1/chat/completions"
ON_CHAT = frozenset((CHAT,))


def isolated(**rest: Any) -> Ask:
    return ask(**{"tenant": "ten_a", "domain": "tenant:ten_a", "isolated_on": CHAT, **rest})


def why_not(fleet: Fleet, request: Ask, id: str) -> str:
    return fleet.candidates(request, now=0.0)[1].get(f"{id}/0", "")


def test_isolated_callers_get_engines_that_were_seen_to_keep_caches_apart() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    assert ids(fleet, isolated()) == []
    assert ids(fleet, ask()) == ["a/0", "b/0"]
    fleet.keep_apart("b", ON_CHAT, "seen by events")
    assert ids(fleet, isolated()) == ["b/0"]
    assert why_not(fleet, isolated(), "a").startswith("isolation: ")
    assert why_not(fleet, isolated(isolated_on="/v1/embeddings"), "b") == (
        "isolation: takes no cache salt on /v1/embeddings"
    )


def test_a_new_process_has_to_be_seen_anew() -> None:
    fleet = fleet_of(instance("a"), facts=EngineFacts(served=(), boot_id="1"))
    fleet.keep_apart("a", ON_CHAT, "seen by events")
    fleet.learn("a", EngineFacts(served=(), boot_id="1"), now=1.0)
    assert ids(fleet, isolated()) == ["a/0"]
    fleet.learn("a", EngineFacts(served=(), boot_id="2"), now=1.0)
    assert ids(fleet, isolated()) == []


def test_an_engine_without_a_cache_mixes_none() -> None:
    fleet = fleet_of(instance("a"), facts=EngineFacts(served=(), prefix_caching=False))
    assert ids(fleet, isolated()) == ["a/0"]


@pytest.mark.parametrize(
    ("unverified", "domain", "expected"),
    [
        ("refuse", "tenant:ten_a", []),
        ("dedicated", "tenant:ten_a", ["own/0"]),
        ("dedicated", "key:key_1", []),  # it is its tenant's, and other keys' too
        ("allow", "tenant:ten_a", ["own/0", "common/0"]),
    ],
)
def test_what_becomes_of_the_others_is_a_setting(unverified: Any, domain: str, expected: list[str]) -> None:
    fleet = fleet_of(instance("own", labels={"tenant": "ten_a"}), instance("common"))
    fleet.unverified = unverified
    assert ids(fleet, isolated(domain=domain)) == expected


def test_an_engine_of_one_tenant_takes_nobody_else() -> None:
    fleet = fleet_of(instance("own", labels={"tenant": "gold"}), instance("common"))
    assert ids(fleet, ask()) == ["common/0"]
    assert ids(fleet, ask(tenant="ten_a")) == ["common/0"]
    assert ids(fleet, ask(tenant="ten_a", labels={"tenant": "gold"})) == ["own/0"]
    assert ids(fleet, ask(tenant="gold")) == ["own/0", "common/0"]
    assert why_not(fleet, ask(), "own") == "is kept for one tenant"


def test_a_callers_labels_must_be_the_engines() -> None:
    fleet = fleet_of(instance("a", labels={"zone": "x", "size": "l"}), instance("b", labels={"zone": "y"}))
    assert ids(fleet, ask(labels={"zone": "x"})) == ["a/0"]
    assert ids(fleet, ask(labels={"zone": "y"})) == ["b/0"]
    assert ids(fleet, ask(labels={"zone": "y", "size": "l"})) == []
    assert why_not(fleet, ask(labels={"zone": "y"}), "a") == "does not have the label zone: y"
    fleet.remove("b")
    assert ids(fleet, ask(labels={"zone": "y"})) == []


def test_what_a_rank_shows_of_its_pace_holds_for_those_that_are_said_to_be_alike() -> None:
    fleet = fleet_of()
    fast = Rates(c1_ms=0.02)
    for id, rates in (("a", fast), ("b", fast), ("other", Rates(c1_ms=0.04)), ("unsaid", None)):
        fleet.add(instance(id), now=0.0, rates=rates)
    fleet.add(instance("another-model", model="n"), now=0.0, rates=fast)
    for _ in range(50):
        rank(fleet, "a").factor.observe(4_000, 4_000, ttft_ms=fast.c0_ms + 1.1 * fast.prefill_ms(4_000, 4_000))
    assert rank(fleet, "a").factor.value == pytest.approx(1.1, rel=0.02)
    assert rank(fleet, "b").factor.rates == rank(fleet, "a").factor.rates
    assert [rank(fleet, id).factor.value for id in ("other", "unsaid", "another-model")] == [1.0, 1.0, 1.0]
