"""Drives conversations through a gateway, at most so many requests at a time, and keeps what was said of each."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.real.conversations import Conversation


@dataclass
class Row:
    """One answered request."""

    request_id: str
    started_at: float  # monotonic
    prompt_tokens: int
    predicted: int
    delivered: int
    said_before: int = 0  # tokens of the conversation's last prompt
    best: int = 0  # what the gateway thought the engine to hold that holds most
    ttft_s: float | None = None
    alone: bool = False
    prompt_source: str = ""
    instance: str = ""


class Driver:
    def __init__(self, url: str, model: str, *, think_s: float = 0.1) -> None:
        """`think_s`: between an answer and the next turn. Engines tell of an answer's blocks just after its end."""
        self.rows: list[Row] = []
        self.failed = 0
        self._url = url
        self._model = model
        self._think_s = think_s

    async def run(
        self, conversations: Iterable[Conversation], *, width: int = 4, until: Callable[[], bool] = lambda: False
    ) -> None:
        """All conversations to their ends, or until `until()`; `width` requests at a time."""
        waiting = iter(conversations)
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            await asyncio.gather(*(self._worker(client, waiting, until) for _ in range(width)))

    async def _worker(
        self, client: httpx.AsyncClient, waiting: Iterator[Conversation], until: Callable[[], bool]
    ) -> None:
        for conversation in waiting:
            while not conversation.finished and not until():
                body = conversation.next_body(self._model)
                row, content = await self._ask(client, body)
                row.said_before, conversation.said = conversation.said, row.prompt_tokens
                conversation.answered(content)
                await asyncio.sleep(self._think_s)
            if until():
                return

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Row, str]:
        """Tries again while the gateway or an engine is away, as an SDK does."""
        while True:
            started = time.monotonic()
            try:
                if body.get("stream"):
                    row, content = await self._streamed(client, body, started)
                else:
                    row, content = await self._whole(client, body, started)
            except (httpx.HTTPError, KeyError, ValueError):
                self.failed += 1
                await asyncio.sleep(0.2)
                continue
            self.rows.append(row)
            return row, content

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any], started: float) -> tuple[Row, str]:
        answer = await client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        fields = answer.json()
        return _row(answer, fields["usage"], started), fields["choices"][0]["message"]["content"] or ""

    async def _streamed(self, client: httpx.AsyncClient, body: dict[str, Any], started: float) -> tuple[Row, str]:
        content, usage, first = "", None, None
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ValueError("the stream broke")
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    first = first or time.monotonic()
                    content += choice["delta"].get("content") or ""
        if usage is None:
            raise ValueError("the stream ended without usage")
        row = _row(answer, usage, started)
        row.ttft_s = first - started if first else None
        return row, content

    def learn(self, receipts: Iterable[dict[str, Any]]) -> None:
        """Who was alone, and where it ran, from the gateway's receipts."""
        known = {receipt["request_id"]: receipt for receipt in receipts}
        for row in self.rows:
            receipt = known.get(row.request_id)
            if receipt is not None:
                row.alone, row.instance = receipt["alone"], receipt["instance"]
                row.prompt_source, row.best = receipt["prompt_source"], receipt["best_hit_tokens"]


def _row(answer: httpx.Response, usage: dict[str, Any], started: float) -> Row:
    details = usage.get("prompt_tokens_details") or {}
    return Row(
        request_id=answer.headers["x-request-id"],
        started_at=started,
        prompt_tokens=usage["prompt_tokens"],
        predicted=int(answer.headers["x-warmroute-predicted-tokens"]),
        delivered=details.get("cached_tokens") or 0,
    )


def hit_rate(rows: Iterable[Row]) -> float:
    rows = list(rows)
    return sum(row.delivered for row in rows) / max(1, sum(row.prompt_tokens for row in rows))


def hit_rate_error(rows: Sequence[Row]) -> float:
    """Standard error of their hit rate."""
    rate = hit_rate(rows)
    squares = sum((row.delivered - rate * row.prompt_tokens) ** 2 for row in rows)
    return math.sqrt(squares) / max(1, sum(row.prompt_tokens for row in rows))


def known_rate(rows: Iterable[Row]) -> float:
    """Of what conversations had said before: how much of it the gateway knew some engine to hold."""
    rows = [row for row in rows if row.instance and row.said_before]
    known = sum(min(row.best, row.said_before) for row in rows)
    return known / max(1, sum(row.said_before for row in rows))
