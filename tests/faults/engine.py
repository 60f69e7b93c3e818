"""An engine on a raw socket that goes wrong just as a test says. What it answers when it is well is always the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Self

from tests.listener import Listener
from tests.router.serving.stand import STREAM_HEAD, EngineSide

WORDS = tuple(f"word{number}" for number in range(60))
WHOLE = " ".join(WORDS)
DONE = b"data: [DONE]\n\n"
PROMPT_TOKENS = 21


class Wrong(EngineSide):
    """The engine's side of one call, with what an engine can do to it."""

    model = "main"

    def event(self, **fields: Any) -> bytes:
        return (
            b"data: "
            + json.dumps({"id": "x", "object": "chat.completion.chunk", "model": self.model, **fields}).encode()
            + b"\n\n"
        )

    def token(self, number: int) -> bytes:
        text = WORDS[number] if number == 0 else f" {WORDS[number]}"
        return self.event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])

    @property
    def finish(self) -> bytes:
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(WORDS), "total_tokens": 81}
        stop = self.event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        return stop + self.event(choices=[], usage=usage)

    async def begin(self) -> None:
        await self.raw(STREAM_HEAD)

    async def tokens(self, start: int, end: int) -> None:
        for number in range(start, end):
            await self.chunk(self.token(number))

    async def end(self, tail: bytes = DONE) -> None:
        await self.chunk(self.finish + tail)
        await self.raw(b"0\r\n\r\n")

    async def well(self) -> None:
        await self.begin()
        await self.tokens(0, len(WORDS))
        await self.end()

    async def refuse(self, status: int, code: str = "", message: str = "no", **headers: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code or status}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.whole(json.dumps({"error": error}).encode(), status=status, headers=named)


Script = Callable[[Wrong, int], Awaitable[None]]
"""What is done about the call of that number, from 1 on."""


async def well(call: Wrong, number: int) -> None:
    await call.well()


class FaultyEngine:
    """Serves one model. `times`: when each call came, by the loop's clock. `max_model_tokens`: set before it joins."""

    def __init__(self, model: str, script: Script = well) -> None:
        self.model = model
        self.script = script
        self.times: list[float] = []
        self.calls: list[Wrong] = []
        self.max_model_tokens: int | None = None
        self._listener = Listener(self._one)
        self.die = self._listener.stop

    @property
    def url(self) -> str:
        return self._listener.url

    async def __aenter__(self) -> Self:
        """On the port that it had before, if it has been here already."""
        await self._listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = Wrong(await reader.readuntil(b"\r\n\r\n"), b"", writer, reader)
        call.model = self.model
        if call.head.startswith(b"GET "):
            card = {"id": self.model, "object": "model", "max_model_len": self.max_model_tokens}
            cards = {"object": "list", "data": [card]}
            await call.whole(json.dumps(cards).encode())
            return
        call.body = await reader.readexactly(int(call.headers["content-length"]))
        self.times.append(asyncio.get_running_loop().time())
        self.calls.append(call)
        await self.script(call, len(self.calls))
