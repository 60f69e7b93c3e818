"""One data-parallel rank's KV events on a socket that a test writes to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from router.core import KVEvent, Stored
from router.lab.events import wire_events

_ANNOUNCE_S = 0.05


class EventSource:
    """PUB only: nothing is replayed, as by an engine without a replay_endpoint."""

    def __init__(self, *, rank: int = 0) -> None:
        self.rank = rank
        self.sequence = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def send(self, *frames: bytes) -> None:
        await self._socket.send_multipart(list(frames))

    async def publish(self, *events: KVEvent) -> None:
        payload = msgspec.msgpack.encode([1.0, wire_events(events), self.rank])
        await self.send(b"kv-events", self.sequence.to_bytes(8, "big"), payload)
        self.sequence += 1

    async def until_heard(self, heard: Callable[[], Awaitable[bool]]) -> None:
        """Empty batches until somebody listens: what a PUB says to nobody is lost."""
        for _ in range(200):
            await self.publish()
            await asyncio.sleep(_ANNOUNCE_S)
            if await heard():
                return
        raise AssertionError("nobody listens to the event source")


def stored(tokens: Sequence[int], *, size: int = 16, first_hash: int = 1) -> Stored:
    """The whole blocks of a prompt, as new ones."""
    blocks = len(tokens) // size
    return Stored(
        hashes=list(range(first_hash, first_hash + blocks)),
        parent=None,
        tokens=list(tokens[: blocks * size]),
        block_size=size,
    )
