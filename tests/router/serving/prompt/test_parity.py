from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from router.errors import EngineProtocolError
from router.serving.prompt import ModelPrompts, check
from router.serving.prompt.dialect import DIALECTS, Dialect
from router.serving.prompt.parity import PROBES, first_difference
from router.serving.prompt.reason import Unreadable

CHAT = "/v1/chat/completions"
MakePrompts = Callable[..., ModelPrompts]
Tokenize = Callable[[str, Mapping[str, Any]], Awaitable[list[int]]]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def engine(
    model: ModelPrompts, dialect: Dialect, change: Callable[[list[int], str], list[int]] | None = None
) -> Tokenize:
    """An engine with the demo tokenizer that reads bodies in a dialect."""

    async def tokenize(path: str, body: Mapping[str, Any]) -> list[int]:
        try:
            ids = model.token_ids(path, body, dialect)
        except Unreadable as unreadable:
            raise EngineProtocolError(unreadable.reason) from unreadable
        return change(ids, json.dumps(body)) if change is not None else ids

    return tokenize


async def test_an_engine_that_reads_as_we_do(make_prompts: MakePrompts, caplog: pytest.LogCaptureFixture) -> None:
    prompts = make_prompts()
    with caplog.at_level(logging.INFO):
        found = await check(prompts, engine(make_prompts(), DIALECTS[0]))
        await check(prompts, engine(make_prompts(), DIALECTS[0]))
    assert (found.state, found.compared, found.dialect) == ("EXACT", len(PROBES), "vllm")
    assert prompts.mode == "exact"
    assert len(caplog.records) == 1, "one line a cause"


@pytest.mark.parametrize("spoken", DIALECTS, ids=lambda dialect: dialect.name)
async def test_the_engine_s_dialect_is_found(make_prompts: MakePrompts, spoken: Dialect) -> None:
    prompts = make_prompts()
    found = await check(prompts, engine(make_prompts(), spoken))
    assert (found.state, found.dialect) == ("EXACT", spoken.name)
    assert prompts.dialect is not None
    assert prompts.dialect.name == spoken.name


async def test_a_difference_is_named_and_the_engine_is_asked_from_then_on(
    make_prompts: MakePrompts, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts()

    def shifted_tools(ids: list[int], body: str) -> list[int]:
        return [*ids[:5], 1, *ids[5:]] if "tools" in body else ids

    tokenize = engine(make_prompts(), DIALECTS[0], shifted_tools)
    prompts.engine_tokenize = tokenize
    found = await check(prompts, tokenize)
    assert (found.state, found.probe, found.position) == ("DEGRADED", "tools", 5)
    assert "Oslo" not in caplog.text, "no text of a prompt is logged"
    assert prompts.mode == "engine"
    assert (await prompts.prepare(CHAT, HELLO)).source == "engine"
    healed = await check(prompts, engine(make_prompts(), DIALECTS[0]))
    assert (healed.state, prompts.mode) == ("EXACT", "exact")


async def test_without_an_engine_to_ask_keys_become_approximate(make_prompts: MakePrompts) -> None:
    prompts = make_prompts()
    await check(prompts, engine(make_prompts(), DIALECTS[0], lambda ids, _: [0, *ids]))
    assert prompts.mode == "approximate"


async def test_an_engine_that_cannot_tokenize_leaves_things_unchecked(make_prompts: MakePrompts) -> None:
    prompts = make_prompts()

    async def refuse(path: str, body: Mapping[str, Any]) -> list[int]:
        raise EngineProtocolError("404")

    found = await check(prompts, refuse)
    assert found.state == "UNCHECKED"
    assert "EngineProtocolError" in found.reason
    assert prompts.mode == "exact"


async def test_a_model_without_tokenizer_asks_the_engine(make_prompts: MakePrompts) -> None:
    prompts = make_prompts(tokenizer=None)
    tokenize = engine(make_prompts(), DIALECTS[0])
    prompts.engine_tokenize = tokenize
    found = await check(prompts, tokenize)
    assert (found.state, prompts.mode) == ("DEGRADED", "engine")


def test_three_differing_counts_in_a_row_raise_the_alarm_once(
    prompts: ModelPrompts, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompts.prepare_now(CHAT, HELLO)
    assert not isinstance(prompt, Awaitable)
    for theirs in (prompt.tokens + 1, prompt.tokens + 1, prompt.tokens, prompt.tokens + 1, prompt.tokens + 1):
        prompts.observe(prompt, theirs)
    assert prompts.parity.state == "UNCHECKED"
    for _ in range(10):
        prompts.observe(prompt, prompt.tokens + 1)
    assert prompts.parity.state == "DEGRADED"
    assert prompts.mode == "approximate"
    assert len(caplog.records) == 1


def test_batches_and_estimates_prove_nothing(prompts: ModelPrompts) -> None:
    batch = prompts.prepare_now("/v1/completions", {"prompt": ["a", "b"]})
    assert not isinstance(batch, Awaitable)
    for _ in range(10):
        prompts.observe(batch, 2 * batch.tokens)
    assert prompts.parity.state == "UNCHECKED"


def test_where_two_lists_of_ids_part() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0
