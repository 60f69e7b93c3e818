"""A rank's stream made whole: gaps, replays, re-deliveries, restarts. The engine keeps a ring of its last batches."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from adapters._stream import EventStream, Item
from router.core import Cleared, EventBatch, Lost
from tests.adapters.wire import batch, numbered, recorded_batches, recorded_replies, stored


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A publisher with its replay ring, one process after the other."""

    def __init__(self, ring: int = 10_000) -> None:
        self.process = 0
        self.published: list[bytes] = []
        self._ring = ring

    def publish(self, count: int = 1) -> list[tuple[int, bytes]]:
        start = len(self.published)
        self.published += [numbered(seq, process=self.process) for seq in range(start, start + count)]
        return [(seq, self.published[seq]) for seq in range(start, start + count)]

    def restart(self) -> None:
        self.process += 1
        self.published = []

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        first = max(start, len(self.published) - self._ring)
        return [(seq, self.published[seq]) for seq in range(first, len(self.published))]


class Driver:
    """Stands in for the sockets: hands batches over and answers what the stream asks for."""

    def __init__(self, engine: Engine, after: int | None = None, *, can_replay: bool = True, **options: float) -> None:
        self.clock = Clock()
        self.stream = EventStream(after, can_replay=can_replay, clock=self.clock, **options)  # type: ignore[arg-type]
        self.engine = engine
        self.asked: list[int] = []
        self.out: list[Item] = []

    def take(self, items: Iterable[Item]) -> None:
        self.out += items

    def connect(self) -> Driver:
        self.take(self.stream.connected())
        self.answer()
        return self

    def live(self, *batches: tuple[int, bytes]) -> Driver:
        for seq, payload in batches:
            self.take(self.stream.live(seq, payload))
        return self

    def answer(self, *, without: Iterable[int] = ()) -> Driver:
        """Answer every replay that is asked for; `without`: what the first answer leaves out, once it has begun."""
        missing = set(without)
        while self.stream.wanted is not None:
            start, self.stream.wanted = self.stream.wanted, None
            self.asked.append(start)
            for seq, payload in self.engine.replay(start):
                if seq not in missing or seq <= start + 1:
                    self.take(self.stream.replayed(seq, payload))
                if self.stream.wanted is not None:
                    break
            else:
                self.take(self.stream.replay_ended())
            missing = set()
        return self

    def told(self) -> list[object]:
        """Since the last call: sequences of batches with events, ("whole", seq) for empty ones, (kind, first, last)."""
        told: list[object] = []
        for item in self.out:
            if isinstance(item, Lost):
                told.append((item.kind, item.first_seq, item.last_seq))
            else:
                told.append(item.seq if item.events else ("whole", item.seq))
        self.out = []
        return told

    def processes(self) -> list[int]:
        return [int(item.at or 0) // 1000 for item in self.out if isinstance(item, EventBatch)]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def joined(engine: Engine, count: int, **options: float | bool) -> Driver:
    """A driver that has followed `count` batches from the first on."""
    driver = Driver(engine, **options).connect()  # type: ignore[arg-type]
    driver.live(*engine.publish(count))
    assert driver.told() == list(range(count))
    driver.asked.clear()
    return driver


class TestStart:
    def test_a_late_joiner_replays_from_the_first(self, engine: Engine) -> None:
        engine.publish(5)
        driver = Driver(engine).connect()
        assert driver.asked == [0]
        assert driver.told() == [0, 1, 2, 3, 4]

    def test_live_batches_wait_for_the_replay_and_come_once(self, engine: Engine) -> None:
        early = engine.publish(5)
        driver = Driver(engine)
        driver.take(driver.stream.connected())
        driver.live(*early[3:], *engine.publish(2))
        assert driver.told() == []
        driver.answer()
        assert driver.told() == [0, 1, 2, 3, 4, 5, 6]
        driver.live(*early[3:])  # still on their way when the replay was answered
        assert driver.told() == []

    def test_nothing_is_published_yet(self, engine: Engine) -> None:
        driver = Driver(engine).connect()
        assert driver.told() == []
        driver.live(*engine.publish(2))
        assert driver.told() == [0, 1]

    def test_history_that_is_no_longer_in_the_ring_is_lost_and_said(self) -> None:
        engine = Engine(ring=2)
        engine.publish(500)
        driver = Driver(engine).connect()
        assert driver.told() == [("gap", 0, 497), 498, 499]
        assert driver.asked == [0]

    def test_without_a_replay_socket_the_history_is_lost(self, engine: Engine) -> None:
        engine.publish(500)
        driver = Driver(engine, can_replay=False).connect()
        driver.live(*engine.publish(2))
        assert driver.told() == [("gap", 0, 499), 500, 501]

    def test_without_a_replay_socket_a_first_batch_of_zero_is_whole(self, engine: Engine) -> None:
        assert Driver(engine, can_replay=False).connect().live(*engine.publish(2)).told() == [0, 1]

    def test_a_position_of_an_earlier_run_is_continued(self, engine: Engine) -> None:
        engine.publish(10)
        assert Driver(engine, after=6).connect().told() == [7, 8, 9]

    def test_a_position_that_is_still_the_last_one_is_confirmed(self, engine: Engine) -> None:
        engine.publish(10)
        driver = Driver(engine, after=9).connect()
        assert driver.told() == [("whole", 9)]
        assert driver.live(*engine.publish()).told() == [10]

    def test_a_position_the_engine_has_not_reached_is_another_engines(self, engine: Engine) -> None:
        engine.publish(3)
        driver = Driver(engine, after=100).connect()
        assert driver.told() == [("restart", None, None), 0, 1, 2]
        assert driver.asked == [100, 0]

    def test_without_a_replay_socket_a_lower_sequence_than_known_is_a_restart(self, engine: Engine) -> None:
        driver = Driver(engine, after=100, can_replay=False).connect()
        engine.publish(99)
        driver.live(*engine.publish())
        assert driver.told() == [("restart", None, None), ("gap", 0, 98), 99]


class TestGap:
    def test_is_replayed_in_order_with_one_request(self, engine: Engine) -> None:
        driver = joined(engine, 3)
        engine.publish(4)
        driver.live(*engine.publish(2)).answer()
        assert driver.told() == [3, 4, 5, 6, 7, 8]
        assert len(driver.asked) == 1
        assert not driver.stream.replaying

    def test_more_gaps_while_a_replay_runs_ask_nothing_more(self, engine: Engine) -> None:
        driver = joined(engine, 3)
        engine.publish()
        driver.live(*engine.publish())
        engine.publish()
        driver.live(*engine.publish()).answer()
        assert driver.told() == [3, 4, 5, 6]
        assert len(driver.asked) == 1

    def test_past_the_ring_is_lost_and_the_stream_goes_on(self) -> None:
        engine = Engine(ring=2)
        driver = joined(engine, 1)
        engine.publish(2)  # of which the ring has lost the first when it is asked
        driver.live(*engine.publish()).answer()
        assert driver.told() == [("gap", 1, 1), 2, 3]
        assert len(driver.asked) == 1
        assert driver.live(*engine.publish()).told() == [4]

    def test_without_a_replay_socket_is_lost(self, engine: Engine) -> None:
        driver = joined(engine, 1, can_replay=False)
        engine.publish(2)
        assert driver.live(*engine.publish()).told() == [("gap", 1, 2), 3]
        assert driver.asked == []

    def test_a_hole_within_the_replay_is_asked_for_again_from_the_hole(self, engine: Engine) -> None:
        driver = joined(engine, 3)
        engine.publish(10)
        driver.live(*engine.publish()).answer(without=(6, 7))
        assert driver.told() == list(range(3, 14))
        assert driver.asked == [2, 6]

    def test_a_hole_that_stays_is_lost(self, engine: Engine) -> None:
        driver = joined(engine, 3)
        engine.publish(10)
        driver.live(*engine.publish())
        driver.stream.wanted = None
        for start in (2, 6):
            for seq, payload in engine.replay(start):
                if seq not in (6, 7):
                    driver.take(driver.stream.replayed(seq, payload))
            driver.take(driver.stream.replay_ended())
        assert driver.told() == [3, 4, 5, ("gap", 6, 7), 8, 9, 10, 11, 12, 13]
        assert not driver.stream.replaying

    def test_a_replay_full_of_holes_ends(self, engine: Engine) -> None:
        driver = joined(engine, 1)
        engine.publish(100)
        driver.live(*engine.publish())
        requests = 0
        while driver.stream.wanted is not None:
            start, driver.stream.wanted = driver.stream.wanted, None
            requests += 1
            for seq, payload in engine.replay(start):
                if seq == start or seq % 2:
                    driver.take(driver.stream.replayed(seq, payload))
            driver.take(driver.stream.replay_ended())
        told = driver.told()
        assert requests <= 5
        assert told[-1] == 101
        assert sum(isinstance(item, tuple) for item in told) > 10

    def test_history_lost_and_a_hole_are_told_apart(self) -> None:
        engine = Engine(ring=10)
        engine.publish(100)
        driver = Driver(engine)
        driver.take(driver.stream.connected())
        driver.answer(without=(95,))
        assert driver.told() == [("gap", 0, 89), *range(90, 100)]
        assert driver.asked == [0, 95]


class TestFailedReplay:
    def test_loses_the_gap_and_goes_on(self, engine: Engine) -> None:
        driver = joined(engine, 3)
        engine.publish(2)
        driver.live(*engine.publish())
        driver.take(driver.stream.replay_failed("no answer"))
        assert driver.told() == [("gap", 3, 4), 5]

    def test_no_gap_asks_again_before_the_cooldown_is_over(self, engine: Engine) -> None:
        driver = joined(engine, 3, cooldown_s=30.0)
        engine.publish()
        driver.live(*engine.publish())
        driver.stream.wanted = None
        driver.take(driver.stream.replay_failed("no answer"))
        driver.clock.now = 29.0
        engine.publish()
        driver.live(*engine.publish())
        assert driver.stream.wanted is None
        driver.clock.now = 31.0
        engine.publish()
        driver.live(*engine.publish()).answer()
        assert driver.told() == [("gap", 3, 3), 4, ("gap", 5, 5), 6, 7, 8]

    def test_of_the_first_history_loses_nothing_until_something_is_missing(self, engine: Engine) -> None:
        driver = Driver(engine)
        driver.take(driver.stream.connected())
        driver.take(driver.stream.replay_failed("no answer"))
        assert driver.live(*engine.publish(2)).told() == [0, 1]

    def test_too_much_to_hold_gives_the_replay_up(self, engine: Engine) -> None:
        driver = joined(engine, 1, max_held_bytes=1000)
        engine.publish()
        driver.live(*engine.publish(50))
        told = driver.told()
        assert told[:2] == [("gap", 1, 1), 2]
        assert not driver.stream.replaying

    def test_answers_after_it_are_ignored(self, engine: Engine) -> None:
        driver = joined(engine, 3)
        engine.publish(2)
        driver.live(*engine.publish())
        driver.take(driver.stream.replay_failed("no answer"))
        driver.told()
        driver.take(driver.stream.replayed(3, engine.published[3]))
        driver.take(driver.stream.replay_ended())
        assert driver.told() == []


class TestRedelivery:
    def test_the_same_batch_again_is_dropped(self, engine: Engine) -> None:
        driver = joined(engine, 500)
        driver.live((499, engine.published[499]), (498, engine.published[498]), (3, engine.published[3]))
        assert driver.told() == []
        assert driver.live(*engine.publish()).told() == [500]

    def test_one_step_back_to_a_batch_never_seen_is_no_restart(self, engine: Engine) -> None:
        engine.publish(500)
        driver = Driver(engine, can_replay=False).connect().live(*engine.publish())
        assert driver.told() == [("gap", 0, 499), 500]
        assert driver.live((499, engine.published[499]), *engine.publish()).told() == [501]

    def test_one_step_back_with_other_bytes_is_no_restart_yet(self, engine: Engine) -> None:
        driver = joined(engine, 501)
        assert driver.live((500, batch(stored(1), at=9.0)), *engine.publish()).told() == [501]

    def test_a_lost_batch_that_comes_late_is_dropped(self, engine: Engine) -> None:
        driver = joined(engine, 20, can_replay=False)
        late = engine.publish()
        driver.live(*engine.publish())
        assert driver.told() == [("gap", 20, 20), 21]
        assert driver.live(*late, *engine.publish()).told() == [22]


class TestRestart:
    def test_sequence_zero_again(self, engine: Engine) -> None:
        driver = joined(engine, 500)
        engine.restart()
        driver.live(*engine.publish(2))
        assert driver.processes() == [1, 1]
        assert driver.told() == [("restart", None, None), 0, 1]
        assert driver.asked == []

    def test_whose_first_batches_were_missed_is_replayed_from_the_first(self, engine: Engine) -> None:
        driver = joined(engine, 500)
        engine.restart()
        engine.publish(3)
        driver.live(*engine.publish()).answer()
        assert driver.told() == [("restart", None, None), 0, 1, 2, 3]
        assert driver.asked == [0]

    def test_right_after_the_first_batch(self, engine: Engine) -> None:
        driver = joined(engine, 1)
        engine.restart()
        assert driver.live(*engine.publish()).told() == [("restart", None, None), 0]

    def test_unseen_that_has_counted_up_to_nearly_where_we_are(self, engine: Engine) -> None:
        driver = joined(engine, 30, can_replay=False)
        engine.restart()
        engine.publish(28)
        driver.live(*engine.publish(2))
        assert ("restart", None, None) in driver.told()

    def test_while_away_is_seen_at_the_reconnection(self, engine: Engine) -> None:
        driver = joined(engine, 60)
        driver.take(driver.stream.disconnected("connection lost"))
        engine.restart()
        driver.connect()
        assert driver.told() == [("silent", None, None), ("restart", None, None)]
        assert driver.live(*engine.publish(2)).told() == [0, 1]

    def test_that_counted_past_our_last_batch_while_we_were_away(self, engine: Engine) -> None:
        driver = joined(engine, 60)
        driver.take(driver.stream.disconnected("connection lost"))
        engine.restart()
        engine.publish(100)
        driver.connect()
        assert driver.asked == [59, 0]
        assert set(driver.processes()) == {1}
        assert driver.told() == [("silent", None, None), ("restart", None, None), *range(100)]

    def test_while_a_replay_runs(self, engine: Engine) -> None:
        driver = joined(engine, 60)
        engine.publish()
        driver.live(*engine.publish())
        driver.stream.wanted = None
        engine.restart()
        driver.live(*engine.publish(2))
        assert driver.told() == [("restart", None, None), 0, 1]
        assert not driver.stream.replaying

    def test_forgives_a_failed_replay(self, engine: Engine) -> None:
        driver = joined(engine, 60)
        engine.publish()
        driver.live(*engine.publish())
        driver.take(driver.stream.replay_failed("no answer"))
        engine.restart()
        engine.publish()
        driver.live(*engine.publish()).answer()
        assert driver.told() == [("gap", 60, 60), 61, ("restart", None, None), 0, 1]


class TestReconnection:
    def test_that_missed_nothing_says_so(self, engine: Engine) -> None:
        driver = joined(engine, 5)
        driver.take(driver.stream.disconnected("connection lost"))
        driver.connect()
        assert driver.told() == [("silent", None, None), ("whole", 4)]
        assert driver.live(*engine.publish()).told() == [5]

    def test_that_missed_something_replays_it(self, engine: Engine) -> None:
        driver = joined(engine, 5)
        driver.take(driver.stream.disconnected("connection lost"))
        engine.publish(3)
        driver.connect()
        assert driver.told() == [("silent", None, None), 5, 6, 7]


def test_an_unreadable_batch_is_a_gap_and_the_stream_goes_on(engine: Engine) -> None:
    driver = joined(engine, 2)
    engine.published.append(b"\xc1")
    driver.live((2, b"\xc1"), *engine.publish())
    assert driver.told() == [("gap", 2, 2), 3]


@pytest.mark.parametrize("name", ["events.jsonl", "events-lora-bytehash.jsonl"])
def test_recorded_streams_of_vllm_come_out_whole(name: str) -> None:
    recorded = recorded_batches("vllm-0.32.0", name)
    driver = Driver(Engine()).connect().live(*recorded)
    assert driver.told() == [seq for seq, _ in recorded]


def test_recorded_stream_of_sglang_comes_out_whole() -> None:
    """SGLang publishes batch 0, an AllBlocksCleared, before anybody can listen: only the replay has it."""
    recorded = recorded_batches("sglang-0.5.23")
    engine = Engine()
    engine.published = [recorded_replies("sglang-0.5.23")[0][1], *(payload for _, payload in recorded)]
    driver = Driver(engine)
    driver.take(driver.stream.connected())
    driver.live(*recorded).answer()
    assert isinstance(driver.out[0], EventBatch)
    assert driver.out[0].events == [Cleared()]
    assert driver.told() == list(range(len(recorded) + 1))


def test_recorded_restart_of_vllm_is_seen() -> None:
    recorded = recorded_batches("vllm-0.32.0", "events-restart.jsonl")
    sequences = [seq for seq, _ in recorded]
    before = sequences.index(0)
    driver = Driver(Engine(), can_replay=False).connect().live(*recorded)
    assert driver.told() == [
        ("gap", 0, sequences[0] - 1),
        *sequences[:before],
        ("restart", None, None),
        *sequences[before:],
    ]


@pytest.mark.parametrize(("engine_name", "start"), [("vllm-0.32.0", 56), ("sglang-0.5.23", 32)])
def test_recorded_replay_repeats_the_live_batches(engine_name: str, start: int) -> None:
    live = dict(recorded_batches(engine_name))
    replies = recorded_replies(engine_name, start=start)
    assert [seq for seq, _ in replies[:-1]] == list(range(start, start + len(replies) - 1))
    assert all(live[seq] == payload for seq, payload in replies[:-1])
    assert replies[-1] == (2**64 - 1, b"")


@pytest.mark.parametrize("seed", range(20))
def test_any_loss_with_a_whole_ring_comes_out_in_order(seed: int) -> None:
    """Whatever the network drops, repeats and cuts: after the last replay every batch has come once and in order."""
    dice = random.Random(seed)
    engine = Engine()
    driver = Driver(engine).connect()
    expected: list[int] = []
    for _ in range(200):
        fresh = engine.publish(dice.randrange(1, 4))
        expected += [seq for seq, _ in fresh]
        if dice.random() < 0.05:
            driver.take(driver.stream.disconnected("connection lost"))
            driver.connect()
            continue
        driver.live(*(entry for entry in fresh if dice.random() < 0.8))
        if dice.random() < 0.2:
            seq = dice.randrange(len(engine.published))
            driver.live((seq, engine.published[seq]))
        if dice.random() < 0.5:
            driver.answer(without=[seq for seq in range(len(engine.published)) if dice.random() < 0.05])
    driver.connect()
    told = driver.told()
    assert [item for item in told if isinstance(item, int)] == expected
    assert {item[0] for item in told if isinstance(item, tuple)} <= {"silent", "whole"}
