"""Spare time is a share of the time that passes, kept for a second at most."""

from collections.abc import Callable

from router.serving.prompt.prepare import ModelPrompts, PromptLimits
from router.serving.prompt.spare import SpareTime

CHAT = "/v1/chat/completions"


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_what_has_been_spent_comes_back_with_time() -> None:
    clock = Clock()
    spare = SpareTime(0.05, clock=clock)
    assert [spare.spend(20_000) for _ in range(3)] == [True, True, False]
    clock.now += 0.21  # 10.5 ms more
    assert [spare.spend(20_000), spare.spend(1_000)] == [True, False]


def test_no_more_than_a_second_is_saved() -> None:
    clock = Clock()
    spare = SpareTime(0.05, clock=clock)
    clock.now += 3600
    assert not spare.spend(50_001)
    assert spare.spend(50_000)


def test_nothing_is_spent_of_nothing() -> None:
    assert not SpareTime(0.0, clock=Clock()).spend(1)


def test_short_unseen_text_is_exact_while_there_is_little_to_do(make_prompts: Callable[..., ModelPrompts]) -> None:
    prompts = make_prompts(limits=PromptLimits(spare_share=0.05), unseen_counts=False)
    exact = []
    for number in range(4_000):
        body = {"messages": [{"role": "user", "content": f"{number} is a number like any other, but for this: " * 4}]}
        prompt = prompts.prepare_now(CHAT, body)
        exact.append(prompt.exact)  # type: ignore[union-attr]
    assert exact[0]
    assert not all(exact)
