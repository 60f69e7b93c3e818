"""An engine's KV event publisher on real sockets, one for each rank: what is sent, what is lost, what is replayed.

Wire format as vLLM 0.32 has it (`distributed/kv_events.py`): `topic | sequence, 8 bytes big-endian | msgpack`. The
publishing socket is an XPUB, which is a PUB on the wire and tells when a subscription has come.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq
import zmq.asyncio

TOPIC = b"kv-events"
END = b"\xff" * 8
_HASHES = ("block_hashes", "parent_block_hash")


class EventPort:
    """`ring`: how many batches a replay can still answer with; `replay=False`: there is no replay socket.

    requests    the start of each replay that was asked for, since the last start or restart
    """

    def __init__(self, rank: int = 0, *, ring: int = 10_000, replay: bool = True) -> None:
        self.rank = rank
        self.requests: list[int] = []
        self._has_replay = replay
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self._next = 0
        self._ports: tuple[int, int] = (0, 0)
        self._subscribed, self._asked = asyncio.Event(), asyncio.Event()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[0]}"

    def config(self) -> dict[str, Any]:
        """Its entry in `/kv_event_sources`: wildcards, as vLLM shows them."""
        port, replay_port = self._ports
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{replay_port}" if self._has_replay else None,
            "topic": TOPIC.decode(),
        }

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._publisher.sndhwm = self._router.sndhwm = 0
        self._ports = (_bound(self._publisher, self._ports[0]), _bound(self._router, self._ports[1]))
        self._subscribed.clear()
        self._asked.clear()
        self.requests = []
        self._tasks = [asyncio.create_task(self._see_subscriptions()), asyncio.create_task(self._serve_replays())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def restart(self) -> None:
        """A new process at the same address: the connections break, and nothing of the old one can be replayed."""
        await self.stop()
        self.begin_anew()
        await self.start()

    def begin_anew(self) -> None:
        """A new process that nobody sees start: the sequence begins at 0 again."""
        self._ring.clear()
        self._next = 0

    async def joined(self) -> None:
        """Until the gateway has subscribed, and has asked for what it may have missed."""
        await asyncio.wait_for(self._subscribed.wait(), 10)
        if self._has_replay:
            await asyncio.wait_for(self._asked.wait(), 10)

    async def publish(
        self, *events: Mapping[str, Any], seq: int | None = None, rank: int | None = None, drop: bool = False
    ) -> int:
        """One batch; returns its sequence. `rank`: as the batch itself says. `drop`: it never arrives."""
        seq = self._next if seq is None else seq
        payload = msgspec.msgpack.encode([1.5, [_named(event) for event in events], rank])
        self._ring.append((seq, payload))
        self._next = seq + 1
        if not drop:
            await self._send(seq, payload)
        return seq

    async def publish_again(self, seq: int) -> None:
        """The same bytes under the same sequence, as after a reconnect of a proxy between."""
        await self._send(seq, dict(self._ring)[seq])

    async def _send(self, seq: int, payload: bytes) -> None:
        await self._publisher.send_multipart([TOPIC, seq.to_bytes(8, "big"), payload])

    async def _see_subscriptions(self) -> None:
        while True:
            if (await self._publisher.recv())[:1] == b"\x01":
                self._subscribed.set()

    async def _serve_replays(self) -> None:
        while True:
            client, empty, start = await self._router.recv_multipart()
            assert empty == b""
            self.requests.append(int.from_bytes(start, "big"))
            self._asked.set()
            for seq, payload in list(self._ring):
                if seq >= self.requests[-1]:
                    await self._router.send_multipart([client, b"", TOPIC, seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", b"", END, b""])


def _bound(socket: zmq.asyncio.Socket, port: int) -> int:
    """Binds to `port`, or to a free one for 0; returns which."""
    socket.bind(f"tcp://127.0.0.1:{port or '*'}")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])


def stored(
    name: str, tokens: list[int], *, block_size: int, parent: str | None = None, **fields: Any
) -> dict[str, Any]:
    """A BlockStored of whole blocks; their hashes are `name`, `name.1`, `name.2` …"""
    count = len(tokens) // block_size
    return {
        "type": "BlockStored",
        "block_hashes": [name if number == 0 else f"{name}.{number}" for number in range(count)],
        "parent_block_hash": parent,
        "token_ids": tokens[: count * block_size],
        "block_size": block_size,
        "lora_id": None,
        "lora_name": None,
        "medium": "GPU",
        "extra_keys": None,
        **fields,
    }


def _named(event: Mapping[str, Any]) -> dict[str, Any]:
    """Names become the 32 bytes of vLLM's sha256 hashes; numbers stay, as with its 64-bit ones."""
    return {key: _hashed(value) if key in _HASHES else value for key, value in event.items()}


def _hashed(value: Any) -> Any:
    if isinstance(value, list):
        return [_hashed(each) for each in value]
    return hashlib.sha256(value.encode()).digest() if isinstance(value, str) else value
