"""Can a tenant tell by the clock whether another tenant has asked the same?

    python -m tests.real.isolation_timing [--probes 1500] [--json FILE]                        the gateway alone
    python -m tests.real.isolation_timing --engines DIR --kind vllm [--probes 1500] [--json FILE]     with a real engine

Before each probe of B, A asks something: in one arm what B is about to ask, in the other something else of the same
length. Arms are interleaved at random. Compared are B's times by the area under the ROC curve (the chance that a time
of one arm is above one of the other): .5 where nothing can be told. A third arm, in which B itself has asked before,
shows that the measure sees what there is to see. Ends with 1 where an area is off by more than .05.

The gateway alone: in front of two engines that answer at once and always the same, so that only its own memo, filter
and placement can differ. On a quiet machine it takes 2 minutes; with a real engine 15.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import uvloop

from tests.cases.engine import MODEL, Engine, Exchange, whole_answer
from tests.real.engines import RealEngines
from tests.real.isolation import Tenants

BOUND = 0.05
CHAT = "/v1/chat/completions"
WORDS = ("river", "stone", "cloud", "field", "light", "water", "house", "paper")
ARMS = ("nobody has it", "the other tenant has it", "the tenant itself has it")
CONTROL = 5
"""One probe of the third arm for so many of the others."""


def text(dice: random.Random, words: int) -> str:
    return " ".join([secrets.token_hex(8), *dice.choices(WORDS, k=words)])


def area(first: Sequence[float], second: Sequence[float]) -> float:
    """The chance that a value of `second` is above one of `first`, ties counting half (Mann-Whitney U over n·m)."""
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    total, at = 0.0, 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end][0] == ranked[at][0]:
            end += 1
        total += sum(arm for _, arm in ranked[at:end]) * (at + end + 1) / 2
        at = end
    n, m = len(first), len(second)
    return (total - m * (m + 1) / 2) / (n * m)


async def probe(tenants: Tenants, model: str, probes: int, words: int) -> dict[str, Any]:
    dice = random.Random(1)
    arms = [0, 1] * probes + [2] * (probes // CONTROL)
    dice.shuffle(arms)
    times: dict[int, list[float]] = {0: [], 1: [], 2: []}
    told: dict[int, Counter[str]] = {0: Counter(), 1: Counter(), 2: Counter()}
    for arm in arms:
        wanted = _body(model, text(dice, words))
        before = wanted if arm else _body(model, text(dice, words))
        (await tenants.ask("B" if arm == 2 else "A", CHAT, before)).raise_for_status()
        started = time.perf_counter()
        answer = await tenants.ask("B", CHAT, wanted)
        times[arm].append(time.perf_counter() - started)
        answer.raise_for_status()
        told[arm][f"predicted {answer.headers['x-warmroute-predicted-tokens']}"] += 1
    return {
        "probes": {ARMS[arm]: len(times[arm]) for arm in times},
        "median_ms": {ARMS[arm]: round(1e3 * median(times[arm]), 3) for arm in times},
        "area": {ARMS[arm]: round(area(times[0], times[arm]), 4) for arm in (1, 2)},
        "predicted": {ARMS[arm]: dict(told[arm].most_common(3)) for arm in told},
    }


def _body(model: str, content: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}


async def alone(probes: int) -> dict[str, Any]:
    async def at_once(exchange: Exchange) -> None:
        await exchange.answer(whole_answer())

    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(name, script=at_once, ports=())) for name in ("A", "B")]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = {MODEL: {"tokenizer": "demo"}}
        tenants = Tenants([engine.url for engine in engines], folder, models=models)
        await stack.enter_async_context(tenants)
        await tenants.verified()
        return await probe(tenants, MODEL, probes, words=300)


async def whole(urls: list[str], model: str, probes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with Tenants(urls, Path(folder)) as tenants:
            await tenants.verified()
            return await probe(tenants, model, probes, words=600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, help="folder with start_vllm.sh and start_sglang.sh")
    parser.add_argument("--kind", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--probes", type=int, default=1_500, help="of each arm")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.engines is None:
        figures = {"of": "the gateway alone", **uvloop.run(alone(options.probes))}
    else:
        engines = RealEngines(options.kind, options.engines, count=1)
        try:
            engines.start()
            model = httpx.get(engines.urls[0] + "/v1/models", timeout=10).json()["data"][0]["id"]
            figures = {"of": options.kind, **uvloop.run(whole(engines.urls, model, options.probes))}
        finally:
            engines.stop()
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    kept = abs(figures["area"][ARMS[1]] - 0.5) <= BOUND and len(figures["predicted"][ARMS[1]]) == 1
    print("kept" if kept else "MISSED")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
