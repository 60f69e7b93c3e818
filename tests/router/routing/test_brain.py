"""Placement as serving sees it: over a real index, real side tables, real bookings and a clock in the test's hand."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from policies.kv_aware import KvAware
from policies.round_robin import RoundRobin
from router.core import (
    Ask,
    Booking,
    Cost,
    EngineFacts,
    EventSource,
    HitRule,
    Instance,
    Load,
    Outcome,
    Prompt,
    Rates,
    Snapshot,
    Stored,
    Usage,
)
from router.errors import NoEngine
from router.routing.answers import LIKELY
from router.routing.blocks import chain, root_key
from router.routing.bookings import Bookings
from router.routing.brain import Brain, Placed
from router.routing.confidence import Confidence
from router.routing.fleet import Fleet, Health, Rank
from router.routing.footprint import Footprints
from router.routing.index import BlockIndex
from router.routing.receipts import RECEIPTS
from router.routing.recent import RecentDispatches
from router.routing.sent import SentIndex
from router.routing.shadow import Shadows

BLOCK = 16
SECRET = b"deployment secret"


class Broken:
    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        return []


class World:
    """A fleet of ready engines and the brain over it."""

    def __init__(
        self, *engines: str, events: bool = True, options: Mapping[str, Any] | None = None, **facts: Any
    ) -> None:
        self.now = 100.0
        self.fleet = Fleet()
        self.index = BlockIndex(SECRET, clock=self.clock)
        self.sent = SentIndex(self.index, clock=self.clock)
        self.recent = RecentDispatches(clock=self.clock)
        self.bookings = Bookings[Placed]()
        self.brain = Brain(
            fleet=self.fleet,
            index=self.index,
            sent=self.sent,
            recent=self.recent,
            bookings=self.bookings,
            policies={
                "kv_aware": KvAware({}, random.Random(1)),
                "round_robin": RoundRobin({}, random.Random(1)),
                "broken": Broken(),  # type: ignore[dict-item]
            },
            default_policy="kv_aware",
            model_policies={"turns": "round_robin"},
            clock=self.clock,
            dice=random.Random(1),
            **(options or {}),
        )
        for engine in engines:
            self.add(engine, events=events, **facts)

    def clock(self) -> float:
        return self.now

    def add(
        self, engine: str, *, events: bool = True, model: str = "m", rates: Rates | None = None, **facts: Any
    ) -> None:
        self.fleet.add(Instance(engine, f"http://{engine}:8000", "vllm", model), now=self.now, rates=rates)
        ranks = facts.get("ranks", 1)
        sources = tuple(EventSource(rank, f"tcp://{engine}:{5557 + rank}") for rank in range(ranks)) if events else ()
        facts = {"served": (model,), "block_size": BLOCK, "sources": sources} | facts
        self.fleet.learn(engine, EngineFacts(**facts), now=self.now)
        self.fleet.set_health(engine, Health.READY, "", now=self.now)
        for rank in self.fleet.ranks(engine):
            rank.confidence = Confidence(clock=self.clock)
            if events:
                rank.slot = self.index.open(engine, rank.rank, model=model, block_size=BLOCK)
            else:
                rank.slot = self.sent.open(engine, rank.rank, model=model, block_size=BLOCK)
                rank.slot_is_assumed = True

    def rank(self, engine: str, rank: int = 0) -> Rank:
        found = self.fleet.rank(engine, rank)
        assert found is not None
        return found

    def store(self, engine: str, tokens: Sequence[int], rank: int = 0, tier: str = "gpu") -> None:
        """The engine announces all whole blocks of `tokens`."""
        slot = self.rank(engine, rank).slot
        assert slot is not None
        blocks = len(tokens) // BLOCK
        names = [hash(tuple(tokens[: (i + 1) * BLOCK])) & (1 << 64) - 1 for i in range(blocks)]
        self.index.apply(slot, Stored(names, None, list(tokens[: blocks * BLOCK]), BLOCK, tier))
        confidence = self.rank(engine, rank).confidence
        assert confidence is not None
        confidence.heard()

    def place(self, request: Ask) -> Booking:
        return self.brain.place_now(request)


def ask(tokens: Sequence[int], id: str = "r1", model: str = "m", **rest: Any) -> Ask:
    keys = chain(root_key(SECRET, model, None, None), array("I", tokens), BLOCK)
    return Ask(id, model, Prompt(len(tokens), len(tokens), {BLOCK: keys}), domain="acme", **rest)


def outcome(**rest: Any) -> Outcome:
    basis = Outcome(
        "r1", "m", "acme", "a", 0, 200, "complete", None, 1000, 0, 0, None, "none", 0.0, 0.0, 0.05, 0.5, True
    )  # fmt: skip
    return msgspec.structs.replace(basis, **rest)


LONG = list(range(1000, 3048))  # 128 blocks, about 42 ms of prefill


def test_a_request_goes_to_the_engine_that_holds_its_prefix() -> None:
    world = World("a", "b", "c")
    world.store("b", LONG)
    booking = world.place(ask([*LONG, 1, 2, 3]))
    assert booking.instance == "b"
    assert (booking.tokens, booking.predicted_hit_tokens, booking.best_hit_tokens) == (2051, 2048, 2048)
    assert (booking.url, booking.served, booking.engine, booking.policy) == ("http://b:8000", "m", "vllm", "kv_aware")
    assert set(booking.attempts_left) == {"a", "c"}
    assert booking.alone
    assert not booking.target_rank


def test_what_a_placement_blind_to_caches_could_expect_is_the_mean_of_all() -> None:
    world = World("a", "b", "c", "d")
    world.store("b", LONG)
    world.store("c", LONG[:1024])
    booking = world.place(ask([*LONG, 1, 2, 3]))
    assert (booking.predicted_hit_tokens, booking.blind_hit_tokens) == (2048, (2048 + 1024) // 4)
    assert world.place(ask(list(range(5000, 6000)), id="r2")).blind_hit_tokens == 0


def test_nobody_for_the_model_is_an_error_that_names_only_the_model() -> None:
    world = World("a")
    world.fleet.set_health("a", Health.DOWN, "secret host", now=world.now)
    with pytest.raises(NoEngine) as caught:
        world.place(ask(LONG))
    assert caught.value.message == "No engine can serve the model 'm' at the moment."
    assert caught.value.detail == "a/0: down: secret host"
    with pytest.raises(NoEngine):
        world.place(ask(LONG, model="unheard of"))


def test_a_chain_matches_from_its_first_token_only() -> None:
    """A prompt made of b's text followed by a's text: a holds it in the middle, which is worth nothing."""
    first, second = LONG[:1024], LONG[1024:]
    world = World("a", "b")
    world.store("a", second)
    world.store("b", first)
    booking = world.place(ask(first + second))
    assert (booking.instance, booking.predicted_hit_tokens) == ("b", 1024)


def test_doubt_shortens_the_credit() -> None:
    world = World("a")
    world.store("a", LONG)
    confidence = world.rank("a").confidence
    assert confidence is not None
    for _ in range(3):
        confidence.answered(predicted_tokens=1000, delivered_tokens=0, slack_tokens=16)
    booking = world.place(ask([*LONG, 1]))
    assert 0.5 < confidence.value < 0.52
    assert booking.predicted_hit_tokens == int(2048 * confidence.value) // BLOCK * BLOCK


async def test_a_hit_rule_of_the_engine_caps_every_credit() -> None:
    world = World("a", hit_rule=HitRule(alignment_tokens=512, drop_tokens=512))
    world.store("a", LONG)
    decision = await world.brain.explain(ask(LONG[:1600]))
    assert decision.chosen.hit_tokens == 1024
    assert decision.chosen.held_tokens == {"gpu": 1600}


async def test_an_engine_whose_prefix_cache_is_off_earns_no_credit() -> None:
    world = World("a", prefix_caching=False)
    world.store("a", LONG)
    world.place(ask(LONG))
    assert (await world.brain.explain(ask(LONG))).chosen.hit_tokens == 0


async def test_a_slower_tier_counts_as_held_but_costs_its_load() -> None:
    world = World("a", "b")
    world.store("a", LONG[:1024])
    world.store("a", LONG, tier="host")
    world.store("b", LONG)
    decision = await world.brain.explain(ask([*LONG, 1]))
    by_name = {scored.candidate.instance: scored for scored in decision.scored}
    assert by_name["a"].candidate.held_tokens == {"gpu": 1024, "host": 2048}
    assert by_name["a"].candidate.hit_tokens == by_name["b"].candidate.hit_tokens == 2048
    assert by_name["a"].cost.value - by_name["b"].cost.value == pytest.approx(1024 * 0.0026)


async def test_siblings_of_a_burst_follow_the_first_before_any_event() -> None:
    world = World("a", "b", "c", "d")
    long = list(range(30_000))
    chosen = [world.place(ask(long, id=f"r{i}")) for i in range(14)]
    assert len({booking.instance for booking in chosen}) <= 2
    assert chosen[0].predicted_hit_tokens == 0
    assert chosen[1].predicted_hit_tokens == 29_984
    decision = await world.brain.explain(ask(long))
    assert decision.chosen.expected_tokens == decision.chosen.hit_tokens == 29_984
    assert decision.chosen.held_tokens == {}


async def test_what_was_dispatched_is_forgotten_in_time_and_when_the_engine_fails() -> None:
    world = World("a", "b")
    world.place(ask(LONG))
    world.now += 16
    assert (await world.brain.explain(ask(LONG))).best_hit_tokens == 0
    second = world.place(ask(LONG))
    assert (await world.brain.explain(ask(LONG))).best_hit_tokens > 0
    world.brain.release(second.id, outcome(finish="upstream_failed", ttft_s=None, status=500, error="server_error"))
    decision = await world.brain.explain(ask(LONG))
    assert len(decision.scored) == 2
    assert decision.best_hit_tokens == 0


async def test_a_failed_request_takes_its_own_prompt_with_it_and_no_others() -> None:
    world = World("a")
    other = list(range(50_000, 52_000))
    world.place(ask(other, id="fine"))
    failed = world.place(ask(LONG))
    world.brain.release(failed.id, outcome(finish="upstream_failed", ttft_s=None, status=500, error="server_error"))
    assert (await world.brain.explain(ask(LONG))).best_hit_tokens == 0
    assert (await world.brain.explain(ask(other))).best_hit_tokens == 1984


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_that_left_before_its_prefill_casts_no_doubt_on_events(others: int) -> None:
    world = World("a")
    left = world.place(ask(LONG))
    world.now += 1
    for _ in range(others):
        world.place(ask(LONG, id="waits"))
    world.brain.release(left.id, outcome(finish="client_gone", ttft_s=None))
    confidence = world.rank("a").confidence
    assert confidence is not None
    world.now += 5
    assert confidence.reasons() == []
    world.now += 10  # longer than the grace
    assert (confidence.value < 1.0) is (others == 1)


def test_an_engine_that_refuses_a_connection_is_avoided_for_some_seconds() -> None:
    world = World("a", "b")
    world.store("a", LONG)
    booking = world.place(ask(LONG))
    world.brain.release(
        booking.id, outcome(finish="upstream_failed", ttft_s=None, status=502, error="engine_unreachable")
    )
    assert world.place(ask(LONG)).instance == "b"
    world.now += 6
    assert world.place(ask(LONG)).instance == "a"


async def test_an_engine_that_breaks_its_promises_is_not_followed_by_siblings() -> None:
    world = World("a")
    for _ in range(20):
        booking = world.place(ask(LONG))
        world.brain.release(booking.id, outcome(delivered_hit_tokens=0))
    assert (await world.brain.explain(ask(LONG))).best_hit_tokens < 100


async def test_siblings_meet_on_one_of_several_ranks_only_by_chance() -> None:
    world = World("a", ranks=4)
    world.place(ask(LONG))
    assert (await world.brain.explain(ask(LONG))).chosen.expected_tokens == 512


def _turn(tokens: Sequence[int], *names: tuple[int, int]) -> Ask:
    request = ask(tokens)
    return msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt, known_text_keys=names))


@pytest.mark.parametrize(("late", "hit_tokens"), [(True, 304), (False, 288)])
def test_the_next_turn_finds_an_answer_that_events_have_not_told_of(late: bool, hit_tokens: int) -> None:
    """300 tokens, 10 generated ones, 2 of the template's; the events of the last answer do not come."""
    world = World("a", tells_answers_late=late)
    rank, usage = world.rank("a"), Usage(300, 10)
    for talk in range(LIKELY[0] + 1):
        first, answer, more = [talk] * 300, list(range(10)), list(range(50, 72))
        booking = world.place(_turn(first, (1000 + talk, 290), (2000 + talk, 300)))
        world.store("a", first)
        if talk < LIKELY[0]:
            world.store("a", [*first, *answer])
            rank.tell_after(ask(first).prompt.keys[BLOCK][-1], world.now)
        world.brain.release(booking.id, outcome(usage=usage, input_tokens=300))
        names = ((1000 + talk, 290), (3000 + talk, 312), (4000 + talk, 332))
        booking = world.place(_turn([*first, *answer, *more], *names))
        world.brain.release(booking.id, outcome(finish="client_gone"))
    assert booking.predicted_hit_tokens == hit_tokens


@pytest.mark.parametrize(
    "ended", [{"finish": "client_gone"}, {"usage": None}, {"attempts": 2}, {"usage": Usage(301, 10)}, {}]
)
def test_an_answer_is_noted_that_ended_whole_at_the_first_attempt(ended: dict[str, Any]) -> None:
    world = World("a", tells_answers_late=True)
    booking = world.place(_turn([1] * 300, (1, 290), (2, 300)))
    world.brain.release(booking.id, outcome(**({"usage": Usage(300, 10), "input_tokens": 300} | ended)))
    assert len(world.brain._answers) == (not ended)


def test_the_event_for_a_prompts_last_block_ends_its_prefill() -> None:
    world = World("a")
    request = ask(LONG)
    booked = world.rank("a").booked
    world.place(request)
    world.bookings.computed(booked, request.prompt.keys[BLOCK][-1], world.now)
    assert (booked.requests, len(booked.prefills)) == (1, 0)


def test_a_prompt_that_ends_unseen_or_is_held_already_waits_for_its_first_token() -> None:
    world = World("a")
    world.store("a", LONG)
    unseen = msgspec.structs.replace(ask(LONG), prompt=Prompt(9000, 2048, ask(LONG).prompt.keys))
    world.place(unseen)
    world.place(ask(LONG))
    assert not world.rank("a").booked.awaited


async def test_another_domains_dispatches_are_not_seen() -> None:
    world = World("a", "b")
    world.place(ask(LONG))
    stranger = msgspec.structs.replace(ask(LONG), domain="other")
    assert (await world.brain.explain(stranger)).best_hit_tokens == 0


async def test_text_that_is_not_tokenized_yet_still_brings_siblings_together() -> None:
    world = World("a", "b", "c")
    prompt = Prompt(40_000, 0, {}, text_keys=((11, 20_000), (12, 40_000)), source="exact", reason="")
    request = Ask("r", "m", prompt, domain="acme")
    first = world.place(request)
    second = world.place(request)
    assert second.instance == first.instance
    assert second.predicted_hit_tokens > 39_000


async def test_without_a_key_the_decision_says_why() -> None:
    world = World("a", "b")
    decision = await world.brain.explain(Ask("r", "m", Prompt(500, 0, {}, source="none", reason="an image")))
    assert decision.reason == "no key: an image"
    assert (await world.brain.explain(ask([1, 2, 3]))).reason == "no key: shorter than a block"
    assert (await world.brain.explain(ask(LONG))).reason == ""


def test_work_under_way_moves_the_next_request_elsewhere() -> None:
    world = World("a", "b")
    first = world.place(ask(list(range(20_000))))
    second = world.place(ask(list(range(50_000, 70_000)), id="r2"))
    assert {first.instance, second.instance} == {"a", "b"}
    assert first.alone
    assert second.alone
    assert not world.place(ask(LONG, id="r3")).alone


def test_all_totals_return_to_zero_whatever_the_order_of_calls() -> None:
    world = World("a", "b")
    dice = random.Random(4)
    booked = [world.place(ask(list(range(i, i + 200)), id=f"r{i}", stream=i % 3 > 0)) for i in range(300)]
    ends = [booking.id for booking in booked for _ in range(dice.randint(1, 3))]
    dice.shuffle(ends)
    for id in ends:
        world.now += dice.random() / 50
        dice.choice([world.brain.progress, lambda _: world.brain.sweep(world.now)])(id)
        world.brain.release(id, outcome(finish=dice.choice(["complete", "client_gone", "upstream_failed"])))
    for rank in world.fleet:
        booked_there = rank.booked
        assert (
            booked_there.requests,
            booked_there.kv_tokens,
            booked_there.prefill_tokens,
            booked_there.prefill_us,
        ) == (0,) * 4
    assert len(world.bookings) == 0


def test_a_lease_that_runs_out_makes_the_engine_suspect_until_it_answers() -> None:
    world = World("a", "b")
    world.store("a", LONG)
    stuck = world.place(ask(LONG))
    assert stuck.instance == "a"
    world.now += 40
    assert world.place(ask(LONG, id="r2")).instance == "b"
    assert world.brain.receipt("r2").filtered == {"a/0": "no first token for 40 s"}  # type: ignore[union-attr]
    world.brain.release(stuck.id, outcome())
    world.store("a", LONG)
    assert world.place(ask(LONG, id="r3")).instance in {"a", "b"}
    assert world.brain.receipt("r3").filtered == {}  # type: ignore[union-attr]


def test_an_answer_without_a_stream_ends_its_prefill_by_estimate() -> None:
    world = World("a")
    world.place(ask(LONG, stream=False))
    assert len(world.rank("a").booked.prefills) == 1
    world.now += 0.2  # 43 ms were predicted
    world.brain.sweep(world.now)
    assert len(world.rank("a").booked.prefills) == 0
    assert world.rank("a").booked.requests == 1


def test_misses_cost_confidence_and_hits_give_it_back() -> None:
    world = World("a")
    world.store("a", LONG)
    rank = world.rank("a")
    assert rank.confidence is not None
    world.brain.release(world.place(ask(LONG)).id, outcome(delivered_hit_tokens=0))
    assert rank.confidence.value == pytest.approx(0.8)
    world.brain.release(world.place(ask(LONG)).id, outcome(delivered_hit_tokens=2032))
    assert rank.confidence.value > 0.8
    assert (rank.hits.answers, rank.hits.delivered_tokens) == (2, 2032)


async def test_a_count_above_the_prediction_teaches() -> None:
    world = World("a")
    booking = world.place(ask(LONG))
    world.now += 20  # whatever was noted at dispatch has faded
    assert (await world.brain.explain(ask(LONG))).best_hit_tokens == 0
    world.brain.release(booking.id, outcome(delivered_hit_tokens=1024))
    assert (await world.brain.explain(ask(LONG))).best_hit_tokens == 1024


async def test_an_engine_without_events_is_believed_to_hold_what_it_was_sent() -> None:
    world = World("a", "b", events=False)
    booking = world.place(ask(LONG))
    world.brain.release(booking.id, outcome())
    world.now += 60
    again = world.place(ask([*LONG, 1, 2, 3]))
    assert again.instance == booking.instance
    assert again.predicted_hit_tokens == 2048


async def test_an_engine_without_events_is_corrected_by_what_it_reports() -> None:
    world = World("a", events=False)
    world.brain.release(world.place(ask(LONG)).id, outcome(delivered_hit_tokens=0))
    world.now += 60
    world.brain.release(world.place(ask(LONG)).id, outcome(delivered_hit_tokens=0))  # it promised, and broke it
    world.now += 60
    assert (await world.brain.explain(ask(LONG))).best_hit_tokens == 0


def test_an_adapter_is_asked_for_by_its_own_name() -> None:
    world = World("a", "b", loras=("law",))
    assert world.place(ask(LONG, lora="law")).served == "law"


def test_ranks_of_one_engine_are_placed_on_apart() -> None:
    world = World("a", ranks=4, rank_targeting=True)
    world.store("a", LONG, rank=2)
    booking = world.place(ask(LONG))
    assert (booking.instance, booking.rank, booking.target_rank) == ("a", 2, True)


def test_ranks_that_cannot_be_targeted_count_for_what_they_hold_on_average() -> None:
    world = World("a", ranks=4)
    world.store("a", LONG, rank=2)
    booking = world.place(ask([*LONG, 1]))
    assert (booking.rank, booking.target_rank, booking.predicted_hit_tokens) == (0, False, 512)


def test_the_policy_is_the_requests_else_the_models_else_the_default() -> None:
    world = World("a", "b")
    world.add("t", model="turns")
    assert world.place(ask(LONG)).policy == "kv_aware"
    assert world.place(ask(LONG, model="turns")).policy == "round_robin"
    assert world.place(ask(LONG, policy="round_robin")).policy == "round_robin"
    assert world.place(ask(LONG, policy="made up by a client")).policy == "kv_aware"


async def test_shadows_hear_of_every_placement_and_of_nothing_else() -> None:
    calls: list[Callable[[], None]] = []
    shadows = Shadows(
        {"round_robin": RoundRobin({}, random.Random(1)), "broken": Broken()},  # type: ignore[dict-item]
        call_at=lambda when, call: calls.append(call),
        clock=lambda: 100.0,
        dice=random.Random(1),
    )
    world = World("a", "b", "c", options={"shadows": shadows})
    world.store("b", LONG)
    await world.brain.explain(ask(LONG))
    assert calls == []
    bookings = [world.place(ask(LONG, id=f"r{number}")) for number in range(4)]
    calls.pop()()
    assert [booking.instance for booking in bookings] == ["b"] * 4
    assert [booking.policy for booking in bookings] == ["kv_aware"] * 4
    turns = shadows.counts["round_robin"]
    assert (turns.agreed, turns.differed, turns.errors) == (1, 3, 0)  # a, b, c, a
    assert shadows.counts["broken"].errors == 4
    assert world.brain.policy_failures == {}


async def test_the_objective_grows_with_the_prompt() -> None:
    world = World("a", "b", options={"ttft_slo_ms": lambda tokens: 30.0 + tokens / 100})
    world.store("b", LONG)
    world.rank("b").load = Load(at=world.now, waiting=2)  # two more like it, 42 ms each
    decision = await world.brain.explain(ask([*LONG, 1]))
    slo = {scored.candidate.instance: scored.cost.parts["slo"] for scored in decision.scored}
    assert decision.chosen.instance == "a"  # 42 ms of 50
    assert slo["a"] == 0 < slo["b"]
    without = World("a", "b")
    decision = await without.brain.explain(ask(LONG))
    assert all("slo" not in scored.cost.parts for scored in decision.scored)


def test_a_broken_policy_serves_the_request_and_is_counted() -> None:
    world = World("a", "b")
    booking = world.place(ask(LONG, policy="broken"))
    assert booking.policy == "least_booked"
    assert world.brain.policy_failures == {"broken": 1}


def test_a_policy_that_does_not_exist_stops_the_start() -> None:
    world = World()
    with pytest.raises(ValueError, match="no such policy: nope"):
        Brain(
            fleet=world.fleet,
            index=world.index,
            sent=world.sent,
            recent=world.recent,
            bookings=world.bookings,
            policies={},
            default_policy="nope",
            clock=world.clock,
            dice=random.Random(1),
        )


def test_the_snapshot_says_what_the_engine_said() -> None:
    seen: list[Snapshot] = []

    class Spy:
        def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
            seen.append(snapshot)
            return [Cost(0.0, {})] * len(snapshot.candidates)

    world = World("a", capacity_tokens=400_000)
    world.brain._policies = {"kv_aware": Spy()}  # type: ignore[dict-item]
    world.rank("a").load = Load(at=world.now - 0.5, running=7, waiting=3, kv_usage=0.25)
    world.place(ask(LONG, tenant="acme", session="s1", max_output_tokens=50, choices=2, request_class="batch"))
    world.place(ask(LONG))
    first, second = seen
    assert (first.at, first.tokens, first.model, first.tenant, first.session) == (100.0, 2048, "m", "acme", "s1")
    assert (first.request_class, first.turn, first.choices, first.output_tokens) == ("batch", 1, 2, 50)
    there = first.candidates[0]
    assert (there.running, there.waiting, there.kv_usage, there.load_age_s) == (7, 3, 0.25, 0.5)
    assert (there.capacity_tokens, there.booked_requests, there.recent_tokens) == (400_000, 0, 0)
    then = second.candidates[0]
    assert (then.booked_requests, then.booked_prefills, then.booked_prefill_tokens) == (1, 1, 2048)
    assert (then.booked_kv_tokens, then.recent_tokens, then.expected_tokens) == (2048 + 2 * 50, 2048, 2032)
    assert then.booked_prefill_ms == pytest.approx(then.rates.prefill_ms(2048, 2048), abs=0.001)


def test_prefill_rates_are_learned_from_requests_that_were_alone() -> None:
    world = World("a")
    rank = world.rank("a")
    for _ in range(60):
        booking = world.place(ask(list(range(20_000)), id="slow"))
        world.now += 20
        world.brain.release(booking.id, outcome(input_tokens=20_000, ttft_s=1.2, delivered_hit_tokens=0))
    predicted = 20_000 * 0.01983 + 7.95e-7 * 20_000 * 10_000
    assert rank.factor.value == pytest.approx((1200 - 6.66) / predicted, rel=0.01)
    assert rank.factor.rates.c1_ms == pytest.approx(0.01983 * rank.factor.value)


def test_a_whole_answer_sooner_than_its_prefill_was_thought_to_take_tells_of_a_faster_engine() -> None:
    """2,048 tokens by the prior: 49 ms. Later than that says nothing, since the answer's tokens took their time too."""
    world = World("a")
    factor = world.rank("a").factor
    for took_s, expected in ((0.5, 1.0), (0.010, pytest.approx((10 - 6.66) / 42.27, rel=0.01))):
        booking = world.place(ask(LONG, stream=False))
        world.now += took_s
        world.brain.release(
            booking.id,
            outcome(
                input_tokens=2_048, took_s=took_s + 3, queue_s=3.0, ttft_s=None, stream=False, delivered_hit_tokens=0
            ),
        )
        assert factor.value == expected


async def test_sessions_one_at_a_time_spread_and_stay() -> None:
    """Paced traffic, where nothing overlaps: new sessions use all engines, each session stays on one."""
    world = World("a", "b", capacity_tokens=400_000)
    common = list(range(32))  # the same short system prompt for everyone
    homes: dict[int, set[str]] = {session: set() for session in range(40)}
    for session in homes:
        tokens = [*common, *range(10_000 * (session + 1), 10_000 * (session + 1) + 1500)]
        for turn in range(6):
            booking = world.place(ask(tokens, id=f"s{session}t{turn}"))
            homes[session].add(booking.instance)
            world.now += 1
            world.store(booking.instance, tokens)
            world.brain.progress(booking.id)
            world.brain.release(booking.id, outcome(input_tokens=len(tokens), ttft_s=None))
            tokens = [*tokens, *range(turn * 300, turn * 300 + 300)]
            world.now += 5
    assert all(len(instances) == 1 for instances in homes.values())
    first = [next(iter(instances)) for instances in homes.values()]
    assert 16 <= first.count("a") <= 24


@pytest.mark.parametrize("decoding", [False, True])
def test_a_popular_prefix_spreads_as_load_needs_and_keeps_its_hits(decoding: bool) -> None:
    """Nobody has more than 1.5 × the mean in flight, and at least 80 % of the shared tokens are still hit."""
    world = World("a", "b", "c", "d", capacity_tokens=400_000)
    shared = list(range(2000))
    world.store("a", shared)
    hits = 0
    for number in range(200):
        tokens = [*shared, *range(number * 500 + 10_000, number * 500 + 10_200)]
        booking = world.place(ask(tokens, id=f"r{number}"))
        hits += booking.predicted_hit_tokens
        world.now += 0.01
        if decoding:
            world.brain.progress(booking.id)
    inflight = [rank.booked.requests for rank in world.fleet]
    assert max(inflight) <= 1.5 * sum(inflight) / 4
    assert hits >= 0.8 * 200 * 2000


@pytest.mark.parametrize(
    ("own_tokens", "at_once", "engines"),
    [(2000, False, 1), (100, True, 3), (500, True, 4)],
)
def test_a_hot_prefix_is_copied_to_as_many_engines_as_its_load_needs(
    own_tokens: int, at_once: bool, engines: int
) -> None:
    """Twenty requests, at once or one after the other; one engine holds their first 8,192 tokens."""
    world = World("a", "b", "c", "d")
    prefix = list(range(8192))
    world.store("a", prefix)
    chosen: list[str] = []
    for number in range(20):
        own = range(10_000 * (number + 1), 10_000 * (number + 1) + own_tokens)
        booking = world.place(ask([*prefix, *own], id=f"r{number}"))
        chosen.append(booking.instance)
        if not at_once:
            world.brain.progress(booking.id)
            world.brain.release(booking.id, outcome())
    assert len(set(chosen)) == engines
    assert chosen.count("a") == max(chosen.count(engine) for engine in "abcd")


def test_unequal_engines_are_used_by_their_size_and_none_is_overfilled() -> None:
    """One GPU has 2.8 × the memory and the speed of the other."""
    world = World()
    world.add("big", rates=Rates(), capacity_tokens=228_000)
    world.add("small", rates=Rates(c1_ms=0.0567, c2_ms=2.27e-6, c3_ms=1.2e-4), capacity_tokens=81_000)
    dice = random.Random(2)
    running: list[Booking] = []
    placed = {"big": 0, "small": 0}
    for number in range(800):
        tokens = list(range(number * 3000, number * 3000 + dice.randint(500, 3000)))
        booking = world.place(ask(tokens, id=f"r{number}"))
        placed[booking.instance] += len(tokens)
        running.append(booking)
        world.now += 0.05
        world.brain.progress(booking.id)
        if len(running) > 100:  # about 200k tokens, of 309k
            world.brain.release(running.pop(dice.randrange(len(running))).id, outcome())
        assert world.rank("small").booked.kv_tokens <= 81_000
    share = placed["small"] / sum(placed.values())
    assert 0.6 * 81 / 309 <= share <= 1.2 * 81 / 309


def test_receipts_are_kept_for_the_last_requests_only() -> None:
    world = World("a", "b")
    for number in range(RECEIPTS + 5):
        world.brain.release(world.place(ask([number] * 20, id=f"r{number}")).id, outcome())
    assert world.brain.receipt("r4") is None
    receipt = world.brain.receipt(f"r{RECEIPTS + 4}")
    assert receipt is not None
    assert {part for scored in receipt.scored for part in scored.cost.parts} >= {"queue", "prefill"}


async def test_explain_books_nothing() -> None:
    world = World("a", "b")
    await world.brain.explain(ask(LONG))
    assert len(world.bookings) == 0
    assert (await world.brain.explain(ask(LONG))).best_hit_tokens == 0


@pytest.mark.parametrize(("retry_after_s", "avoided_s"), [(None, 1.0), (0.0, 1.0), (7.0, 7.0), (3600.0, 60.0)])
def test_an_engine_that_says_it_is_busy_is_left_alone_as_long_as_it_asks(
    retry_after_s: float | None, avoided_s: float
) -> None:
    world = World("a", "b")
    booking = world.place(ask(LONG))
    world.brain.release(
        booking.id,
        outcome(ttft_s=None, status=503, finish="upstream_failed", error="engine_503", retry_after_s=retry_after_s),
    )
    busy = world.rank(booking.instance)
    assert busy.suspect_until - world.now == avoided_s
    assert busy.failures == 0, "it is not broken"


def test_an_engine_that_begins_answers_and_breaks_them_is_avoided_until_it_ends_one() -> None:
    world = World("a")

    def begin(number: int) -> int:
        id = world.place(ask(LONG, id=f"r{number}")).id
        world.brain.progress(id)
        return id

    def breaks(id: int) -> None:
        world.brain.release(id, outcome(ttft_s=0.1, finish="upstream_failed", error="engine_timeout"))

    rank = world.rank("a")
    breaks(begin(0))
    breaks(begin(1))
    world.brain.release(begin(2), outcome(ttft_s=0.1, finish="client_gone", error="client_gone"))
    assert (rank.failures, rank.suspicion) == (2, ""), "who leaves says nothing of the engine"
    world.brain.release(begin(3), outcome(ttft_s=0.1))
    assert rank.failures == 0
    under_way = world.place(ask(LONG, id="under way")).id
    for number in range(4, 7):
        breaks(begin(number))
    assert rank.suspicion == "failed 3 requests in a row"
    first_s = rank.suspect_until - world.now
    world.brain.progress(under_way)
    assert rank.id in world.fleet._suspects, "a first token is what it could give before, too"
    world.brain.release(under_way, outcome(ttft_s=0.1, finish="upstream_failed", error="engine_timeout"))
    assert rank.suspect_until - world.now == 2 * first_s
    world.now = rank.suspect_until
    world.brain.release(begin(7), outcome(ttft_s=0.1))
    assert rank.id not in world.fleet._suspects
    assert (rank.failures, rank.suspected) == (0, 0)


@pytest.mark.parametrize("error", ["engine_404", "total_timeout", "relay_gone", "internal_error"])
def test_what_is_not_the_engines_fault_never_opens_its_circuit(error: str) -> None:
    world = World("a", "b")
    for number in range(30):
        booking = world.place(ask(LONG, id=f"r{number}"))
        world.brain.release(booking.id, outcome(ttft_s=None, finish="upstream_failed", error=error))
    assert [rank.suspicion for rank in world.fleet] == ["", ""]


def test_an_engine_that_answers_nobody_while_others_do_is_out_after_three() -> None:
    """Its health is green, and no lease of a request has run out yet."""
    world = World("dead", "well")
    stuck = []
    for number in range(3):
        world.rank("well").health, world.rank("dead").health = Health.DOWN, Health.READY
        world.fleet._changed()
        stuck.append(world.place(ask(list(range(number * 100, number * 100 + 64)), id=f"s{number}")))
    assert {booking.instance for booking in stuck} == {"dead"}
    world.rank("well").health = Health.READY
    world.fleet._changed()
    for at in (4.0, 8.0):
        world.now = 100.0 + at
        booking = world.place(ask(LONG, id=f"w{at}", exclude=("dead",)))
        world.brain.progress(booking.id)
        suspicion = world.rank("dead").suspicion
        assert suspicion == ("3 requests without a first token" if at > 5 else "")
    assert world.place(ask(LONG, id="next")).instance == "well"


def test_cold_prompts_of_a_domain_that_fills_too_much_go_to_few_ranks_and_the_others_are_told() -> None:
    engines = [f"e{number}" for number in range(8)]
    world = World(*engines, capacity_tokens=10_000, options={"footprints": Footprints(most=0.25)})
    chosen = set()
    for number in range(40):
        booking = world.place(ask(range(number * 10_000, number * 10_000 + 4_000), id=f"r{number}"))
        chosen.add(booking.instance)
        world.brain.release(booking.id, outcome())
    assert len(chosen) > 2
    late = {
        world.place(ask(range(number * 10_000, number * 10_000 + 4_000), id=f"r{number}")).instance
        for number in range(100, 110)
    }
    assert len(late) <= 2
    decision = world.brain.receipt("r109")
    assert decision is not None
    assert list(decision.filtered.values()) == ["its domain fills enough of the caches"] * 6
    other = msgspec.structs.replace(ask(range(9_000_000, 9_004_000), id="other"), domain="calm")
    world.place(other)
    assert world.brain.receipt("other").filtered == {}  # type: ignore[union-attr]
