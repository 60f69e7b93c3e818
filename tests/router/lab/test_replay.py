"""Replays so small that every time in them can be worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.kv_aware import KvAware
from router.core import Cost, Rates, Snapshot
from router.lab.fleet_model import EngineSpec
from router.lab.measures import measure
from router.lab.profiles import PROFILES, Profile, step_ms
from router.lab.replay import Outage, Replay, Replayed, Served, Setup
from router.lab.trace_request import Trace, TraceRequest
from router.routing.room_rule import RoomRule
from router.routing.waiting_room import RoomLimits

BLOCK = 100
RATES = Rates(c0_ms=10.0, c1_ms=0.1, c2_ms=0.0, c3_ms=0.0, c4_ms=1.0, n0_tokens=0)
PROFILE = Profile("plain", RATES, capacity_tokens=1_000_000, max_batched_tokens=8_000, max_num_seqs=64)
"""A prompt of n tokens alone: 10 + n / 10 ms. A token of one sequence that decodes: 11.1 ms."""
DECODE_S = 0.0111
SIGNAL_S, EVENT_S = 0.015, 0.005
H100 = PROFILES["llama-3.1-8b-h100"]


class InOrder:
    """The first candidate there is."""

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        return [Cost(float(position), {}, "rank") for position in range(len(snapshot.candidates))]


class InTurn:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        self._turn += 1
        count = len(snapshot.candidates)
        return [Cost(float(position != self._turn % count), {}, "rank") for position in range(count)]


def request(id: str, at: float, tokens: int, output: int = 1, **rest: Any) -> TraceRequest:
    """A prompt like no other, unless `blocks` say what it begins with."""
    named = rest.pop("blocks", None)
    if named is None:
        start = (crc32(id.encode())) << 20
        named = range(start, start + -(-tokens // BLOCK))
    return TraceRequest(id, at, tokens, output, list(named), **rest)


def prepared(
    *requests: TraceRequest, engines: int = 1, spec: EngineSpec | None = None, policy: Any = None, **setup: Any
) -> Replay:
    """Placed at arrival unless `room` says otherwise."""
    specs = [spec or EngineSpec(PROFILE)] * engines
    chosen = policy or KvAware({}, random.Random(1))
    return Replay(
        Trace("test", BLOCK, list(requests)), Setup(specs, **setup), chosen, name="test", seed=setup.pop("seed", 0)
    )


def replay(*requests: TraceRequest, **setup: Any) -> Replayed:
    return prepared(*requests, **setup).run()


def by_id(found: Replayed) -> dict[str, Served]:
    assert len({one.id for one in found.served}) == len(found.served)
    return {one.id: one for one in found.served}


# --- one engine


def test_one_request_takes_the_steps_of_its_engine() -> None:
    found = replay(request("r", 0.5, 1_000, 3, tenant="acme", turn=2))
    (one,) = found.served
    assert (one.id, one.tenant, one.turn, one.input_tokens, one.output_tokens) == ("r", "acme", 2, 1_000, 3)
    assert (one.arrived_at, one.placed_at, one.engine) == (0.5, 0.5, 0)
    assert one.first_token_at == pytest.approx(0.5 + 0.110)
    assert one.finished_at == pytest.approx(0.5 + 0.110 + 2 * DECODE_S)
    assert one.solo_s == pytest.approx(0.110)
    assert (one.hit_tokens, one.predicted_hit_tokens, one.best_hit_tokens, one.retries, one.refused) == (0, 0, 0, 0, "")
    assert found.ended_at == pytest.approx(one.finished_at + SIGNAL_S)
    assert found.busy_s == [pytest.approx(0.110 + 2 * DECODE_S)]
    assert (found.policy, found.preemptions, found.duplicate_share, found.room) == ("test", 0, 0.0, None)


def test_the_steps_are_those_of_the_profile() -> None:
    """10,000 tokens in chunks of 8,192 and 1,808."""
    found = replay(request("r", 0.0, 10_000, 3), spec=EngineSpec(H100))
    first = step_ms(H100.rates, prefill_tokens=8_192, attention=8_192 * 4_096, decoding=0, context=0)
    second = step_ms(H100.rates, prefill_tokens=1_808, attention=1_808 * (8_192 + 904), decoding=0, context=0)
    decodes = [
        step_ms(H100.rates, prefill_tokens=0, attention=0, decoding=1, context=context) for context in (10_000, 10_001)
    ]
    (one,) = found.served
    assert one.first_token_at == pytest.approx((first + second) / 1e3)
    assert one.finished_at == pytest.approx((first + second + sum(decodes)) / 1e3)


def test_who_is_placed_at_arrival_waits_in_the_engine() -> None:
    """The second is computed by the step after the first's: with one token of that, 10 + 0.1 × 5,001 + 1 ms."""
    found = by_id(replay(request("one", 0.0, 5_000, 90), request("two", 0.1, 5_000)))
    assert found["two"].placed_at == found["two"].arrived_at == 0.1
    assert found["two"].first_token_at == pytest.approx(0.510 + 0.5111)


def test_an_engine_that_runs_the_shortest_first_does_so() -> None:
    spec = EngineSpec(PROFILE, order="shortest_first")
    found = by_id(
        replay(request("busy", 0.0, 8_000), request("long", 0.1, 8_000), request("short", 0.2, 7_000), spec=spec)
    )
    assert found["short"].first_token_at == pytest.approx(0.810 + 0.810)  # a thousand of "long" fill the step
    assert found["long"].first_token_at == pytest.approx(0.810 + 0.810 + 0.710)


# --- hits


def test_a_second_prompt_hits_the_whole_blocks_they_share() -> None:
    found = by_id(
        replay(
            request("first", 0.0, 350, blocks=[1, 2, 3, 4]),
            request("second", 1.0, 350, blocks=[1, 2, 3, 5]),
            request("third", 2.0, 350, blocks=[1, 12, 13, 14]),
        )
    )
    assert [one.hit_tokens for one in found.values()] == [0, 300, 100]
    assert [one.predicted_hit_tokens for one in found.values()] == [0, 300, 100]
    assert found["second"].first_token_at == pytest.approx(1.0 + 0.010 + 0.005)
    assert found["third"].first_token_at == pytest.approx(2.0 + 0.010 + 0.025)


def test_of_a_prompt_that_is_held_whole_the_last_block_is_computed() -> None:
    found = by_id(replay(request("first", 0.0, 300, blocks=[1, 2, 3]), request("second", 1.0, 300, blocks=[1, 2, 3])))
    assert (found["second"].hit_tokens, found["second"].predicted_hit_tokens) == (200, 200)
    assert found["second"].first_token_at == pytest.approx(1.0 + 0.010 + 0.010)


def test_a_request_goes_to_the_engine_that_holds_its_prefix() -> None:
    long = range(1, 31)
    found = by_id(
        replay(
            request("first", 0.0, 3_000, blocks=long),
            request("other", 0.001, 3_000),
            request("again", 5.0, 3_050, blocks=[*long, 99]),
            engines=2,
        )
    )
    assert found["first"].engine != found["other"].engine
    assert found["again"].engine == found["first"].engine
    assert (found["again"].hit_tokens, found["again"].best_hit_tokens) == (3_000, 3_000)


def test_what_two_engines_hold_alike_is_counted_as_duplicate() -> None:
    """Looked at every second: at 1 none is, from 2 to 25 s 10 of 20 are."""
    found = replay(
        request("first", 0.0, 1_000, blocks=range(10)),
        request("second", 1.0, 1_000, blocks=range(10)),
        request("last", 25.0, 100),
        engines=2,
        policy=InTurn(),
    )
    assert [one.engine for one in found.served] == [0, 1, 0]
    assert found.duplicate_share == pytest.approx(24 * 0.5 / 25)


# --- turns


def test_a_turn_comes_when_the_one_before_it_is_over_and_thought_about() -> None:
    found = by_id(
        replay(
            request("t1", 1.0, 1_000, 11, session="s"),
            request("t2", 1.5, 1_200, 1, session="s", turn=2, after="t1", think_s=2.0),
            request("side", 1.6, 100, 1, after="t1", think_s=0.5),
            request("t3", 1.7, 1_400, 1, session="s", turn=3, after="t2"),
        )
    )
    over = 1.0 + 0.110 + 10 * DECODE_S + SIGNAL_S
    assert found["t2"].arrived_at == pytest.approx(over + 2.0)
    assert found["side"].arrived_at == pytest.approx(over + 0.5)
    assert found["t3"].arrived_at == pytest.approx(over + 2.0 + 0.130 + SIGNAL_S)
    assert [one.id for one in found.values()] == ["t1", "side", "t2", "t3"]  # as they came


def test_a_turn_comes_though_the_one_before_it_was_refused() -> None:
    found = by_id(
        replay(
            request("huge", 0.0, 9_000), request("next", 0.0, 100, after="huge", think_s=1.0),
            spec=EngineSpec(PROFILE, capacity_tokens=5_000),
        )
    )  # fmt: skip
    assert found["huge"].refused
    assert found["next"].arrived_at == 1.0
    assert found["next"].finished_at is not None


# --- the waiting room


def test_with_a_room_the_next_prompt_is_sent_after_the_first_ones_token() -> None:
    """Its last block shows in the engine's events 5 ms after the step."""
    found = replay(request("one", 0.0, 3_000), request("two", 0.1, 2_000), room=RoomRule())
    two = by_id(found)["two"]
    assert (two.arrived_at, two.placed_at) == (0.1, pytest.approx(0.310 + EVENT_S))
    assert two.first_token_at == pytest.approx(0.310 + EVENT_S + 0.210)
    assert found.room is not None
    assert (found.room.placed_at_once, found.room.placed) == (1, 1)
    assert found.room.longest_wait_s == pytest.approx(0.215)
    assert measure(found).longest_wait_s == pytest.approx(0.215)


def test_where_events_are_lost_the_first_token_tells() -> None:
    found = by_id(replay(request("one", 0.0, 3_000, 50), request("two", 0.1, 2_000), room=RoomRule(), event_loss=1.0))
    assert found["two"].placed_at == pytest.approx(0.310 + SIGNAL_S)


def test_an_answer_that_is_not_streamed_tells_nothing_but_its_end() -> None:
    """300 ms are expected of the first, though it takes 10: the next is sent within a tick of 50 ms."""
    rates = msgspec.structs.replace(RATES, n0_tokens=5_000)
    found = by_id(
        replay(
            request("one", 0.0, 3_000, 90), request("two", 0.1, 2_000), room=RoomRule(), event_loss=1.0,
            not_streamed=1.0, spec=EngineSpec(msgspec.structs.replace(PROFILE, rates=rates)),
        )
    )  # fmt: skip
    placed_at = found["two"].placed_at
    assert placed_at is not None
    assert 0.300 <= placed_at <= 0.350 + 1e-9
    assert found["one"].first_token_at == pytest.approx(0.010)  # by the engine's own clock all the same


@pytest.mark.parametrize("signal_s", [SIGNAL_S, 0.06])
def test_the_rule_knows_the_delay_of_the_replays_signals(signal_s: float) -> None:
    """A gap of 100 ms, of which so much has passed when the end is known: 1.4 s have held up those who decode."""
    found = by_id(
        replay(
            request("first", 0.0, 100, 500),
            request("second", 0.0, 100, 500),
            request("one", 0.1, 14_000),
            request("two", 0.2, 2_000),
            room=RoomRule(),
            signal_delay_s=signal_s,
        )
    )
    ended_at = found["one"].first_token_at
    assert ended_at is not None
    assert found["two"].placed_at == pytest.approx(ended_at + EVENT_S + 0.1 - signal_s)


def test_a_request_waits_for_the_busy_engine_that_holds_its_prefix() -> None:
    """Engine 0 holds 8,000 tokens of it and has 4,000 to compute, which ends at 1.410; engine 1 is idle."""
    long = range(1, 81)
    found = by_id(
        replay(
            request("first", 0.0, 8_000, blocks=long),
            request("busy", 1.0, 12_000, blocks=[*long, *range(500, 540)]),
            request("held", 1.1, 8_050, blocks=[*long, 600]),
            engines=2,
            room=RoomRule(),
        )
    )
    assert found["busy"].hit_tokens == 8_000
    assert found["held"].engine == found["first"].engine
    assert found["held"].placed_at == pytest.approx(1.410 + EVENT_S)
    assert found["held"].hit_tokens == 8_000


def test_what_the_room_refuses_is_not_served() -> None:
    found = replay(
        request("one", 0.0, 9_000),
        request("two", 0.1, 1_000),
        request("three", 0.2, 1_000),
        room=RoomRule(),
        room_limits=RoomLimits(requests=1),
    )
    assert {one.id: one.refused for one in found.served} == {"one": "", "two": "", "three": "overloaded"}
    assert by_id(found)["three"].placed_at is None


# --- what does not fit


@pytest.mark.parametrize("room", [None, RoomRule()])
@pytest.mark.parametrize(("tokens", "output"), [(2_001, 1), (1_900, 200)])
def test_a_prompt_that_can_never_fit_is_refused_and_the_others_are_served(
    tokens: int, output: int, room: RoomRule | None
) -> None:
    found = replay(
        request("before", 0.0, 500, 5),
        request("huge", 0.01, tokens, output),
        request("after", 1.0, 500, 5),
        spec=EngineSpec(PROFILE, capacity_tokens=2_000),
        room=room,
    )
    assert {one.id: one.refused for one in found.served} == {"before": "", "huge": "does_not_fit", "after": ""}
    huge = by_id(found)["huge"]
    assert huge.first_token_at is huge.finished_at is None
    assert measure(found).refused == 1


def test_a_prompt_that_is_refused_breaks_no_promise() -> None:
    replaying = prepared(
        request("fits", 0.0, 1_000, blocks=range(10)),
        request("huge", 1.0, 2_050, blocks=range(21)),
        spec=EngineSpec(PROFILE, capacity_tokens=2_000),
    )
    replaying.run()
    confidence = replaying._fleet.ranks("e0")[0].confidence
    assert confidence is not None
    assert confidence.value == 1.0


def test_of_unequal_engines_the_one_where_it_fits_is_taken() -> None:
    replaying = Replay(
        Trace("test", BLOCK, [request("large", 0.0, 3_000)]),
        Setup([EngineSpec(PROFILE, capacity_tokens=2_000), EngineSpec(PROFILE)]),
        InOrder(),
        name="test",
    )
    (one,) = replaying.run().served
    assert (one.engine, one.refused) == (1, "")


# --- outages

DOWN_FROM_HALF_TO_2 = [Outage(0, at_s=0.5, back_s=2.0)]


@pytest.mark.parametrize("room", [None, RoomRule()])
def test_a_request_whose_engine_dies_is_computed_by_another(room: RoomRule | None) -> None:
    """Known after 15 ms; two chunks there: 810 and 210 ms."""
    found = replay(
        request("lost", 0.1, 10_000), engines=2, policy=InOrder(), outages=DOWN_FROM_HALF_TO_2, room=room
    )  # fmt: skip
    (one,) = found.served
    assert (one.arrived_at, one.placed_at, one.engine, one.retries) == (0.1, pytest.approx(0.515), 1, 1)
    assert one.finished_at == pytest.approx(0.515 + 1.020)
    assert found.busy_s == [0.0, pytest.approx(1.020)]  # the step it died in was no use


def test_an_engine_comes_back_empty() -> None:
    found = by_id(
        replay(
            request("before", 0.0, 1_000, blocks=range(10)),
            request("meanwhile", 1.0, 1_050, blocks=range(11)),
            request("after", 3.0, 1_050, blocks=range(11)),
            request("later", 4.0, 1_050, blocks=range(11)),
            engines=2,
            policy=InOrder(),
            outages=DOWN_FROM_HALF_TO_2,
        )
    )
    assert [(one.engine, one.hit_tokens) for one in found.values()] == [(0, 0), (1, 0), (0, 0), (0, 1_000)]
    assert [one.predicted_hit_tokens for one in found.values()] == [0, 0, 0, 1_000]
    assert not any(one.retries for one in found.values())


def test_what_is_sent_to_an_engine_that_is_not_known_to_be_dead_fails_and_goes_elsewhere() -> None:
    found = by_id(
        replay(request("r", 0.505, 1_000), engines=2, policy=InOrder(), outages=DOWN_FROM_HALF_TO_2),
    )
    assert (found["r"].engine, found["r"].retries, found["r"].placed_at) == (1, 1, pytest.approx(0.520))


def test_an_answer_that_has_begun_is_broken_off() -> None:
    found = replay(
        request("begun", 0.0, 1_000, 90), request("next", 0.0, 100, after="begun"),
        engines=2, policy=InOrder(), outages=DOWN_FROM_HALF_TO_2,
    )  # fmt: skip
    begun, following = found.served
    assert (begun.refused, begun.finished_at, begun.retries) == ("broken_off", None, 0)
    assert begun.first_token_at == pytest.approx(0.110)
    assert following.arrived_at == pytest.approx(0.515)
    assert measure(found).goodput == 0.5


def test_a_whole_answer_of_which_nobody_has_seen_anything_is_computed_by_another() -> None:
    (one,) = replay(
        request("begun", 0.0, 1_000, 90), engines=2, policy=InOrder(), outages=DOWN_FROM_HALF_TO_2, not_streamed=1.0
    ).served
    assert (one.retries, one.refused) == (1, "")


def test_a_request_fails_over_only_once() -> None:
    (one,) = replay(
        request("r", 0.1, 10_000),
        engines=3,
        policy=InOrder(),
        outages=[*DOWN_FROM_HALF_TO_2, Outage(1, at_s=1.0, back_s=9.0)],
    ).served
    assert (one.refused, one.retries, one.finished_at) == ("engine_no_answer", 1, None)


@pytest.mark.parametrize("room", [None, RoomRule()])
def test_while_no_engine_is_alive_clients_try_again_every_second(room: RoomRule | None) -> None:
    (one,) = replay(request("r", 1.25, 1_000), outages=[Outage(0, at_s=0.5, back_s=4.0)], room=room).served
    assert (one.arrived_at, one.placed_at, one.retries) == (1.25, 4.25, 0)
    assert one.finished_at == pytest.approx(4.25 + 0.110)


def test_those_in_the_room_when_the_last_engine_dies_try_again_too() -> None:
    found = by_id(
        replay(
            request("one", 0.0, 9_000),
            request("two", 0.1, 1_000),
            outages=DOWN_FROM_HALF_TO_2,
            room=RoomRule(),
        )
    )
    assert all(one.finished_at is not None for one in found.values())
    assert (found["one"].retries, found["two"].retries) == (1, 0)


def test_an_outage_that_is_over_before_anybody_knows_of_it_is_over() -> None:
    found = by_id(
        replay(
            request("before", 0.0, 1_000, blocks=range(10)),
            request("lost", 0.495, 1_000),
            request("after", 1.0, 1_050, blocks=range(11)),
            engines=2,
            policy=InOrder(),
            outages=[Outage(0, at_s=0.5, back_s=0.51)],
        )
    )
    assert (found["lost"].engine, found["lost"].retries) == (1, 1)
    assert (found["after"].engine, found["after"].hit_tokens, found["after"].predicted_hit_tokens) == (0, 0, 0)


def test_an_engine_that_is_back_takes_who_waits_at_once() -> None:
    found = by_id(
        replay(
            request("busy", 1.0, 90_000),
            request("waits", 1.1, 1_000),
            engines=2,
            outages=[Outage(0, at_s=0.5, back_s=2.345)],
            room=RoomRule(),
        )
    )
    assert (found["waits"].engine, found["waits"].placed_at) == (0, 2.345)


def test_of_a_fleet_that_never_comes_back_clients_have_enough_after_ten_minutes() -> None:
    found = replay(
        request("r", 1.0, 100), request("next", 0.0, 100, after="r"), outages=[Outage(0, at_s=0.5, back_s=inf)]
    )
    assert [one.refused for one in found.served] == ["no_engine_available"] * 2
    assert found.served[1].arrived_at == 601.0
    assert found.ended_at == 1_201.0


# --- lost events


def test_lost_events_leave_hits_unpredicted_but_delivered() -> None:
    """What was just dispatched counts for some seconds even so."""
    prompts = [
        request("first", 0.0, 1_000, blocks=range(10)),
        request("soon", 2.0, 1_050, blocks=range(11)),
        request("late", 60.0, 1_050, blocks=range(11)),
    ]
    heard = replay(*prompts).served
    assert [(one.predicted_hit_tokens, one.hit_tokens) for one in heard] == [(0, 0), (1_000, 1_000), (1_000, 1_000)]
    replaying = prepared(*prompts, event_loss=1.0)
    lost = replaying.run().served
    assert [(one.predicted_hit_tokens, one.hit_tokens) for one in lost] == [(0, 0), (1_000, 1_000), (0, 1_000)]
    confidence = replaying._fleet.ranks("e0")[0].confidence
    assert confidence is not None
    assert any("lost in the replay" in reason for reason in confidence.reasons())


# --- what is learned


@pytest.mark.parametrize("begins", [0.0, 5.0])
def test_what_is_learned_does_not_depend_on_when_a_trace_begins(begins: float) -> None:
    """The engine computes the first 192 tokens of a step for nothing, of which its rates do not tell."""
    replaying = prepared(request("r", begins, 1_000), spec=EngineSpec(H100))
    (one,) = replaying.run().served
    assert one.first_token_at is not None
    factor = replaying._fleet.ranks("e0")[0].factor
    seen_ms = (one.first_token_at - begins) * 1e3 - H100.rates.c0_ms
    ratio = seen_ms / H100.rates.prefill_ms(1_000, 1_000)
    assert 0.5 < ratio < 0.95
    assert factor.value == pytest.approx(1.0 + 0.1 * (ratio - 1.0))


# --- all of it


def mixed(seed: int, size: int) -> list[TraceRequest]:
    """Prompts with common beginnings, and turns."""
    dice = random.Random(seed)
    requests: list[TraceRequest] = []
    for number in range(size):
        prefix = dice.randrange(3) * 1_000
        shared = range(prefix, prefix + dice.randrange(60))
        tokens = len(shared) * BLOCK + dice.randrange(1, 9_000)
        own = range((number + 10) << 20, ((number + 10) << 20) + -(-tokens // BLOCK) - len(shared))
        after = dice.choice(requests).id if requests and dice.random() < 0.3 else None
        requests.append(
            request(
                f"r{number}", number * 0.05, tokens, dice.randrange(1, 60), blocks=[*shared, *own], after=after,
                think_s=dice.random(), tenant=dice.choice(["a", "b"]), priority=dice.choice([0, 0, 1]),
            )
        )  # fmt: skip
    return requests


@pytest.mark.parametrize("room", [None, RoomRule()])
def test_the_same_seed_gives_the_same_replay(room: RoomRule | None) -> None:
    def once(seed: int) -> Replayed:
        trace = Trace("test", BLOCK, mixed(3, 120))
        setup = Setup(
            [EngineSpec(PROFILE, capacity_tokens=60_000)] * 2, room=room, event_loss=0.2, not_streamed=0.3,
            outages=[Outage(1, at_s=2.0, back_s=3.0)],
        )  # fmt: skip
        return Replay(trace, setup, KvAware({}, random.Random(seed)), name="test", seed=seed).run()

    assert once(1) == once(1)
    assert once(1).served != once(2).served


def test_progress_is_told_by_the_hundred() -> None:
    told: list[int] = []
    trace = Trace("test", BLOCK, [request(f"r{number}", number * 0.1, 100) for number in range(250)])
    Replay(trace, Setup([EngineSpec(PROFILE)]), InOrder(), name="test", progress=told.append).run()
    assert told == [100, 200]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    engines=st.integers(1, 3),
    room=st.sampled_from([None, RoomRule(), RoomRule(hold=False, head_start=0.0), RoomRule(free_tokens=200)]),
    limits=st.sampled_from([RoomLimits(), RoomLimits(requests=5, wait_s=3.0)]),
    capacity=st.sampled_from([12_000, 60_000]),
    event_loss=st.sampled_from([0.0, 0.3, 1.0]),
    not_streamed=st.sampled_from([0.0, 0.5]),
    outages=st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 4), st.floats(0.1, 3)), max_size=3),
)
def test_every_request_ends_exactly_once(
    seed: int,
    engines: int,
    room: RoomRule | None,
    limits: RoomLimits,
    capacity: int,
    event_loss: float,
    not_streamed: float,
    outages: list[tuple[int, float, float]],
) -> None:
    requests = mixed(seed, 50)
    spread = {engine: Outage(engine, at_s=at, back_s=at + lasts) for engine, at, lasts in outages if engine < engines}
    replaying = prepared(
        *requests,
        engines=engines,
        spec=EngineSpec(PROFILE, capacity_tokens=capacity, max_batched_tokens=1_000),
        room=room,
        room_limits=limits,
        event_loss=event_loss,
        not_streamed=not_streamed,
        outages=list(spread.values()),
    )
    found = replaying.run()
    assert sorted(one.id for one in found.served) == sorted(one.id for one in requests)
    assert len(replaying._bookings) == len(replaying._going) == 0
    assert found.room is None or len(replaying._brain.room or ()) == 0
    for one in found.served:
        assert (one.finished_at is None) is bool(one.refused)
        if one.finished_at is not None:
            assert one.placed_at is not None
            assert one.first_token_at is not None
            assert one.arrived_at <= one.placed_at < one.first_token_at <= one.finished_at <= found.ended_at
            assert one.hit_tokens < one.input_tokens
        assert one.retries <= 1
    for rank in replaying._fleet:
        booked = rank.booked
        assert (booked.requests, booked.kv_tokens, booked.prefill_tokens, booked.prefill_us) == (0, 0, 0, 0)
    assert measure(found).requests == len(requests)
