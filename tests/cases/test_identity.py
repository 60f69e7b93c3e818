"""Keys, and what they must not become: a way past a revocation, another's identity, a line in a log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.serving.apis import ROUTES
from router.store.database import Database, open_database
from router.store.schema import tenants
from tests.accounts import PEPPER, Accounts
from tests.cases.engine import MODEL, Engine, Exchange, answer_ok, event
from tests.cases.stand import CHAT, Stand, case_input, request_head, written
from tests.servers import Postgres

AUTH = {"pepper": PEPPER, "refresh_s": 0.05}
CLIENT_KEY = "gw-tenant-key"


@pytest.fixture
def accounts(database: Database) -> Accounts:
    return Accounts(database)


@pytest.fixture
async def kept(sqlite_url: str) -> AsyncIterator[Accounts]:
    """Where it does not matter which database it is."""
    database = open_database(sqlite_url)
    yield Accounts(database)
    await database.aclose()


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Stand]:
    """A second gateway."""
    (tmp_path / "replica").mkdir()
    replica = Stand(tmp_path / "replica")
    yield replica
    await replica.stop()


def on(url: str, **auth: Any) -> dict[str, Any]:
    """The sections of a gateway that keeps its tenants there."""
    return {"store": {"url": url}, "auth": {**AUTH, **auth}, "isolation": {"unverified": "allow"}}


def keyed(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# https://github.com/sgl-project/sglang/pull/27048, https://github.com/kcolemangt/llm-router/issues/13
class TestAClientsCredential:
    """FC-75"""

    async def _start(self, stand: Stand, **sections: Any) -> tuple[Engine, Engine]:
        with_key, without = Engine("A"), Engine("B")
        for engine in (with_key, without):
            await stand.launch(engine)
        keys = {spec["id"]: spec["api_key"] for spec in case_input("75")["upstream"]}
        engines = [
            {"id": engine.name, "url": engine.url, "kind": "vllm"} | ({"api_key": key} if key else {})
            for engine in (with_key, without)
            for key in (keys[engine.name],)
        ]
        await stand.start(with_key, without, engines=engines, policy={"name": "round_robin"}, **sections)
        return with_key, without

    @pytest.mark.parametrize("open_to_all", [True, False])
    async def test_leaves_the_gateway_on_no_route(
        self, stand: Stand, kept: Accounts, sqlite_url: str, caplog: pytest.LogCaptureFixture, open_to_all: bool
    ) -> None:
        caplog.set_level(logging.DEBUG)
        key = CLIENT_KEY if open_to_all else await kept.new()
        sections = {} if open_to_all else on(sqlite_url)
        with_key, without = await self._start(stand, listen={"port": 0, "access_log": True}, **sections)
        statuses = set()
        for path in ROUTES:
            for call in case_input("75")["client"]:
                query = call["path"].partition("?")[2].replace(CLIENT_KEY, key)
                headers = {name: value.replace(CLIENT_KEY, key) for name, value in call.get("headers", {}).items()}
                body = {**call["json"], "prompt": "hello", "input": "hello"}
                headers["cookie"] = f"session={key}"
                answer = await stand.ask(body, path=f"{path}?{query}" if query else path, headers=headers)
                statuses.add(answer.status_code)
                assert key not in answer.text
                assert not (query and not open_to_all) or answer.status_code == 401  # a query holds no key
        assert 200 in statuses
        assert len(with_key.seen) > 20
        assert len(without.seen) > 20
        assert not any(key.encode() in heard for heard in (*with_key.heard, *without.heard))
        keyless = {
            heard.split(b"\r\n")[0]
            for heard in with_key.heard
            if b"authorization: bearer worker-key\r\n" not in heard.lower()
        }
        assert keyless <= {b"GET /v1/models HTTP/1.1"}  # whether it answers without one
        credentials = {b"authorization", b"x-api-key", b"api-key", b"cookie"}
        assert credentials.isdisjoint(names_in(without.heard))
        assert key not in logged(caplog)


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """All there is, but for the lines of the test's own client."""
    ours = (record for record in caplog.records if not record.name.startswith(("httpx", "httpcore")))
    return "".join(f"{record.getMessage()} {record.exc_text or ''}\n" for record in ours)


def names_in(heard: Sequence[bytes]) -> set[bytes]:
    """Of headers, in lower case."""
    lines = (line for request in heard for line in request.partition(b"\r\n\r\n")[0].split(b"\r\n"))
    return {line.partition(b":")[0].lower() for line in lines}


# https://github.com/vllm-project/semantic-router/issues/1445, https://github.com/praxis-proxy/ai/issues/418
class TestAnIdentityThatAClientWrites:
    """FC-78"""

    HEADERS = tuple(case_input("78")["client"][0]["headers"])

    async def _asked(self, stand: Stand, kept: Accounts, url: str, **sections: Any) -> tuple[dict[str, Any], str, str]:
        """The receipt of the case's request, and the ids of T1 and T2."""
        (call,) = case_input("78")["client"]
        first = await kept.tenant("T1")
        second = await kept.tenant("T2")
        key = await kept.key(await kept.project(first))
        await stand.start(Engine(), **{**on(url), **sections})
        answer = await stand.ask(call["json"], headers={**call["headers"], **keyed(key)})
        assert answer.status_code == 200
        engine = stand.engines["A"]
        assert not {name.encode() for name in self.HEADERS} & names_in(engine.heard)
        assert not any(b"T2" in heard for heard in engine.heard)
        return await stand.receipt(answer), first, second

    @pytest.mark.parametrize("header", [None, {"name": "X-Tenant-Id", "peers": ["10.0.0.0/8"]}])
    async def test_is_not_believed(self, stand: Stand, kept: Accounts, sqlite_url: str, header: Any) -> None:
        receipt, first, _ = await self._asked(stand, kept, sqlite_url, auth={**AUTH, "header": header})
        assert receipt["tenant"] == receipt["caller"]["tenant"] == first
        assert receipt["caller"]["key"]
        assert receipt["caller"]["domain"] == f"tenant:{first}"
        assert receipt["end_user"]
        assert "victim" not in str(receipt)

    async def test_is_believed_from_a_gateway_that_is_named(
        self, stand: Stand, kept: Accounts, sqlite_url: str
    ) -> None:
        header = {"name": "x-tenant-id", "peers": ["127.0.0.1"]}
        receipt, _, second = await self._asked(stand, kept, sqlite_url, auth={**AUTH, "header": header})
        assert receipt["tenant"] == second
        assert receipt["caller"]["key"] == ""

    async def test_behind_a_balancer_the_client_counts_not_the_balancer(
        self, stand: Stand, kept: Accounts, sqlite_url: str
    ) -> None:
        """The balancer's address is on the list; it introduces a client that is not."""
        await kept.tenant("T2")
        await stand.start(
            Engine(),
            **on(sqlite_url, header={"name": "x-tenant-id", "peers": ["127.0.0.1", "10.0.0.7"]}),
            listen={"port": 0, "proxy_protocol": True, "trusted_proxies": ["127.0.0.1"]},
        )
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
        for client, status in (("203.0.113.9", b"401"), ("10.0.0.7", b"200")):
            async with stand.connection() as (reader, writer):
                introduced = f"PROXY TCP4 {client} 127.0.0.1 40000 4000\r\n".encode()
                forged = {"x-tenant-id": "T2", "x-forwarded-for": "10.0.0.7"}
                writer.write(introduced + request_head(body, forged, path="/v1/completions") + written(body))
                assert (await reader.read()).split(b" ")[1] == status


class Line:
    """A TCP line to a port of this machine, which can be cut and mended."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> Line:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        self._writers -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.transport.abort()


# https://github.com/BerriAI/litellm/issues/9820, https://github.com/BerriAI/litellm/issues/25553
class TestAKeyThatIsRevoked:
    """FC-79"""

    BODY: Mapping[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}

    @pytest.mark.parametrize("what", ["key", "tenant"])
    async def test_ends_on_every_replica_in_time_and_stays_so(
        self, stand: Stand, replica: Stand, accounts: Accounts, database_url: str, what: str
    ) -> None:
        key = await accounts.new()
        go_on = asyncio.Event()

        async def script(exchange: Exchange) -> None:
            if not exchange.json.get("stream"):
                await answer_ok(exchange)
                return
            await exchange.begin_stream()
            await exchange.chunk(event({"choices": [{"index": 0, "delta": {"content": "a"}}]}))
            await go_on.wait()
            await exchange.chunk(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
            await exchange.chunk(event("[DONE]"))
            await exchange.chunk(b"")

        await stand.start(Engine(script=script), **on(database_url))
        await replica.start(Engine(script=script), **on(database_url))
        assert (await stand.ask(self.BODY, headers=keyed(key))).status_code == 200
        assert (await replica.ask(self.BODY, headers=keyed(key))).status_code == 200

        stream = {**self.BODY, "stream": True}
        async with replica.connection() as (reader, writer):
            writer.write(request_head(stream, keyed(key)) + written(stream))
            await reader.readuntil(b'"a"')
            if what == "key":
                await accounts.revoke(key)
            else:
                async with accounts.database.read() as connection:
                    row = (await connection.execute(tenants.select())).one()
                await accounts.change(tenants, row.id, archived_at=time.time())
            revoked_at = last_accepted = asyncio.get_running_loop().time()
            while (answer := await replica.ask(self.BODY, headers=keyed(key))).status_code == 200:
                last_accepted = asyncio.get_running_loop().time()
                assert last_accepted < revoked_at + 5
            assert answer.status_code == 401
            assert (await stand.ask(self.BODY, headers=keyed(key))).status_code in (200, 401)
            go_on.set()  # what ran before goes on to its end
            assert (await reader.read()).endswith(b"0\r\n\r\n")
        await stand.until(lambda: self._is_refused(stand, key))
        for _ in range(5):
            for each in (stand, replica):
                assert (await each.ask(self.BODY, headers=keyed(key))).status_code == 401

    async def _is_refused(self, stand: Stand, key: str) -> bool:
        return (await stand.ask(self.BODY, headers=keyed(key))).status_code == 401

    async def test_on_a_replica_that_is_cut_off_from_the_database(
        self, replica: Stand, postgres: Postgres, postgres_url: str
    ) -> None:
        """It works there for stale_s at most; then nothing does, until the database is back."""
        database = open_database(postgres_url)
        accounts = Accounts(database)
        key = await accounts.new()
        async with Line(postgres.port) as line:
            url = postgres_url.replace(f":{postgres.port}/", f":{line.port}/")
            await replica.start(Engine(), **on(url, stale_s=0.5))
            assert (await replica.ask(self.BODY, headers=keyed(key))).status_code == 200
            await line.cut()
            await accounts.revoke(key)
            await self._until_all_is_refused(replica, key)
            await line.mend()
            await replica.until(lambda: self._is_refused(replica, key))
            assert (await replica._running.live.readiness())["ready"]
            await replica.stop()
        await database.aclose()

    async def _until_all_is_refused(self, replica: Stand, key: str) -> None:
        async def statuses() -> tuple[int, int]:
            known = await replica.ask(self.BODY, headers=keyed(key))
            unknown = await replica.ask(self.BODY, headers=keyed("sk-new"))
            return known.status_code, unknown.status_code

        seen = {await statuses()}
        await replica.until(lambda: self._reached(statuses, seen, (503, 503)))
        assert seen <= {(200, 401), (200, 503), (503, 503)}
        assert (200, 503) in seen
        answer = await replica.ask(self.BODY, headers=keyed(key))
        assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("store_unavailable", "1")
        ready = await replica._running.live.readiness()
        assert (ready["ready"], ready["auth"]["database"]) == (False, "stale")
        metrics = await replica.metrics()
        assert metrics["warmroute_store_up"] == 0
        assert metrics['warmroute_unauthenticated_total{code="store_unavailable"}'] > 0

    async def _reached(self, statuses: Any, seen: set[tuple[int, int]], wanted: tuple[int, int]) -> bool:
        found = await statuses()
        seen.add(found)
        return bool(found == wanted)


# https://github.com/BerriAI/litellm/issues/39757, https://github.com/sxueck/llm-gateway/issues/34
class TestWhatErrorsAndLogsTell:
    """FC-80"""

    MARKER = "MARKER-7f3a"
    TRACEBACK = 'Traceback (most recent call last):\n  File "/opt/engine/server.py", line 7, in run\nValueError: '

    async def _fails(self, exchange: Exchange) -> None:
        """Both variants of the case's engine, in turn."""
        self._turn = getattr(self, "_turn", 0) + 1
        if self._turn % 2:
            exchange.reset()
        else:
            quoted = self.TRACEBACK + exchange.body.decode()
            await exchange.answer(quoted.encode(), status=500, content_type="text/plain")

    @pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
    async def test_no_key_no_prompt_no_address(
        self, stand: Stand, kept: Accounts, sqlite_url: str, caplog: pytest.LogCaptureFixture, path: str
    ) -> None:
        caplog.set_level(logging.DEBUG)
        key = await kept.new()
        await stand.start(Engine(script=self._fails), **on(sqlite_url), listen={"port": 0, "access_log": True})
        await stand.until(lambda: self._is_read(stand))
        caplog.clear()
        wrong, none = case_input("80")["client"]
        answers = [
            await stand.ask({**call["json"], "input": self.MARKER}, path=path, headers=headers)
            for call, headers in ((wrong, wrong["headers"]), (none, {}), (wrong, keyed(key)), (wrong, keyed(key)))
        ]
        assert [answer.status_code for answer in answers[:2]] == [401, 401]
        assert all(answer.status_code in (500, 502, 503) for answer in answers[2:])
        told = "".join(f"{answer.headers}{answer.text}" for answer in answers)
        address = stand.engines["A"].url.removeprefix("http://")
        for secret in (self.MARKER, "wrong-key-123456", key, key[3:12], kept.id_of(key), address, "Traceback", "sk-"):
            assert secret not in told
        assert all(answer.headers["x-request-id"] for answer in answers)
        ours = logged(caplog)
        for secret in (self.MARKER, "wrong-key", key, key[3:12], PEPPER, "Traceback"):
            assert secret not in ours
        receipts = str(await stand.receipts())
        for secret in (self.MARKER, "wrong-key", key):
            assert secret not in receipts

    async def _is_read(self, stand: Stand) -> bool:
        return (await stand._running.live.readiness())["auth"]["database"] == "ok"
