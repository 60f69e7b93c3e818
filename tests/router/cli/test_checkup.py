"""What doctor finds: a well engine has no complaint, and each ailment is told with its mend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from router.cli.checkup import Examined, Finding, compare, examine
from router.cli.event_probe import EventProbe, Heard, own_address
from router.core import EngineFacts, EventSource, Instance
from router.errors import EngineUnreachable

INSTANCE = Instance("e1", "http://engine", "vllm", "m", api_key="k")
FACTS = EngineFacts(
    ("m",), version="0.32.0", max_model_tokens=8192, block_size=16, prefix_caching=True, open_without_key=False
)


class KnownFacts:
    """The one method of an adapter that doctor calls."""

    name = "vllm"

    def __init__(self, facts: EngineFacts | None, cached: Callable[[str], Awaitable[int | None]] | None = None) -> None:
        self._facts = facts
        self._cached = cached

    async def probe(self, instance: Instance, tokens: list[int], salt: str, rank: int | None) -> int | None:
        if self._cached is None:
            raise EngineUnreachable("the engine cannot be reached")
        return await self._cached(salt)

    async def request_fields(self, instance: Instance) -> Mapping[str, Sequence[frozenset[str]]]:
        return {"/v1/chat/completions": [frozenset(("model", "messages", "cache_salt", *self.strange_fields))]}

    strange_fields: tuple[str, ...] = ()

    async def inspect(self, _: Instance) -> EngineFacts:
        if self._facts is None:
            raise EngineUnreachable("the engine cannot be reached")
        return self._facts


class Publisher:
    """The event side of an engine: a PUB and, if wanted, a ROUTER that replays what it holds."""

    def __init__(self, *, replay: bool = True, held: int = 2) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.router = self.context.socket(zmq.ROUTER)
        replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.held = held
        endpoint = f"tcp://127.0.0.1:{port}"
        self.source = EventSource(0, endpoint, f"tcp://127.0.0.1:{replay_port}" if replay else None, "kv")
        self._answering = asyncio.create_task(self._answer())

    async def publish(self, salt: str = "") -> None:
        await self.pub.send_multipart([b"kv", bytes(8), b"batch" + salt.encode()])

    async def _answer(self) -> None:
        while True:
            who, empty, start = await self.router.recv_multipart()
            assert (empty, start) == (b"", bytes(8))
            for _ in range(self.held):
                await self.router.send_multipart([who, b"", b"kv", bytes(8), b"batch"])
            await self.router.send_multipart([who, b"", b"", b"\xff" * 8, b""])

    async def stop(self) -> None:
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self.context.destroy(linger=0)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    made = Publisher()
    yield made
    await made.stop()


class FakeEngine:
    """Answers chat requests with a usage; remembers the bodies."""

    def __init__(self, details: list[dict[str, Any] | None], *, publisher: Publisher | None = None) -> None:
        self.details = details
        self.publisher = publisher
        self.requests: list[httpx.Request] = []
        self.salts: list[str] = []
        self.honours_salts = True
        self.strange_fields: tuple[str, ...] = ()

    async def cached(self, salt: str) -> int | None:
        """Of a probe under this salt. Where there are events and salts are honoured, only events say so."""
        cached = 256 if self.salts and (salt in self.salts or not self.honours_salts) else 0
        self.salts.append(salt)
        if self.publisher and self.honours_salts:
            await self.publisher.publish(salt)
            return None
        return cached

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        details = self.details[len(self.requests)]
        self.requests.append(request)
        if self.publisher:
            await self.publisher.publish()
        return httpx.Response(200, json={"usage": {"prompt_tokens": 90, "prompt_tokens_details": details}})

    async def examine(
        self, facts: EngineFacts | None, instance: Instance = INSTANCE, *, isolates: bool = False
    ) -> dict[str, Finding]:
        adapter = KnownFacts(facts, self.cached)
        adapter.strange_fields = self.strange_fields
        async with httpx.AsyncClient(transport=httpx.MockTransport(self)) as client:
            examined = await examine(instance, adapter, client, isolates=isolates)  # type: ignore[arg-type]
        return {finding.check: finding for finding in examined.findings}


WELL = [{"cached_tokens": 0}, {"cached_tokens": 64}]


async def test_a_well_engine(publisher: Publisher) -> None:
    engine = FakeEngine(WELL, publisher=publisher)
    found = await engine.examine(msgspec.structs.replace(FACTS, sources=(publisher.source,)))
    assert {check: finding.state for check, finding in found.items()} == {
        "reachable": "ok",
        "events": "ok",
        "replay": "ok",
        "prefix caching": "ok",
        "cached counts": "ok",
        "block size": "ok",
        "key": "ok",
        "event port": "ok",
        "isolation": "ok",
        "request fields": "ok",
    }
    assert found["reachable"].seen == "vllm 0.32.0 serves m"
    assert "batch(es) of what was just sent" in found["events"].seen
    assert "2 batch(es) replayed" in found["replay"].seen
    assert found["cached counts"].seen == "64 of 90 tokens when asked again"


async def test_the_probe_is_two_equal_small_requests_with_the_engines_key() -> None:
    engine = FakeEngine(WELL)
    await engine.examine(FACTS)
    first, second = (json.loads(request.content) for request in engine.requests)
    assert first == second
    assert (first["model"], first["max_tokens"]) == ("m", 1)
    assert len(first["messages"][0]["content"].split()) >= 4 * 16
    assert engine.requests[0].headers["authorization"] == "Bearer k"


async def test_an_engine_that_is_not_there() -> None:
    found = await FakeEngine([]).examine(None)
    assert list(found) == ["reachable"]
    assert (found["reachable"].state, found["reachable"].seen) == ("fail", "the engine cannot be reached")


async def test_no_events_at_all() -> None:
    found = await FakeEngine(WELL).examine(FACTS)
    assert found["events"].state == "warn"
    assert "--kv-events-config" in found["events"].mend
    assert "replay" not in found


async def test_events_off_by_choice_is_no_ailment() -> None:
    found = await FakeEngine(WELL).examine(FACTS, msgspec.structs.replace(INSTANCE, events=()))
    assert found["events"].state == "skip"


async def test_an_endpoint_nobody_listens_at_tells_of_the_bind_trap() -> None:
    source = EventSource(0, "tcp://127.0.0.1:1")
    found = await FakeEngine(WELL).examine(msgspec.structs.replace(FACTS, sources=(source,)))
    assert (found["events"].state, found["replay"].state) == ("fail", "warn")
    assert "tcp://0.0.0.0:PORT" in found["events"].mend
    assert "replay_endpoint" in found["replay"].mend


async def test_a_silent_publisher(publisher: Publisher) -> None:
    async with EventProbe((publisher.source,), patience_s=0.1) as probe:
        assert await probe.heard() == {0: Heard(True, 0)}


async def test_an_empty_and_a_dead_replay(publisher: Publisher) -> None:
    publisher.held = 0
    dead = EventSource(1, publisher.source.endpoint, "tcp://127.0.0.1:1")
    async with EventProbe((publisher.source, dead), patience_s=0.2) as probe:
        assert await probe.replayed() == {0: Heard(True, 0), 1: Heard(False, 0)}


@pytest.mark.skipif(own_address() is None, reason="this machine has no address but loopback")
async def test_an_event_port_open_beyond_loopback() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as pub:
        port = pub.bind_to_random_port("tcp://*")
        source = EventSource(0, f"tcp://127.0.0.1:{port}")
        async with EventProbe((source,)) as probe:
            assert await probe.reachable_elsewhere(source) == f"{own_address()}:{port}"


@pytest.mark.parametrize(
    ("facts", "check", "state", "mend"),
    [
        ({"prefix_caching": False}, "prefix caching", "fail", "--enable-prefix-caching"),
        ({"prefix_caching": None}, "prefix caching", "skip", ""),
        ({"block_size": 1}, "page size", "fail", "--page-size 16"),
        ({"block_size": None}, "block size", "warn", "set block_size"),
        ({"open_without_key": True}, "key", "fail", "--api-key"),
        ({"open_without_key": None}, "key", "skip", ""),
        ({"notes": ("two models: name one",)}, "engine's word", "warn", "name one"),
    ],
)
async def test_what_the_facts_show(facts: dict[str, Any], check: str, state: str, mend: str) -> None:
    found = await FakeEngine(WELL).examine(msgspec.structs.replace(FACTS, **facts))
    assert found[check].state == state
    assert mend in found[check].mend


async def test_an_open_engine_is_a_warning_where_no_key_was_meant() -> None:
    facts = msgspec.structs.replace(FACTS, open_without_key=True)
    found = await FakeEngine(WELL).examine(facts, msgspec.structs.replace(INSTANCE, api_key=None))
    assert found["key"].state == "warn"


@pytest.mark.parametrize(
    ("details", "state", "mend"),
    [
        ([None, None], "warn", "--enable-prompt-tokens-details (vLLM) or --enable-cache-report (SGLang)"),
        ([{"cached_tokens": 0}, {"cached_tokens": 0}], "warn", "see prefix caching"),
    ],
)
async def test_cached_counts_that_do_not_come(details: list[Any], state: str, mend: str) -> None:
    found = await FakeEngine(details).examine(FACTS)
    assert (found["cached counts"].state, mend in found["cached counts"].mend) == (state, True)


async def test_a_probe_that_is_refused() -> None:
    async def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "secret internals"}})

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as client:
        examined = await examine(INSTANCE, KnownFacts(FACTS), client)  # type: ignore[arg-type]
    (finding,) = [finding for finding in examined.findings if finding.check == "cached counts"]
    assert (finding.state, finding.seen) == ("fail", "the probe request failed: HTTP 400")


def test_block_sizes_that_differ_within_a_model() -> None:
    def examined(engine: str, model: str, size: int) -> Examined:
        return Examined(
            Instance(engine, "http://x", "vllm", model), msgspec.structs.replace(FACTS, block_size=size), []
        )

    assert compare([examined("a", "m", 16), examined("b", "m", 16), examined("c", "n", 32)]) == []
    (finding,) = compare([examined("a", "m", 16), examined("b", "m", 32), examined("c", "m", 16)])
    assert (finding.engine, finding.state, finding.seen) == ("*", "warn", "m: 16 on a, c; 32 on b")


async def test_an_engine_that_ignores_salts_is_told_with_the_mend(publisher: Publisher) -> None:
    engine = FakeEngine(WELL, publisher=publisher)
    engine.honours_salts = False
    facts = msgspec.structs.replace(FACTS, sources=(publisher.source,))
    found = (await engine.examine(facts))["isolation"]
    assert found.state == "warn"
    assert "reuses across cache salts" in found.seen
    assert "honours cache_salt" in found.mend


async def test_what_lets_others_in_fails_where_tenants_are_kept_apart(publisher: Publisher) -> None:
    engine = FakeEngine(WELL, publisher=publisher)
    engine.honours_salts = False
    facts = msgspec.structs.replace(FACTS, sources=(publisher.source,), open_without_key=True)
    found = await engine.examine(facts, isolates=True)
    assert {found[check].state for check in ("isolation", "key")} == {"fail"}


async def test_fields_that_nobody_has_reviewed_are_named(publisher: Publisher) -> None:
    engine = FakeEngine(WELL, publisher=publisher)
    engine.strange_fields = ("frobnicate", "kv_transfer_params")
    found = (await engine.examine(msgspec.structs.replace(FACTS, sources=(publisher.source,))))["request fields"]
    assert (found.state, found.seen) == ("warn", "not reviewed: frobnicate")
