"""A gateway as `warmroute serve` builds it before faulty engines, and what its clients and its books say."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import httpx

from router import config
from router.app import Running
from router.core import Outcome
from tests.faults.engine import FaultyEngine, Script, well
from tests.flows.site import Client, joined

RESCUE = {"attempts": 3, "retry_on": ["refused", "busy", "unable", "died", "reset", "failed", "silent"], "wait_s": 10}
"""All that may be done about a failure, short of a second answer after the first byte."""


class Told:
    """What a client made of an answer, as far as it came."""

    def __init__(self, response: httpx.Response, body: bytes, *, broken: bool) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self.body = body
        self.broken = broken
        self.events = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part.startswith(b"data: ")]

    @property
    def done(self) -> bool:
        return b"[DONE]" in self.events

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != b"[DONE]"]

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    @property
    def error(self) -> dict[str, Any] | None:
        if self.status != 200:
            return dict(json.loads(self.body)["error"])
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)


class Deployment:
    def __init__(self, folder: Path) -> None:
        self.outcomes: list[Outcome] = []
        self._folder = folder
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def engine(self, script: Script = well, *, model: str = "main") -> FaultyEngine:
        engine: FaultyEngine = await self._stack.enter_async_context(FaultyEngine(model, script))
        return engine

    async def start(
        self,
        *engines: FaultyEngine,
        failover: Mapping[str, Any] = RESCUE,
        main: Mapping[str, Any] | None = None,
        ready: int | None = None,
        kind: str = "openai",
        **sections: Any,
    ) -> None:
        """`main`: settings of the model that is asked for. `ready`: how many engines join, by default all."""
        models = {"*": {"tokenizer": "demo", "parity": "off"}}
        models["main"] = {**models["*"], **(main or {})}
        declared = [{"url": engine.url, "kind": kind} for engine in engines]
        written = {
            **{"listen": {"port": 0}, "admin": {"port": 0}, "models": models, "failover": dict(failover)},
            **{"state_dir": str(self._folder / "state"), "engines": declared, **sections},
        }
        file = self._folder / "warmroute.yaml"
        file.write_text(json.dumps(written))
        self.running = await self._stack.enter_async_context(
            Running(config.load(file, environ={}), admin="inline", drain_s=0.2, listeners=[self.outcomes.append])
        )
        self.http = await self._stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
        await joined(Client(self.running, self.http), len(engines) if ready is None else ready)

    async def ask(self, *, model: str = "main", path: str = "/v1/chat/completions", **more: Any) -> Told:
        headers = more.pop("headers", {})
        body = {"model": model, "messages": [{"role": "user", "content": "sixty words"}], "stream": True, **more}
        body = {name: value for name, value in body.items() if value is not None}
        url = f"{self.running.url}{path}"
        got = b""
        async with self.http.stream("POST", url, json=body, headers=headers) as response:
            try:
                async for part in response.aiter_raw():
                    got += part
            except httpx.RemoteProtocolError:
                return Told(response, got, broken=True)
        return Told(response, got, broken=False)

    async def is_well(self) -> bool:
        """Nothing is booked, and nothing is left of what went wrong."""
        await asyncio.sleep(0)
        rows = await self.running.live.fleet()
        return not any(row[total] for row in rows for total in ("booked_requests", "booked_kv_tokens"))


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]
