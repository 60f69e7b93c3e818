"""What it costs to know a prompt: from the body's bytes to its block keys.

    python -m tests.bench.decision [--tokenizer DIRECTORY]

Figures are this machine's; the ratio is to the plain way (encode the whole text, then its keys) in the same run.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import quantiles
from typing import Any

import orjson

from router.app import SWITCH_INTERVAL_S
from router.core import Prompt
from router.lab.train_demo_model import chinese, code, english, json_text, markdown
from router.routing.blocks import chain
from router.serving.beginnings import Beginnings
from router.serving.call import parse_body
from router.serving.prompt import ModelPrompts, PromptLimits, load_prompts
from router.serving.prompt.tokenizer import load_tokenizer
from tests.bench.table import Row, report

TAKES_S = 25
BLOCK = 16
CHAT = "/v1/chat/completions"


def run(tokenizer: str = "demo") -> dict[str, dict[str, float]]:
    """p50 and p95 in microseconds for each case. `tokenizer`: a directory with a tokenizer.json, or "demo"."""
    text = _text(600_000)
    han = _text(600_000, kinds=(chinese,))
    results: dict[str, dict[str, float]] = {}
    with ThreadPoolExecutor(1) as executor:
        characters = _characters_per_token(tokenizer, text)
        for name, tokens, messages in (
            ("next turn, 1 KB in 2 messages", 250, 2),
            ("next turn, 32k tokens in 20 messages", 32_000, 20),
            ("next turn, 100k tokens in 20 messages", 100_000, 20),
            ("next turn, 100k tokens in 120 messages", 100_000, 120),
            ("next turn, 100k tokens in 500 messages", 100_000, 500),
        ):
            body = _conversation(text, int(tokens * characters), messages)
            results[name] = _next_turn(tokenizer, executor, body)
        body = _conversation(han, int(100_000 * _characters_per_token(tokenizer, han)), 20)
        results["next turn, 100k tokens in 20 messages, Chinese"] = _next_turn(tokenizer, executor, body)
        for tokens in (1_000, 32_000, 100_000):
            body = _conversation(text, int(tokens * characters), 2)
            results[f"baseline, {tokens} tokens: encode all, then keys"] = _baseline(tokenizer, body)
            results[f"cold, {tokens} tokens: until answered"], stall = asyncio.run(_cold(tokenizer, executor, body))
            results[f"cold, {tokens} tokens: longest time on the loop"] = stall
    return results


def _next_turn(tokenizer: str, executor: ThreadPoolExecutor, body: dict[str, Any]) -> dict[str, float]:
    prompts, beginnings = _prompts(tokenizer, executor), Beginnings()
    data = orjson.dumps(body)
    prompt = asyncio.run(prompts.prepare(CHAT, orjson.loads(data)))
    assert prompt.exact, prompt.reason

    def turn() -> Prompt:
        fields, beginning = beginnings.parse(data, "", parse_body)
        found = prompts.prepare_now(CHAT, fields, beginning=beginning)
        assert isinstance(found, Prompt)
        return found

    return _timed(turn, 2_000 if len(data) < 10_000 else 60)


async def _cold(tokenizer: str, executor: ThreadPoolExecutor, body: dict[str, Any]) -> tuple[dict[str, float], Any]:
    data = orjson.dumps(body)
    took, stalls = [], []
    for _ in range(7):
        prompts = _prompts(tokenizer, executor)
        stall = asyncio.create_task(_longest_stall())
        await asyncio.sleep(0.02)
        started = time.perf_counter()
        await prompts.prepare(CHAT, orjson.loads(data))
        took.append(1e6 * (time.perf_counter() - started))
        stall.cancel()
        stalls.append(1e6 * await stall)
    return _summary(took), _summary(stalls)


async def _longest_stall() -> float:
    """How late the loop came back at worst, until cancelled."""
    longest = 0.0
    last = time.perf_counter()
    try:
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest


def _baseline(tokenizer: str, body: dict[str, Any]) -> dict[str, float]:
    encode = load_tokenizer(tokenizer).encode
    text = "".join(f"{message['role']}\n{message['content']}" for message in body["messages"])
    return _timed(lambda: chain(1, encode([text])[0], BLOCK), 7)


def _prompts(tokenizer: str, executor: ThreadPoolExecutor) -> ModelPrompts:
    return load_prompts(
        "bench",
        tokenizer=tokenizer,
        secret=b"bench",
        block_sizes=lambda: (BLOCK,),
        executor=executor,
        limits=PromptLimits(wait_s=10.0, always=True),
    )


def _text(characters: int, kinds: Sequence[Callable[[random.Random], str]] | None = None) -> str:
    dice = random.Random(11)
    kinds = kinds or (english, english, english, english, code, json_text, markdown)
    sentences: list[str] = []
    length = 0
    while length < characters:
        sentences.append(dice.choice(kinds)(dice))
        length += len(sentences[-1]) + 1
    return " ".join(sentences)


def _characters_per_token(tokenizer: str, text: str) -> float:
    sample = text[:50_000]
    return len(sample) / len(load_tokenizer(tokenizer).encode([sample])[0])


def _conversation(text: str, characters: int, messages: int) -> dict[str, Any]:
    each = characters // messages
    offsets = random.Random(3).sample(range(max(1, len(text) - each)), messages)
    roles = ["system", *(("user", "assistant")[n % 2] for n in range(messages - 1))]
    chat = [{"role": role, "content": text[at : at + each]} for role, at in zip(roles, offsets, strict=True)]
    return {"model": "bench", "messages": chat, "stream": True, "max_tokens": 100}


def _timed(call: Callable[[], object], times: int) -> dict[str, float]:
    took = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        took.append(1e6 * (time.perf_counter() - started))
    return _summary(took)


def _summary(took_us: list[float]) -> dict[str, float]:
    cuts = quantiles(took_us, n=20)
    return {"p50": cuts[9], "p95": cuts[18]}


def rows(figures: dict[str, dict[str, float]]) -> Iterator[Row]:
    for name, times in figures.items():
        tokens = re.search(r"(\d+)(k|000) tokens", name)
        plain = figures.get(f"baseline, {tokens[1]}000 tokens: encode all, then keys") if tokens else None
        stall, is_baseline = "longest time" in name, name.startswith("baseline")
        for quantile, value in times.items():
            baseline = plain[quantile] if plain and not stall and not is_baseline else None
            label = "all encoded, then keys" if baseline else ""
            yield Row(f"{name}: {quantile}", value, "µs", baseline, label, "≤ 1 ms" if stall else "")


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    report(__doc__, run, rows)
