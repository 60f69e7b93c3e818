"""KV events on ZMQ, as vLLM 0.32 sends them: PUB with [topic, sequence, batch], and a ROUTER that replays."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from router.core import Cleared, KVEvent, Removed, Stored

_END = (b"", b"\xff" * 8, b"")  # topic, sequence -1, no payload
_SLICE = 64  # batches replayed in one go; ~0.5 ms
_HWM = 100_000


def wire_events(events: Sequence[KVEvent]) -> list[dict[str, Any]]:
    """Map events with `type` (vLLM 0.24 and later): nullable fields always there, defaults left out."""
    return [wired for event in events for wired in _wired(event)]


def _wired(event: KVEvent) -> Iterator[dict[str, Any]]:
    match event:
        case Cleared():
            yield {"type": "AllBlocksCleared"}
        case Removed(hashes=hashes):
            for block_hash in hashes:  # vLLM announces every block on its own
                yield {"type": "BlockRemoved", "block_hashes": [block_hash], "medium": "GPU", "group_idx": 0}
        case Stored():
            yield {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": event.tokens,
                "block_size": event.block_size,
                "lora_id": None if event.lora is None else 1,
                "medium": "GPU",
                "lora_name": event.lora,
                "extra_keys": _extra_keys(event),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }


def _extra_keys(event: Stored) -> list[list[str] | None]:
    """The adapter's name is in every block, the salt in the first one of the chain only."""
    every = [event.lora] if event.lora else []
    first = [*every, event.salt] if event.salt and event.parent is None else every
    return [first or None] + [every or None] * (len(event.hashes) - 1)


class EventPublisher:
    """One rank's stream. `publish` never blocks: a subscriber that is too slow misses batches, and may ask for them."""

    def __init__(
        self, *, host: str, port: int, replay_port: int | None, topic: str = "kv-events", buffer_steps: int = 10_000
    ) -> None:
        """Port 0: any free one. Raises OSError (zmq.ZMQError) for a port in use. Needs the running loop."""
        self.topic = topic
        self.buffer_steps = buffer_steps
        self.sequence = 0  # of the next batch
        self._topic = topic.encode()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.asyncio.Context()
        self._replay: zmq.asyncio.Socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._pub: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUB)
        try:
            self._pub.set_hwm(_HWM)
            self.port = _bind(self._pub, host, port)
            self.replay_port = None if replay_port is None else self._serve_replay(host, replay_port)
        except BaseException:
            self._close_sockets()
            raise

    def publish(self, events: Sequence[KVEvent], at: float) -> None:
        """One batch. `at`: wall clock, seconds."""
        payload = self._encode([at, wire_events(events), 0])
        sequence = self.sequence.to_bytes(8, "big")
        self.sequence += 1
        self._buffer.append((sequence, payload))
        try:
            self._pub.send_multipart((self._topic, sequence, payload), zmq.NOBLOCK)
        except zmq.Again:
            pass  # beyond the high-water mark: a gap, as the real engine leaves one

    async def aclose(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()

    def _serve_replay(self, host: str, port: int) -> int:
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(2 * (self.buffer_steps + 1))  # a ROUTER drops silently what a slow reader leaves
        bound = _bind(self._replay, host, port)
        self._serving = asyncio.get_running_loop().create_task(self._answer(self._replay))
        return bound

    async def _answer(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                continue  # vLLM logs these and never answers
            await self._resend(socket, frames[0], int.from_bytes(frames[2], "big"))

    async def _resend(self, socket: zmq.asyncio.Socket, peer: bytes, start: int) -> None:
        """What is left from `start` on; nothing says that older batches are gone, but that the first is not `start`."""
        oldest = self.sequence - len(self._buffer)
        batches = list(islice(self._buffer, max(0, start - oldest), None))
        for number, (sequence, payload) in enumerate(batches):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            await socket.send_multipart((peer, b"", self._topic, sequence, payload))
        await socket.send_multipart((peer, b"", *_END))


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> int:
    address = "*" if host in ("0.0.0.0", "::", "") else host
    socket.bind(f"tcp://{address}:{port or '*'}")
    return port or int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
