"""CPU of a bare relay made of the two sides of router.http: what a request costs before anything is decided about it.

python -m tests.bench.http_relay

Three processes on loopback: an echo of fixed answers, the relay, a client that keeps 16 connections busy with 1 KB chat
requests (9 headers). The relay's CPU is read from the system's accounts of its process, the rest is not counted.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import cast

import uvloop

from router.errors import EngineError
from router.http.client import Exchange, Pool
from router.http.messages import Header
from router.http.server import Request, Responder, serve
from tests.bench.table import Row, report

TAKES_S = 6
_SECONDS = 2.0
_CONNECTIONS = 16
_BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 960}], "max_tokens": 16}).encode()
_REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n"
    b"Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nUser-Agent: OpenAI/Python 2.0\r\n"
    b"Authorization: Bearer sk-0123456789abcdef\r\nX-Request-Id: 0123456789\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_ANSWER = b'{"id":"c","choices":[{"message":{"role":"assistant","content":"ok"}}]}' * 4
_PASSED_UP = frozenset((b"accept", b"content-type", b"user-agent", b"x-request-id"))
_JSON: list[Header] = [(b"content-type", b"application/json")]


class _Relayed:
    """Both ends of one request, as a proxy would write it at the least."""

    __slots__ = ("_headers", "_parts", "_responder", "_status", "_streamed")

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._parts: list[bytes] = []
        self._status = 0
        self._streamed = False

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        self._headers = headers
        self._streamed = (b"content-type", b"text/event-stream") in headers
        if self._streamed:
            self._responder.start(status, headers)

    def on_data(self, data: bytes) -> None:
        if self._streamed:
            self._responder.write(data)
        else:
            self._parts.append(data)

    def on_end(self) -> None:
        if self._streamed:
            self._responder.finish()
        else:
            self._responder.send(self._status, self._headers, b"".join(self._parts))

    def on_error(self, error: EngineError) -> None:
        self._responder.send(error.status, _JSON, b"{}")


async def _relay(upstream: int, ready: Connection) -> None:
    pool = Pool(f"http://127.0.0.1:{upstream}")

    def handle(request: Request, responder: Responder) -> None:
        headers = [header for header in request.headers if header[0] in _PASSED_UP]
        exchange: Exchange = pool.send(b"POST", request.path.encode(), headers, request.body, _Relayed(responder))
        responder.on_gone = exchange.cancel

    server = await serve(handle)
    ready.send(server.port)
    await asyncio.Event().wait()


async def _engine(_upstream: int, ready: Connection) -> None:
    server = await serve(lambda request, responder: responder.send(200, _JSON, _ANSWER))
    ready.send(server.port)
    await asyncio.Event().wait()


class _Client(asyncio.Protocol):
    """Sends the next request when an answer is whole. Answers are of one size, learned from the first."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts
        self._size = 0
        self._seen = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast(asyncio.Transport, transport).write
        self._write(_REQUEST)

    def data_received(self, data: bytes) -> None:
        self._seen += len(data)
        if not self._size:
            self._size = data.index(b"\r\n\r\n") + 4 + len(_ANSWER)
        if self._seen == self._size:
            self._seen = 0
            self._counts[0] += 1
            self._write(_REQUEST)


async def _load(port: int) -> int:
    counts = [0]
    loop = asyncio.get_running_loop()
    transports = [
        (await loop.create_connection(lambda: _Client(counts), "127.0.0.1", port))[0] for _ in range(_CONNECTIONS)
    ]
    await asyncio.sleep(_SECONDS)
    for transport in transports:
        transport.abort()
    return counts[0]


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _child(main: object, upstream: int, ready: Connection) -> None:
    uvloop.run(main(upstream, ready))  # type: ignore[operator]


def _measure(pid: int, port: int) -> tuple[float, float]:
    before, began = _cpu_s(pid), time.perf_counter()
    requests = uvloop.run(_load(port))
    return (_cpu_s(pid) - before) / requests * 1e6, requests / (time.perf_counter() - began)


def run() -> dict[str, float]:
    """CPU in µs a request, and requests a second, through the relay and straight to the engine's stand-in."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    engine = context.Process(target=_child, args=(_engine, 0, theirs), daemon=True)
    engine.start()
    engine_port = mine.recv()
    relay = context.Process(target=_child, args=(_relay, engine_port, theirs), daemon=True)
    relay.start()
    relay_port = mine.recv()
    try:
        assert engine.pid is not None
        assert relay.pid is not None
        direct_us, direct_rate = _measure(engine.pid, engine_port)
        relay_us, relay_rate = _measure(relay.pid, relay_port)
    finally:
        for process in (relay, engine):
            process.terminate()
            process.join()
    return {"relay_cpu_us": relay_us, "relay_rps": relay_rate, "server_cpu_us": direct_us, "direct_rps": direct_rate}


def rows(figures: dict[str, float]) -> Iterator[Row]:
    yield Row("CPU a request", figures["relay_cpu_us"], "µs", figures["server_cpu_us"], "our server alone")
    yield Row("requests", figures["relay_rps"], "/s", figures["direct_rps"], "our server alone")


if __name__ == "__main__":
    report(__doc__, run, rows)
