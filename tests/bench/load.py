"""A load generator on loopback that ends by itself. Prints one JSON object.

    python -m tests.bench.load plain  --port 4000 -c 16 -t 3 [--kb 1]
    python -m tests.bench.load stream --port 4000 -c 64 -t 3           streams one after the other until the time is up
    python -m tests.bench.load stream --port 4000 -c 64 --rounds 1     every stream read to its end
    python -m tests.bench.load turns  --port 4000 -c 16 -t 3 --kb 128  next turns of known conversations, all tails new
    python -m tests.bench.load cold   --port 4000 -c 1 -t 3 --kb 280 --every-s 1   prompts of which nothing is known

Prompts of `plain` and `stream`: 16 shared system prompts (two thirds of the size), then a tail nobody has sent before.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import httptools
import uvloop

STAMP = re.compile(rb"@(\d+)@")
WORDS = (  # noqa: SIM905
    "each request goes where most of its prompt already lies in memory unless that engine has so much more to do than "
    "the others that waiting there would cost more than computing the prompt again somewhere else would take"
).split()


def text(size: int, seed: int) -> str:
    dice = random.Random(seed)
    words: list[str] = []
    length = 0
    while length < size:
        words.append(dice.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


def shared_prefix_bodies(kb: float, stream: bool) -> Callable[[], bytes]:
    size = int(kb * 1024)
    parts = []
    for group in range(16):
        system, tail = text(size * 2 // 3, group), text(size - size * 2 // 3, 1000 + group)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "0123456789 " + tail}]
        body = {"model": "fake", "messages": messages, "max_tokens": 256, "temperature": 0, "stream": stream}
        before, _, after = json.dumps(body).partition("0123456789")
        parts.append((before.encode(), after.encode()))
    counter = iter(range(random.randrange(10**8) * 10, 10**10))

    def body() -> bytes:
        n = next(counter)
        before, after = parts[n % 16]
        return before + b"%010d" % n + after

    return body


def next_turn_bodies(kb: float) -> Callable[[], bytes]:
    """16 conversations of 20 messages; each request is one of them with a new last message."""
    conversations = []
    for group in range(16):
        roles = ["system"] + ["user", "assistant"] * 9
        share = int(kb * 1024) // len(roles)
        messages = [{"role": role, "content": text(share, group * 100 + i)} for i, role in enumerate(roles)]
        body = {"model": "fake", "messages": [*messages, {"role": "user", "content": "0123456789"}], "max_tokens": 16}
        before, _, after = json.dumps(body).partition("0123456789")
        conversations.append((before.encode(), after.encode()))
    counter = iter(range(random.randrange(10**8) * 10, 10**10))

    def body() -> bytes:
        n = next(counter)
        before, after = conversations[n % 16]
        return before + b"%010d %s" % (n, b"and so on " * 20) + after

    return body


def cold_bodies(kb: float, model: str) -> Callable[[], bytes]:
    """A number in every kilobyte makes all of it new; to make new text instead would cost the core that measures."""
    pieces = [text(1012, i).encode() for i in range(int(kb))]
    counter = iter(range(random.randrange(10**8) * 10, 10**10))
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "0123456789"}]}
    before, _, after = json.dumps(body).encode().partition(b"0123456789")
    return lambda: before + (b" %010d " % next(counter)).join((b"", *pieces)) + after


class Client(asyncio.Protocol):
    """One connection: sends a request, reads the answer to its end, sends the next."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        if not self.run.may_start():
            self.transport.close()
            return
        body = self.run.body()
        self.parser = httptools.HttpResponseParser(self)
        self.first = self.last = 0
        self.tail = b""
        self.sent = time.monotonic_ns()
        self.transport.write(self.run.head % len(body) + body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self.run.streaming:
            self.chunks(data, now)
        self.parser.feed_data(data)

    def chunks(self, data: bytes, now: int) -> None:
        stamps = STAMP.findall(self.tail + data)
        self.tail = b"" if stamps else (self.tail + data)[-40:]
        for stamp in stamps:
            self.run.transit.append(now - int(stamp))
        if stamps:
            if not self.first:
                self.first = now
                self.run.ttft.append(now - self.sent)
            else:
                self.run.gaps.append(now - self.last)
            self.last = now
            self.run.chunk_count += len(stamps)

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() == 200:
            self.run.latencies.append(time.monotonic_ns() - self.sent)
        else:
            self.run.errors += 1
        if self.run.every_s:
            asyncio.get_running_loop().call_later(self.run.every_s, self.next)
        else:
            self.next()

    def connection_lost(self, exc: Exception | None) -> None:
        self.run.open -= 1
        if not self.run.open:
            self.run.done.set()


def bodies(options: argparse.Namespace) -> Callable[[], bytes]:
    if options.kind == "turns":
        return next_turn_bodies(options.kb)
    if options.kind == "cold":
        return cold_bodies(options.kb, options.model)
    return shared_prefix_bodies(options.kb, options.kind == "stream")


class Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self.streaming = options.kind == "stream"
        self.body = bodies(options)
        self.every_s = options.every_s
        self.head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"authorization: Bearer sk-bench\r\ncontent-length: %d\r\n\r\n"
        )
        self.until = time.monotonic() + options.seconds if not options.rounds else 0
        self.left = options.rounds * options.connections
        self.latencies: list[int] = []
        self.ttft: list[int] = []
        self.gaps: list[int] = []
        self.transit: list[int] = []
        self.errors = self.chunk_count = 0
        self.open = 0
        self.done = asyncio.Event()

    def may_start(self) -> bool:
        if self.until:
            return time.monotonic() < self.until
        self.left -= 1
        return self.left >= 0


def quantile(values: list[int], q: float) -> float | None:
    values.sort()
    return round(values[min(len(values) - 1, int(len(values) * q))] / 1e3, 1) if values else None


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("plain", "stream", "turns", "cold"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-c", dest="connections", type=int, default=16)
    parser.add_argument("-t", dest="seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--kb", type=float, default=1)
    parser.add_argument("--stagger-ms", type=float, default=0)
    parser.add_argument("--every-s", type=float, default=0, help="pause of each connection after an answer")
    parser.add_argument("--model", default="fake", help="for cold prompts")
    options = parser.parse_args()
    run = Run(options)
    loop = asyncio.get_running_loop()
    gc.freeze()
    start = time.monotonic()
    for _ in range(options.connections):
        run.open += 1
        await loop.create_connection(lambda: Client(run), "127.0.0.1", options.port)
        if options.stagger_ms:
            await asyncio.sleep(options.stagger_ms / 1e3)
    await run.done.wait()
    took = time.monotonic() - start
    figures = {
        "requests": len(run.latencies),
        "errors": run.errors,
        "seconds": round(took, 3),
        "requests_per_s": round(len(run.latencies) / took, 1),
        "chunks": run.chunk_count,
        "ttft_p50_us": quantile(run.ttft, 0.5),
    }
    for name, values in (("", run.latencies), ("gap_", run.gaps), ("transit_", run.transit)):
        figures |= {f"{name}p50_us": quantile(values, 0.5), f"{name}p99_us": quantile(values, 0.99)}
    print(json.dumps(figures))


if __name__ == "__main__":
    uvloop.run(main())
