"""A whole deployment on loopback: simulated engines, the gateway as `router.app` builds it, and its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from router import config
from router.app import AdminMode, Door, Running
from router.config import Config
from router.lab.chat import ChatModel
from router.lab.options import SimEngineOptions
from router.lab.server import SimEngineServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SPEED = 200.0
"""An engine step of 6.7 ms takes 33 µs: tests wait for sockets, not for engines."""
UNTIL_S = 10.0

BASE: Mapping[str, Any] = {
    "listen": {"port": 0, "receipts": True},
    "admin": {"port": 0},
    "models": {"*": {"tokenizer": "demo"}},
}


def said(text: str, *, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def essay(subject: str, words: int = 120) -> str:
    """Some blocks of text that share no block with another subject's."""
    return " ".join(f"{subject} {number} and so on" for number in range(words // 5))


def chat(*messages: dict[str, Any] | str, **more: Any) -> dict[str, Any]:
    """A short answer, whose length is known."""
    listed = [said(message) if isinstance(message, str) else message for message in messages]
    return {"model": "demo", "messages": listed, "max_tokens": 8, "ignore_eos": True, **more}


class Answer:
    """What came back, and what the gateway says of it."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers
        self.text = response.text
        self.id = response.headers["x-request-id"]
        self.instance: str | None = response.headers.get("x-warmroute-instance")

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def predicted(self) -> int:
        return int(self.headers["x-warmroute-predicted-tokens"])

    @property
    def cached(self) -> int:
        """By the engine's own word."""
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def streamed(self) -> bool:
        return self.headers["content-type"].startswith("text/event-stream")

    @property
    def said(self) -> str:
        if not self.streamed:
            return str(self.json["choices"][0]["message"]["content"])
        *events, done, end = self.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        return "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)


class Client:
    """One HTTP client of a running gateway, for bodies that no SDK would send and for the admin API."""

    def __init__(self, running: Running, http: httpx.AsyncClient) -> None:
        self.running = running
        self.http = http

    async def post(self, body: Mapping[str, Any] | bytes, path: str = CHAT, **headers: str) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Answer(
            await self.http.post(
                self.running.url + path, content=content, headers={"content-type": "application/json", **named}
            )
        )

    async def ask(self, body: Mapping[str, Any], path: str = CHAT, **headers: str) -> Answer:
        """An answer that has to be one."""
        answer = await self.post(body, path, **headers)
        assert answer.status == 200, answer.text
        return answer

    async def explain(self, body: Mapping[str, Any], path: str = CHAT) -> dict[str, Any]:
        response = await self.http.post(f"{self.running.admin_url}/admin/v1/explain", params={"path": path}, json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def hits(self, body: Mapping[str, Any], path: str = CHAT) -> dict[str, int]:
        """By instance, what each would reuse of this prompt now."""
        found = await self.explain(body, path)
        return {candidate["instance"]: candidate["hit_tokens"] for candidate in found["candidates"]}

    async def receipt(self, request_id: str) -> dict[str, Any]:
        response = await self.http.get(f"{self.running.admin_url}/admin/v1/requests/{request_id}")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def rows(self) -> dict[str, dict[str, Any]]:
        """The fleet by "instance/rank"."""
        return {f"{row['instance']}/{row['rank']}": row for row in await self.running.live.fleet()}

    async def row(self, engine: SimEngineServer) -> dict[str, Any]:
        return (await self.rows())[f"{name(engine)}/0"]

    async def caught_up(self, *engines: SimEngineServer) -> None:
        """Waits until every event of these engines has been heard."""

        async def heard() -> bool:
            rows = [await self.row(engine) for engine in engines if engine.published]
            last = [engine.published - 1 for engine in engines if engine.published]
            return [row["last_seq"] for row in rows] == last

        await until(heard, what="all events are heard")

    async def nothing_booked(self) -> bool:
        """Every total of every rank is exactly zero."""
        return not any(
            row[total]
            for row in (await self.rows()).values()
            if row["health"] != "pending"
            for total in ("booked_requests", "booked_prefills", "booked_prefill_ms", "booked_kv_tokens")
        )


def name(engine: SimEngineServer) -> str:
    """What the gateway calls it."""
    return engine.url.removeprefix("http://")


async def until(condition: Callable[[], Awaitable[bool]], *, what: str, seconds: float = UNTIL_S) -> None:
    """Waits for what must come about."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    while not await condition():
        assert clock() < end, f"it never came about that {what}"
        await asyncio.sleep(0.01)


class Site:
    """Everything that is started here ends with it: gateways and clients first, last of all the engines."""

    def __init__(self, chat_model: ChatModel, folder: Path) -> None:
        self.folder = folder
        self._chat_model = chat_model
        self._engines = AsyncExitStack()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._engines:
            await self._stack.aclose()

    async def enter(self, context: Any) -> Any:
        return await self._stack.enter_async_context(context)

    async def engine(self, **options: Any) -> SimEngineServer:
        engine = SimEngineServer(SimEngineOptions(**{"speed": SPEED, **options}), chat=self._chat_model)
        await engine.start()
        self._engines.push_async_callback(engine.stop)
        return engine

    async def killed(self, engine: SimEngineServer) -> None:
        """Its process is gone: answers break off, connections are cut, ports are closed, all at once."""
        engine.crash()
        assert engine._server is not None
        engine._server.close()
        await engine.stop()

    async def started_again(self, engine: SimEngineServer) -> SimEngineServer:
        """A new process on the ports of one that was killed."""
        return await self.engine(**ports_of(engine))

    def configured(self, *engines: SimEngineServer | Mapping[str, Any], **sections: Any) -> Config:
        """Read from a file, as an operator's is. `sections` are merged over `BASE`, one level deep."""
        self.write(*engines, **sections)
        return self.read()

    def read(self) -> Config:
        return config.load(self.folder / "warmroute.yaml", environ={})

    def write(self, *engines: SimEngineServer | Mapping[str, Any], **sections: Any) -> None:
        """What the next reload finds."""
        declared = [{"url": engine.url} if isinstance(engine, SimEngineServer) else dict(engine) for engine in engines]
        merged = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {*BASE, *sections}}
        whole = {**merged, "state_dir": str(self.folder / "state"), "engines": declared}
        (self.folder / "warmroute.yaml").write_text(json.dumps(whole))

    async def gateway(
        self,
        *engines: SimEngineServer | Mapping[str, Any],
        ready: int | None = None,
        door: Door | None = None,
        admin_in: AdminMode = "inline",
        **sections: Any,
    ) -> Client:
        """A gateway that knows `ready` ranks, by default one an engine, and how they read."""
        client: Client = await self.enter(self.running(*engines, ready=ready, door=door, admin_in=admin_in, **sections))
        return client

    @asynccontextmanager
    async def running(
        self,
        *engines: SimEngineServer | Mapping[str, Any],
        ready: int | None = None,
        door: Door | None = None,
        drain_s: float = 1.0,
        admin_in: AdminMode = "inline",
        **sections: Any,
    ) -> AsyncIterator[Client]:
        """The same, for tests that end it themselves."""
        found = self.configured(*engines, **sections)
        async with (
            Running(found, admin=admin_in, drain_s=drain_s, door=door, read_again=self.read) as running,
            httpx.AsyncClient(trust_env=False, timeout=30, verify=False) as http,
        ):
            client = Client(running, http)
            await joined(client, len(engines) if ready is None else ready)
            yield client

    async def sdk(self, client: Client, **options: Any) -> AsyncOpenAI:
        """The official client, which needs nothing but the base_url."""
        options.setdefault("http_client", DefaultAsyncHttpxClient(trust_env=False, verify=False))
        made = AsyncOpenAI(base_url=f"{client.running.url}/v1", api_key="none", **{"max_retries": 0, **options})
        self._stack.push_async_callback(made.close)
        return made


async def joined(client: Client, ranks: int) -> None:
    """So many ranks are ready, and it is settled how every model's prompts are read."""

    async def state() -> bool:
        models = (await client.running.live.readiness())["models"].values()
        settled = all(model["prompts"]["state"] not in ("LOADING", "UNCHECKED") or _off(model) for model in models)
        return settled and sum(model["ready"] for model in models) >= ranks

    await until(state, what=f"{ranks} ranks are ready")


def _off(model: Mapping[str, Any]) -> bool:
    return "by configuration" in model["prompts"].get("reason", "")


def ports_of(engine: SimEngineServer) -> dict[str, Any]:
    """The options of an engine that takes another's place."""
    options = {field: getattr(engine.options, field) for field in engine.options.__struct_fields__}
    endpoints = {"events_port": engine.events_endpoint, "replay_port": engine.replay_endpoint}
    ports = {field: int(endpoint.rpartition(":")[2]) for field, endpoint in endpoints.items() if endpoint is not None}
    return {**options, "port": engine.port, **ports}
