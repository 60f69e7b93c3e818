"""What a failure is, and what may be done about it."""

from __future__ import annotations

import random

import pytest

from router.errors import BadRequest, EngineProtocolError, EngineTimeout, EngineUnreachable, NoEngine, WarmrouteError
from router.serving.failover import SAFE, FailoverRule, Fault, RetryBudget, Tries, fault_of
from router.serving.openai_errors import EngineFailure, EngineRefusal


def refusal(status: int) -> EngineRefusal:
    return EngineRefusal(status, "no", type="x", param=None, code=None)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (EngineUnreachable("x"), Fault.REFUSED),
        (EngineUnreachable("x", code="engine_no_answer"), Fault.RESET),
        (EngineFailure(429), Fault.BUSY),
        (EngineFailure(503), Fault.BUSY),
        (EngineFailure(401), Fault.UNABLE),
        (EngineFailure(403), Fault.UNABLE),
        (refusal(404), Fault.UNABLE),
        (EngineFailure(500), Fault.FAILED),
        (EngineFailure(500, died=True), Fault.DIED),
        (EngineFailure(502), Fault.FAILED),
        (EngineTimeout("x", code="ttft_timeout"), Fault.SILENT),
        (EngineTimeout("x", code="total_timeout"), None),
        (EngineTimeout("x", code="stall_timeout"), None),
        (refusal(400), None),
        (EngineProtocolError("x"), None),
        (BadRequest("x"), None),
        (NoEngine("x"), None),
    ],
)
def test_faults(error: WarmrouteError, fault: Fault | None) -> None:
    assert fault_of(error) is fault


def tries(budget: RetryBudget | None = None, **rule: object) -> Tries:
    return Tries(FailoverRule(**rule), budget or RetryBudget(0.1), dice=random.Random(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", list(Fault))
def test_by_default_nothing_is_tried_again_that_an_engine_may_still_be_doing(fault: Fault) -> None:
    assert tries().again(fault, "a", age_s=0.0) is (fault in SAFE)


def test_attempts_and_time_are_bounded() -> None:
    some = tries(attempts=3, within_s=10.0)
    assert some.again(Fault.BUSY, "a", age_s=9.9)
    assert some.left == 1
    assert some.again(Fault.BUSY, "b", age_s=10.0)
    assert some.failed == ("a", "b")
    assert not some.again(Fault.BUSY, "c", age_s=10.0), "the third attempt was the last"
    assert not tries().again(Fault.BUSY, "a", age_s=30.1)


def test_a_tenth_of_the_requests_may_be_tried_again_and_ten_at_once() -> None:
    budget = RetryBudget(0.1)
    assert sum(tries(budget).again(Fault.BUSY, "a", age_s=0.0) for _ in range(100)) == 10
    for _ in range(41):
        budget.requests += 1
    assert sum(tries(budget).again(Fault.BUSY, "a", age_s=0.0) for _ in range(100)) == 4
    assert tries(budget).again(Fault.REFUSED, "a", age_s=0.0), "what no engine has work with costs nothing"
    for _ in range(10_000):
        budget.requests += 1
    assert sum(tries(budget).again(Fault.DIED, "a", age_s=0.0) for _ in range(100)) == 10


def test_the_same_engine_is_asked_again_only_by_who_wants_to_wait_and_not_before_it_said_so() -> None:
    waiting = tries(attempts=4, wait_s=8.0, within_s=20.0)
    assert waiting.again(Fault.BUSY, "a", age_s=0.0)
    assert waiting.wait_s(Fault.BUSY, 2.0, age_s=0.0) == 2.0
    assert waiting.wait_s(Fault.BUSY, 8.1, age_s=0.0) is None, "longer than anybody waits"
    assert waiting.wait_s(Fault.BUSY, 2.0, age_s=19.0) is None, "too late"
    assert waiting.wait_s(Fault.SILENT, None, age_s=0.0) is None
    assert waiting.wait_s(Fault.REFUSED, None, age_s=0.0) is None
    for times in range(3):
        wait_s = waiting.wait_s(Fault.BUSY, None, age_s=0.0)
        assert wait_s is not None
        assert 0.5 * 2**times <= wait_s <= 1.0 * 2**times
        waiting.again(Fault.BUSY, "a", age_s=0.0)
    assert tries().wait_s(Fault.BUSY, None, age_s=0.0) is None, "nobody, by default"
