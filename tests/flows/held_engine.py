"""An engine whose answers end when the test says so: for what happens to requests that run."""

from __future__ import annotations

import asyncio
from typing import Any

from router.http.responder import Responder
from tests.flows.recording_engine import _EVENTS, DONE, STOP, TOKEN, USAGE, RecordingEngine


class HeldEngine(RecordingEngine):
    """A stream gets its first token at once, any other answer nothing. `finish`: the rest of all of them."""

    def __init__(self, *, served: str = "own") -> None:
        super().__init__(served=served)
        self.held: list[Responder] = []
        self.aborted = 0
        self.holds = True

    def _answer(self, body: dict[str, Any], responder: Responder) -> None:
        if not self.holds:
            super()._answer(body, responder)
            return
        self.held.append(responder)
        responder.on_gone = self._gone
        if body.get("stream"):
            responder.start(200, _EVENTS)
            responder.write(TOKEN)

    def _gone(self) -> None:
        self.aborted += 1

    async def has(self, requests: int) -> None:
        """Until so many are held."""
        async with asyncio.timeout(10):
            while len(self.held) < requests:  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.002)

    def finish(self) -> None:
        """Streams only."""
        held, self.held = self.held, []
        for responder in held:
            for event in (STOP, USAGE, DONE):
                responder.write(event)
            responder.finish()
