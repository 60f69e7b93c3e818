"""What needs neither a request nor a store: classes and prices of tokens, lengths of answers, headers, whose limits."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core import Caller
from router.serving.limits.book import LimitBook
from router.serving.limits.charges import cost_of
from router.serving.limits.headers import Room, anthropic_lines, duration, openai_lines, tightest
from router.serving.limits.lengths import OutputLengths
from router.serving.limits.meters import Meter
from tests.router.serving.limits.stand import CALLER, MONDAY, PARTS, Stand, limit, price

# -- what is charged


def test_tokens_count_by_the_weight_of_their_class_rounded_up() -> None:
    meter = Meter(limit("tokens", 1000, weights={"cache_read": 0.1, "output": 4}))
    assert meter.weighted({"uncached_input": 10, "cache_read": 30, "output": 2}) == 10 + 3 + 8
    assert meter.weighted({"cache_read": 31}) == 4
    assert meter.weighted({}) == 0
    assert Meter(limit("tokens", 1)).weighted({"uncached_input": 10, "cache_read": 30}) == 40


def test_money_is_exact() -> None:
    of_million = {"uncached_input": "0.2", "cache_read": "0.006", "output": "0.3"}
    counts = {"uncached_input": 1_000_001, "cache_read": 3, "output": 7}
    exactly = sum(Decimal(of_million[name]) * count for name, count in counts.items()) / 10**6
    assert Decimal(cost_of(counts, price("CNY", **of_million))) / PARTS == exactly


# -- lengths of answers


def test_a_length_is_learned_for_each_key_and_model() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.note("key_a", "m", 200)
    assert 200 <= lengths.expected("key_a", "m") <= 240
    assert lengths.expected("key_a", "other") == lengths.expected("key_b", "m") == 1024


def test_few_answers_exceed_what_was_learned() -> None:
    lengths = OutputLengths()
    for tokens in range(1, 1001):
        lengths.note("key_a", "m", tokens)
    assert 900 <= lengths.expected("key_a", "m") <= 1200


def test_what_was_long_ago_is_forgotten() -> None:
    lengths = OutputLengths()
    for tokens in [5000] * 300 + [50] * 3000:
        lengths.note("key_a", "m", tokens)
    assert 50 <= lengths.expected("key_a", "m") <= 60


def test_the_memory_of_lengths_is_bounded() -> None:
    lengths = OutputLengths(known=10)
    for number in range(1000):
        for _ in range(20):
            lengths.note(f"key_{number}", "m", 8)
    assert len(lengths._seen) == 10
    assert lengths.expected("key_999", "m") == 8
    assert lengths.expected("key_1", "m") == 1024


@given(st.lists(st.integers(0, 2**40), min_size=8, max_size=600))
def test_any_length_can_be_noted(tokens: list[int]) -> None:
    lengths = OutputLengths()
    for count in tokens:
        lengths.note("key_a", "m", count)
    assert lengths.expected("key_a", "m") >= 0
    assert len(lengths._seen["key_a", "m"]._counts) <= 97


# -- headers


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, b"0s"), (0.2, b"1s"), (59, b"59s"), (60, b"1m0s"), (360, b"6m0s"), (86399, b"23h59m59s"), (90000, b"25h0m0s")],
)
def test_a_duration_is_written_as_openai_does(seconds: float, text: bytes) -> None:
    assert duration(seconds) == text


def test_both_dialects_say_what_is_left() -> None:
    requests, tokens = Room(600, 599, int(MONDAY) + 60), Room(10_000, 0, int(MONDAY) + 3600)
    assert openai_lines(requests, tokens, MONDAY + 0.5).split(b"\r\n")[1:] == [
        b"x-ratelimit-limit-requests: 600", b"x-ratelimit-remaining-requests: 599",
        b"x-ratelimit-reset-requests: 1m0s", b"x-ratelimit-limit-tokens: 10000", b"x-ratelimit-remaining-tokens: 0",
        b"x-ratelimit-reset-tokens: 1h0m0s",
    ]  # fmt: skip
    assert anthropic_lines(requests, None, MONDAY).split(b"\r\n")[1:] == [
        b"anthropic-ratelimit-requests-limit: 600", b"anthropic-ratelimit-requests-remaining: 599",
        b"anthropic-ratelimit-requests-reset: 2026-09-28T00:01:00Z",
    ]  # fmt: skip
    assert openai_lines(None, None, MONDAY) == b""


async def test_the_limit_that_leaves_least_is_shown() -> None:
    stand = Stand(limit("requests", 5, "1m"), limit("requests", 3, "1d", owner="ten_a"))
    await stand.begin()
    assert tightest(list(stand.book), stand.now) == Room(3, 2, int(MONDAY) + 86400)
    assert tightest(list(stand.book), MONDAY + 86400) == Room(3, 3, int(MONDAY) + 86400)  # over, and nobody came since
    assert tightest([], MONDAY) is None


# -- whose limits


def test_all_limits_of_a_caller_apply_and_those_of_others_do_not() -> None:
    book = LimitBook()
    limits = [limit("requests", 1, owner=owner) for owner in ("key_a", "proj_a", "ten_a", "key_b", "ten_b")]
    book.learn(limits, book.new_meters(limits))
    found = book.of(CALLER)
    assert found is not None
    assert [meter.limit.owner for meter in found.requests] == ["key_a", "proj_a", "ten_a"]
    assert (found.parallel, found.tokens, found.money) == ((), (), ())
    assert book.of(Caller()) is None
    assert book.of(Caller("ten_c", "proj_c", "key_c")) is None
    by_header = book.of(Caller("ten_b"))
    assert by_header is not None
    assert [meter.limit.owner for meter in by_header.requests] == ["ten_b"]


async def test_a_limit_that_changes_forgets_nothing_and_one_that_is_archived_is_gone() -> None:
    stand = Stand(limit("requests", 1))
    await stand.begin()
    with pytest.raises(Exception, match="You have reached the limit of 1 requests per minute of this API key"):
        await stand.begin()
    stand.learn(limit("requests", 2))
    await stand.begin()
    assert stand.used() == [2]
    stand.learn(limit("requests", 2, is_archived=True))
    assert stand.limiter.hold(CALLER) is None


def test_a_limit_that_cannot_be_read_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    stand = Stand(limit("requests", 1, "soon"), limit("requests", 1, number=2))
    assert [meter.id for meter in stand.book] == ["lim_requests_key_a2"]
    assert "limit lim_requests_key_a is not enforced: its window must be such as" in caplog.text
