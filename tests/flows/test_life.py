"""A gateway's end, another configuration while it runs, and engines that come and go, with requests under way."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import pytest

from adapters.openai import OpenAIAdapter
from router import plugins
from tests.cases.stand import case_input
from tests.flows.held_engine import HeldEngine
from tests.flows.site import CHAT, Client, Site, chat, essay, joined, name, until

OWN = {"own": {"tokenizer": "demo", "parity": "off"}}


def body(*, stream: bool = True) -> dict[str, Any]:
    return {"model": "own", "messages": [{"role": "user", "content": "hello"}], "stream": stream}


def at(engine: HeldEngine) -> str:
    """What the gateway calls it."""
    return engine.url.removeprefix("http://")


class Wire:
    """A request over a connection of its own, and what came back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def send(cls, url: str, asked: Mapping[str, Any], *, copies: int = 1) -> Wire:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        data = json.dumps(asked).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        writer.write((head + data) * copies)
        return cls(reader, writer)

    async def begun(self) -> bytes:
        """The head, and the first event."""
        return await asyncio.wait_for(self._reader.readuntil(b"\n\n\r\n"), 10)

    async def whole(self) -> bytes:
        """The rest of a stream that ends as it should."""
        try:
            return await asyncio.wait_for(self._reader.readuntil(b"\r\n0\r\n\r\n"), 10)
        finally:
            self._writer.close()

    async def rest(self) -> bytes:
        """Until the gateway closes the connection."""
        try:
            return await asyncio.wait_for(self._reader.read(), 20)
        finally:
            self._writer.close()


class Process:
    """`warmroute serve -c FILE`, as an operator runs it. `log`: what it has written so far."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.log: list[str] = []

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "router",
            "serve",
            "-c",
            str(self._file),
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._reading = asyncio.ensure_future(self._read())
        await until(self._started, what="it has started", seconds=30)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self.log.append(line.decode().rstrip())

    async def _started(self) -> bool:
        assert self._process.returncode is None, self.log
        found = [re.search(r"base_url (\S+)/v1, admin (\S+)", line) for line in self.log]
        for match in filter(None, found):
            self.url, self.admin_url = match.groups()
            return True
        return False

    def tell(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def tell_group(self, number: signal.Signals) -> None:
        """As a supervisor does that does not know who is whose child."""
        os.killpg(self._process.pid, number)

    async def group_is_gone(self) -> bool:
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    async def ended(self) -> int:
        code = await asyncio.wait_for(self._process.wait(), 15)
        await self._reading
        return code

    async def says(self, words: str) -> None:
        async def said() -> bool:
            return any(words in line for line in self.log)

        await until(said, what=f"it says {words!r}")

    def outcomes(self) -> Counter[tuple[int, str, str]]:
        """Of the access log: how many requests ended how."""
        lines = [json.loads(line[line.index("{") :]) for line in self.log if '"request_id"' in line]
        return Counter((line["status"], line["finish"], line["error"]) for line in lines)


async def ready(url: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{url}/readyz")).status_code == 200


@pytest.fixture
async def engine() -> AsyncIterator[HeldEngine]:
    async with HeldEngine() as engine:
        yield engine


# --- the gateway ends


# https://github.com/api7/aisix/pull/995, https://github.com/inference-gateway/inference-gateway/issues/133
async def test_sigterm_drains_and_nobody_notices(site: Site) -> None:
    call = case_input("69")["client"][0]
    asked, count = call["json"], call["concurrent"]
    engine: HeldEngine = await site.enter(HeldEngine(served=asked["model"]))
    drain = {"accept_s": 3.0, "finish_s": 60}
    site.configured(
        {"url": engine.url}, models={asked["model"]: OWN["own"]}, listen={"drain": drain, "access_log": True}
    )
    async with Process(site.folder / "warmroute.yaml") as process, httpx.AsyncClient(trust_env=False) as http:
        await until(lambda: ready(process.url), what="it is ready")
        assert (await http.get(f"{process.url}/healthz")).headers.get("connection") is None
        streams = [await Wire.send(process.url, asked) for _ in range(count)]
        await asyncio.gather(*(stream.begun() for stream in streams))
        await engine.has(count)

        process.tell_group(signal.SIGTERM)
        await process.says("draining")
        engine.holds = False
        for url in (process.url, process.admin_url):
            answer = await http.get(f"{url}/readyz")
            assert (answer.status_code, answer.json()["draining"]) == (503, True)
        kept = await http.get(f"{process.url}/healthz")  # over the connection from before
        assert kept.headers["connection"] == "close"
        late = await asyncio.gather(*(_whole(process.url, {**asked, "stream": False}) for _ in range(10)))
        assert all(answer.startswith(b"HTTP/1.1 200 ") and b"\r\nconnection: close\r\n" in answer for answer in late)

        await until(lambda: _refused(process.url), what="the window has closed")
        engine.finish()
        for answer in await asyncio.gather(*(stream.rest() for stream in streams)):
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert await process.ended() == 0
        await until(process.group_is_gone, what="the admin process has ended with it")
    assert process.outcomes() == {(200, "complete", ""): count + 10}


async def _whole(url: str, asked: Mapping[str, Any]) -> bytes:
    return await (await Wire.send(url, asked)).rest()


async def _refused(url: str) -> bool:
    address = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(address.hostname, address.port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def test_what_outlives_the_limit_ends_with_an_error(site: Site, engine: HeldEngine) -> None:
    drain = {"accept_s": 0, "finish_s": 0.2}
    async with site.running({"url": engine.url}, models=OWN, listen={"drain": drain}) as client:
        stream, whole = [await Wire.send(client.running.url, body(stream=stream)) for stream in (True, False)]
        await stream.begun()
        await engine.has(2)
        assert await client.running.drain(hurry=asyncio.Event()) == 2
        said = await stream.rest()
        assert b'"code":"shutting_down"' in said
        assert b"[DONE]" not in said
        assert not said.endswith(b"0\r\n\r\n")
        head, _, answer = (await whole.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1" in head
        assert json.loads(answer)["error"]["code"] == "shutting_down"
        receipts = await client.running.live.requests(None)
        assert {(r["finish"], r["error"]) for r in receipts} == {("upstream_failed", "shutting_down")}
        assert len(receipts) == 2
        assert await client.nothing_booked()

    async def freed() -> bool:
        return engine.aborted == 1  # of the other one the engine would learn with its next token

    await until(freed, what="the engine is freed")


async def test_what_was_pipelined_behind_it_is_told_too(site: Site, engine: HeldEngine) -> None:
    async with site.running({"url": engine.url}, models=OWN) as client:
        wire = await Wire.send(client.running.url, body(stream=False), copies=3)
        await engine.has(1)
        hurry = asyncio.Event()
        hurry.set()
        await client.running.drain(hurry=hurry)
        said = await wire.rest()
        assert said.count(b"HTTP/1.1 503 ") == said.count(b'"code":"shutting_down"') == 3
        receipts = await client.running.live.requests(None)
        assert [(r["finish"], r["error"]) for r in receipts] == [("upstream_failed", "shutting_down")] * 3


async def test_whoever_ends_a_gateway_ends_its_streams_with_an_error(site: Site, engine: HeldEngine) -> None:
    async with site.running({"url": engine.url}, models=OWN, drain_s=0.1) as client:
        stream = await Wire.send(client.running.url, body())
        await stream.begun()
    assert b'"code":"shutting_down"' in await stream.rest()


async def test_who_waits_for_an_engine_is_told_too(site: Site, engine: HeldEngine) -> None:
    slow = {"url": engine.url, "rates": {"c1_ms": 1000}}
    async with site.running(slow, models=OWN, waiting_room={"free_tokens": 1}) as client:
        first = await Wire.send(client.running.url, body(stream=False))
        await engine.has(1)
        second = await Wire.send(client.running.url, body(stream=False))

        async def waits() -> bool:
            page = (await client.running.live.metrics()).decode()
            return "\nwarmroute_room_waiting 1.0" in page or "\nwarmroute_room_held 1.0" in page

        await until(waits, what="the second one waits")
        hurry = asyncio.Event()
        hurry.set()
        assert await client.running.drain(hurry=hurry) == 2
        for wire in (first, second):
            assert (await wire.rest()).startswith(b"HTTP/1.1 503 ")
        assert await client.nothing_booked()


async def test_a_second_signal_is_obeyed_at_once(site: Site, engine: HeldEngine) -> None:
    site.configured({"url": engine.url}, models=OWN, listen={"access_log": True})  # it would wait for two minutes
    async with Process(site.folder / "warmroute.yaml") as process:
        await until(lambda: ready(process.url), what="it is ready")
        stream = await Wire.send(process.url, body())
        await stream.begun()
        process.tell(signal.SIGTERM)
        await process.says("draining")
        process.tell(signal.SIGTERM)
        assert b'"code":"shutting_down"' in await stream.rest()
        assert await process.ended() == 0
    assert process.outcomes() == {(200, "upstream_failed", "shutting_down"): 1}


# --- another configuration


async def reloaded(client: Client) -> dict[str, Any]:
    answer = await client.http.post(f"{client.running.admin_url}/admin/v1/config/reload")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def is_forgotten(client: Client, engine: HeldEngine) -> bool:
    return f"{at(engine)}/0" not in await client.rows()


def drains(client: Client, engine: HeldEngine) -> Callable[[], Awaitable[bool]]:
    async def is_draining() -> bool:
        return bool((await client.rows())[f"{at(engine)}/0"]["health"] == "draining")

    return is_draining


async def test_engines_come_and_go_under_running_streams(site: Site, engine: HeldEngine) -> None:
    other: HeldEngine = await site.enter(HeldEngine())
    other.holds = False
    client = await site.gateway({"url": engine.url}, models=OWN)
    stream = await Wire.send(client.running.url, body())
    await stream.begun()

    site.write({"url": other.url}, models=OWN)
    answer = await reloaded(client)
    assert answer["engines"] == {"added": [at(other)], "changed": [], "removed": [at(engine)]}
    assert (answer["changed"], answer["needs_restart"]) == (["engines"], [])
    await until(drains(client, engine), what="the other one has joined, so it drains")
    row = (await client.rows())[f"{at(engine)}/0"]
    assert (row["reason"], row["booked_requests"]) == ("removed from the configuration", 1)
    await joined(client, 1)
    assert (await client.ask(body(stream=False))).instance == at(other)
    refused = await client.http.post(f"{client.running.admin_url}/admin/v1/instances/{at(engine)}/undrain")
    assert refused.status_code == 409

    engine.finish()
    assert b"data: [DONE]" in await stream.whole()
    await until(lambda: is_forgotten(client, engine), what="the old one is forgotten")
    assert engine.aborted == 0


async def test_an_engine_that_comes_back_before_it_has_gone_was_never_away(site: Site, engine: HeldEngine) -> None:
    other: HeldEngine = await site.enter(HeldEngine())
    client = await site.gateway({"url": engine.url}, {"url": other.url}, models=OWN)
    streams = [await Wire.send(client.running.url, body()) for _ in range(2)]
    await asyncio.gather(*(stream.begun() for stream in streams))
    await asyncio.gather(engine.has(1), other.has(1))
    site.write({"url": other.url}, models=OWN)
    assert (await reloaded(client))["engines"]["removed"] == [at(engine)]
    site.write({"url": engine.url}, {"url": other.url}, models=OWN)
    assert (await reloaded(client))["engines"]["added"] == [at(engine)]
    await joined(client, 2)
    assert (await client.rows())[f"{at(engine)}/0"]["booked_requests"] == 1
    for each in (engine, other):
        each.finish()
    for stream in streams:
        await stream.whole()


async def test_other_settings_of_an_engine_are_for_the_next_request(site: Site, engine: HeldEngine) -> None:
    client = await site.gateway({"url": engine.url, "api_key": "one", "labels": {"zone": "a"}}, models=OWN)
    stream = await Wire.send(client.running.url, body())
    await stream.begun()
    rates = {"c1_ms": 3.0}
    site.write({"url": engine.url, "api_key": "two", "labels": {"zone": "b"}, "rates": rates}, models=OWN)
    answer = await reloaded(client)
    assert answer["engines"] == {"added": [], "changed": [at(engine)], "removed": []}
    assert not re.search("one|two", json.dumps(answer))

    async def taken() -> bool:
        return (await client.rows())[f"{at(engine)}/0"]["labels"] == {"zone": "b"}

    await until(taken, what="its labels are known")
    engine.finish()
    await stream.whole()
    engine.holds = False
    await client.ask(body())
    assert [request.header(b"authorization") for request in engine.seen] == [b"Bearer one", b"Bearer two"]
    (candidate,) = (await client.explain(body()))["candidates"]
    assert candidate["rates"]["c1_ms"] == 3.0


async def test_an_engine_under_another_url_is_another_engine(site: Site, engine: HeldEngine) -> None:
    other: HeldEngine = await site.enter(HeldEngine())
    other.holds = False
    client = await site.gateway({"id": "a", "url": engine.url}, models=OWN)
    stream = await Wire.send(client.running.url, body())
    await stream.begun()
    site.write({"id": "a", "url": other.url}, models=OWN)
    assert (await reloaded(client))["engines"]["changed"] == ["a"]

    async def serves() -> bool:
        rows = (await client.http.get(f"{client.running.admin_url}/admin/v1/instances")).json()["data"]
        return [(row["url"], row["state"]) for row in rows] == [(other.url, "ready")]

    await until(serves, what="the new one serves")
    await client.ask(body())
    assert len(other.seen) == 1
    engine.finish()
    assert b"data: [DONE]" in await stream.whole()


async def test_mistakes_leave_everything_as_it_was(
    site: Site, engine: HeldEngine, caplog: pytest.LogCaptureFixture
) -> None:
    client = await site.gateway({"url": engine.url}, models=OWN)
    engine.holds = False
    file = site.folder / "warmroute.yaml"
    file.write_text("engines: [{url: http://127.0.0.1:9}]\nlisten: {prot: 1}\npolicy:\n  weights: 7\n")
    answer = await client.http.post(f"{client.running.admin_url}/admin/v1/config/reload")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_config"
    assert [mistake.partition(": ")[0] for mistake in answer.json()["mistakes"]] == [f"{file}:2", f"{file}:4"]
    assert [r.message for r in caplog.records if "not reloaded" in r.message] == [
        f"not reloaded: {mistake}" for mistake in answer.json()["mistakes"]
    ]
    assert list(await client.rows()) == [f"{at(engine)}/0"]
    await client.ask(body())

    site.write({"url": "http://127.0.0.1:9"}, models=OWN, policy={"weights": {"nonsense": 1}})
    answer = await client.http.post(f"{client.running.admin_url}/admin/v1/config/reload")
    assert answer.status_code == 400
    assert "nonsense" in answer.json()["mistakes"][0]
    assert list(await client.rows()) == [f"{at(engine)}/0"]


async def test_what_is_taken_over_at_once(site: Site) -> None:
    engines = [await site.engine() for _ in range(2)]
    client = await site.gateway(*engines)
    assert (await client.post(chat("hello", model="fast"))).status == 404
    site.write(
        *engines,
        models={"demo": {"aliases": ["fast"], "tokenizer": "demo"}},
        policy={"name": "round_robin", "shadow": ["lmetric"]},
        timeouts={"connect_s": 1, "first_byte_s": 9},
        waiting_room={"max_requests": 7},
        failover={"share": 0.5},
        listen={"port": 1, "max_body_bytes": 1000},
    )
    answer = await reloaded(client)
    assert answer["engines"] == {"added": [], "changed": [], "removed": []}
    assert set(answer["changed"]) == {
        "models.demo",
        "policy.name",
        "policy.shadow",
        "timeouts.connect_s",
        "timeouts.first_byte_s",
        "waiting_room.max_requests",
        "failover.share",
    }
    assert answer["needs_restart"] == ["listen.port", "listen.max_body_bytes"]
    answers = [await client.ask(chat(essay("turns"), model="fast")) for _ in range(6)]
    assert Counter(answer.instance for answer in answers) == {name(engine): 3 for engine in engines}
    assert (await client.receipt(answers[0].id))["policy"] == "round_robin"
    assert client.running._brain.room.limits.requests == 7
    assert client.running._models.resolve("fast").model.limits.first_byte_s == 9
    assert client.running._gateway.budget.share == 0.5

    site.write(*engines)
    assert set((await reloaded(client))["changed"]) == set(answer["changed"])
    assert (await client.post(chat("hello", model="fast"))).status == 404
    assert (await client.receipt((await client.ask(chat("hello"))).id))["policy"] == "kv_aware"


async def test_a_model_is_read_otherwise_without_a_pause(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine)
    before = await client.ask(chat(essay("reading")))
    assert (await client.receipt(before.id))["prompt_source"] == "exact"
    site.write(engine, models={"*": {"tokenizer": "none"}})
    answer = await reloaded(client)
    assert (answer["changed"], answer["prompts_read_anew"]) == (["models['*']"], ["demo"])

    async def unread() -> bool:
        found = await client.ask(chat(essay("reading")))  # answered at any time
        return (await client.receipt(found.id))["prompt_source"] == "approximate"

    await until(unread, what="prompts are not tokenized any more")


async def test_a_template_that_was_edited_in_its_place_is_read_anew(site: Site) -> None:
    engine = await site.engine()
    template = site.folder / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    models = {"*": {"tokenizer": "demo", "chat_template": str(template), "parity": "off"}}
    client = await site.gateway(engine, models=models)
    tokens = (await client.explain(chat("hello")))["request"]["tokens"]
    assert (await reloaded(client))["prompts_read_anew"] == []
    template.write_text("{% for m in messages %}{{ m.content }} and much more of it{% endfor %}")
    answer = await reloaded(client)
    assert (answer["changed"], answer["prompts_read_anew"]) == ([], ["demo"])

    async def longer() -> bool:
        return bool((await client.explain(chat("hello")))["request"]["tokens"] > tokens)

    await until(longer, what="prompts are longer")
    assert (await reloaded(client))["prompts_read_anew"] == []


async def test_a_model_that_nobody_serves_any_more_is_unknown(site: Site, engine: HeldEngine) -> None:
    other: HeldEngine = await site.enter(HeldEngine(served="next"))
    client = await site.gateway({"url": engine.url}, models={"*": OWN["own"]})
    site.write({"url": other.url}, models={"*": OWN["own"]})
    await reloaded(client)

    async def listed() -> bool:
        cards = (await client.http.get(f"{client.running.url}/v1/models")).json()["data"]
        return [card["id"] for card in cards] == ["next"]

    await until(listed, what="only the new model is listed")
    assert (await client.post(body())).status == 404


async def test_without_a_file_there_is_nothing_to_reload(site: Site, engine: HeldEngine) -> None:
    client = await site.gateway({"url": engine.url}, models=OWN)
    url = f"{client.running.admin_url}/admin/v1/config/reload"
    client.running._read_again = None
    answer = await client.http.post(url)
    assert answer.status_code == 409
    assert "without a configuration file" in answer.json()["error"]["message"]


async def test_a_gateway_that_ends_takes_no_other_configuration(site: Site, engine: HeldEngine) -> None:
    client = await site.gateway({"url": engine.url}, models=OWN)
    client.running.live.draining = True
    answer = await client.http.post(f"{client.running.admin_url}/admin/v1/config/reload")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


async def test_sighup_reloads(site: Site, engine: HeldEngine) -> None:
    other: HeldEngine = await site.enter(HeldEngine())
    site.configured({"url": engine.url}, models=OWN)
    file = site.folder / "warmroute.yaml"
    async with Process(file) as process, httpx.AsyncClient(trust_env=False) as http:
        await until(lambda: ready(process.url), what="it is ready")
        stream = await Wire.send(process.url, body())
        await stream.begun()
        good = file.read_text()
        file.write_text("engines: 7\n")
        process.tell(signal.SIGHUP)
        await process.says(f"not reloaded: {file}:1: engines: ")
        file.write_text(good.replace(engine.url, other.url).replace('"port": 0', '"port": 1', 1))
        process.tell(signal.SIGHUP)
        await process.says("reloaded: engines")
        await process.says("port has changed and needs a restart")

        async def is_draining() -> bool:
            rows = (await http.get(f"{process.admin_url}/admin/v1/instances")).json()["data"]
            return bool(rows[0]["state"] == "draining")

        await until(is_draining, what="the other engine has joined")
        file.write_text(good)
        answer = await http.post(f"{process.admin_url}/admin/v1/config/reload")  # through the admin process
        assert answer.json()["engines"]["added"] == [at(engine)]
        engine.finish()
        assert b"data: [DONE]" in await stream.whole()
        process.tell(signal.SIGINT)
        assert await process.ended() == 0


# --- engines behind a name


class Name:
    """A name whose addresses the test says."""

    def __init__(self, *urls: str) -> None:
        self.urls = set(urls)
        self._changed = asyncio.Event()

    def means(self, *urls: str) -> None:
        self.urls = set(urls)
        self._changed.set()

    def __call__(self, host: str, port: int, *, scheme: str) -> Name:
        return self

    async def changes(self) -> AsyncIterator[set[str]]:
        while True:
            self._changed.clear()
            yield self.urls
            await self._changed.wait()


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Name:
    name, load = Name(), plugins.load
    monkeypatch.setattr(plugins, "load", lambda group, what: name if "discovery" in group else load(group, what))
    return name


# https://github.com/NVIDIA/nvcf/issues/1531, https://github.com/vllm-project/production-stack/issues/601
async def test_an_engine_whose_address_has_gone_ends_what_it_has_begun(
    site: Site, engine: HeldEngine, behind: Name
) -> None:
    other: HeldEngine = await site.enter(HeldEngine())
    other.holds = False
    behind.means(engine.url)
    client = await site.gateway({"url": "dns+http://engines:80"}, models=OWN, ready=1)
    streams = [await Wire.send(client.running.url, body()) for _ in range(20)]
    await asyncio.gather(*(stream.begun() for stream in streams))

    behind.means(other.url)

    async def drains() -> bool:
        return (await client.rows())[f"{at(engine)}/0"]["health"] == "draining"

    await until(drains, what="the first one is draining")
    await joined(client, 1)
    row = (await client.rows())[f"{at(engine)}/0"]
    assert (row["health"], row["reason"]) == ("draining", "its address is gone from the name")
    assert {(await client.ask(body())).instance for _ in range(5)} == {at(other)}
    engine.finish()
    for stream in streams:
        assert b"data: [DONE]" in await stream.whole()
    await until(lambda: is_forgotten(client, engine), what="it is forgotten")
    assert engine.aborted == 0


async def test_an_address_that_flickers_loses_nothing(site: Site, engine: HeldEngine, behind: Name) -> None:
    behind.means(engine.url)
    client = await site.gateway({"url": "dns+http://engines:80"}, models=OWN, ready=1)
    stream = await Wire.send(client.running.url, body())
    await stream.begun()
    behind.means()

    async def state() -> str:
        return str((await client.rows())[f"{at(engine)}/0"]["health"])

    async def drains() -> bool:
        return await state() == "draining"

    await until(drains, what="it is draining")
    behind.means(engine.url)
    await joined(client, 1)
    assert (await client.rows())[f"{at(engine)}/0"]["booked_requests"] == 1
    engine.finish()
    await stream.whole()


async def test_settings_of_a_name_reach_all_engines_behind_it(site: Site, engine: HeldEngine, behind: Name) -> None:
    other: HeldEngine = await site.enter(HeldEngine())
    behind.means(engine.url, other.url)
    client = await site.gateway({"url": "dns+http://engines:80"}, models=OWN, ready=2)
    stream = await Wire.send(client.running.url, body())
    await stream.begun()
    site.write({"url": "dns+http://engines:80", "labels": {"zone": "b"}}, models=OWN)
    assert (await reloaded(client))["engines"]["changed"] == ["engines:80"]

    async def told() -> bool:
        return [row["labels"] for row in (await client.rows()).values()] == [{"zone": "b"}] * 2

    await until(told, what="both have the label")
    site.write({"url": other.url}, models=OWN)
    assert (await reloaded(client))["engines"]["removed"] == ["engines:80"]
    for each in (engine, other):
        each.finish()
    assert b"data: [DONE]" in await stream.whole()
    await until(lambda: is_forgotten(client, engine), what="the one is forgotten")
    await joined(client, 1)


# --- an engine is drained


async def test_a_drained_engine_gets_nothing_and_forgets_nothing(site: Site) -> None:
    engines = [await site.engine() for _ in range(2)]
    client = await site.gateway(*engines)
    asked = chat(essay("drained"))
    first = await client.ask(asked)
    home, other = sorted(engines, key=lambda engine: name(engine) != first.instance)
    await client.caught_up(home)
    url = f"{client.running.admin_url}/admin/v1/instances"
    drained = (await client.http.post(f"{url}/{name(home)}/drain")).json()
    assert (drained["id"], drained["state"], drained["reason"]) == (name(home), "draining", "by the operator")
    states = {row["id"]: row["state"] for row in (await client.http.get(url)).json()["data"]}
    assert states == {name(home): "draining", name(other): "ready"}
    assert (await client.ask(asked)).instance == name(other)
    assert (await client.explain(asked))["filtered"] == {f"{name(home)}/0": "draining: by the operator"}
    row = await client.row(home)
    assert (row["health"], row["index_blocks"] > 0) == ("draining", True)

    back = (await client.http.post(f"{url}/{name(home)}/undrain")).json()
    assert (back["state"], back["reason"]) == ("ready", "")
    assert (await client.hits(asked))[name(home)] > 0


async def test_what_runs_on_a_drained_engine_goes_on(site: Site, engine: HeldEngine) -> None:
    client = await site.gateway({"url": engine.url}, models=OWN)
    stream = await Wire.send(client.running.url, body())
    await stream.begun()
    await client.running.live.drain(at(engine))
    assert (await client.post(body())).status == 503
    ready = await client.http.get(f"{client.running.url}/readyz")
    assert ready.status_code == 503
    assert not ready.json()["draining"]
    engine.finish()
    assert b"data: [DONE]" in await stream.whole()


async def test_engines_that_are_all_replaced_serve_until_one_of_the_others_has_joined(
    site: Site, engine: HeldEngine
) -> None:
    old, late = [await site.enter(HeldEngine()) for _ in range(2)]
    for each in (engine, old, late):
        each.holds = False
    late.starting = True
    client = await site.gateway({"url": engine.url}, {"url": old.url}, models=OWN)
    site.write({"url": late.url}, models=OWN)
    await reloaded(client)
    assert {(await client.ask(body())).instance for _ in range(6)} == {at(engine), at(old)}
    rows = (await client.http.get(f"{client.running.admin_url}/admin/v1/instances")).json()["data"]
    assert [row["state"] for row in rows if row.get("leaving")] == ["ready", "ready"]

    late.starting = False
    for each in (engine, old):
        await until(drains(client, each), what="the others are draining")
    assert {(await client.ask(body())).instance for _ in range(3)} == {at(late)}


async def test_what_the_operator_has_drained_stays_so_through_reloads(
    site: Site, engine: HeldEngine, behind: Name
) -> None:
    client = await site.gateway({"url": engine.url}, models=OWN)

    async def state() -> tuple[str, str]:
        row = (await client.rows())[f"{at(engine)}/0"]
        return row["health"], row["reason"]

    async def told(zone: str) -> bool:
        return (await client.rows())[f"{at(engine)}/0"]["labels"] == {"zone": zone}

    await client.running.live.drain(at(engine))
    site.write({"url": engine.url, "labels": {"zone": "b"}}, models=OWN)
    await reloaded(client)
    await until(lambda: told("b"), what="its label is known")
    assert await state() == ("draining", "by the operator")

    behind.means(engine.url)  # the same engine, found by its name now
    site.write({"url": "dns+http://engines:80", "labels": {"zone": "c"}}, models=OWN)
    await reloaded(client)
    assert await state() == ("draining", "removed from the configuration")
    await until(lambda: told("c"), what="it is back")
    assert await state() == ("draining", "by the operator")
    await client.running.live.undrain(at(engine))
    assert (await state())[0] == "ready"


async def test_an_engine_that_is_not_there_cannot_be_drained(site: Site, engine: HeldEngine) -> None:
    client = await site.gateway({"url": engine.url}, models=OWN)
    answer = await client.http.post(f"{client.running.admin_url}/admin/v1/instances/nobody/drain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "instance_not_found")


class OfTheEngines(OpenAIAdapter):
    """One that an engine names, and nobody has installed."""

    closed = 0

    async def aclose(self) -> None:
        type(self).closed += 1
        await super().aclose()


async def test_an_adapter_that_an_engine_names_is_closed_with_the_gateway(site: Site, engine: HeldEngine) -> None:
    kind = f"{__name__}:{OfTheEngines.__name__}"
    async with site.running({"url": engine.url, "kind": kind}, models=OWN):
        assert OfTheEngines.closed == 0
    assert OfTheEngines.closed == 1
