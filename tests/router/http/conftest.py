from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from router.http.connection import Handler, Refuser
from router.http.messages import Limits, Request
from router.http.responder import Responder
from router.http.server import Server, serve

_NEVER_PAUSES = (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)
"""Versions of Python whose own transports take any amount from `writelines` (CPython gh-127655)."""

Serve = Callable[..., Awaitable[Server]]


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test here runs on both: uvloop is what we serve with, plain asyncio keeps us to what transports promise."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if not _NEVER_PAUSES:
        loops["asyncio"] = asyncio.new_event_loop
    return loops


def echo(request: Request, responder: Responder) -> None:
    """Answers with what was asked."""
    line = f"{request.method} {request.path} {request.query.decode()}\n".encode()
    responder.send(200, [(b"content-type", b"text/plain")], line + request.body)


@pytest.fixture
async def start() -> AsyncIterator[Serve]:
    """start(handler=echo, **limits): a server on a free loopback port."""
    servers: list[Server] = []

    async def start_one(handler: Handler = echo, refuser: Refuser | None = None, **limits: float) -> Server:
        servers.append(await serve(handler, limits=Limits(**limits), refuser=refuser))  # type: ignore[arg-type]
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()
    await asyncio.sleep(0.002)


class Wire:
    """A client that writes and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), 10)

    async def answer(self) -> tuple[bytes, bytes]:
        """Head and body of an answer with a length."""
        head = await self.until(b"\r\n\r\n")
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return head, await asyncio.wait_for(self.reader.readexactly(length), 10)

    async def to_end(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 10)

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()


@pytest.fixture
async def dial() -> AsyncIterator[Callable[[Server], Awaitable[Wire]]]:
    wires: list[Wire] = []

    async def dial_one(server: Server) -> Wire:
        wires.append(Wire(*await asyncio.open_connection("127.0.0.1", server.port, limit=2**22)))
        return wires[-1]

    yield dial_one
    for wire in wires:
        wire.reset()
    await asyncio.sleep(0.002)
