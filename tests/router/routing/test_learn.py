"""How fast an engine is, from what it shows."""

from weakref import ref

import pytest

from router.core import Rates
from router.routing.learn import Pace, PrefillFactor


def seen(factor: PrefillFactor, times_slower: float, answers: int = 3, tokens: int = 4_000) -> float:
    for _ in range(answers):
        prefill_ms = factor.pace.prior.prefill_ms(tokens, tokens)
        factor.observe(tokens, tokens, ttft_ms=factor.pace.prior.c0_ms + times_slower * prefill_ms)
    return factor.value


def test_an_engine_nobody_described_is_as_slow_as_it_shows_itself() -> None:
    factor = PrefillFactor(Pace(None))
    assert seen(factor, 20.0) == pytest.approx(20.0)
    assert factor.rates.prefill_ms(100, 100) == pytest.approx(20 * Rates().prefill_ms(100, 100))


def test_what_an_operator_says_is_corrected_within_bounds() -> None:
    assert seen(PrefillFactor(Pace(Rates())), 20.0, answers=80) == pytest.approx(2.0, rel=0.01)
    assert seen(PrefillFactor(Pace(Rates())), 0.1, answers=80) == pytest.approx(0.5, rel=0.01)


def test_one_odd_answer_among_many_moves_it_little() -> None:
    factor = PrefillFactor(Pace(None))
    seen(factor, 1.0, answers=20)
    assert seen(factor, 11.0, answers=1) == pytest.approx(2.0)


@pytest.mark.parametrize(("tokens", "ttft_ms"), [(100, 500.0), (300, 10.0), (4_000, 0.0)])
def test_short_prefills_say_nothing(tokens: int, ttft_ms: float) -> None:
    factor = PrefillFactor(Pace(None))
    factor.observe(tokens, tokens, ttft_ms=ttft_ms)
    assert factor.value == 1.0


def test_engines_that_are_alike_go_by_one_pace_whatever_few_answers_show() -> None:
    """Else all requests that nobody holds would go to the one that seems a little faster."""
    pace = Pace(Rates())
    factors = [PrefillFactor(pace) for _ in range(4)]
    for factor, shows in zip(factors, (1.15, 1.2, 1.25, 1.3), strict=True):
        seen(factor, shows, answers=50)
    values = {factor.value for factor in factors}
    assert len(values) == 1
    assert values.pop() == pytest.approx(1.3, rel=0.02)  # what was seen last


def test_one_that_is_clearly_slower_than_those_like_it_goes_by_its_own() -> None:
    pace = Pace(Rates())
    well, throttled = PrefillFactor(pace), PrefillFactor(pace)
    for _ in range(60):
        seen(throttled, 1.6, answers=1)
        seen(well, 1.0, answers=5)
    assert throttled.value == pytest.approx(1.6, rel=0.02)
    assert well.value == pytest.approx(1.0, rel=0.1)
    assert throttled.rates.c1_ms == pytest.approx(1.6 * Rates().c1_ms, rel=0.02)


def test_one_that_is_no_longer_slower_goes_by_the_pace_of_all_again() -> None:
    pace = Pace(Rates())
    well, throttled = PrefillFactor(pace), PrefillFactor(pace)
    for shows in (1.6, 1.0):
        for _ in range(60):
            seen(throttled, shows, answers=1)
            seen(well, 1.0, answers=5)
    assert throttled.value == well.value


def test_an_engine_that_has_shown_nothing_goes_by_what_those_like_it_show() -> None:
    pace = Pace(None)
    shown, fresh = PrefillFactor(pace), PrefillFactor(pace)
    seen(shown, 20.0)
    assert fresh.value == shown.value == pytest.approx(20.0)
    assert PrefillFactor(pace).rates == shown.rates  # one that comes later too


def test_an_engine_that_is_gone_is_not_kept() -> None:
    pace = Pace(Rates())
    gone = PrefillFactor(pace)
    reference = ref(gone)
    del gone
    assert reference() is None
