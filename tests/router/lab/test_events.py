"""What a subscriber learns must be what the engine holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from router.core import Cleared, Removed, Stored
from router.lab.chat import ChatModel
from router.lab.engine import block_hashes, root_hash
from router.lab.events import EventPublisher, wire_events
from router.lab.server import SimEngineOptions, SimEngineServer


class Subscriber:
    """Reads one engine's stream as a listener outside would, with nothing of ours but ZMQ and msgpack."""

    def __init__(self, endpoint: str | None) -> None:
        assert endpoint is not None
        self._context = zmq.asyncio.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self.sequences: list[int] = []
        self.events: list[dict[str, Any]] = []

    async def read(self, batches: int) -> None:
        while len(self.sequences) < batches:
            topic, sequence, payload = await asyncio.wait_for(self._sub.recv_multipart(), 5)
            assert topic == b"kv-events"
            self.sequences.append(int.from_bytes(sequence, "big"))
            at, events, rank = msgspec.msgpack.decode(payload)
            assert at > 1e9
            assert rank == 0
            self.events += events

    def held(self) -> dict[int, int]:
        held: dict[int, int] = {}
        for event in self.events:
            for name in event.get("block_hashes", ()):
                held[name] = held.get(name, 0) + (1 if event["type"] == "BlockStored" else -1)
            if event["type"] == "AllBlocksCleared":
                held.clear()
        return {name: copies for name, copies in held.items() if copies}

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
async def engine(chat: ChatModel) -> AsyncIterator[SimEngineServer]:
    options = SimEngineOptions(speed=200, capacity_tokens=1_600, max_model_tokens=1_000, loras=("poet",))
    async with SimEngineServer(options, chat=chat) as engine:
        yield engine


@pytest.fixture
async def subscriber(engine: SimEngineServer) -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(engine.events_endpoint)
    await asyncio.sleep(0.1)  # a subscription takes a moment to reach the publisher
    yield subscriber
    subscriber.close()


@pytest.fixture
async def http(engine: SimEngineServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url) as http:
        yield http


async def complete(http: httpx.AsyncClient, prompt: list[int], output: int = 1, **more: Any) -> list[int]:
    ask = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "return_token_ids": True, **more}
    answer = await http.post("/v1/completions", json=ask)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


async def test_events_add_up_to_what_the_engine_holds(
    engine: SimEngineServer, subscriber: Subscriber, http: httpx.AsyncClient
) -> None:
    for round in range(6):
        await complete(http, list(range(100 * round, 100 * round + 300)), output=40)
    assert engine.model.pool.cached_hashes
    await subscriber.read(engine.published)
    assert subscriber.sequences == list(range(engine.published))
    assert any(event["type"] == "BlockRemoved" for event in subscriber.events)
    assert subscriber.held() == engine.model.pool.cached_hashes


async def test_stored_blocks_carry_their_tokens_and_parents(
    engine: SimEngineServer, subscriber: Subscriber, http: httpx.AsyncClient
) -> None:
    prompt = list(range(50))
    output = await complete(http, prompt, output=20)
    await subscriber.read(2)
    first, second = subscriber.events
    hashes = block_hashes(prompt + output, 16, root_hash(None, None))
    assert first == {
        "type": "BlockStored",
        "block_hashes": hashes[:3],
        "parent_block_hash": None,
        "token_ids": prompt[:48],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * 3,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert second["block_hashes"] == hashes[3:4]
    assert second["parent_block_hash"] == hashes[2]
    assert second["token_ids"] == (prompt + output)[48:64]


async def test_salt_is_in_the_first_block_and_the_adapter_in_every_one(
    subscriber: Subscriber, http: httpx.AsyncClient
) -> None:
    await complete(http, list(range(33)), cache_salt="tenant-a")
    await complete(http, list(range(33)), model="poet", cache_salt="tenant-a")
    await subscriber.read(2)
    salted, both = subscriber.events
    assert salted["extra_keys"] == [["tenant-a"], None]
    assert both["extra_keys"] == [["poet", "tenant-a"], ["poet"]]
    assert both["lora_name"] == "poet"
    assert not set(salted["block_hashes"]) & set(both["block_hashes"])


async def test_a_warm_prompt_publishes_nothing_and_a_reset_waits_for_the_next_request(
    engine: SimEngineServer, subscriber: Subscriber, http: httpx.AsyncClient
) -> None:
    for _ in range(2):
        await complete(http, list(range(40)))
    assert engine.published == 1
    assert (await http.post("/reset_prefix_cache")).json() == {"success": True}
    assert engine.published == 1
    await complete(http, list(range(40)))
    await subscriber.read(2)
    assert [event["type"] for event in subscriber.events] == ["BlockStored", "AllBlocksCleared", "BlockStored"]
    assert subscriber.held() == engine.model.pool.cached_hashes


async def replayed(endpoint: str | None, *frames: bytes) -> list[list[bytes]]:
    """What a DEALER gets, up to and without the end mark."""
    assert endpoint is not None
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set_hwm(0)
    dealer.connect(endpoint)
    try:
        await dealer.send_multipart(frames)
        got: list[list[bytes]] = []
        while True:
            parts = await asyncio.wait_for(dealer.recv_multipart(), 5)
            if parts == [b"", b"", b"\xff" * 8, b""]:
                return got
            got.append(parts)
    finally:
        context.destroy(linger=0)


async def test_replay_gives_what_was_published(
    engine: SimEngineServer, subscriber: Subscriber, http: httpx.AsyncClient
) -> None:
    for round in range(4):
        await complete(http, list(range(100 * round, 100 * round + 50)))
    got = await replayed(engine.replay_endpoint, b"", (1).to_bytes(8, "big"))
    assert [(parts[0], parts[1], int.from_bytes(parts[2], "big")) for parts in got] == [
        (b"", b"kv-events", sequence) for sequence in (1, 2, 3)
    ]
    await subscriber.read(4)
    assert [event for parts in got for event in msgspec.msgpack.decode(parts[3])[1]] == subscriber.events[1:]
    assert await replayed(engine.replay_endpoint, b"", (99).to_bytes(8, "big")) == []


async def test_replay_begins_with_what_is_left() -> None:
    publisher = EventPublisher(host="127.0.0.1", port=0, replay_port=0, buffer_steps=200)
    try:
        for _ in range(500):
            publisher.publish([Cleared()], 1.0)
        got = await replayed(f"tcp://127.0.0.1:{publisher.replay_port}", b"", bytes(8))
    finally:
        await publisher.aclose()
    assert [int.from_bytes(parts[2], "big") for parts in got] == list(range(300, 500))


async def test_a_malformed_replay_request_is_ignored(engine: SimEngineServer, http: httpx.AsyncClient) -> None:
    await complete(http, list(range(40)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(replayed(engine.replay_endpoint, bytes(8)), 0.3)
    assert len(await replayed(engine.replay_endpoint, b"", bytes(8))) == 1


async def test_sources_tell_the_ports_under_a_wildcard(engine: SimEngineServer, http: httpx.AsyncClient) -> None:
    source = (await http.get("/kv_event_sources")).json()["0"]
    assert engine.events_endpoint is not None
    assert engine.replay_endpoint is not None
    assert source["endpoint"] == engine.events_endpoint.replace("127.0.0.1", "*")
    assert source["replay_endpoint"] == engine.replay_endpoint.replace("127.0.0.1", "*")


async def test_an_engine_without_events_names_no_source() -> None:
    async with (
        SimEngineServer(SimEngineOptions(events_port=None, speed=200)) as engine,
        httpx.AsyncClient(base_url=engine.url) as http,
    ):
        await complete(http, list(range(40)))
        assert (await http.get("/kv_event_sources")).json() == {}
    assert engine.events_endpoint is None


async def test_a_taken_port_is_said_at_the_start() -> None:
    async with SimEngineServer(SimEngineOptions()) as first:
        with pytest.raises(OSError, match="in use"):
            await SimEngineServer(SimEngineOptions(port=first.port)).start()


def test_every_removed_block_is_an_event_of_its_own() -> None:
    assert wire_events([Removed([1, 2])]) == [
        {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0} for name in (1, 2)
    ]
    assert wire_events([Cleared()]) == [{"type": "AllBlocksCleared"}]
    assert wire_events([Stored([1], None, [7], 1)])[0]["parent_block_hash"] is None
