"""How fast an engine is, from what it shows."""

import pytest

from router.core import Rates
from router.routing.learn import PrefillFactor


def seen(factor: PrefillFactor, times_slower: float, answers: int = 3, tokens: int = 4_000) -> float:
    for _ in range(answers):
        prefill_ms = factor.prior.prefill_ms(tokens, tokens)
        factor.observe(tokens, tokens, ttft_ms=factor.prior.c0_ms + times_slower * prefill_ms)
    return factor.value


def test_an_engine_nobody_described_is_as_slow_as_it_shows_itself() -> None:
    factor = PrefillFactor(None)
    assert seen(factor, 20.0) == pytest.approx(20.0)
    assert factor.rates.prefill_ms(100, 100) == pytest.approx(20 * Rates().prefill_ms(100, 100))


def test_what_an_operator_says_is_corrected_within_bounds() -> None:
    assert seen(PrefillFactor(Rates()), 20.0, answers=80) == pytest.approx(2.0, rel=0.01)
    assert seen(PrefillFactor(Rates()), 0.1, answers=80) == pytest.approx(0.5, rel=0.01)


def test_one_odd_answer_among_many_moves_it_little() -> None:
    factor = PrefillFactor(None)
    seen(factor, 1.0, answers=20)
    assert seen(factor, 11.0, answers=1) == pytest.approx(2.0)


@pytest.mark.parametrize(("tokens", "ttft_ms"), [(100, 500.0), (300, 10.0), (4_000, 0.0)])
def test_short_prefills_say_nothing(tokens: int, ttft_ms: float) -> None:
    factor = PrefillFactor(None)
    factor.observe(tokens, tokens, ttft_ms=ttft_ms)
    assert factor.value == 1.0
