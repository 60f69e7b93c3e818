"""Spare time is a share of the time that passes while the loop has little to do, kept for a second at most."""

from collections.abc import Callable
from math import inf

import pytest

from router.serving.prompt.prepare import ModelPrompts, PromptLimits
from router.serving.prompt.spare import SpareTime

CHAT = "/v1/chat/completions"


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def spare_time(clock: Clock, share: float = 0.05) -> tuple[SpareTime, Clock]:
    """And what the thread that asks has computed."""
    computed = Clock()
    spare = SpareTime(share, clock=clock, computed=computed)
    clock.now += 0.125
    assert not spare.spend(inf)  # from now on it is known how busy it is
    return spare, computed


def test_what_has_been_spent_comes_back_with_time() -> None:
    clock = Clock()
    spare, _ = spare_time(clock)
    assert [spare.spend(20_000) for _ in range(3)] == [True, True, False]
    clock.now += 0.21  # 10.5 ms more
    assert [spare.spend(20_000), spare.spend(1_000)] == [True, False]


@pytest.mark.parametrize(
    ("computed_s", "back_us"),
    [(0.0, 10_000), (0.05, 5_000), (0.1, 0), (0.2, 0)],
    ids=["idle", "quarter", "half", "all"],
)
def test_the_busier_the_loop_the_less_comes_back(computed_s: float, back_us: float) -> None:
    clock = Clock()
    spare, computed = spare_time(clock)
    assert spare.spend(50_000)
    clock.now += 0.2
    computed.now += computed_s
    assert not spare.spend(back_us + 1)
    assert spare.spend(back_us - 1)


def test_no_more_than_a_second_is_saved() -> None:
    clock = Clock()
    spare, _ = spare_time(clock)
    clock.now += 3600
    assert not spare.spend(50_001)
    assert spare.spend(50_000)


def test_nothing_is_spent_of_nothing() -> None:
    spare, _ = spare_time(Clock(), share=0.0)
    assert not spare.spend(1)


def test_short_unseen_text_is_exact_while_there_is_little_to_do(make_prompts: Callable[..., ModelPrompts]) -> None:
    prompts = make_prompts(limits=PromptLimits(spare_share=0.05), unseen_counts=False)
    exact = []
    for number in range(4_000):
        body = {"messages": [{"role": "user", "content": f"{number} is a number like any other, but for this: " * 4}]}
        prompt = prompts.prepare_now(CHAT, body)
        exact.append(prompt.exact)  # type: ignore[union-attr]
    assert exact[0]
    assert not all(exact)
