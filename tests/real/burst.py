"""A burst past the engines' capacity: with the waiting room, and placed at arrival, in turns on the same engines.

    python -m tests.real.burst --engines DIR [--kind vllm] [--requests 120] [--rounds 6] [--json FILE]

Each round sends the same requests at once: six long system prompts, questions of very different lengths. The servers
keep to one core: else gateway and client wait for theirs, and a burst takes 2 to 8 s. What counts is the mean of the
rounds: below that of placing at arrival, and of the longest prompt not above it by more than 5 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import yaml

from tests.policy_grid.verdict import half_interval
from tests.real.engines import CannotStart, RealEngines
from tests.real.gateway import GatewayProcess

WORDS = "the parcel that was sent on Monday has not arrived and nobody knows where it is now".split()  # noqa: SIM905
LONG_WORDS = 2_500
ARRIVE_WITHIN_S = 1.0
LONGEST = "ttft_longest_prompts_max_s"


def bodies(requests: int, model: str, seed: int) -> Iterator[dict[str, Any]]:
    """A tenth of them long, the others a few dozen to a few hundred words; all within what one engine can hold."""
    dice = random.Random(seed)
    systems = [f"Number {n}. " + " ".join(dice.choices(WORDS, k=600)) for n in range(6)]
    for n in range(requests):
        words = LONG_WORDS if n % 10 == 5 else dice.randrange(20, 400)
        messages = [
            {"role": "system", "content": systems[n % 6]},
            {"role": "user", "content": f"Round {seed}, {n}: " + " ".join(dice.choices(WORDS, k=words))},
        ]
        yield {"model": model, "messages": messages, "max_tokens": 16, "stream": True, "temperature": 0}


async def ttfts(url: str, sent: list[dict[str, Any]], seed: int) -> list[tuple[int, float]]:
    """(characters of the prompt, seconds to the first token) of each."""
    dice = random.Random(seed)

    async def one(body: dict[str, Any], after_s: float) -> tuple[int, float]:
        await asyncio.sleep(after_s)
        started = time.monotonic()
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            first = None
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    first = first or time.monotonic()
        assert first is not None, "an answer without a token"
        return sum(len(message["content"]) for message in body["messages"]), first - started

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        return await asyncio.gather(*(one(body, dice.random() * ARRIVE_WITHIN_S) for body in sent))


def config(folder: Path, urls: list[str], *, room: bool) -> Path:
    file = folder / f"room-{room}.yaml"
    settings = {
        "listen": {"port": 14000},
        "admin": {"port": 14001},
        "state_dir": str(folder / f"state-{room}"),
        "waiting_room": {"enabled": room},
        "engines": [{"url": url} for url in urls],
    }
    file.write_text(yaml.safe_dump(settings))
    return file


def mean_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(mean(figures[name] for figures in rounds), 3) for name in rounds[0]}


def figures_of(found: list[tuple[int, float]]) -> dict[str, float]:
    longest = max(size for size, _ in found)
    return {
        "ttft_mean_s": round(mean(s for _, s in found), 3),
        "ttft_p50_s": round(median(s for _, s in found), 3),
        "ttft_longest_prompts_mean_s": round(mean(s for size, s in found if size > 0.9 * longest), 3),
        LONGEST: round(max(s for size, s in found if size > 0.9 * longest), 3),
        "ttft_max_s": round(max(s for _, s in found), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="folder with start_vllm.sh and start_sglang.sh")
    parser.add_argument("--kind", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engines = RealEngines(options.kind, options.engines)
    rounds: dict[str, list[dict[str, float]]] = {"room": [], "at arrival": []}
    try:
        print(f"starting two {options.kind} servers …", flush=True)
        engines.start()
        engines.keep_to_one_core()
        model = httpx.get(engines.urls[0] + "/v1/models", timeout=10).json()["data"][0]["id"]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)

            def burst(arm: str, seed: int) -> list[tuple[int, float]]:
                engines.forget()
                file = config(folder, engines.urls, room=arm == "room")
                with GatewayProcess(engines.urls, folder, file=file) as gateway:
                    return asyncio.run(ttfts(gateway.url, list(bodies(options.requests, model, seed)), seed))

            burst("at arrival", options.rounds)  # not counted: a server's first prompts take longer
            for n in range(options.rounds):
                for arm in ("room", "at arrival") if n % 2 == 0 else ("at arrival", "room"):
                    rounds[arm].append(figures_of(burst(arm, n)))
                    print(arm, rounds[arm][-1], flush=True)
    except CannotStart as reason:
        print(f"SKIPPED {options.kind}: {reason}")
        return 0
    finally:
        engines.stop()
    figures = {arm: mean_of(each) for arm, each in rounds.items()}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    room, push = figures["room"], figures["at arrival"]
    over_s = [one[LONGEST] - other[LONGEST] for one, other in zip(rounds["room"], rounds["at arrival"], strict=True)]
    print(f"longest prompt: {mean(over_s):+.2f} ± {half_interval(over_s):.2f} s")
    kept = room["ttft_mean_s"] < push["ttft_mean_s"] and room[LONGEST] <= 1.05 * push[LONGEST]
    print("kept" if kept else "MISSED", figures)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
