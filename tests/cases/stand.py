"""A whole gateway, as `warmroute serve` builds it, in front of engines that a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from router import config
from router.app import Running
from tests.cases.engine import MODEL, Engine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
INPUTS = Path(__file__).parent / "inputs"


def case_input(number: str) -> dict[str, Any]:
    """The script of a field case: `client` and `upstream`, as they were reconstructed from the public report."""
    (file,) = INPUTS.glob(f"{number}-*.json")
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))["input"]
    return found


def client_bodies(number: str) -> list[dict[str, Any]]:
    return [call["json"] for call in case_input(number)["client"]]


def kv_steps(number: str) -> Iterator[dict[str, Any]]:
    """The batches that a case publishes, in order: `seq`, `events`, `instance`, and what else the step says."""
    for step in case_input(number)["upstream"]:
        step = step.get("late", step)
        if "kv_batch" in step:
            yield {**step, **step["kv_batch"]}


def written(body: Any) -> bytes:
    """A body as clients write it: UTF-8, no escapes but those JSON asks for."""
    return body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()


def request_head(body: Any, headers: Mapping[str, str], *, path: str = CHAT) -> bytes:
    """Of a completion; the connection ends with its answer."""
    lines = {"host": "x", "connection": "close", "content-length": str(len(written(body))), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode()


def ids_body(tokens: list[int]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": tokens, "max_tokens": 1}


class Stand:
    def __init__(self, folder: Path) -> None:
        self.engines: dict[str, Engine] = {}
        self._folder = folder
        self._stack = AsyncExitStack()

    async def launch(self, engine: Engine) -> Engine:
        """For what an engine does before the gateway starts. Twice is once."""
        if engine.name not in self.engines:
            self.engines[engine.name] = await self._stack.enter_async_context(engine)
        return engine

    async def start(
        self,
        *engines: Engine,
        model: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> None:
        """Until every engine has joined and is followed. `model`, `engine`, `sections`: what the configuration says.

        By default every prompt is tokenized, nobody compares tokens, and the engines are said to be slow: costs within
        3 ms of each other are a tie, and the cases' prompts are short.
        """
        for each in engines:
            await self.launch(each)
        settings = {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "models": {MODEL: {"tokenizer": "demo", "tokenize": "always", "parity": "off", **(model or {})}},
            "engines": [
                {
                    **{"id": e.name, "url": e.url, "kind": "vllm", "rates": {"c1_ms": 20}, "lacks": list(e.lacks)},
                    **(engine or {}),
                }
                for e in engines
            ],
            **sections,
        }
        file = self._folder / "warmroute.yaml"
        file.write_text(json.dumps(settings))
        found = config.load(file, flags={"state_dir": str(self._folder / "state")}, environ={})
        self._running = await self._stack.enter_async_context(Running(found, admin="inline", drain_s=1.0))
        self._client = await self._stack.enter_async_context(
            httpx.AsyncClient(trust_env=False, verify=False, timeout=20)
        )
        self.url, self.admin_url = self._running.url, self._running.admin_url
        await self.until(self._is_ready)
        for each in engines:
            for port in each.ports:
                await port.joined()

    async def stop(self) -> None:
        await self._stack.aclose()

    async def _is_ready(self) -> bool:
        readiness = await self._running.live.readiness()
        models = readiness["models"]
        if MODEL not in models or {row["health"] for row in await self.fleet()} != {"ready"}:
            return False
        if readiness["auth"]["mode"] == "keys" and not await self._is_proven():
            return False
        prompts = models[MODEL]["prompts"]
        is_compared = prompts["state"] in ("EXACT", "DEGRADED") or "by configuration" in prompts.get("reason", "")
        return is_compared

    async def _is_proven(self) -> bool:
        """Whether it is known of every engine if it honours cache salts."""
        return all(row["method"] for row in (await self._running.live.isolation())["engines"])

    @staticmethod
    async def until(condition: Callable[[], Awaitable[bool]], *, what: str = "it") -> None:
        for _ in range(2_000):
            if await condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{what} never came about")

    # --- as a client

    async def ask(self, body: Any, *, path: str = CHAT, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return await self._client.post(
            self.url + path, content=written(body), headers={"content-type": "application/json", **(headers or {})}
        )

    async def ask_raw(self, body: Any, *, headers: Mapping[str, str]) -> bytes:
        """For what a client library would not send. The whole answer, as it came."""
        async with self.connection() as (reader, writer):
            writer.write(request_head(body, headers) + written(body))
            return await reader.read()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """To the gateway; it breaks off when the block ends."""
        address = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def streamed(self, body: Any) -> AsyncIterator[httpx.Response]:
        async with self._client.stream("POST", self.url + CHAT, content=written(body)) as answer:
            yield answer

    # --- as an operator

    async def explain(self, body: Any, *, path: str = CHAT) -> dict[str, Any]:
        answer = await self._client.post(f"{self.admin_url}/admin/v1/explain?path={path}", content=written(body))
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    async def receipt(self, answer: httpx.Response) -> dict[str, Any]:
        found: dict[str, Any] = await self._admin(f"/admin/v1/requests/{answer.headers['x-request-id']}")
        return found

    async def receipts(self) -> list[dict[str, Any]]:
        """Newest first."""
        found: list[dict[str, Any]] = (await self._admin("/admin/v1/requests?limit=1000"))["data"]
        return found

    async def fleet(self) -> list[dict[str, Any]]:
        return await self._running.live.fleet()

    async def fleet_rows(self) -> list[dict[str, Any]]:
        """The fleet as the admin API shows it."""
        found: list[dict[str, Any]] = (await self._admin("/admin/v1/fleet"))["data"]
        return found

    async def prompts(self) -> dict[str, Any]:
        """How the model's prompts are read, as `/readyz` says it."""
        found: dict[str, Any] = (await self._client.get(self.url + "/readyz")).json()["models"][MODEL]["prompts"]
        return found

    async def metrics(self) -> dict[str, float]:
        """Sample → value; a sample is written as on the page."""
        page = (await self._client.get(f"{self.admin_url}/metrics")).text
        lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
        return {sample: float(value) for sample, _, value in lines}

    async def _admin(self, path: str) -> Any:
        answer = await self._client.get(f"{self.admin_url}{path}")
        answer.raise_for_status()
        return answer.json()

    # --- as an engine

    async def publish(self, step: Mapping[str, Any], *, engine: str | None = None) -> None:
        """A step of `kv_steps`; a batch that is not dropped has been applied when this returns."""
        name = engine or step.get("instance", "A")
        port = self.engines[name].port
        drop = bool(step.get("drop"))
        seq = await port.publish(*step["events"], seq=step["seq"], drop=drop)
        if not drop:
            await self.heard(name, seq)

    async def heard(self, engine: str, seq: int | None, *, rank: int = 0) -> None:
        """Until the gateway stands at this batch of the rank; None: at none."""

        async def stands_there() -> bool:
            rows = await self.fleet()
            return any(r["instance"] == engine and r["rank"] == rank and r["last_seq"] == seq for r in rows)

        await self.until(stands_there, what=f"batch {seq} of {engine}/{rank}")

    async def overlap(self, tokens: list[int]) -> dict[str, int]:
        """Leading tokens of the prompt that each engine is known to hold, in any tier."""
        found = await self.explain(ids_body(tokens), path=COMPLETIONS)
        return {c["instance"]: max(c["held_tokens"].values(), default=0) for c in found["candidates"]}

    async def credit(self, tokens: list[int]) -> dict[str, int]:
        """Leading tokens that each engine is counted on to reuse: whole blocks, all but the last token, if believed."""
        found = await self.explain(ids_body(tokens), path=COMPLETIONS)
        return {c["instance"]: c["hit_tokens"] for c in found["candidates"]}
