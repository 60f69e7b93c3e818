"""Sample traffic for the demo: people in conversations, a few long system prompts shared between them."""

from __future__ import annotations

import asyncio
import random

import httpx
import orjson

TALK = (
    "the cache holds every block of a prompt once and the next turn finds it there if it goes to the same engine "
    "how long does a request wait when another one computes its prefix again why is the first token late who holds "
    "which tokens what happens to old blocks when memory is full and new users come with long documents to read"
)
WORDS = TALK.split()
SYSTEMS = 6
SYSTEM_WORDS = 900
TURNS = 8
TIMEOUT_S = 120.0


class Traffic:
    """`people` conversations at once, each starting over with a new one after `TURNS` turns.

    speed: 2 thinks half as long. The dice decide texts and pauses, so that a seed gives the same traffic.
    """

    def __init__(self, url: str, model: str, *, people: int, speed: float, dice: random.Random) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._people = people
        self._speed = speed
        self._dice = dice
        self._systems = [self._text(SYSTEM_WORDS) for _ in range(SYSTEMS)]
        self.answered = 0
        self.failed = 0

    async def run(self) -> None:
        """Until cancelled."""
        limits = httpx.Limits(max_connections=self._people)
        client = httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False)
        async with client, asyncio.TaskGroup() as group:
            for _ in range(self._people):
                group.create_task(self._person(client))

    async def _person(self, client: httpx.AsyncClient) -> None:
        while True:
            messages = [{"role": "system", "content": self._dice.choice(self._systems)}]
            for _ in range(TURNS):
                await asyncio.sleep(self._dice.expovariate(self._speed / 2))
                messages.append({"role": "user", "content": self._text(self._dice.randint(20, 200))})
                messages.append({"role": "assistant", "content": await self._answer(client, messages)})

    async def _answer(self, client: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
        body = {"model": self._model, "messages": messages, "max_tokens": self._dice.randint(20, 80), "stream": True}
        text = ""
        try:
            async with client.stream("POST", self._url, json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    text += _content(line)
        except httpx.HTTPError:
            self.failed += 1
            await asyncio.sleep(1)
        else:
            self.answered += 1
        return text

    def _text(self, words: int) -> str:
        return " ".join(self._dice.choices(WORDS, k=words))


def _content(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices = orjson.loads(line[len("data: ") :]).get("choices")
    return choices[0]["delta"].get("content") or "" if choices else ""
