"""Where keys may stand in a request, what strangers are told, and what a key may ask for."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from router.core import OPEN
from router.errors import Unauthenticated
from router.http.messages import Header, Request
from router.http.proxies import TrustedProxies
from router.serving.apis import APIS, FORMS
from router.serving.callers import Callers
from router.serving.identity import NO_TENANTS, Identity, IdentityHeader, presented_key
from router.serving.models import ServedModel
from router.serving.split import arms
from router.store.database import open_database
from router.store.schema import tenants
from tests.accounts import PEPPER, Accounts
from tests.router.serving.stand import EngineSide, Stand

CHAT = {"model": "m-chat", "messages": [{"role": "user", "content": "hello"}]}
KEY = "sk-" + "k" * 43


async def echo(engine: EngineSide) -> None:
    await engine.whole(b'{"choices":[]}')


@pytest.fixture
async def accounts(sqlite_url: str) -> AsyncIterator[Accounts]:
    database = open_database(sqlite_url)
    yield Accounts(database)
    await database.aclose()


async def identity(accounts: Accounts, *, needs_key: bool = True, private: bool = True, **how: Any) -> Identity:
    callers = Callers(accounts.database, pepper=PEPPER.encode(), salt_of=lambda domain: None, refresh_s=0.5, stale_s=60)
    identity = Identity(callers, needs_key=needs_key, private=private, **how)
    await identity.refresh()
    return identity


def request(*head: Header, peer: str = "127.0.0.1") -> Request:
    return Request("POST", "/", query=b"", head=head, named=dict(reversed(head)), body=b"", peer=peer)


# --- keys where SDKs put them


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer %b")],
        [(b"authorization", b"bearer  %b")],
        [(b"x-api-key", b"%b")],
        [(b"api-key", b"%b")],
        [(b"authorization", b"Bearer %b"), (b"x-api-key", b"%b"), (b"api-key", b"%b")],
        [(b"authorization", b"Bearer "), (b"x-api-key", b"%b")],
        [(b"authorization", b"Basic dTpw"), (b"x-api-key", b"%b")],
    ],
)
def test_a_key_is_found(headers: Sequence[Header]) -> None:
    head = [(name, value % KEY.encode() if b"%b" in value else value) for name, value in headers]
    assert presented_key(request((b"host", b"x"), *head)) == KEY


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ([], "No API key"),
        ([(b"authorization", b"")], "No API key"),
        ([(b"authorization", KEY.encode())], "No API key"),
        ([(b"cookie", b"key=" + KEY.encode())], "No API key"),
        ([(b"authorization", b"Bearer a"), (b"x-api-key", b"b")], "Two different"),
        ([(b"x-api-key", b"a"), (b"api-key", b"b")], "Two different"),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], "Two different"),
        ([(b"authorization", b"Bearer sk-admin-abc")], "administrator"),
    ],
)
def test_no_key_two_keys_and_keys_of_administrators(head: Sequence[Header], said: str) -> None:
    with pytest.raises(Unauthenticated, match=said):
        presented_key(request(*head))


# --- what strangers are told


@pytest.mark.parametrize("path", sorted(APIS))
async def test_a_stranger_is_told_the_same_on_every_route(stand: Stand, accounts: Accounts, path: str) -> None:
    await stand.start(echo, identify=await identity(accounts))
    answer = await stand.ask(CHAT, path=path, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json["error"]
    if path.startswith("/v1/messages"):
        assert error == {"type": "authentication_error", "message": "Incorrect API key provided."}
    else:
        assert (error["code"], error["message"]) == ("invalid_api_key", "Incorrect API key provided.")
    assert KEY.encode() not in answer.body
    assert stand.engine.seen == []
    assert (stand.outcome.status, stand.outcome.error, stand.outcome.model) == (401, "invalid_api_key", "unknown")


async def test_what_needs_a_key_and_what_does_not(stand: Stand, accounts: Accounts) -> None:
    key = await accounts.new()

    async def readiness() -> dict[str, Any]:
        return {"ready": True, "draining": False, "models": {"m-chat": 1}, "pending": {"http://10.0.0.9:8000": "down"}}

    await stand.start(echo, identify=await identity(accounts), readiness=readiness)
    with_key = {"x-api-key": key}
    for path in ("/v1/models", "/v1/models/m-chat", "/models"):
        assert (await stand.ask(method="GET", path=path)).status == 401
        assert (await stand.ask(method="GET", path=path, headers=with_key)).status == 200
    assert (await stand.ask(method="GET", path="/healthz")).status == 200
    for headers in ({}, with_key):  # where engines are is for nobody on this port
        ready = await stand.ask(method="GET", path="/readyz", headers=headers)
        assert (ready.status, ready.json) == (200, {"ready": True, "draining": False})


async def test_a_body_that_is_too_large_is_no_way_to_learn_anything(stand: Stand, accounts: Accounts) -> None:
    key = await accounts.new()
    await stand.start(echo, identify=await identity(accounts), body_limit=10)
    assert (await stand.ask(CHAT)).status == 401
    assert (await stand.ask(CHAT, headers={"x-api-key": key})).status == 413
    assert [bool(outcome.tenant) for outcome in stand.outcomes] == [False, True]


async def test_the_callers_outcome_is_theirs(stand: Stand, accounts: Accounts) -> None:
    key = await accounts.new()
    await stand.start(echo, identify=await identity(accounts))
    assert (await stand.ask(CHAT, headers={"authorization": f"Bearer {key}"})).status == 200
    assert stand.outcome.caller.key == accounts.id_of(key)
    assert stand.outcome.tenant == stand.outcome.caller.tenant
    assert b"authorization: Bearer engine-key" in stand.engine.seen[0].head
    assert key.encode() not in stand.engine.seen[0].head


# --- open mode


async def test_without_tenants_it_is_open_until_the_first_one(
    stand: Stand, accounts: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "warmroute")
    found = await identity(accounts, needs_key=False)
    await stand.start(echo, identify=found)
    assert (await stand.ask(CHAT, headers={"authorization": "Bearer none"})).status == 200
    assert stand.outcomes[0].caller is OPEN
    assert found.state()["mode"] == "open"
    tenant = await accounts.tenant("acme")
    await found.refresh()
    assert (await stand.ask(CHAT)).status == 401
    assert found.state()["mode"] == "keys"
    await accounts.change(tenants, tenant, archived_at=1.0)
    await found.refresh()
    assert (await stand.ask(CHAT)).status == 401  # an archived tenant opens nothing again
    assert caplog.messages == [
        "there are no tenants: open, to this machine only",
        "there are tenants now: requests need keys",
    ]


async def test_without_tenants_nobody_else_is_served(
    stand: Stand, accounts: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    found = await identity(accounts, needs_key=False, private=False)
    await stand.start(echo, identify=found)
    refused = await stand.ask(CHAT)
    assert (refused.status, refused.json["error"]["message"]) == (401, NO_TENANTS)
    assert found.state()["mode"] == "closed"
    assert NO_TENANTS in caplog.messages
    key = await accounts.new()
    await found.refresh()
    assert (await stand.ask(CHAT, headers={"x-api-key": key})).status == 200


# --- identity by header


@pytest.fixture
def header() -> IdentityHeader:
    return IdentityHeader(b"x-tenant-id", TrustedProxies([ipaddress.ip_network("10.1.0.0/16")]))


async def test_a_header_counts_from_whom_it_is_believed(accounts: Accounts, header: IdentityHeader) -> None:
    key, tenant = await accounts.new(), await accounts.tenant("other")
    found = await identity(accounts, header=header)
    named, keyed = (b"x-tenant-id", b"other"), (b"x-api-key", key.encode())
    assert found(request(named, peer="10.1.2.3")).tenant == tenant
    assert found(request(named, keyed, peer="10.1.2.3")).tenant == tenant
    assert found(request(named, keyed, peer="10.2.0.1")).key == accounts.id_of(key)
    assert found(request(keyed, peer="10.1.2.3")).key == accounts.id_of(key)
    for head, peer in (
        ([named], "10.2.0.1"),  # not believed, and no key
        ([(b"x-tenant-id", b"nobody"), keyed], "10.1.2.3"),
        ([(b"x-tenant-id", b""), keyed], "10.1.2.3"),
        ([named, (b"x-tenant-id", b"acme")], "10.1.2.3"),  # the client's own, and the other gateway's behind it
        ([(b"x-tenant-id", b"other, acme")], "10.1.2.3"),
    ):
        with pytest.raises(Unauthenticated):
            found(request(*head, peer=peer))


async def test_x_forwarded_for_makes_nobody_believed(accounts: Accounts, header: IdentityHeader) -> None:
    await accounts.tenant("other")
    found = await identity(accounts, header=header)
    forged = request((b"x-tenant-id", b"other"), (b"x-forwarded-for", b"10.1.2.3"), peer="10.2.0.1")
    with pytest.raises(Unauthenticated):
        found(forged)


async def test_without_peers_all_clients_have_shown_a_certificate(accounts: Accounts) -> None:
    tenant = await accounts.tenant("other")
    found = await identity(accounts, header=IdentityHeader(b"x-tenant-id", None))
    assert found(request((b"x-tenant-id", b"other"), peer="192.0.2.1")).tenant == tenant


# --- the models of a key


class TestTheModelsOfAKey:
    @pytest.fixture
    async def start(self, stand: Stand, accounts: Accounts) -> Any:
        async def start(*allowed: str) -> Mapping[str, str]:
            key = await accounts.new(models=list(allowed))
            await stand.start(echo, identify=await identity(accounts))
            stand.models.replace(
                [
                    ServedModel("big", stand.prompts, aliases=("large",), loras=("big-tuned",)),
                    ServedModel("small", stand.prompts, fallbacks=("big",)),
                    ServedModel("mixed", stand.prompts, split=arms({"big": 1})),
                ]
            )
            return {"x-api-key": key}

        return start

    @pytest.mark.parametrize(
        ("allowed", "asked", "status"),
        [
            ("big", "big", 200),
            ("big", "large", 200),  # an alias is the model
            ("big", "big-tuned", 403),  # an adapter is another
            ("big", "small", 403),
            ("big", "mixed", 403),  # nor does a split lead to what is allowed, or past it
            ("big", "nobody", 403),  # the same as for one that others have
            ("large", "large", 200),
            ("large", "big", 403),
            ("big-tuned", "big-tuned", 200),
            ("big-tuned", "big", 403),
            ("mixed", "mixed", 200),
            ("mixed", "big", 403),
            ("nobody", "nobody", 404),
        ],
    )
    async def test_what_may_be_asked(self, stand: Stand, start: Any, allowed: str, asked: str, status: int) -> None:
        headers = await start(allowed)
        answer = await stand.ask({**CHAT, "model": asked}, headers=headers)
        assert answer.status == status
        cards = {
            card["id"] for card in (await stand.ask(method="GET", path="/v1/models", headers=headers)).json["data"]
        }
        assert (asked in cards) is (status == 200)
        card = await stand.ask(method="GET", path=f"/v1/models/{asked}", headers=headers)
        assert card.status == (200 if status == 200 else 404)
        if status == 403:
            assert answer.json["error"] == {
                "message": "This key may not use the model.",
                "type": "permission_error",
                "param": "model",
                "code": "model_not_allowed",
            }
            assert stand.engine.seen == []
            assert stand.outcome.caller.key
            told = await stand.ask({**CHAT, "model": asked}, path="/v1/messages", headers=headers)
            assert (told.status, told.json["error"]["type"]) == (403, "permission_error")

    async def test_none_at_all(self, stand: Stand, start: Any) -> None:
        headers = await start()
        assert (await stand.ask({**CHAT, "model": "big"}, headers=headers)).status == 403
        assert (await stand.ask(method="GET", path="/v1/models", headers=headers)).json["data"] == []

    async def test_a_request_that_names_none(self, stand: Stand, start: Any) -> None:
        headers = await start("other")
        stand.models.replace([ServedModel("only", stand.prompts)])
        body = {"messages": CHAT["messages"]}
        assert (await stand.ask(body, headers=headers)).status == 403

    async def test_another_way_to_name_an_adapter(self, stand: Stand, start: Any) -> None:
        headers = await start("big")
        answer = await stand.ask({**CHAT, "model": "big", "lora_path": "big-tuned"}, headers=headers)
        assert (answer.status, answer.json["error"]["param"]) == (403, "lora_path")

    async def test_a_form(self, stand: Stand, start: Any) -> None:
        headers = await start("big")
        (path, *_) = sorted(FORMS)
        form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nsmall\r\n--b--\r\n'
        answer = await stand.ask(
            form, path=path, headers={**headers, "content-type": "multipart/form-data; boundary=b"}
        )
        assert answer.status == 403

    @pytest.mark.parametrize(("allowed", "status"), [(["small"], 502), (["small", "big"], 200)])
    async def test_a_fallback_is_asked_only_if_it_is_on_the_list(
        self, stand: Stand, start: Any, allowed: list[str], status: int
    ) -> None:
        headers = await start(*allowed)

        async def fails_small(engine: EngineSide) -> None:
            if stand.placement.asks[-1].model == "small":
                engine.reset()
            else:
                await echo(engine)

        stand.engine.script = fails_small
        answer = await stand.ask({**CHAT, "model": "small"}, headers=headers)
        assert answer.status == status
