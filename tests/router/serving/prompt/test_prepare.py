from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
import threading
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.core import Prompt
from router.errors import EngineUnreachable
from router.routing.blocks import chain, root_key
from router.serving.beginnings import Beginnings
from router.serving.prompt import ModelPrompts, Parity, PromptLimits, load_prompts
from router.serving.prompt.dialect import DIALECTS
from router.serving.prompt.encode import let_the_loop_go_first
from router.serving.prompt.pieces import Beginning
from router.serving.prompt.tokenizer import HuggingFaceTokenizer, Ids

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
PROSE = "The engineer reads the report because the assistant explains the price of bread to the customer. "

MakePrompts = Callable[..., ModelPrompts]


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    """A system text, then user and assistant in turns."""
    roles = ["system", *("user", "assistant") * len(texts)]
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)], **fields}


def now(prompts: ModelPrompts, path: str, body: Mapping[str, Any], **whose: Any) -> Prompt:
    found = prompts.prepare_now(path, body, **whose)
    assert isinstance(found, Prompt), "this should not have needed the thread"
    return found


def expected_keys(prompts: ModelPrompts, path: str, body: Mapping[str, Any], size: int = 16, **root: Any) -> Any:
    dialect = prompts.dialect
    assert dialect is not None
    key = root_key(b"secret", "m-chat", root.get("lora"), root.get("salt"))
    return chain(key, prompts.token_ids(path, body, dialect), size)


# --- what is read -----------------------------------------------------------------------------------------------------


def test_keys_are_those_of_the_templated_prompt(prompts: ModelPrompts, tokenizer: HuggingFaceTokenizer) -> None:
    body = chat("You help.", "Where is the report, and who reads it today?")
    prompt = now(prompts, CHAT, body)
    text = "<|turn|>system\nYou help.<|end|>\n<|turn|>user\nWhere is the report, and who reads it today?<|end|>\n"
    ids = tokenizer.encode([text + "<|turn|>assistant\n"])[0]
    assert prompt.exact
    assert prompt.source == "exact"
    assert prompt.tokens == prompt.known_tokens == len(ids)
    assert prompt.keys == {16: chain(root_key(b"secret", "m-chat", None, None), ids, 16)}
    assert prompt.keys[16].typecode == "Q"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([1, 2, 3] * 20, ""),
        ([[1, 2, 3] * 20, [3]], "batch: the first of 2 prompts"),
        (PROSE * 3, ""),
        ([PROSE * 3, "b"], "batch: the first of 2 prompts"),
        ([[1, 2, 3] * 20], ""),
    ],
)
def test_completion_prompts(prompts: ModelPrompts, prompt: Any, reason: str) -> None:
    found = now(prompts, COMPLETION, {"prompt": prompt, "echo": True})
    assert (found.source, found.reason) == ("exact", reason)
    assert found.keys[16] == expected_keys(prompts, COMPLETION, {"prompt": prompt})
    assert len(found.keys[16]) >= 3


def test_ids_are_ids_whatever_the_route(prompts: ModelPrompts) -> None:
    ids = list(range(5_000))
    for path in (CHAT, COMPLETION, "/generate"):
        found = now(prompts, path, {"input_ids": ids, "messages": []})
        assert found.keys[16] == chain(root_key(b"secret", "m-chat", None, None), array("I", ids), 16)


def test_blocks_are_keyed_by_their_chain_not_by_their_content(make_prompts: MakePrompts) -> None:
    prompts = make_prompts(sizes=(4,))
    first = now(prompts, COMPLETION, {"prompt": [1, 2, 3, 4]}).keys[4]
    second = now(prompts, COMPLETION, {"prompt": [5, 6, 7, 8]}).keys[4]
    both = now(prompts, COMPLETION, {"prompt": [5, 6, 7, 8, 1, 2, 3, 4]}).keys[4]
    assert both[0] == second[0]
    assert both[1] != first[0]


@pytest.mark.parametrize("prompt", ["", [], None, {}, 7, [1, "a"], [-1], [2**40], [[]], [1.5], [None]])
def test_odd_prompts_have_no_keys_and_a_reason(prompts: ModelPrompts, prompt: Any) -> None:
    found = now(prompts, COMPLETION, {"prompt": prompt})
    assert (found.source, found.keys, found.tokens) == ("none", {}, 1)
    assert found.reason


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/audio/speech", ""])
def test_routes_that_are_not_read(prompts: ModelPrompts, path: str) -> None:
    assert now(prompts, path, {"input": [1, 2, 3], "messages": []}).source == "none"


RENDERED_DIFFERENTLY: list[dict[str, Any]] = [
    {},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"documents": [{"text": "d"}]},
    {"add_generation_prompt": False},
    {"reasoning_effort": "high"},
]


def test_every_field_that_is_rendered_changes_the_keys(make_prompts: MakePrompts) -> None:
    prompts = make_prompts(sizes=(1,))
    found = [tuple(now(prompts, CHAT, chat("s", "hello", **fields)).keys[1]) for fields in RENDERED_DIFFERENTLY]
    assert len(set(found[:-1])) == len(found) - 1
    assert found[-1] == found[1], "the effort reaches the demo template as enable_thinking"
    open_end = chat("s", "hello", "Sure", add_generation_prompt=False, continue_final_message=True)
    assert tuple(now(prompts, CHAT, open_end).keys[1]) not in found


GOES_ON = {"add_generation_prompt": False, "continue_final_message": True}
TRIMS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim if m.role == 'assistant' else m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_message_goes_on_where_the_template_leaves_its_text_alone(make_prompts: MakePrompts, tmp_path: Path) -> None:
    trims = tmp_path / "trims.jinja"
    trims.write_text(TRIMS)
    ours, trimming = make_prompts(), make_prompts(chat_template=trims)
    asked = chat("s", "hello")
    for said, survives in (("Sure, it", True), ("Sure,\n", False), ("\nSure", False)):
        going_on = chat("s", "hello", said, **GOES_ON)
        assert ours.is_continued(asked, going_on, said)
        assert trimming.is_continued(asked, going_on, said) is survives
        assert not ours.is_continued(asked, going_on, said + "more")


def test_sglang_puts_the_text_behind_the_prompt(make_prompts: MakePrompts) -> None:
    assert make_prompts(dialect="sglang").is_continued(chat("s", "hello"), chat("s", "hello", " so", **GOES_ON), " so")


def test_a_message_in_a_chat_that_is_not_read_here_does_not_go_on(prompts: ModelPrompts) -> None:
    asked, going_on = chat("s", "hello"), chat("s", "hello", "Sure", **GOES_ON)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert not prompts.is_continued({"messages": [image]}, {"messages": [image, *going_on["messages"]]}, "Sure")
    prompts.settle(Parity("DEGRADED", "other tokens"))
    assert not prompts.is_continued(asked, going_on, "Sure")


def test_a_client_s_own_template_is_never_rendered(prompts: ModelPrompts) -> None:
    found = now(prompts, CHAT, chat("s", "hello", chat_template="{{ raise_exception('rendered') }}"))
    assert (found.source, found.keys) == ("none", {})
    assert "template" in found.reason


def test_fifty_equal_requests_have_one_key(prompts: ModelPrompts) -> None:
    tools = [{"type": "function", "function": {"name": n, "parameters": {"b": 1, "a": 2}}} for n in ("search", "alpha")]
    found = {bytes(now(prompts, CHAT, chat("s", "hello", tools=tools)).keys[16]) for _ in range(50)}
    assert len(found) == 1


def test_half_an_emoji_is_read_as_the_replacement_character(prompts: ModelPrompts) -> None:
    body = json.loads(
        '{"messages": [{"role": "user", "content": "cut \\ud83d here \\u4f60 \\ud83c\\udf0d and on it goes"}]}'
    )
    replaced = {"messages": [{"role": "user", "content": "cut \ufffd here 你 🌍 and on it goes"}]}
    assert now(prompts, CHAT, body).keys == now(prompts, CHAT, replaced).keys
    assert now(prompts, COMPLETION, {"prompt": "\ud83d"}).source == "exact"


def test_text_is_not_normalised(make_prompts: MakePrompts) -> None:
    prompts = make_prompts(sizes=(1,))
    composed, decomposed = (now(prompts, CHAT, chat("s", text)).keys[1] for text in ("caf\u00e9", "cafe\u0301"))
    assert composed != decomposed
    assert now(prompts, CHAT, chat("s", "nul \x00 and \x1f 👨‍👩‍👧 مرحبا")).exact


def test_images_have_no_keys(prompts: ModelPrompts) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    found = now(prompts, CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": PROSE}, image]}]})
    assert found.source == "none"
    assert found.tokens > len(PROSE) // 8


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "tool"]) | JSON, "content": JSON, "tool_calls": JSON}
)
FIELDS = (
    "messages prompt input_ids tools tool_choice documents chat_template_kwargs reasoning_effort continue_final_message"
)
BODY = st.fixed_dictionaries(
    {}, optional={name: JSON for name in FIELDS.split()} | {"messages": JSON | st.lists(MESSAGE, max_size=4)}
)


@given(
    body=BODY,
    path=st.sampled_from([CHAT, COMPLETION, "/generate"]),
    dialect=st.sampled_from(["vllm", "sglang", "plain"]),
)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_a_client_sends_raises(executor: Executor, body: dict[str, Any], path: str, dialect: str) -> None:
    for tokenizer in ("demo", None):
        if (tokenizer, dialect) not in PROMPTS:
            PROMPTS[tokenizer, dialect] = make_for(tokenizer, dialect, executor)
        assert isinstance(PROMPTS[tokenizer, dialect].prepare_now(path, body), Prompt)


PROMPTS: dict[tuple[str | None, str], ModelPrompts] = {}


def make_for(tokenizer: str | None, dialect: str, executor: Executor) -> ModelPrompts:
    return load_prompts(
        "m", tokenizer=tokenizer, secret=b"s", block_sizes=lambda: (16,), executor=executor, dialect=dialect
    )


# --- the memo ---------------------------------------------------------------------------------------------------------


@given(
    texts=st.lists(st.text(max_size=30) | st.sampled_from([PROSE, PROSE * 40]), min_size=1, max_size=9),
    cuts=st.lists(st.integers(1, 9), max_size=5),
    sizes=st.sampled_from([(1,), (16,), (4, 7), (16, 32, 64)]),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_keys_do_not_depend_on_what_is_remembered(
    make_prompts: MakePrompts, texts: list[str], cuts: list[int], sizes: tuple[int, ...]
) -> None:
    warm = make_prompts(sizes=sizes)
    for cut in [*cuts, len(texts)]:
        body = chat(*texts[:cut])
        prompt = await warm.prepare(CHAT, body)
        assert prompt.exact
        for size in sizes:
            assert prompt.keys[size] == expected_keys(warm, CHAT, body, size)


def test_a_turn_costs_its_new_text_alone(prompts: ModelPrompts) -> None:
    encoded: list[str] = []
    tokenizer = prompts._tokenizer
    assert tokenizer is not None
    encode = tokenizer.encode

    def counting(texts: Any) -> list[Ids]:
        encoded.extend(texts)
        return encode(texts)

    tokenizer.encode = counting  # type: ignore[method-assign]
    now(prompts, CHAT, chat("s", "first", "answer"))
    encoded.clear()
    now(prompts, CHAT, chat("s", "first", "answer", "second"))
    assert encoded == ["<|turn|>user\nsecond<|end|>\n", "<|turn|>assistant\n"]


def test_new_block_sizes_are_keyed_as_text_is_asked_for(executor: Executor) -> None:
    sizes: Collection[int] = ()
    prompts = load_prompts("m-chat", tokenizer="demo", secret=b"secret", block_sizes=lambda: sizes, executor=executor)
    body = chat("s", PROSE)
    assert now(prompts, CHAT, body).keys == {}
    for sizes in ((16,), frozenset({32, 16}), {64, 7, 33}, [32]):
        found = now(prompts, CHAT, body)
        assert found.exact
        assert found.keys == {size: expected_keys(prompts, CHAT, body, size) for size in sizes}


def test_salt_adapter_and_domain_keep_chains_apart(prompts: ModelPrompts) -> None:
    body = chat("s", PROSE)
    plain = now(prompts, CHAT, body)
    salted = now(prompts, CHAT, body, salt="a", domain="a")
    adapted = now(prompts, CHAT, body, lora="l")
    assert salted.keys[16] == expected_keys(prompts, CHAT, body, salt="a")
    assert adapted.keys[16] == expected_keys(prompts, CHAT, body, lora="l")
    assert not set(plain.keys[16]) & set(salted.keys[16])
    assert not set(plain.keys[16]) & set(adapted.keys[16])


def test_user_turns_are_counted(prompts: ModelPrompts) -> None:
    assert now(prompts, CHAT, chat("s", "u", "a", "u")).turn == 2
    assert now(prompts, COMPLETION, {"prompt": "x"}).turn == 1


# --- text that was never seen -----------------------------------------------------------------------------------------


def test_unseen_text_is_estimated_until_it_comes_again(make_prompts: MakePrompts) -> None:
    prompts = make_prompts(unseen_counts=False)
    system = PROSE * 10
    now(prompts, CHAT, chat(system, "one"))
    now(prompts, CHAT, chat(system, "two"))
    third = now(prompts, CHAT, chat(system, "three " + PROSE))
    assert third.source == "exact"
    assert not third.exact
    assert "not seen" in third.reason
    head = chat(system, add_generation_prompt=False)
    assert third.keys[16] == expected_keys(prompts, CHAT, head)
    assert [tokens for _, tokens in third.text_keys] == sorted(tokens for _, tokens in third.text_keys)
    assert third.text_keys[-1][1] == third.tokens
    again = now(prompts, CHAT, chat(system, "three " + PROSE))
    assert again.exact
    assert abs(again.tokens - third.tokens) < 0.5 * again.tokens
    assert now(prompts, CHAT, chat(system, "three " + PROSE)) == again


def test_another_domain_has_not_seen_it(make_prompts: MakePrompts) -> None:
    prompts = make_prompts(unseen_counts=False)
    body = chat("s", PROSE)
    now(prompts, CHAT, body, domain="a")
    assert now(prompts, CHAT, body, domain="a").exact
    assert not now(prompts, CHAT, body, domain="b").exact, "its speed would tell what the other has sent"


def test_a_conversation_is_known_up_to_its_last_answer(
    make_prompts: MakePrompts, tokenizer: HuggingFaceTokenizer
) -> None:
    prompts = make_prompts(unseen_counts=False)
    assert not now(prompts, CHAT, chat("s", "u")).exact
    talk = now(prompts, CHAT, chat("s", "u", "the answer", "a new question"))
    assert not talk.exact, "what comes behind the last answer nobody has seen"
    upto = "<|turn|>system\ns<|end|>\n<|turn|>user\nu<|end|>\n<|turn|>assistant\nthe answer<|end|>\n"
    assert talk.known_tokens == len(tokenizer.encode([upto])[0])
    assert now(prompts, CHAT, chat("s", "u", "the answer", "a new question")).exact, "it was asked before"
    assert now(prompts, COMPLETION, {"prompt": [1] * 40}).exact


def test_where_engines_hold_what_others_sent_unseen_text_counts(make_prompts: MakePrompts) -> None:
    assert now(make_prompts(unseen_counts=True), CHAT, chat("s", "a")).exact
    assert not now(make_prompts(unseen_counts=False), CHAT, chat("s", "a")).exact


async def test_long_unseen_text_is_tokenized_afterwards(make_prompts: MakePrompts) -> None:
    prompts = make_prompts(unseen_counts=False)
    body = chat("s", PROSE * 100)
    first = now(prompts, CHAT, body)
    assert not first.exact
    await asyncio.wait(prompts._encoder.running)
    assert now(prompts, CHAT, body).exact


def count_encoded(prompts: ModelPrompts) -> list[int]:
    """Characters of each text that its tokenizer gets from here on."""
    assert prompts._tokenizer is not None
    encode, encoded = prompts._tokenizer.encode, []

    def counted(texts: Sequence[str]) -> list[Ids]:
        encoded.extend(map(len, texts))
        return encode(texts)

    prompts._tokenizer.encode = counted  # type: ignore[method-assign]
    return encoded


async def test_long_text_is_tokenized_in_the_thread_once_for_all_who_ask(make_prompts: MakePrompts) -> None:
    prompts = make_prompts()
    encoded = count_encoded(prompts)
    body = chat("s", PROSE * 200)
    found = await asyncio.gather(*(prompts.prepare(CHAT, body) for _ in range(5)))
    assert all(prompt == found[0] and prompt.exact for prompt in found)
    assert len(PROSE) * 200 < sum(encoded) < len(PROSE) * 201
    assert found[0].keys[16] == expected_keys(prompts, CHAT, body)


async def test_what_long_texts_begin_with_is_tokenized_once_for_all_that_come_together(
    make_prompts: MakePrompts,
) -> None:
    prompts = make_prompts()
    encoded = count_encoded(prompts)
    bodies = [chat("s", PROSE * 200, "a", f"{n} " + PROSE * 10) for n in range(5)]
    found = await asyncio.gather(*(prompts.prepare(CHAT, body) for body in bodies))
    assert len(PROSE) * 250 < sum(encoded) < len(PROSE) * 255, "the beginning once, and five ends"
    apart = make_prompts()
    assert found == [await apart.prepare(CHAT, body) for body in bodies]


async def test_work_on_the_same_text_from_different_beginnings(make_prompts: MakePrompts, executor: Executor) -> None:
    prompts = make_prompts()
    body = chat("s", PROSE * 200)
    release = threading.Event()
    executor.submit(release.wait, 10)
    first = asyncio.create_task(prompts.prepare(CHAT, body))
    await asyncio.sleep(0)
    now(prompts, CHAT, chat("s", "x"))  # the beginning is known from here on
    second = asyncio.create_task(prompts.prepare(CHAT, body))
    await asyncio.sleep(0)
    release.set()
    for prompt in (await first, await second):
        assert prompt.keys[16] == expected_keys(prompts, CHAT, body)


async def test_long_bodies_are_read_in_a_thread(make_prompts: MakePrompts) -> None:
    bodies = [
        (CHAT, chat("s", PROSE * 60)),
        (CHAT, chat("s", PROSE * 60, tools=[])),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": PROSE * 60}]}]}),
        (COMPLETION, {"prompt": PROSE * 60}),
    ]
    at_once, prompts = make_prompts(), make_prompts(limits=PromptLimits(wait_s=10.0, read_at_once_chars=4_000))
    for path, body in bodies:
        reading = prompts.prepare_now(path, body)
        assert not isinstance(reading, Prompt), "it was read on the loop"
        assert await reading == await at_once.prepare(path, body)
    odd = {"messages": [{"role": "user", "content": PROSE * 60}, {"role": "user", "content": 7}]}
    assert (await prompts.prepare(CHAT, odd)).source == "none"
    assert isinstance(prompts.prepare_now(CHAT, chat("s", "short")), Prompt)


async def test_text_that_cannot_be_cut_is_not_tokenized_beyond_a_bound(make_prompts: MakePrompts) -> None:
    """Its ids would be handed over in one go, and the loop waits for that."""
    prompts = make_prompts()
    encoded: list[int] = []
    tokenizer = prompts._tokenizer
    assert tokenizer is not None
    encode = tokenizer.encode

    def counting(texts: Any) -> list[Ids]:
        encoded.extend(map(len, texts))
        return encode(texts)

    tokenizer.encode = counting  # type: ignore[method-assign]
    system, data = PROSE * 30, "QUJD" * 40_000
    for body in (chat(system, data), chat(system, data, "It is A, B and C.", "And then?")):
        found = await prompts.prepare(CHAT, body)
        assert max(encoded) < 10_000
        assert not found.exact
        assert found.keys[16] == expected_keys(prompts, CHAT, chat(system, add_generation_prompt=False))
        assert found.text_keys[-1][1] == found.tokens > len(data) // 8
    assert (await prompts.prepare(CHAT, chat(data, "x"))).reason.startswith("a text too long")


async def test_who_waits_too_long_gets_an_estimate(make_prompts: MakePrompts, executor: Executor) -> None:
    prompts = make_prompts(limits=PromptLimits(wait_s=0.01))
    body = chat("s", PROSE * 200)
    release = threading.Event()
    executor.submit(release.wait, 10)
    late = await prompts.prepare(CHAT, body)
    assert not late.exact
    assert late.reason == "tokenizing takes too long"
    assert late.keys[16] == array("Q")
    release.set()
    await asyncio.wait(prompts._encoder.running)
    assert now(prompts, CHAT, body).exact


async def test_the_backlog_is_bounded(make_prompts: MakePrompts, executor: Executor) -> None:
    prompts = make_prompts(limits=PromptLimits(wait_s=0.01, backlog_bytes=30_000))
    release = threading.Event()
    executor.submit(release.wait, 10)
    await prompts.prepare(CHAT, chat("one", PROSE * 200))
    refused = now(prompts, CHAT, chat("two", PROSE * 200))
    assert refused.reason == "the tokenizer has too much to do"
    release.set()


async def test_a_tokenizer_that_fails_costs_the_keys_only(
    make_prompts: MakePrompts, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts()

    def fail(texts: object) -> list[Ids]:
        raise RuntimeError("secret prompt text")

    assert prompts._tokenizer is not None
    prompts._tokenizer.encode = fail  # type: ignore[method-assign]
    found = await prompts.prepare(CHAT, chat("s", PROSE * 200))
    assert found.reason == "tokenizing failed"
    short = now(prompts, CHAT, chat("s", "short"))
    assert short.reason == "tokenizing failed"
    assert "secret" not in caplog.text


# --- without a tokenizer, and with the engine's -----------------------------------------------------------------------


def test_a_missing_tokenizer_is_said_once_and_requests_go_on(
    make_prompts: MakePrompts, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        prompts = make_prompts(tokenizer="/nonexistent")
        found = [now(prompts, CHAT, chat("s", "same question " * 20)) for _ in range(200)]
    assert prompts.parity.state == "DEGRADED"
    assert len(caplog.records) == 1
    assert {prompt.source for prompt in found} == {"approximate"}
    assert all(prompt.keys == found[0].keys and len(prompt.keys[16]) > 2 for prompt in found)
    longer = now(prompts, CHAT, chat("s", "same question " * 20, "answer " * 20))
    assert longer.keys[16][: len(found[0].keys[16]) - 1] == found[0].keys[16][:-1]


def test_approximate_keys_depend_on_role_tools_and_text(make_prompts: MakePrompts) -> None:
    prompts = make_prompts(tokenizer=None, sizes=(1,))
    bodies = [
        {"messages": [{"role": "user", "content": "abcd"}]},
        {"messages": [{"role": "system", "content": "abcd"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]},
        {"messages": [{"role": "user", "content": "abcd"}], "tools": [{"a": 2**70}]},
        {"prompt": "abcd"},
        {"prompt": [1, 2]},
    ]
    found = [now(prompts, COMPLETION if "prompt" in body else CHAT, body) for body in bodies]
    assert len({bytes(prompt.keys[1]) for prompt in found}) == len(bodies)
    assert not any(prompt.exact for prompt in found)


def test_pseudo_tokens_are_never_taken_for_tokens(make_prompts: MakePrompts) -> None:
    body = {"prompt": [1, 2, 3, 4] * 8}
    exact, approximate = make_prompts(), make_prompts(tokenizer=None)
    assert not set(now(exact, COMPLETION, body).keys[16]) & set(now(approximate, COMPLETION, body).keys[16])


async def test_the_engine_s_own_ids_where_ours_are_not_its(prompts: ModelPrompts) -> None:
    asked: list[str] = []

    async def tokenize(path: str, body: Mapping[str, Any]) -> list[int]:
        asked.append(path)
        if body["messages"][0]["content"] == "broken":
            raise EngineUnreachable("no")
        return [9, 8, 7] * 20

    prompts.engine_tokenize = tokenize
    prompts.settle(Parity("DEGRADED", "differs"))
    body = chat("s", "hello", temperature=0.1)
    found = await prompts.prepare(CHAT, body)
    assert (found.source, found.exact) == ("engine", True)
    assert found.keys[16] == chain(root_key(b"secret", "m-chat", None, None), array("I", [9, 8, 7] * 20), 16)
    await prompts.prepare(CHAT, {**body, "temperature": 0.9})
    assert len(asked) == 1, "sampling does not change the prompt"
    await prompts.prepare(CHAT, body, domain="b")
    assert len(asked) == 2, "another domain must not profit"
    refused = await prompts.prepare(CHAT, chat("broken", "x"))
    assert (refused.source, refused.keys) == ("none", {})


async def test_an_engine_that_takes_too_long_costs_the_keys_only(make_prompts: MakePrompts) -> None:
    prompts = make_prompts(limits=PromptLimits(wait_s=0.01))

    async def tokenize(path: str, body: Mapping[str, Any]) -> list[int]:
        await asyncio.sleep(10)
        return [1]

    prompts.engine_tokenize = tokenize
    prompts.settle(Parity("DEGRADED", "differs"))
    found = await prompts.prepare(CHAT, chat("s", "x"))
    assert found.source == "none"
    assert "too long" in found.reason


def test_dialects_have_names_of_their_own() -> None:
    assert len({dialect.name for dialect in DIALECTS}) == len(DIALECTS)


@pytest.mark.parametrize(
    ("on_difference", "state", "mode"),
    [("enforce", "DEGRADED", "approximate"), ("warn", "DEGRADED", "exact"), ("off", "UNCHECKED", "exact")],
)
def test_what_a_differing_count_leads_to(make_prompts: MakePrompts, on_difference: str, state: str, mode: str) -> None:
    prompts = make_prompts(on_difference=on_difference)
    prompt = now(prompts, CHAT, chat("s", "u"))
    for _ in range(3):
        prompts.observe(prompt, prompt.tokens + 1)
    assert (prompts.parity.state, prompts.mode) == (state, mode)


# --- by way of what a body begins with --------------------------------------------------------------------------------


def begun(known: Beginnings, body: Mapping[str, Any], domain: str = "") -> tuple[dict[str, Any], Beginning | None]:
    return known.parse(json.dumps(body).encode(), domain, json.loads)


async def test_a_turn_read_by_way_of_the_one_before_is_the_same_prompt(make_prompts: MakePrompts) -> None:
    one, other = make_prompts(unseen_counts=False), make_prompts(unseen_counts=False)
    known = Beginnings(shortest=1_000)
    dice = random.Random(3)
    read_from = set()
    talks = [("s" * 30, *[PROSE * dice.randrange(1, 60) for _ in range(dice.choice((1, 3)))]) for _ in range(4)]
    for turn in range(40):
        talk = dice.choice(talks)
        if turn % 3 == 2:
            talk = (*talk[:-1], f"{turn} another end")
        salt = dice.choice([None, "salt"])
        fields, beginning = begun(known, chat(*talk))
        assert await one.prepare(CHAT, fields, beginning=beginning, salt=salt) == await other.prepare(
            CHAT, chat(*talk), salt=salt
        )
        if beginning is not None:
            read_from |= {note.messages for note in beginning.notes.values()}
        await asyncio.gather(*one._encoder.running, *other._encoder.running)
        talks[talks.index(talk) if talk in talks else 0] = (*talk, f"answer {turn} " * 50, f"question {turn}")
    assert len(read_from) > 5


async def test_what_the_memo_has_forgotten_is_read_again(make_prompts: MakePrompts) -> None:
    prompts, known = make_prompts(limits=PromptLimits(wait_s=10.0, memo_bytes=20_000)), Beginnings(shortest=1_000)
    body = chat("s", PROSE * 100, "a", "q")
    for others in range(3):
        fields, beginning = begun(known, body)
        assert (await prompts.prepare(CHAT, fields, beginning=beginning)).keys[16] == expected_keys(prompts, CHAT, body)
        assert beginning is not None
        assert beginning.notes
        await prompts.prepare(CHAT, chat(f"{others}", PROSE * 200, "a", "q"))


async def test_conversations_that_no_short_cut_reads_have_their_keys(make_prompts: MakePrompts) -> None:
    prompts, known = make_prompts(), Beginnings(shortest=1_000)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for _ in range(3):
        for extra in ({}, {"tools": [tool]}):
            body = chat("s", PROSE * 30, "a", "q", **extra)
            fields, beginning = begun(known, body)
            found = await prompts.prepare(CHAT, fields, beginning=beginning)
            assert found.keys[16] == expected_keys(prompts, CHAT, body)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a thread a priority of its own")
def test_the_thread_that_tokenizes_stands_back_and_the_loop_does_not() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1, initializer=let_the_loop_go_first) as executor:
        assert executor.submit(os.getpriority, os.PRIO_PROCESS, 0).result() == min(mine + 10, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine
