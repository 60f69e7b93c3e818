"""A fast engine that computes nothing: fixed answers, paced or unpaced streams, and KV events at a given rate.

    python -m tests.bench.fake_engine --ports 9101,9102 [--chunks 200] [--delay-ms 10] [--metrics-bytes 0]
                                      [--events-port 9501 --blocks-per-s 50000]

Each streamed chunk carries the sender's monotonic clock as its content, so that a reader on the same machine knows how
long it was on the way. `GET /_set?chunks=…&delay_ms=…&blocks_per_s=…` changes the pace, `GET /_count` tells requests
per port.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import re
import time
from typing import Any

import msgspec
import uvloop
import zmq

LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 256, "completion_tokens": 40, "total_tokens": 296}
CHUNK = (
    b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"fake","choices":[{"index":0,"delta":{"content":"@'
)


def answer(body: bytes, content_type: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, content_type, len(body))
    return head + body


REPLY = answer(
    json.dumps(
        {
            "id": "c", "object": "chat.completion", "created": 1, "model": "fake", "usage": USAGE,
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "w " * 80}}],
        }
    ).encode()
)  # fmt: skip
MODELS = answer(b'{"object":"list","data":[{"id":"fake","object":"model","owned_by":"vllm","max_model_len":262144}]}')


def event(data: bytes) -> bytes:
    data = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


END = (
    event(b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"fake",'
          b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')
    + event(b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"fake","choices":[],"usage":'
            + json.dumps(USAGE).encode() + b"}")
    + event(b"[DONE]") + b"0\r\n\r\n"
)  # fmt: skip


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(
        self, pace: dict[str, float], counts: dict[int, int], port: int, metrics: bytes, sources: bytes
    ) -> None:
        self.pace, self.counts, self.port, self.metrics, self.sources = pace, counts, port, metrics, sources
        self.buffer = b""
        self.transport: Any = None
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (head := self.buffer.find(b"\r\n\r\n")) >= 0:
            length = LENGTH.search(self.buffer, 0, head + 2)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self.buffer) < end:
                return
            request, self.buffer = self.buffer[:end], self.buffer[end:]
            self.handle(request)

    def handle(self, request: bytes) -> None:
        if request.startswith(b"POST /v1/"):
            self.counts[self.port] += 1
            if b'"stream": true' in request or b'"stream":true' in request:
                self.transport.write(SSE_HEAD)
                self.send(0, self.loop.time())
            else:
                self.transport.write(REPLY)
            return
        path = request.split(b" ", 2)[1].decode()
        self.transport.write(self.other(path))

    def other(self, path: str) -> bytes:
        path, _, query = path.partition("?")
        if path == "/_set":
            self.pace.update((k, float(v)) for k, _, v in (pair.partition("=") for pair in query.split("&")))
        if path == "/v1/models":
            return MODELS
        if path == "/metrics":
            return answer(self.metrics, b"text/plain")
        if path == "/kv_event_sources" and self.sources:
            return answer(self.sources)
        if path in ("/health", "/_set"):
            return answer(b"{}")
        if path == "/version":
            return answer(b'{"version":"0.32.0"}')
        if path == "/_count":
            return answer(json.dumps(self.counts).encode())
        return answer(b'{"detail":"Not Found"}', status=b"404 Not Found")

    def send(self, i: int, start: float) -> None:
        if i >= self.pace["chunks"]:
            self.timer = None
            self.transport.write(END)
            return
        self.transport.write(event(CHUNK + b'%d@ "},"finish_reason":null}]}' % time.monotonic_ns()))
        if self.pace["delay_ms"]:
            self.timer = self.loop.call_at(start + (i + 1) * self.pace["delay_ms"] / 1e3, self.send, i + 1, start)
        else:
            self.timer = self.loop.call_soon(self.send, i + 1, start)


def batches(count: int, *, blocks: int = 32, size: int = 16, lifetime: int = 600) -> list[bytes]:
    """KV events as vLLM 0.32 sends them: in each batch a chain of `blocks` stored, and the one of `lifetime` batches
    ago removed. They may be sent round and round.
    """
    encode = msgspec.msgpack.Encoder().encode
    made = []
    for n in range(count):
        stored = {
            "type": "BlockStored", "block_hashes": list(range(n * blocks + 1, (n + 1) * blocks + 1)),
            "parent_block_hash": None, "token_ids": [(n * 7919 + i) % 50_000 for i in range(blocks * size)],
            "block_size": size, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }  # fmt: skip
        first = (n - lifetime) % count * blocks + 1
        removed = [{"type": "BlockRemoved", "block_hashes": [first + i], "medium": "GPU"} for i in range(blocks)]
        made.append(encode([time.time(), [stored, *removed], 0]))
    return made


async def publish(port: int, pace: dict[str, float], blocks: int = 32) -> None:
    """Batches made beforehand: what loads the gateway must not load the core of those who measure it."""
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.bind(f"tcp://127.0.0.1:{port}")
    payloads = batches(1200, blocks=blocks)
    due = time.monotonic()
    for seq in itertools.count():
        while (now := time.monotonic()) < due or not pace["blocks_per_s"]:
            await asyncio.sleep(0.001 if pace["blocks_per_s"] else 0.05)
            due = due if pace["blocks_per_s"] else time.monotonic()
        payload = payloads[seq % len(payloads)]
        socket.send_multipart([b"", seq.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        due = max(due, now - 0.1) + blocks / pace["blocks_per_s"]


def metrics_page(size: int) -> bytes:
    """A page in vLLM's form, filled up with other metrics to `size` bytes."""
    lines = [
        'vllm:num_requests_running{engine="0",model_name="fake"} 0.0',
        'vllm:num_requests_waiting{engine="0",model_name="fake"} 0.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="fake"} 0.1',
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="27500",engine="0"} 1.0',
        "process_start_time_seconds 1.7e9",
    ]
    page = "\n".join(lines) + "\n"
    bucket = 'vllm:other_seconds_bucket{{engine="0",le="{0}.0",model_name="fake"}} {0}.0\n'
    filler = "".join(bucket.format(i) for i in range(40))
    while len(page) < size:
        page = filler + page
    return page.encode()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", default="9101,9102,9103,9104")
    parser.add_argument("--chunks", type=float, default=200)
    parser.add_argument("--delay-ms", type=float, default=10)
    parser.add_argument("--metrics-bytes", type=int, default=0)
    parser.add_argument("--events-port", type=int, default=0)
    parser.add_argument("--blocks-per-s", type=float, default=0)
    options = parser.parse_args()
    pace = {"chunks": options.chunks, "delay_ms": options.delay_ms, "blocks_per_s": options.blocks_per_s}
    page = metrics_page(options.metrics_bytes)
    counts: dict[int, int] = {}
    loop = asyncio.get_running_loop()
    publishers = []
    for i, port in enumerate(map(int, options.ports.split(","))):
        counts[port] = 0
        sources = b""
        if options.events_port and i == 0:
            endpoint = f"tcp://127.0.0.1:{options.events_port}"
            sources = json.dumps({"0": {"endpoint": endpoint, "replay_endpoint": None, "topic": ""}}).encode()
            publishers.append(asyncio.create_task(publish(options.events_port, pace)))
        await loop.create_server(
            lambda port=port, sources=sources: Engine(pace, counts, port, page, sources),
            "127.0.0.1",
            port,
            backlog=1024,
        )
    gc.collect()
    gc.freeze()
    await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        uvloop.run(main())
    except KeyboardInterrupt:
        pass
