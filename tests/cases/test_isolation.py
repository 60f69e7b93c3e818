"""Tenants' caches: who writes the salt, what may steer an engine, what one tenant can tell of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from router.serving.apis import FORMS, ROUTES
from router.store.database import open_database
from router.store.schema import isolation_proofs
from tests.accounts import PEPPER, Accounts
from tests.cases.engine import MODEL, Engine, Exchange, answer_ok, event, whole_answer
from tests.cases.stand import CHAT, COMPLETIONS, Stand, case_input

SALT_DIGITS = 64


@pytest.fixture
async def accounts(sqlite_url: str) -> AsyncIterator[Accounts]:
    database = open_database(sqlite_url)
    yield Accounts(database)
    await database.aclose()


class Tenants:
    """Two of them, T1 with two keys, in front of engines that a test scripts."""

    def __init__(self, stand: Stand, keys: dict[str, str]) -> None:
        self.stand = stand
        self.keys = keys

    async def ask(
        self, who: str, body: Any, *, path: str = CHAT, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        return await self.stand.ask(
            body, path=path, headers={**(headers or {}), "authorization": f"Bearer {self.keys[who]}"}
        )


@pytest.fixture
async def tenants(stand: Stand, accounts: Accounts, sqlite_url: str) -> Any:
    async def start(*engines: Engine, tenant: dict[str, Any] | None = None, **sections: Any) -> Tenants:
        project = await accounts.project(await accounts.tenant("T1", **(tenant or {})))
        keys = {"T1": await accounts.key(project), "T1'": await accounts.key(project)}
        keys["T2"] = await accounts.new("T2", tenant=tenant)
        sections = {"store": {"url": sqlite_url}, "auth": {"pepper": PEPPER, "refresh_s": 0.05}, **sections}
        await stand.start(*engines, **sections)
        return Tenants(stand, keys)

    return start


def salts(engine: Engine) -> list[str | None]:
    return [exchange.json.get("cache_salt") for exchange in engine.seen]


async def any_answer(exchange: Exchange) -> None:
    """What each API takes for an answer."""
    await exchange.answer({**whole_answer(), "content": [], "output": [], "role": "assistant"})


# https://github.com/vllm-project/vllm/pull/53347, https://github.com/tinfoilsh/confidential-model-router/pull/387
class TestASaltThatATenantSends:
    """FC-73"""

    CALLS = case_input("73")["client"]

    async def test_is_a_part_of_its_own_domain_on_every_path(self, tenants: Any) -> None:
        gateway = await tenants(engine := Engine(script=any_answer))
        first, *others = self.CALLS
        refused = await gateway.ask("T1", first["json"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "extra_key")
        del first["json"]["extra_key"]
        for call in self.CALLS:
            before = len(engine.seen)
            for who in ("T1", "T1'", "T2"):
                answer = await gateway.ask(who, call["json"], path=call["path"])
                assert answer.status_code == 200, answer.text
            mine, colleagues, theirs = salts(engine)[before:]
            assert mine == colleagues != theirs
            for salt in (mine, theirs):
                assert isinstance(salt, str)
                assert len(salt) == SALT_DIGITS
                assert not {"@", "/", "\\", "\0"} & set(salt)
            assert b"T2-salt" not in engine.seen[-1].body
        assert len({salts(engine)[number] for number in range(0, len(engine.seen), 3)}) == 3  # "T2-salt", a list, none
        assert others

    async def test_written_in_any_way_is_replaced(self, tenants: Any) -> None:
        gateway = await tenants(engine := Engine(script=any_answer))
        plain = f'{{"model": "{MODEL}", "messages": []'
        for written in ('"cache\\u005fsalt": "T2-salt"', '"cache_salt": 1, "cache_salt": "T2-salt"'):
            answer = await gateway.ask("T1", f"{plain}, {written}}}".encode())
            assert answer.status_code == 200
            assert b"T2-salt" not in engine.seen[-1].body
            assert engine.seen[-1].body.count(b"salt") == 1
        both = salts(engine)
        await gateway.ask("T2", f'{plain}, "cache_salt": "T2-salt"}}'.encode())
        assert salts(engine)[-1] not in both

    async def test_reaches_an_engine_on_no_route(self, tenants: Any) -> None:
        gateway = await tenants(engine := Engine(script=any_answer))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
        body |= {"token_ids": [1], "max_tokens": 1, "cache_salt": "T2-salt"}
        for route in [route for route, path in ROUTES.items() if path not in FORMS]:
            for who in ("T1", "T2"):
                await gateway.ask(who, body, path=route)
        assert len({exchange.path for exchange in engine.seen}) > 5
        assert not any(b"T2-salt" in exchange.body for exchange in engine.seen)
        first, second = set(salts(engine)[0::2]), set(salts(engine)[1::2])
        assert (len(first), len(second), first & second) == (1, 1, set())

    async def test_keys_of_a_tenant_may_have_domains_of_their_own(self, tenants: Any) -> None:
        gateway = await tenants(engine := Engine(), tenant={"isolation": "key"})
        for who in ("T1", "T1'", "T2"):
            await gateway.ask(who, self.CALLS[1]["json"])
        assert len(set(salts(engine))) == 3

    @pytest.mark.parametrize("rule", ["group:finance", "shared"])
    async def test_tenants_may_share_one_by_choice(self, tenants: Any, rule: str) -> None:
        gateway = await tenants(engine := Engine(), tenant={"isolation": rule})
        for who in ("T1", "T1'", "T2"):
            await gateway.ask(who, self.CALLS[1]["json"])
        (salt,) = set(salts(engine))
        assert salt

    async def test_an_open_gateway_passes_it_on(self, stand: Stand) -> None:
        await stand.start(engine := Engine())
        await stand.ask(self.CALLS[2]["json"] | {"messages": []})
        assert salts(engine) == ["T2-salt"]

    async def test_an_engine_that_knows_no_salts_gets_no_isolated_tenant(self, tenants: Any) -> None:
        gateway = await tenants(deaf := Engine("DEAF", salted=()), Engine("SALTED"))
        for _ in range(4):
            assert (await gateway.ask("T1", self.CALLS[1]["json"])).status_code == 200
        assert deaf.seen == []
        row = next(row for row in await gateway.stand.fleet_rows() if row["instance"] == "DEAF")
        assert "reuses across cache salts" in row["isolation"]

    async def test_without_any_that_does_the_tenant_is_told(self, tenants: Any) -> None:
        gateway = await tenants(deaf := Engine(salted=()))
        answer = await gateway.ask("T1", self.CALLS[1]["json"])
        assert answer.status_code == 503
        assert "keep this caller's cache apart" in answer.json()["error"]["message"]
        assert deaf.seen == []

    async def test_an_engine_that_is_open_past_the_gateway_may_count_as_one(self, tenants: Any) -> None:
        gateway = await tenants(engine := Engine(), isolation={"open_engines": "refuse"})
        assert (await gateway.ask("T1", self.CALLS[1]["json"])).status_code == 503
        assert engine.seen == []
        assert "answers without a key" in (await gateway.stand.fleet_rows())[0]["isolation"]

    async def test_tenants_that_share_by_choice_may_use_it(self, tenants: Any) -> None:
        gateway = await tenants(deaf := Engine(salted=()), tenant={"isolation": "shared"})
        assert (await gateway.ask("T1", self.CALLS[1]["json"])).status_code == 200
        assert len(deaf.seen) == 1

    async def test_a_route_without_salts_goes_by_way_of_one_that_has_them(self, tenants: Any) -> None:
        """SGLang 0.5.23 takes no salt on /v1/messages."""
        gateway = await tenants(engine := Engine(script=any_answer, salted=(CHAT, COMPLETIONS)))
        answer = await gateway.ask("T1", self.CALLS[3]["json"], path="/v1/messages")
        assert answer.status_code == 200
        assert [exchange.path for exchange in engine.seen] == [CHAT]
        assert len(salts(engine)[0] or "") == SALT_DIGITS

    async def test_a_route_that_has_no_other_is_refused(self, tenants: Any) -> None:
        gateway = await tenants(engine := Engine(salted=(CHAT, COMPLETIONS)))
        answer = await gateway.ask("T1", {"model": MODEL, "input": "x"}, path="/v1/embeddings")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "route_not_isolated")
        assert engine.seen == []


# https://github.com/sgl-project/sglang/issues/36855, https://github.com/ray-project/ray/pull/64224
class TestFieldsThatSteerAnEngine:
    """FC-76"""

    (CALL,) = case_input("76")["client"]
    STEERING = frozenset(CALL["json"]) - {"model", "messages", "max_tokens"}

    async def test_are_refused_all_by_name(self, tenants: Any) -> None:
        gateway = await tenants(engine := Engine())
        answer = await gateway.ask("T1", self.CALL["json"], headers=self.CALL["headers"])
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert all(name in message for name in self.STEERING)
        assert engine.seen == []

    @pytest.mark.parametrize("rule", ["tenant", "shared"])
    async def test_are_refused_each_by_itself(self, tenants: Any, rule: str) -> None:
        gateway = await tenants(engine := Engine(), tenant={"isolation": rule})
        for name in self.STEERING:
            body = {**self.CALL["json"], **dict.fromkeys(self.STEERING), name: self.CALL["json"][name]}
            assert (await gateway.ask("T1", body)).status_code == (200 if body[name] is None else 400), name
        assert not any(exchange.json.get("priority") for exchange in engine.seen)

    async def test_in_headers_reach_no_engine(self, tenants: Any) -> None:
        gateway = await tenants(engine := Engine())
        body = {name: value for name, value in self.CALL["json"].items() if name not in self.STEERING}
        assert (await gateway.ask("T1", body, headers=self.CALL["headers"])).status_code == 200
        assert not self.CALL["headers"].keys() & engine.seen[0].headers.keys()

    async def test_pass_for_a_tenant_that_may_steer(self, tenants: Any) -> None:
        gateway = await tenants(engine := Engine(), tenant={"steers": True})
        assert (await gateway.ask("T1", self.CALL["json"])).status_code == 200
        assert engine.seen[0].json.keys() >= self.STEERING

    async def test_unknown_ones_pass_where_caches_are_shared_and_are_refused_elsewhere(self, tenants: Any) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "frobnicate": 1}
        gateway = await tenants(engine := Engine(), tenant={"isolation": "shared"})
        assert (await gateway.ask("T1", body)).status_code == 200
        assert engine.seen[0].json["frobnicate"] == 1

    async def test_unknown_ones_are_refused_for_isolated_tenants_unless_reviewed(self, tenants: Any) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "frobnicate": 1, "twiddle": 1}
        gateway = await tenants(Engine(), isolation={"safe_fields": ["twiddle"]})
        answer = await gateway.ask("T1", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "frobnicate")
        assert "twiddle" not in answer.json()["error"]["message"]

    async def test_pass_on_an_open_gateway(self, stand: Stand) -> None:
        await stand.start(engine := Engine())
        assert (await stand.ask(self.CALL["json"])).status_code == 200
        assert engine.seen[0].json.keys() >= self.STEERING


# https://github.com/sgl-project/sglang/pull/39461, https://github.com/sgl-project/sglang/pull/31685
class TestAnAbort:
    """FC-77"""

    async def test_of_one_tenant_ends_no_other_tenants_request(self, tenants: Any) -> None:
        """Engines are freed by closing the connection of that request; no id is ever sent to abort by."""
        first, second = case_input("77")["client"]
        chunk = case_input("77")["upstream"][0]["sse_forever"]
        released = asyncio.Event()

        async def script(exchange: Exchange) -> None:
            await exchange.begin_stream()
            await exchange.chunk(event(chunk))
            await released.wait()
            await exchange.chunk(event({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
            await exchange.chunk(event("[DONE]"))
            await exchange.chunk(b"")

        gateway = await tenants(engine := Engine(script=script))
        assert (await gateway.ask("T1", first["json"])).status_code == 400  # rid is not the client's to choose
        bodies = [{name: value for name, value in call["json"].items() if name != "rid"} for call in (first, second)]
        leaving = asyncio.ensure_future(gateway.ask("T1", bodies[0], headers={"x-request-id": "a"}))
        staying = asyncio.ensure_future(gateway.ask("T2", bodies[1], headers={"x-request-id": "abc-1"}))

        async def both_run() -> bool:
            return len(engine.seen) == 2

        await gateway.stand.until(both_run)
        leaving.cancel()
        await engine.seen[[e.headers["x-request-id"].endswith("-a") for e in engine.seen].index(True)].until_gone()
        released.set()
        answer = await staying
        assert answer.status_code == 200
        assert answer.text.rstrip().endswith("data: [DONE]")
        assert not any("abort" in path for path in engine.asked)
        ids = [exchange.headers["x-request-id"] for exchange in engine.seen]
        assert not any(one != other and other.startswith(one) for one in ids for other in ids)
        assert min(map(len, ids)) >= 20
        for path in ("/abort_request", "/v1/abort_request", "/inference/v1/abort_requests"):
            assert (await gateway.ask("T1", {"rid": ""}, path=path)).status_code == 404


# https://github.com/BerriAI/litellm/issues/29955, https://github.com/vllm-project/semantic-router/issues/2134
class TestWhatAnAnswerTells:
    """FC-81"""

    CALLS = case_input("81")["client"]
    LONG = " ".join(f"word {number}" for number in range(200))

    def _script(self) -> Any:
        """Caches by salt and prompt, as engines do."""
        cached: set[tuple[str, str]] = set()

        async def script(exchange: Exchange) -> None:
            body = exchange.json
            asked = body.get("cache_salt"), str(body["messages"])
            details = {"cached_tokens": 48 if asked in cached else 0}
            cached.add(asked)
            usage = {"prompt_tokens": 50, "completion_tokens": 1, "total_tokens": 51, "prompt_tokens_details": details}
            await exchange.answer(whole_answer(usage))

        return script

    async def test_nothing_of_another_tenants_prompts(self, tenants: Any) -> None:
        gateway = await tenants(Engine("I1", script=self._script()), Engine("I2", script=self._script()))
        of_a, of_b = self.CALLS[:2]
        body = {**of_a["json"], "messages": [{"role": "user", "content": self.LONG}]}
        for _ in range(2):
            mine = await gateway.ask("T1", body, headers=of_a["headers"])
        theirs = await gateway.ask("T2", body, headers=of_b["headers"])
        assert int(mine.headers["x-warmroute-predicted-tokens"]) > 0
        assert mine.headers["x-warmroute-cached-tokens"] == "48"
        assert theirs.headers["x-warmroute-predicted-tokens"] == "0"
        assert theirs.headers["x-warmroute-cached-tokens"] == "0"
        own = {name for name in theirs.headers if name.startswith("x-warmroute-")}
        assert own == {"x-warmroute-predicted-tokens", "x-warmroute-cached-tokens"}
        assert theirs.headers["cache-control"] == "no-store"
        receipt = await gateway.stand.receipt(theirs)
        assert receipt["best_hit_tokens"] == 0
        assert all(
            not scored["held_tokens"] and not scored["hit_tokens"] for scored in receipt["decision"]["candidates"]
        )

    async def test_no_figures_on_the_clients_port(self, tenants: Any) -> None:
        gateway = await tenants(Engine())
        for call in self.CALLS[2:]:
            for method in ("GET", "POST"):
                answer = await gateway.stand._client.request(
                    method,
                    gateway.stand.url + call["path"],
                    headers={"authorization": f"Bearer {gateway.keys['T2']}"},
                )
                assert answer.status_code == 404


class TestAnEngineOfOneTenant:
    async def test_takes_nobody_else(self, stand: Stand, tenants: Any) -> None:
        own, common = Engine("OWN"), Engine("COMMON")
        for engine in (own, common):
            await stand.launch(engine)
        engines = [
            {"id": "OWN", "url": own.url, "kind": "vllm", "labels": {"tenant": "gold"}},
            {"id": "COMMON", "url": common.url, "kind": "vllm"},
        ]
        gateway = await tenants(own, common, engines=engines)
        for number in range(6):
            body = {"model": MODEL, "messages": [{"role": "user", "content": f"{number}"}]}
            assert (await gateway.ask("T1", body)).status_code == 200
        assert (len(own.seen), len(common.seen)) == (0, 6)

    async def test_is_the_only_one_for_a_tenant_with_its_label(self, stand: Stand, tenants: Any) -> None:
        own, common = Engine("OWN", salted=()), Engine("COMMON")
        for engine in (own, common):
            await stand.launch(engine)
        engines = [
            {"id": "OWN", "url": own.url, "kind": "vllm", "labels": {"tenant": "gold"}},
            {"id": "COMMON", "url": common.url, "kind": "vllm"},
        ]
        rule = {"instance_labels": {"tenant": "gold"}}
        gateway = await tenants(own, common, engines=engines, tenant=rule, isolation={"unverified": "dedicated"})
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        for _ in range(3):
            assert (await gateway.ask("T1", body)).status_code == 200
        assert (len(own.seen), len(common.seen)) == (3, 0)


async def test_an_engine_is_asked_once_for_each_of_its_processes(
    stand: Stand, tenants: Any, accounts: Accounts, tmp_path: Any
) -> None:
    """What was seen is kept in the database, and believed by a gateway that starts later."""
    gateway = await tenants(engine := Engine(script=answer_ok))
    assert (await gateway.ask("T1", {"model": MODEL, "messages": []})).status_code == 200

    async def is_kept() -> bool:
        async with accounts.database.read() as connection:
            return bool((await connection.execute(select(isolation_proofs))).all())

    await stand.until(is_kept)
    async with accounts.database.read() as connection:
        (row,) = (await connection.execute(select(isolation_proofs))).all()
    assert (row.instance, row.model, row.verified, row.method) == ("A", MODEL, True, "usage")
    assert row.boot == str(engine.started_at)
    probes = len(engine._probed)
    later = Stand(tmp_path / "later")
    (tmp_path / "later").mkdir()
    later.engines["A"] = engine
    try:
        await later.start(
            engine, store={"url": str(accounts.database.engine.url).replace("+aiosqlite", "")}, auth={"pepper": PEPPER}
        )
        answer = await later.ask(
            {"model": MODEL, "messages": []}, headers={"authorization": f"Bearer {gateway.keys['T1']}"}
        )
        assert answer.status_code == 200
        assert len(engine._probed) == probes
    finally:
        await later.stop()
