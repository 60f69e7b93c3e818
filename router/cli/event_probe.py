"""Listens to an engine's event endpoints with plain sockets, to see what really arrives.

Wire format (vLLM 0.9 to 0.33, SGLang 0.4.6 to 0.5.23): PUB frames are topic, sequence, payload. A replay is asked of a
ROUTER by the frames "", start as 8 bytes big-endian; the end of the answer is an empty payload.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from router.core import EventSource

SETTLE_S = 0.3
"""A subscription takes effect when the publisher has read it, shortly after the handshake; nothing confirms it."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FROM_THE_FIRST = [b"", (0).to_bytes(8, "big")]


class Heard(NamedTuple):
    connected: bool  # somebody listens at the endpoint, or answered
    messages: int


class EventProbe:
    """Subscribed to all sources from `async with` on. `patience_s`: how long each question waits for an answer."""

    def __init__(self, sources: Sequence[EventSource], *, patience_s: float = 3.0) -> None:
        self._sources = sources
        self._patience_s = patience_s
        self._context = zmq.asyncio.Context()
        self._subscribers: dict[int, zmq.asyncio.Socket] = {}
        self._listening: dict[int, bool] = {}

    async def __aenter__(self) -> Self:
        for source in self._sources:
            self._listening[source.rank] = await listens(source.endpoint)
            if self._listening[source.rank]:
                self._subscribers[source.rank] = await self._subscribe(source)
        if self._subscribers:
            await asyncio.sleep(SETTLE_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def heard(self) -> dict[int, Heard]:
        """By rank: what has arrived since the subscription, waiting for a first message where there is none yet."""
        return {
            source.rank: Heard(self._listening[source.rank], await self._received(self._subscribers.get(source.rank)))
            for source in self._sources
        }

    async def saw(self, text: str, within_s: float) -> bool:
        """Whether a batch that comes now holds these bytes."""
        sought, loop = text.encode(), asyncio.get_running_loop()
        until = loop.time() + within_s
        while self._subscribers and loop.time() < until:
            for subscriber in self._subscribers.values():
                while await subscriber.poll(20):
                    if sought in (await subscriber.recv_multipart())[-1]:
                        return True
        return False

    async def replayed(self) -> dict[int, Heard | None]:
        """By rank: what the replay endpoint gives from the first batch on; None where there is no endpoint."""
        return {source.rank: await self._replayed(source.replay) if source.replay else None for source in self._sources}

    async def reachable_elsewhere(self, source: EventSource) -> str | None:
        """An address beyond loopback at which the endpoint can be reached, if there is one."""
        parts = urlsplit(source.endpoint)
        if parts.scheme != "tcp" or parts.port is None:
            return None
        if parts.hostname not in _LOOPBACK:
            return source.endpoint if self._listening.get(source.rank) else None
        host = own_address()
        return f"{host}:{parts.port}" if host and await listens(f"tcp://{host}:{parts.port}") else None

    async def _subscribe(self, source: EventSource) -> zmq.asyncio.Socket:
        subscriber = self._context.socket(zmq.SUB)
        subscriber.subscribe(source.topic)
        monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        subscriber.connect(source.endpoint)
        await monitor.poll(int(self._patience_s * 1000))
        subscriber.disable_monitor()
        monitor.close(linger=0)
        return subscriber

    async def _received(self, subscriber: zmq.asyncio.Socket | None) -> int:
        messages = 0
        while subscriber and await subscriber.poll(0 if messages else int(self._patience_s * 1000)):
            await subscriber.recv_multipart()
            messages += 1
        return messages

    async def _replayed(self, endpoint: str) -> Heard:
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        await dealer.send_multipart(_FROM_THE_FIRST)
        messages = 0
        while await dealer.poll(int(self._patience_s * 1000)):
            *_, payload = await dealer.recv_multipart()
            if not payload:
                return Heard(True, messages)
            messages += 1
        return Heard(bool(messages), messages)


async def listens(endpoint: str) -> bool:
    """Whether a tcp:// endpoint takes connections; other kinds are believed."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp":
        return True
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def own_address() -> str | None:
    """This machine's address towards others; no packet is sent. None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, RFC 5737: routed like any foreign address
            address: str = probe.getsockname()[0]
        except OSError:
            return None
    return None if address.startswith("127.") else address
