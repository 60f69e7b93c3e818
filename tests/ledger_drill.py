"""Requests of every kind through a gateway that is killed meanwhile, while its database goes away: what must be in the
ledger afterwards, and what is.

The engines count for themselves. A request is named by its number, which the gateway hands on, so that the engines'
count, the client's and the ledger's can be laid beside each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import select

from router.store.database import Database
from router.store.schema import daily, requests
from tests.cases.engine import MODEL, Engine, Exchange, event
from tests.cases.stand import request_head, written

KINDS = {"whole": 40, "stream": 40, "left": 10, "busy": 4, "reset": 3, "broken": 3}
"""Of a hundred. busy, reset: the first engine says 503, or breaks off before it answers. broken: amid the answer."""
PROMPTS = [f"word{n} " * (3 + n) for n in range(16)]


@dataclass
class Known:
    """What there is to know of one request. `served`: by an engine, to its end."""

    number: int
    kind: str
    prompt: int
    attempts: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    events: int = 0  # that the client was sent before it left
    served: bool = False
    client: str = "not sent"  # whole, failed (it got an error), left, cut (the connection broke)


class Engines:
    """Two that fail as the requests ask for. `known`: by number."""

    def __init__(self, known: dict[int, Known], dice: random.Random) -> None:
        self.all = [Engine(name, script=self._serve, ports=(), block_size=16) for name in ("A", "B")]
        self._known = known
        self._dice = dice

    async def _serve(self, exchange: Exchange) -> None:
        known = self._known[int(exchange.headers["x-request-id"].rpartition("-d")[2])]
        known.attempts += 1
        if known.attempts == 1 and known.kind == "busy":
            await exchange.answer({"error": {"message": "busy"}}, status=503)
            return
        if known.attempts == 1 and known.kind == "reset":
            exchange.reset()
            return
        tokens, cached = self._dice.randint(1, 12), self._dice.choice([None, 0, 16])
        usage: dict[str, Any] = {"prompt_tokens": self._dice.randint(16, 500), "completion_tokens": tokens}
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        known.usage, known.events = usage, tokens
        if known.kind in ("whole", "busy", "reset"):
            await asyncio.sleep(self._dice.random() * 0.02)
            known.served = True
            choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
            await exchange.answer({"object": "chat.completion", "choices": [choice], "usage": usage})
            return
        await exchange.begin_stream()
        for _ in range(tokens):
            await exchange.chunk(event({"choices": [{"index": 0, "delta": {"content": "t"}, "finish_reason": None}]}))
        if known.kind == "left":
            await exchange.until_gone()
        elif known.kind == "broken":
            exchange.reset()
        else:
            await asyncio.sleep(self._dice.random() * 0.02)
            known.served = True
            end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
            for last in (event(end), event({"choices": [], "usage": usage}), event("[DONE]"), b""):
                await exchange.chunk(last)


class Gateway:
    """`warmroute serve`, killed and started again."""

    def __init__(self, folder: Path, engines: Sequence[Engine], store_url: str, **sections: Any) -> None:
        self.url = ""
        self._file = folder / "warmroute.yaml"
        settings = {
            "listen": {"port": 0}, "admin": {"enabled": False}, "state_dir": str(folder / "state"),
            "models": {MODEL: {"tokenizer": "demo", "tokenize": "always", "parity": "off"}},
            "engines": [{"id": e.name, "url": e.url, "kind": "vllm", "events": "off"} for e in engines],
            "store": {"url": store_url}, "auth": {"mode": "open"}, "failover": {"share": 1.0}, **sections,
        }  # fmt: skip
        self._file.write_text(json.dumps(settings))
        self.log: list[str] = []

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "serve", "-c", str(self._file), stderr=asyncio.subprocess.PIPE
        )
        assert self.process.stderr is not None
        self.url = ""
        async for line in self.process.stderr:
            self.log.append(line.decode())
            if found := re.search(r"base_url (\S+)/v1", self.log[-1]):
                self.url = found[1]
                break
        assert self.url, "".join(self.log)
        self._reading = asyncio.ensure_future(self._read())
        await self._until_ready()

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())

    async def _until_ready(self) -> None:
        for _ in range(1000):
            with contextlib.suppress(OSError):
                reader, writer = await self.connect()
                writer.write(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                answer = await reader.read()
                writer.close()
                if b" 200 " in answer[:20] and b'"ready":2' in answer:
                    return
            await asyncio.sleep(0.02)
        raise AssertionError("the gateway never became ready:\n" + "".join(self.log))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = urlsplit(self.url)
        return await asyncio.open_connection(address.hostname, address.port)

    async def end(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        await self.process.wait()
        await self._reading


async def ask(gateway: Gateway, known: Known) -> None:
    """As a client: what it got is in `known.client`."""
    stream = known.kind in ("stream", "left", "broken")
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPTS[known.prompt]}], "stream": stream}
    try:
        reader, writer = await gateway.connect()
    except OSError:
        return
    try:
        writer.write(request_head(body, {"x-request-id": f"d{known.number}"}) + written(body))
        known.client = "cut"
        answer = b""
        while data := await reader.read(65536):
            answer += data
            if known.kind == "left" and known.events and answer.count(b"data: ") >= known.events:
                known.client = "left"
                return
        known.client = _judged(answer, stream=stream)
    except OSError:
        pass
    finally:
        writer.transport.abort()


def _judged(answer: bytes, *, stream: bool) -> str:
    if answer and b" 200 " not in answer[:20]:
        return "failed"
    if stream:
        return "whole" if b"[DONE]" in answer else "cut"
    return "whole" if b'"usage"' in answer else "cut"


async def drill(
    gateway: Gateway,
    known: dict[int, Known],
    *,
    at_once: int,
    events: dict[int, Callable[[], Awaitable[None]]],
) -> None:
    """All requests, so many at once. `events`: what else happens, by the number of the request that has its turn."""
    numbers = iter(sorted(known))
    paused = asyncio.Event()
    paused.set()

    async def client() -> None:
        for number in numbers:
            if number in events:
                paused.clear()
                await events.pop(number)()
                paused.set()
            await paused.wait()
            await ask(gateway, known[number])

    await asyncio.gather(*[client() for _ in range(at_once)])


def made_requests(count: int, dice: random.Random) -> dict[int, Known]:
    kinds = dice.choices(list(KINDS), weights=list(KINDS.values()), k=count)
    return {n: Known(n, kind, dice.randrange(len(PROMPTS))) for n, kind in enumerate(kinds)}


@dataclass
class Found:
    """What was in the ledger: requests by how they ended, and what is wrong with it."""

    finishes: Counter[str]
    mistakes: list[str]


async def compare(database: Database, known: dict[int, Known], engine: Engine) -> Found:
    """The ledger with what the engines and the clients know."""
    prompts = [await _prompt_tokens(engine, prompt) for prompt in PROMPTS]
    async with database.read() as connection:
        rows = [dict(row) for row in (await connection.execute(select(requests))).mappings()]
        sums = [dict(row) for row in (await connection.execute(select(daily))).mappings()]
    by_number: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_number.setdefault(int(row["shown_id"][1:]), []).append(row)
    mistakes = []
    for number, request in known.items():
        found = by_number.get(number, [])
        if len(found) != (1 if request.attempts or found else 0):
            mistakes.append(f"{request}: {len(found)} rows")
        elif found and (wrong := _wrong(request, found[0], prompts[request.prompt])):
            mistakes.append(f"{request}: {wrong}: {found[0]}")
    for name in ("output_tokens", "uncached_input_tokens", "cache_read_tokens"):
        if sum(row[name] for row in rows) != sum(row[name] for row in sums):
            mistakes.append(f"the sums of {name} are not those of the rows")
    return Found(Counter(row["finish"] for row in rows), mistakes)


def _wrong(request: Known, row: dict[str, Any], prompt_tokens: int) -> str:
    read, output = row["cache_read_tokens"], row["output_tokens"]
    prompt = row["uncached_input_tokens"] + read
    match row["finish"]:
        case "complete":
            cached = request.usage.get("prompt_tokens_details", {}).get("cached_tokens")
            counted = (request.usage["prompt_tokens"], cached or 0, request.usage["completion_tokens"])
            right = (prompt, read, output) == counted and row["cached_known"] is (cached is not None)
            return "" if right and request.served and not row["estimated"] else "not as the engine counted"
        case "client_gone":
            right = row["estimated"] and output <= request.events and (prompt == prompt_tokens or not row["instance"])
            if request.client == "left":
                right = right and output == request.events
            return "" if right and request.client != "whole" else "not as it reached the gateway"
        case "upstream_failed":
            right = request.client != "whole" and row["cost"] == 0 and output <= request.events
            return "" if right else "billed, and failed"
        case "unknown":
            bound = json.loads(row["raw_usage"])["upper_bound"]
            right = bound["input_tokens"] == prompt_tokens and bound["output_tokens"] >= request.events
            right = right and request.client in ("cut", "left") and row["estimated"]
            return "" if right and (prompt, output, row["cost"]) == (0, 0, 0) else "no bound, or not unknown"
        case _:
            return "a finish that there is not"


async def _prompt_tokens(engine: Engine, prompt: str) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]}
    return len(await engine.tokens("/v1/chat/completions", body))


@contextlib.asynccontextmanager
async def launched(engines: Sequence[Engine]) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        yield
