"""An engine's event publisher on real sockets: a PUB, and a ROUTER with a ring of what was published."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

import zmq
import zmq.asyncio

from router.core import EventSource
from tests.adapters.wire import numbered

END = b"\xff" * 8


class Publisher:
    """`topic_in_replay`: vLLM since 0.26 and SGLang since 0.5.22; earlier versions answer without the topic."""

    def __init__(self, *, topic_in_replay: bool = True, replay: bool = True, rank: int = 0) -> None:
        self.process = 0
        self.rank = rank
        self.topic = "kv-events"
        self.published: list[bytes] = []
        self.requests: list[int] = []
        self.left_out: set[int] = set()  # of the next answer
        self.is_mute = False
        self._topic_in_replay = topic_in_replay
        self._has_replay = replay
        self._ports: list[int] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def source(self) -> EventSource:
        endpoint, replay = (f"tcp://127.0.0.1:{port}" for port in self._ports)
        return EventSource(self.rank, endpoint, replay if self._has_replay else None, self.topic)

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.sndhwm = self._router.sndhwm = 0
        for socket, port in zip((self._pub, self._router), self._ports or (0, 0), strict=True):
            socket.linger = 0
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self._ports = [int(socket.last_endpoint.rpartition(b":")[2]) for socket in (self._pub, self._router)]
        self._replays = asyncio.create_task(self._serve_replays())

    async def stop(self) -> None:
        self._replays.cancel()
        await asyncio.gather(self._replays, return_exceptions=True)
        self._context.destroy(linger=0)

    async def restart(self) -> None:
        """A new process on the same ports."""
        await self.stop()
        self.process += 1
        self.published = []
        await self.start()

    async def publish(self, count: int = 1, *, lost: Iterable[int] = ()) -> None:
        """`lost`: sequences that use a number but never arrive."""
        lost = set(lost)
        for _ in range(count):
            seq = len(self.published)
            payload = numbered(seq, process=self.process)
            self.published.append(payload)
            if seq not in lost:
                await self.send(self.topic.encode(), seq.to_bytes(8, "big"), payload)

    async def send(self, *frames: bytes) -> None:
        await self._pub.send_multipart(list(frames))

    async def _serve_replays(self) -> None:
        while True:
            client, *frames = await self._router.recv_multipart()
            if len(frames) != 2 or frames[0] != b"" or self.is_mute:
                continue  # as the engines do: no empty frame, no answer
            start = int.from_bytes(frames[1], "big")
            self.requests.append(start)
            left_out, self.left_out = self.left_out, set()
            for seq in range(start, len(self.published)):
                if seq not in left_out:
                    await self._reply(client, self.topic.encode(), seq.to_bytes(8, "big"), self.published[seq])
            await self._reply(client, b"", END, b"")

    async def _reply(self, client: bytes, topic: bytes, seq: bytes, payload: bytes) -> None:
        await self._router.send_multipart([client, b"", *([topic] if self._topic_in_replay else []), seq, payload])
