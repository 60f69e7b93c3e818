"""Streams that are cut, and an engine that is killed, amid answers: does another real engine go on as the first would?

    python -m tests.real.resume --engines DIR [--trials 40] [--json FILE]

Greedy answers are compared with those of an undisturbed run. They have to be the same wherever the text so far is cut
into the same tokens again; where it is not (random weights make odd words), that they go on is all there is to ask.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import yaml

from tests.real.engines import CannotStart, RealEngines
from tests.real.gateway import GatewayProcess

TOKENS = 64
QUESTIONS = ("Where is the parcel?", "Who wrote this book, and when?", "Tell a story of a fox.", "What is 12 times 12?")


class Wire:
    """Between the gateway and one engine. What is answered is cut after `left` more events, of any engine."""

    left: int | None = None

    def __init__(self, port: int) -> None:
        self._port = port

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass(reader, to_writer, writer), self._pass(to_reader, writer, to_writer))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, back: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
            if Wire.left is None:
                continue
            Wire.left -= data.count(b"data: {")
            if Wire.left <= 0:
                Wire.left = None
                await asyncio.sleep(0.02)  # what was written is on its way
                sink.transport.abort()
                back.transport.abort()
                return
        sink.close()


def body_of(trial: int, model: str) -> dict[str, Any]:
    question = f"{trial}: {QUESTIONS[trial % len(QUESTIONS)]}"
    messages = [{"role": "system", "content": "You answer."}, {"role": "user", "content": question}]
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}  # else Qwen3's template writes a thought first
    return {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        **thinking,
    }


async def undisturbed(engine: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, list[int], list[int]]:
    """Its text, and the ids of its prompt and of the answer."""
    answer = (await engine.post("/v1/chat/completions", json=body | {"return_token_ids": True})).json()
    choice = answer["choices"][0]
    return choice["message"]["content"], answer["prompt_token_ids"], choice["token_ids"]


class Streamed(NamedTuple):
    """before: the text of the engine that broke off; after: of the one that went on, if one did."""

    before: str
    after: str
    usage: Any
    resumed: int


async def streamed(client: openai.AsyncOpenAI, body: dict[str, Any], path: str) -> Streamed:
    """By the official client."""
    asked = {name: body[name] for name in ("model", "temperature", "max_tokens")}
    asked |= {"extra_body": {"ignore_eos": True}, "stream": True, "stream_options": {"include_usage": True}}
    texts, usage, resumed = ["", ""], None, 0
    if path == "chat":
        asked["extra_body"] |= {"chat_template_kwargs": body["chat_template_kwargs"]}
        stream = await client.chat.completions.create(messages=body["messages"], **asked)
    else:
        stream = await client.completions.create(prompt=body["messages"][-1]["content"], **asked)
    ids = set()
    async for chunk in stream:
        ids.add((chunk.id, chunk.created, chunk.model))
        usage = chunk.usage or usage
        resumed = max(resumed, ((chunk.model_extra or {}).get("warmroute") or {}).get("resumed", 0))
        for choice in chunk.choices:
            texts[resumed > 0] += (choice.delta.content if path == "chat" else choice.text) or ""
    assert len(ids) == 1, ids
    return Streamed(*texts, usage, resumed)


async def tokens_again(engine: httpx.AsyncClient, body: dict[str, Any], text: str) -> list[int]:
    going_on = [*body["messages"], {"role": "assistant", "content": text}]
    asked = {"messages": going_on, "add_generation_prompt": False, "continue_final_message": True}
    asked |= {name: body[name] for name in ("model", "chat_template_kwargs")}
    return list((await engine.post("/tokenize", json=asked)).json()["tokens"])


async def examine(engines: RealEngines, folder: Path, trials: int, seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    direct = httpx.AsyncClient(base_url=engines.urls[0], timeout=120)
    model = (await direct.get("/v1/models")).json()["data"][0]["id"]
    wires = [await Wire(int(url.rpartition(":")[2])).start() for url in engines.urls]
    file = folder / "warmroute.yaml"
    settings = {
        "listen": {"port": 14000},
        "admin": {"port": 14001},
        "state_dir": str(folder / "state"),
        "failover": {"resume": True, "share": 1.0},
        "engines": [{"url": url, "kind": "vllm"} for url in wires],
    }
    file.write_text(yaml.safe_dump(settings))
    figures = {"resumed": 0, "errors": 0, "whole": 0, "same tokens": 0, "same text": 0, "same text of those": 0}
    figures |= {"usage right": 0}
    gateway = GatewayProcess(wires, folder, file=file)
    await asyncio.to_thread(gateway.start)
    try:
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0, timeout=120)
        for trial in range(trials):
            body = body_of(trial, model)
            text, prompt_ids, ids = await undisturbed(direct, body)
            at = dice.randrange(2, TOKENS - 4)
            Wire.left = at
            try:
                said = await streamed(client, body, "chat")
            except openai.APIError as error:
                figures["errors"] += 1
                print(trial, at, type(error).__name__, error, flush=True)
                continue
            finally:
                Wire.left = None
            usage, is_text = said.usage, said.before + said.after == text
            same = same_after(await tokens_again(direct, body, said.before), prompt_ids, ids)
            figures["resumed"] += said.resumed == 1
            figures["whole"] += usage is not None
            figures["same tokens"] += same
            figures["same text"] += is_text
            figures["same text of those"] += same and is_text
            figures["usage right"] += (
                usage.prompt_tokens == len(prompt_ids)
                and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
                and (not same or usage.completion_tokens == TOKENS)
            )
            if same and not is_text:
                print(trial, at, repr(said), repr(text), sep="\n", flush=True)
        Wire.left = 20
        figures["completion resumed"] = (await streamed(client, body_of(0, model), "completions")).resumed
        figures["killed"] = await killed(engines, client, direct, model)
    finally:
        await asyncio.to_thread(gateway.stop)
        await direct.aclose()
    return figures


def same_after(again: list[int], prompt: list[int], answer: list[int]) -> bool:
    return again == prompt + answer[: len(again) - len(prompt)]


async def killed(engines: RealEngines, client: openai.AsyncOpenAI, direct: httpx.AsyncClient, model: str) -> str:
    """Both engines have some streams; the second is killed amid them."""
    tasks = [asyncio.create_task(streamed(client, body_of(n, model) | {"max_tokens": 400}, "chat")) for n in range(8)]
    await asyncio.sleep(1.5)
    engines.kill(1)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [str(one) for one in ended if isinstance(one, BaseException)]
    resumed = sum(isinstance(one, Streamed) and one.resumed > 0 for one in ended)
    return f"{len(ended) - len(errors)} of {len(ended)} whole, {resumed} of them resumed {errors or ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="folder with start_vllm.sh")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engines = RealEngines("vllm", options.engines)
    try:
        print("starting two vllm servers …", flush=True)
        engines.start()
        with tempfile.TemporaryDirectory() as name:
            figures = asyncio.run(examine(engines, Path(name), options.trials, 1))
    except CannotStart as reason:
        print(f"SKIPPED: {reason}")
        return 0
    finally:
        engines.stop()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    kept = figures["same text of those"] == figures["same tokens"] and figures["errors"] == 0
    print("kept" if kept else "MISSED", figures)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
