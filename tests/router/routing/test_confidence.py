from __future__ import annotations

import pytest

from router.core import Lost
from router.routing.confidence import GRACE_S, HALF_LIFE_S, Confidence, freshness, hit_ratio, moved

GAP = Lost("gap", "batches 5 to 9", first_seq=5, last_seq=9)


@pytest.fixture
def confidence(clock) -> Confidence:
    return Confidence(clock=clock)


def test_a_rank_whose_stream_is_whole_is_believed(confidence: Confidence, clock) -> None:
    clock.advance(10_000)  # an idle engine publishes nothing
    assert (confidence.value, confidence.reasons()) == (1.0, [])


def test_a_gap_ends_all_belief_until_the_index_is_rebuilt(confidence: Confidence) -> None:
    confidence.lost(GAP)
    assert confidence.value == 0
    assert confidence.reasons() == ["events lost (batches 5 to 9), 0% rebuilt"]
    confidence.heard()
    assert confidence.value == 0
    confidence.rebuilt()
    assert (confidence.value, confidence.reasons()) == (1.0, [])


def test_confirmed_hits_win_belief_back_after_a_gap(confidence: Confidence) -> None:
    confidence.lost(GAP)
    values = []
    for _ in range(30):
        confidence.answered(predicted_tokens=1000, delivered_tokens=1000, slack_tokens=16)
        values.append(confidence.value)
    assert values == sorted(values)
    assert values[0] == pytest.approx(0.2)
    assert values[1] == pytest.approx(0.36)
    assert values[-1] == 1.0
    assert confidence.reasons() == []


def test_a_miss_after_a_gap_wins_nothing(confidence: Confidence) -> None:
    confidence.lost(GAP)
    confidence.answered(predicted_tokens=1000, delivered_tokens=100, slack_tokens=16)
    assert confidence.value == 0


def test_a_restart_begins_anew(confidence: Confidence) -> None:
    confidence.lost(GAP)
    confidence.answered(predicted_tokens=1000, delivered_tokens=0, slack_tokens=16)
    confidence.lost(Lost("restart", "sequence fell from 500 to 0"))
    assert (confidence.value, confidence.reasons()) == (1.0, [])


def test_misses_cost_belief_and_hits_restore_it(confidence: Confidence) -> None:
    confidence.answered(predicted_tokens=1000, delivered_tokens=500, slack_tokens=16)
    assert confidence.value == pytest.approx(0.9)
    assert confidence.reasons() == ["90% of the predicted hits were delivered"]
    for _ in range(50):
        confidence.answered(predicted_tokens=1000, delivered_tokens=0, slack_tokens=16)
    assert confidence.value < 0.001
    for _ in range(50):
        confidence.answered(predicted_tokens=1000, delivered_tokens=1000, slack_tokens=16)
    assert (confidence.value, confidence.reasons()) == (1.0, [])


def test_nothing_predicted_teaches_nothing(confidence: Confidence) -> None:
    confidence.answered(predicted_tokens=0, delivered_tokens=0, slack_tokens=16)
    confidence.answered(predicted_tokens=0, delivered_tokens=900, slack_tokens=16)
    assert confidence.value == 1.0


def test_uncached_work_without_an_event_is_suspicious(confidence: Confidence, clock) -> None:
    confidence.dispatched(100)
    clock.advance(GRACE_S)
    assert confidence.value == 1.0
    confidence.dispatched(100)  # the clock runs from the first
    clock.advance(HALF_LIFE_S)
    assert confidence.value == pytest.approx(0.5)
    assert confidence.reasons() == ["no event for 20 s after uncached work was sent"]
    confidence.heard()
    assert (confidence.value, confidence.reasons()) == (1.0, [])


def test_cached_work_needs_no_event(confidence: Confidence, clock) -> None:
    confidence.dispatched(0)
    clock.advance(1000)
    assert confidence.value == 1.0


def test_a_lost_connection_costs_belief_from_the_start(confidence: Confidence, clock) -> None:
    confidence.lost(Lost("silent", "connection closed"))
    clock.advance(HALF_LIFE_S)
    confidence.lost(Lost("silent", "connection refused"))
    assert confidence.value == pytest.approx(0.5)
    assert confidence.reasons() == ["no connection for 10 s"]
    clock.advance(HALF_LIFE_S)
    assert confidence.value == pytest.approx(0.25)
    confidence.heard()
    assert confidence.value == 1.0


def test_doubts_multiply(confidence: Confidence, clock) -> None:
    confidence.answered(predicted_tokens=1000, delivered_tokens=0, slack_tokens=16)
    confidence.lost(Lost("silent", "connection closed"))
    clock.advance(HALF_LIFE_S)
    assert confidence.value == pytest.approx(0.4)
    assert len(confidence.reasons()) == 2


@pytest.mark.parametrize(("quiet_s", "expected"), [(-5, 1.0), (0, 1.0), (HALF_LIFE_S, 0.5), (3 * HALF_LIFE_S, 0.125)])
def test_freshness_halves(quiet_s: float, expected: float) -> None:
    assert freshness(quiet_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predicted", "delivered", "expected"),
    [(100, 100, 1.0), (100, 200, 1.0), (100, 84, 1.0), (100, 83, 0.83), (100, 0, 0.0), (10, 0, 1.0)],
)
def test_a_hit_may_be_a_block_short(predicted: int, delivered: int, expected: float) -> None:
    assert hit_ratio(predicted, delivered, 16) == pytest.approx(expected)


def test_a_mean_moves_by_a_fifth() -> None:
    assert moved(1.0, 0.0) == pytest.approx(0.8)
    assert moved(0.0, 1.0) == pytest.approx(0.2)


def test_a_decision_gets_the_value_at_most_a_step_late(confidence: Confidence, clock) -> None:
    assert confidence.at(clock.now) == 1.0
    confidence.dispatched(100)
    clock.advance(GRACE_S - 0.01)
    assert confidence.at(clock.now) == 1.0
    for _ in range(400):
        clock.advance(0.013)
        assert confidence.value <= confidence.at(clock.now) <= confidence.value * 1.004
    confidence.heard()
    assert confidence.at(clock.now) == 1.0
    confidence.lost(Lost("silent", "connection closed"))
    clock.advance(HALF_LIFE_S)
    assert confidence.at(clock.now) == pytest.approx(0.5)
    confidence.lost(GAP)
    assert confidence.at(clock.now) == 0.0
    confidence.rebuilt()
    assert confidence.at(clock.now) == 1.0
    confidence.answered(predicted_tokens=1000, delivered_tokens=500, slack_tokens=16)
    assert confidence.at(clock.now) == confidence.value == pytest.approx(0.9)


def test_work_that_was_withdrawn_needs_no_event(confidence: Confidence, clock) -> None:
    sent = clock.now
    confidence.dispatched(100, at=sent)
    clock.advance(5)
    confidence.dispatched(100, at=clock.now)
    confidence.withdrawn(sent, next_at=clock.now)  # the second is still waited for, from when it was sent
    clock.advance(GRACE_S + HALF_LIFE_S)
    assert confidence.at(clock.now) == confidence.value == pytest.approx(0.5)
    confidence.withdrawn(clock.now - 0.5, next_at=None)  # of another, which had not begun the silence
    assert confidence.value == pytest.approx(0.5)
    confidence.withdrawn(sent + 5, next_at=None)
    assert confidence.at(clock.now) == confidence.value == 1.0
