from __future__ import annotations

from decimal import Decimal
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert, update

from router.core import Usage
from router.serving.pricing import (
    FREE,
    PARTS,
    Hits,
    Price,
    PriceBook,
    Prices,
    Tokens,
    UnknownCached,
    bill,
    parts_per_token,
)  # fmt: skip
from router.serving.usage import read_usage
from router.store.database import Database
from router.store.schema import TOKEN_CLASSES, changes, prices


def price(per_million: dict[str, str], **fields: Any) -> Price:
    given = {"id": "p", "model": "*", "tenant": None, "currency": "USD", "valid_from": 0.0} | fields
    return Price(parts=parts_per_token(per_million), **given)


OPENAI = {"uncached_input": "1.25", "cache_read": "0.125", "output": "10"}
OPENAI_56 = OPENAI | {"cache_write": "1.5625"}
ANTHROPIC = {
    "uncached_input": "3", "cache_read": "0.30", "cache_write_5m": "3.75", "cache_write_1h": "6", "output": "15",
}  # fmt: skip
GEMINI = {"uncached_input": "0.30", "cache_read": "0.03", "media_input": "1.00", "output": "2.50"}
DEEPSEEK = {"uncached_input": "0.30", "cache_read": "0.006", "output": "0.42"}
OWN = {"uncached_input": "0.20", "cache_read": "0.02", "output": "0.60"}
KNOWN = Hits(delivered_known=True, predicted=0, blind=0)


@pytest.mark.parametrize(
    ("per_million", "usage", "cost", "without_cache"),
    [
        pytest.param(
            OPENAI,
            {
                "prompt_tokens": 2006, "completion_tokens": 300, "total_tokens": 2306,
                "prompt_tokens_details": {"cached_tokens": 1920, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 128, "audio_tokens": 0},
            },
            "0.0033475", "0.0055075", id="OpenAI: 86 at 1.25, 1,920 at 0.125, 300 at 10",
        ),
        pytest.param(
            OPENAI_56,
            {
                "prompt_tokens": 2600, "completion_tokens": 100,
                "prompt_tokens_details": {"cached_tokens": 2000, "cache_write_tokens": 400},
            },
            "0.002125", "0.00425", id="OpenAI 5.6: 200 at 1.25, 2,000 at 0.125, 400 written at 1.5625, 100 at 10",
        ),
        pytest.param(
            ANTHROPIC,
            {
                "input_tokens": 50, "output_tokens": 200, "cache_read_input_tokens": 10_000,
                "cache_creation_input_tokens": 3_000,
                "cache_creation": {"ephemeral_5m_input_tokens": 1_000, "ephemeral_1h_input_tokens": 2_000},
            },
            "0.0219", "0.04215", id="Anthropic: 50 at 3, 10,000 at 0.30, 1,000 at 3.75, 2,000 at 6, 200 at 15",
        ),
        pytest.param(
            GEMINI,
            {
                "promptTokenCount": 5_000, "cachedContentTokenCount": 4_000, "candidatesTokenCount": 100,
                "thoughtsTokenCount": 400, "totalTokenCount": 5_500,
                "promptTokensDetails": [
                    {"modality": "TEXT", "tokenCount": 4_400}, {"modality": "AUDIO", "tokenCount": 600},
                ],
            },
            "0.00209", "0.00317", id="Gemini: 400 at 0.30, 4,000 at 0.03, 600 heard at 1, 500 at 2.50",
        ),
        pytest.param(
            DEEPSEEK,
            {
                "prompt_tokens": 1_000, "completion_tokens": 50,
                "prompt_cache_hit_tokens": 896, "prompt_cache_miss_tokens": 104,
            },
            "0.000057576", "0.000321", id="DeepSeek: 104 at 0.30, 896 at 0.006, 50 at 0.42",
        ),
        pytest.param(
            OWN,
            {
                "prompt_tokens": 300, "total_tokens": 306, "completion_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 288, "created_cache_tokens": 0},
            },
            "0.00001176", "0.0000636", id="vLLM: 12 at 0.20, 288 at 0.02, 6 at 0.60",
        ),
        pytest.param(
            OWN,
            {
                "prompt_tokens": 300, "total_tokens": 306, "completion_tokens": 6, "reasoning_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 288}, "completion_tokens_details": None,
            },
            "0.00001176", "0.0000636", id="SGLang: the same, four of the six being thoughts",
        ),
    ],
)  # fmt: skip
def test_what_providers_say_is_billed_to_the_last_digit(
    per_million: dict[str, str], usage: dict[str, Any], cost: str, without_cache: str
) -> None:
    read = read_usage(usage)
    assert read is not None
    tokens = Tokens.of(read)
    billed = bill(price(per_million), tokens, KNOWN)
    assert (billed.cost, billed.without_cache) == (Decimal(cost), Decimal(without_cache))
    assert tokens.input == read.input_tokens
    assert sum(tokens.counts) == read.input_tokens + read.output_tokens


COUNTS = st.integers(0, 100) | st.just(2**31 - 1)


@given(
    usage=st.fixed_dictionaries({}, optional={name: COUNTS for name in (
        "prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cache_read_input_tokens",
        "cache_creation_input_tokens", "prompt_cache_hit_tokens", "reasoning_tokens", "promptTokenCount",
        "candidatesTokenCount", "thoughtsTokenCount", "cachedContentTokenCount", "toolUsePromptTokenCount",
    )} | {
        name: st.dictionaries(st.sampled_from([
            "cached_tokens", "cache_write_tokens", "audio_tokens", "image_tokens", "reasoning_tokens",
            "ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens",
        ]), COUNTS) for name in (
            "prompt_tokens_details", "completion_tokens_details", "input_tokens_details", "output_tokens_details",
            "cache_creation",
        )
    })
)  # fmt: skip
def test_whatever_an_engine_says_no_class_is_negative_and_no_token_in_two(usage: dict[str, Any]) -> None:
    read = read_usage(usage)
    if read is not None:
        tokens = Tokens.of(read)
        assert min(tokens.counts) >= 0
        assert sum(tokens.counts) == read.input_tokens + read.output_tokens


def test_a_count_below_zero_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="less than no tokens"):
        Tokens(uncached_input=-1)
    with pytest.raises(ValueError, match="less than no tokens"):
        Tokens.of(Usage(10, 0, 11))  # which `read_usage` never makes


def test_classes_without_a_price_cost_what_their_base_does() -> None:
    parts = dict(
        zip(TOKEN_CLASSES, parts_per_token({"uncached_input": "2", "cache_write": "3", "output": "5"}), strict=True)
    )
    assert {name: count // 10**6 for name, count in parts.items()} == {
        "uncached_input": 2, "cache_read": 2, "cache_write_5m": 3, "cache_write_1h": 3, "cache_write": 3, "output": 5,
        "reasoning": 5, "media_input": 2, "media_output": 5,
    }  # fmt: skip
    assert parts_per_token({}) == (0,) * 9
    assert parts_per_token({"cache_read": "0"})[TOKEN_CLASSES.index("cache_read")] == 0


@pytest.mark.parametrize("text", ["-1", "0.0000001", "NaN", "Infinity", "", "1,5", "a"])
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(ValueError, match="no price"):
        parts_per_token({"output": text})
    with pytest.raises(ValueError, match="no class of tokens: tokens"):
        parts_per_token({"tokens": "1"})


def test_which_price_holds() -> None:
    ours = price(OWN, id="ours")
    newer = price(OWN, id="newer", valid_from=100.0)
    sale = price(OWN, id="sale", valid_from=150.0, valid_to=160.0)
    theirs = price(OWN, id="theirs", tenant="ten_1", valid_from=50.0)
    big = price(OWN, id="big", model="big")
    book = PriceBook([newer, sale, ours, theirs, big])

    def at(when: float, *, tenant: str = "", model: str = "small") -> str | None:
        found = book.price_at(model, tenant, when)
        return found.id if found is not None else None

    assert [at(when) for when in (-1, 0, 99, 100, 150, 159, 160)] == [
        None, "ours", "ours", "newer", "sale", "sale", "newer",
    ]  # fmt: skip
    assert at(200, model="big") == "big"
    assert [at(when, tenant="ten_1") for when in (49, 50)] == ["ours", "theirs"]
    assert at(200, tenant="ten_1", model="big") == "theirs"
    assert at(200, tenant="ten_2", model="big") == "big"


def test_what_was_cached_is_not_known() -> None:
    tokens = Tokens(uncached_input=100, output=1)
    untold = Hits(delivered_known=False, predicted=96, blind=96)
    full = bill(price(OWN), tokens, untold)
    predicted = bill(price(OWN), tokens, untold, "predicted")
    assert (full.cost, predicted.cost) == (Decimal("0.0000206"), Decimal("0.00000332"))
    assert full.without_cache == predicted.without_cache == full.cost
    assert bill(price(OWN), tokens, KNOWN, "predicted").cost == full.cost
    assert bill(price(OWN), tokens, untold._replace(predicted=1000), "predicted").cost == Decimal("0.0000026")
    assert bill(None, tokens, KNOWN) is FREE


@pytest.mark.parametrize(
    ("hits", "rule", "read"),
    [
        pytest.param(Hits(True, 60, 60), "full_price", 60, id="nowhere else to go, or as much everywhere"),
        pytest.param(Hits(True, 60, 20), "full_price", 20, id="a third of the places held all of it"),
        pytest.param(Hits(True, 64, 20), "full_price", 16, id="the engine read four fewer than predicted"),
        pytest.param(Hits(True, 200, 20), "full_price", 0, id="the engine read far fewer than predicted"),
        pytest.param(Hits(True, 60, 75), "full_price", 75, id="the load was put before a longer hit"),
        pytest.param(Hits(True, 0, 90), "full_price", 100, id="no more than the prompt"),
    ],
)
def test_what_a_policy_blind_to_caches_could_expect(hits: Hits, rule: UnknownCached, read: int) -> None:
    tokens, ours = Tokens(uncached_input=40, cache_read=60, output=10), price(OWN)
    assert bill(ours, tokens, hits, rule).cache_blind == ours.cost(
        Tokens(uncached_input=100 - read, cache_read=read, output=10)
    )


def test_blind_to_caches_where_the_engine_does_not_tell() -> None:
    tokens, ours, untold = Tokens(uncached_input=100, output=1), price(OWN), Hits(False, 60, 20)
    assert bill(ours, tokens, untold).cache_blind == ours.cost(tokens), "billed as if nothing were cached anywhere"
    predicted = bill(ours, tokens, untold, "predicted")
    assert predicted.cost == ours.cost(tokens.as_if_read(60))
    assert predicted.cache_blind == ours.cost(tokens.as_if_read(20))


def test_costs_are_exact_where_floats_are_not() -> None:
    cost = price({"uncached_input": "0.006", "output": "0.1"}).cost(Tokens(uncached_input=2**31 - 1, output=3))
    assert cost * PARTS == (2**31 - 1) * 6_000 + 3 * 100_000


async def test_prices_are_read_as_they_change(database: Database) -> None:
    read = Prices()
    assert not read.known

    async def write(revision: int, statement: Any) -> None:
        async with database.write() as connection:
            await connection.execute(update(changes).values(revision=revision))
            await connection.execute(statement)
        await read.refresh(database)

    row = {
        "id": "p1", "model": "m", "tenant": None, "currency": "USD", "per_million": OWN, "valid_from": 10.0,
        "valid_to": None, "created_at": 1.0, "revision": 1,
    }  # fmt: skip
    await write(1, insert(prices).values(row))
    assert read.known
    first = read.book.price_at("m", "", 20.0)
    assert first == price(OWN, id="p1", model="m", valid_from=10.0, valid_to=inf)
    await write(2, update(prices).values(valid_to=15.0, revision=2))
    await write(3, insert(prices).values(row | {"id": "p2", "per_million": {"output": "x"}, "revision": 3}))
    assert read.book.price_at("m", "", 20.0) is None
    assert read.book.price_at("m", "", 12.0) is not None
    assert read.strange == {"p2"}
