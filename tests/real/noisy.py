"""What a tenant that fills an engine's memory with long answers does to another's first tokens, on a real engine.

    python -m tests.real.noisy --engines DIR [--kind vllm] [--requests 90] [--json FILE]

One server with little KV memory. B asks something short now and then: alone, and while A has sent many requests with
long answers at once; with the waiting room, and placed at arrival. Ends with 1 where the room does not keep B's p90
below a quarter of what it is at arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import uvloop

from tests.real.engines import CannotStart, RealEngines
from tests.real.isolation import Tenants

WORDS = "the parcel that was sent on Monday has not arrived and nobody knows where it is now".split()  # noqa: SIM905
ANSWER_TOKENS = 600
EVERY_S = 1.0
FIRST_AFTER_S = 3.0
"""By then A's requests are all in."""
KEPT_SHARE = 0.25


def body(model: str, dice: random.Random, *, words: int, answer_tokens: int) -> dict[str, Any]:
    text = " ".join(dice.choices(WORDS, k=words))
    return {
        "model": model, "messages": [{"role": "user", "content": f"{dice.random()}: {text}"}], "stream": True,
        "max_tokens": answer_tokens, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip


async def beside(tenants: Tenants, model: str, requests: int, asked: int) -> dict[str, Any]:
    """B's times to the first token, and A's, of so many requests of A, all sent at once."""
    dice = random.Random(1)
    await tenants.first_token_s("B", body(model, dice, words=80, answer_tokens=16))  # it has been here
    large = [
        asyncio.ensure_future(tenants.first_token_s("A", body(model, dice, words=80, answer_tokens=ANSWER_TOKENS)))
        for _ in range(requests)
    ]
    await asyncio.sleep(FIRST_AFTER_S)
    small = []
    for _ in range(asked):
        small.append(asyncio.ensure_future(tenants.first_token_s("B", body(model, dice, words=80, answer_tokens=16))))
        await asyncio.sleep(EVERY_S)
    return {"B": figures(await asyncio.gather(*small)), "A": figures(await asyncio.gather(*large))}


def figures(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    if not ordered:
        return {}
    return {
        "requests": len(ordered),
        "ttft_p50_s": round(ordered[len(ordered) // 2], 3),
        "ttft_p90_s": round(ordered[int(0.9 * len(ordered))], 3),
        "ttft_max_s": round(ordered[-1], 3),
    }


async def examine(urls: list[str], model: str, requests: int, asked: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for arm, room, count in (("alone", True, 0), ("room", True, requests), ("at arrival", False, requests)):
        with tempfile.TemporaryDirectory() as folder:
            async with Tenants(urls, Path(folder), waiting_room={"enabled": room}) as tenants:
                await tenants.verified()
                found[arm] = await beside(tenants, model, count, asked)
        print(f"{arm}: {found[arm]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="folder with start_vllm.sh and start_sglang.sh")
    parser.add_argument("--kind", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--requests", type=int, default=90, help="A's")
    parser.add_argument("--asked", type=int, default=40, help="B's")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engines = RealEngines(options.kind, options.engines, count=1)
    try:
        print(f"starting a {options.kind} server …", flush=True)
        engines.start()
        engines.keep_to_one_core()
        model = httpx.get(engines.urls[0] + "/v1/models", timeout=10).json()["data"][0]["id"]
        found = uvloop.run(examine(engines.urls, model, options.requests, options.asked))
    except CannotStart as reason:
        print(f"SKIPPED {options.kind}: {reason}")
        return 0
    except httpx.TimeoutException:
        print(f"FAILED {options.kind}: a client's time limit ran out; if the engine itself is slow, fewer --requests")
        return 1
    finally:
        engines.stop()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    kept = found["room"]["B"]["ttft_p90_s"] <= KEPT_SHARE * found["at arrival"]["B"]["ttft_p90_s"]
    print("kept" if kept else "MISSED")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
