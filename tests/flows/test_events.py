"""The event flow, end to end: from what an engine does to what the gateway believes, and no further than that."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx
import pytest

from adapters.dns import DnsDiscovery
from router import plugins
from router.core import Stored
from router.lab.server import SimEngineServer
from tests.flows.event_source import EventSource, stored
from tests.flows.recording_engine import RecordingEngine
from tests.flows.site import COMPLETIONS, Client, Site, chat, essay, name, until

SEEN = chat(essay("once seen", 200))
"""A prompt that an engine holds before something happens to it."""


async def _tell(client: Client, engine: SimEngineServer, path: str) -> None:
    """An operator's word to the engine itself."""
    assert (await client.http.post(engine.url + path)).status_code == 200


async def _held(client: Client, engine: SimEngineServer, body: dict[str, Any]) -> int:
    return (await client.hits(body)).get(name(engine), 0)


async def _held_by_events(client: Client, engine: SimEngineServer, body: dict[str, Any]) -> int:
    """The same, but for what it was sent."""
    candidates = (await client.explain(body))["candidates"]
    return sum(sum(each["held_tokens"].values()) for each in candidates if each["instance"] == name(engine))


async def _until_held(client: Client, engine: SimEngineServer, body: dict[str, Any]) -> None:
    async def held() -> bool:
        return await _held_by_events(client, engine, body) > 100

    await until(held, what="the prompt is known to be held")


async def _until_forgotten(client: Client, engine: SimEngineServer, body: dict[str, Any]) -> None:
    async def forgotten() -> bool:
        return await _held_by_events(client, engine, body) == 0

    await until(forgotten, what="the prompt is known to be gone")


async def _warm(client: Client, *engines: SimEngineServer) -> str | None:
    """Twice: the second time it is known in tokens, so that what was sent counts as well as what was heard."""
    await client.ask(SEEN)
    await client.caught_up(*engines)
    return (await client.ask(SEEN)).instance


async def _until_health(client: Client, engine: SimEngineServer, health: str) -> None:
    async def found() -> bool:
        return any(
            row["instance"] == name(engine) and row["health"] == health for row in (await client.rows()).values()
        )

    await until(found, what=f"{name(engine)} is {health}")


# --- caches that go


async def test_an_engine_that_was_killed_has_forgotten(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine)
    await _warm(client, engine)
    await _until_held(client, engine, SEEN)
    await site.killed(engine)
    engine = await site.started_again(engine)

    async def answers() -> bool:
        return (await client.post(chat("first words to the new process"))).status == 200

    await until(answers, what="the new process answers")
    await _until_forgotten(client, engine, SEEN)
    assert await _held(client, engine, SEEN) == 0
    again = await client.ask(SEEN)
    assert (again.predicted, again.cached) == (0, 0)
    await _until_held(client, engine, SEEN)
    warm = await client.ask(SEEN)
    assert warm.predicted == warm.cached > 100


async def test_requests_go_elsewhere_while_an_engine_is_down(site: Site) -> None:
    first, second = await site.engine(), await site.engine()
    client = await site.gateway(first, second)
    holder = await _warm(client, first, second)
    dying, other = (first, second) if holder == name(first) else (second, first)
    await _until_held(client, dying, SEEN)
    await site.killed(dying)
    for number in range(4):  # from the very first on: a connection that is refused is tried elsewhere
        assert (await client.ask(chat(essay("once seen", 200), f"{number}"))).instance == name(other)
    await _until_health(client, dying, "down")
    reborn = await site.started_again(dying)
    await _until_health(client, reborn, "ready")
    assert await _held(client, reborn, SEEN) == 0
    assert await client.nothing_booked()


async def test_an_engine_that_only_fails_is_left_alone(site: Site) -> None:
    """Its core is dead, its HTTP server is not: what holds the prefix would draw every request to it."""
    first, second = await site.engine(), await site.engine()
    client = await site.gateway(first, second)
    holder = await _warm(client, first, second)
    (first if holder == name(first) else second).crash()
    statuses = [(await client.post(SEEN)).status for _ in range(6)]
    assert statuses[-1] == 200


async def test_a_cache_that_is_reset_earns_nothing(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine)
    await _warm(client, engine)
    await _until_held(client, engine, SEEN)
    await _tell(client, engine, "/reset_prefix_cache")
    await client.ask(chat("something else"))  # the engine says it with its next step
    await _until_forgotten(client, engine, SEEN)
    assert await _held(client, engine, SEEN) == 0
    again = await client.ask(SEEN)
    assert (again.predicted, again.cached) == (0, 0)


async def test_an_engine_asleep_gets_nothing_and_wakes_with_nothing(site: Site) -> None:
    first, second = await site.engine(), await site.engine()
    client = await site.gateway(first, second)
    holder = await _warm(client, first, second)
    asleep, awake = (first, second) if holder == name(first) else (second, first)
    await _until_held(client, asleep, SEEN)
    await _tell(client, asleep, "/sleep?level=1")
    await _until_health(client, asleep, "sleeping")
    for number in range(4):
        assert (await client.ask(chat(essay("once seen", 200), f"{number}"))).instance == name(awake)
    assert (await client.explain(SEEN))["filtered"] == {f"{name(asleep)}/0": "sleeping: asleep"}
    await _tell(client, asleep, "/wake_up")
    await _until_health(client, asleep, "ready")
    assert await _held(client, asleep, SEEN) == 0
    assert await _held(client, awake, SEEN) > 100


async def _evicted(site: Site) -> tuple[Client, SimEngineServer]:
    engine = await site.engine(capacity_tokens=1_600)
    client = await site.gateway(engine)
    await _warm(client, engine)
    await _until_held(client, engine, SEEN)
    for number in range(6):
        await client.ask(chat(essay(f"displaces {number}", 200)))
    return client, engine


async def test_what_is_evicted_is_out_of_the_index(site: Site) -> None:
    client, engine = await _evicted(site)
    await _until_forgotten(client, engine, SEEN)
    assert (await client.ask(SEEN)).cached == 0


@pytest.mark.xfail(strict=True, reason="what was sent counts as held for 15 s even if events have said that it is gone")
async def test_what_is_evicted_is_not_counted_on(site: Site) -> None:
    client, engine = await _evicted(site)
    await _until_forgotten(client, engine, SEEN)
    assert (await client.ask(SEEN)).predicted == 0


# --- gateways that go


BRIEF_MEMORY = {"buffer_steps": 4}
"""An engine that can replay its last four steps only: what was before them is known from the saved index, or not."""


async def _fill(client: Client, engine: SimEngineServer) -> None:
    await client.ask(SEEN)
    for number in range(6):
        await client.ask(chat(essay(f"later {number}")))
    await client.caught_up(engine)


async def _until_all_known(client: Client, engine: SimEngineServer) -> None:
    async def known() -> bool:
        row = await client.row(engine)
        return bool(row["last_seq"] == engine.published - 1 and row["confidence"] == 1.0)

    await until(known, what="the stream has gone on from where it stood")


async def test_a_gateway_that_is_restarted_knows_what_it_knew(site: Site) -> None:
    engine = await site.engine(**BRIEF_MEMORY)
    async with site.running(engine) as client:
        await _fill(client, engine)
    async with httpx.AsyncClient(trust_env=False) as http:  # somebody uses the engine meanwhile
        await http.post(engine.url + "/v1/chat/completions", json=chat(essay("past the gateway")))
    async with site.running(engine) as client:
        await _until_all_known(client, engine)
        first = await client.ask(SEEN)
        other = await client.ask(chat(essay("past the gateway")))
    assert first.predicted == first.cached > 100
    assert other.predicted == other.cached > 100


async def test_without_its_state_it_would_not(site: Site) -> None:
    engine = await site.engine(**BRIEF_MEMORY)
    async with site.running(engine) as client:
        await _fill(client, engine)
    (site.folder / "state" / "index").unlink()
    async with site.running(engine) as client:
        await client.caught_up(engine)
        first = await client.ask(SEEN)
    assert first.predicted == 0
    assert first.cached > 100


async def test_a_gateway_that_is_restarted_believes_nothing_of_a_new_process(site: Site) -> None:
    engine = await site.engine()
    async with site.running(engine) as client:
        await _fill(client, engine)
    await site.killed(engine)
    engine = await site.started_again(engine)
    async with site.running(engine) as client:
        assert await _held(client, engine, SEEN) == 0
        first = await client.ask(SEEN)
        await _until_held(client, engine, SEEN)
        again = await client.ask(SEEN)
    assert (first.predicted, first.cached) == (0, 0)
    assert again.predicted == again.cached > 100


# --- engines that come and go


async def test_an_engine_that_is_down_at_the_start_joins_later(site: Site) -> None:
    early, late = await site.engine(), await site.engine()
    await site.killed(late)
    client = await site.gateway(early, late, ready=1)
    assert (await client.rows())[f"{late.url}/0"]["health"] == "pending"
    late = await site.started_again(late)
    await _until_health(client, late, "ready")
    answers = [await client.ask(chat(essay(f"spread {n}"))) for n in range(8)]
    assert {answer.instance for answer in answers} == {name(early), name(late)}


async def test_an_engine_without_events_is_known_by_what_it_was_sent(site: Site) -> None:
    engines = [await site.engine(events_port=None, replay_port=None) for _ in range(2)]
    client = await site.gateway(*({"url": engine.url, "events": "off"} for engine in engines))
    prompts = [chat(essay(f"unheard {n}", 300)) for n in range(4)]
    first = [await client.ask(body) for body in prompts]
    again = [await client.ask(body) for body in prompts]
    assert [answer.instance for answer in again] == [answer.instance for answer in first]
    for answer in again:
        assert 0 < answer.predicted <= answer.cached < answer.predicted + 64  # it is cut into blocks of 64
    assert all(row["index_blocks"] for row in (await client.rows()).values() if row["answers"])


async def test_engines_behind_a_name_come_and_go(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await site.engine()
    second = await site.engine(host="127.0.0.2", port=first.port)
    addresses = ["127.0.0.1"]

    async def lookup(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        assert host == "engines.test"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    load = plugins.load
    found = partial(DnsDiscovery, every_s=0.02, lookup=lookup)
    monkeypatch.setattr(plugins, "load", lambda group, kind: found if group == plugins.DISCOVERY else load(group, kind))
    client = await site.gateway({"url": f"dns+http://engines.test:{first.port}"}, ready=1)
    assert set(await client.rows()) == {f"{name(first)}/0"}
    addresses.append("127.0.0.2")
    await _until_both(client, {f"{name(first)}/0", f"{name(second)}/0"})
    answers = [await client.ask(chat(essay(f"named {n}"))) for n in range(8)]
    assert {answer.instance for answer in answers} == {name(first), name(second)}
    addresses.remove("127.0.0.1")
    await _until_both(client, {f"{name(second)}/0"})
    for number in range(8):
        assert (await client.ask(chat(essay(f"named {number}")))).instance == name(second)


async def _until_both(client: Client, names: set[str]) -> None:
    async def found() -> bool:
        rows = await client.rows()
        return set(rows) == names and all(row["health"] == "ready" for row in rows.values())

    await until(found, what=f"there are {names}")


# --- events that are no good


GARBAGE = (
    (b"",),
    (b"kv-events",),
    (b"kv-events", b"short", b"\x93"),
    (b"kv-events", b"\x00" * 8, b"\xc1"),
    (b"kv-events", b"\x00" * 7 + b"\x01", b"not msgpack at all"),
    (b"kv-events", b"\x00" * 7 + b"\x02", b"\x93\x01\x02\x03"),
    (b"kv-events", b"\x00" * 7 + b"\x03", b"\x93\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x91\x81\xa4type\xa3No!\x00"),
    (b"kv-events", b"\xff" * 8, b"\x00"),
    (b"kv-events", b"\x00" * 8, b"\x90", b"and more", b"frames"),
)


async def test_garbage_neither_stops_the_gateway_nor_earns_credit(site: Site) -> None:
    engine = await site.engine(events_port=None, replay_port=None)
    source: EventSource = await site.enter(EventSource())
    client = await site.gateway({"url": engine.url, "events": [{"endpoint": source.endpoint}]})

    async def heard() -> bool:
        return (await client.row(engine))["last_seq"] is not None

    await source.until_heard(heard)
    for _ in range(20):
        for frames in GARBAGE:
            await source.send(*frames)
    ids = [5 + n for n in range(160)]
    body = {"model": "demo", "prompt": ids, "max_tokens": 2}
    await source.publish(Stored(hashes=[1, 2], parent=None, tokens=ids[:33], block_size=16))  # an id too many
    assert (await client.ask(body, COMPLETIONS)).predicted == 0
    assert max((await client.hits({**body, "prompt": ids[::-1]}, COMPLETIONS)).values()) == 0
    # and the stream is still read: what a whole event says is believed again
    source.sequence += 1_000
    fresh = [400 - n for n in range(160)]

    async def believed() -> bool:
        await source.publish(stored(fresh, first_hash=100))
        return max((await client.hits({**body, "prompt": fresh}, COMPLETIONS)).values()) == 144

    await until(believed, what="good events count again")


async def test_a_request_goes_to_the_rank_that_holds_its_prefix(site: Site) -> None:
    sources = [await site.enter(EventSource(rank=rank)) for rank in range(2)]
    engine: RecordingEngine = await site.enter(RecordingEngine(sources=[source.endpoint for source in sources]))
    client = await site.gateway(
        {"url": engine.url, "model": "demo"}, ready=2, models={"*": {"tokenizer": "demo", "parity": "off"}}
    )
    prompts = [[5 + n + 100 * rank for n in range(96)] for rank in range(2)]
    for rank, source in enumerate(sources):
        await source.until_heard(partial(_heard, client, engine, rank))
        await source.publish(stored(prompts[rank], first_hash=1))  # hashes mean nothing outside their rank
    for rank in (1, 0, 1, 1, 0):
        body = {"model": "demo", "prompt": prompts[rank], "max_tokens": 1}
        await until(partial(_holds, client, body), what="its blocks are known")
        assert (await client.ask(body, COMPLETIONS)).predicted == 80
        assert engine.seen[-1].header(b"x-data-parallel-rank") == b"%d" % rank


async def _heard(client: Client, engine: RecordingEngine, rank: int) -> bool:
    row = (await client.rows())[f"{engine.url.removeprefix('http://')}/{rank}"]
    return row["last_seq"] is not None


async def _holds(client: Client, body: dict[str, Any]) -> bool:
    found = (await client.explain(body, COMPLETIONS))["candidates"]
    return sorted(candidate["hit_tokens"] for candidate in found) == [0, 80]
