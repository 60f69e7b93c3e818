"""FC-94: every engine has its own CA and client certificate, on every path to it, or gets nothing at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from router import app, config, tls
from router.app import Running
from router.http.server import serve
from router.routing.feed import Feed
from router.tls import ServerContext, ServerTls
from tests.cases.engine import MODEL, Engine, Exchange, whole_answer
from tests.cases.stand import CHAT, case_input
from tests.certificates import Authority, Pair, needs_openssl, server_context
from tests.loops import on_both_loops

pytestmark = needs_openssl

PATHS = {"/health", "/v1/models", "/metrics", "/version", "/tokenize"}
WHOLE, STREAMED = (call["json"] for call in case_input("94")["client"][:2])


@pytest.fixture(autouse=True)
def _often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "Feed", partial(Feed, poll_s=0.05))
    monkeypatch.setattr(tls, "LOOK_S", 0.0)


async def answer(exchange: Exchange) -> None:
    if exchange.json.get("stream"):
        chunk = {"choices": [{"index": 0, "delta": {"content": "ok"}, "finish_reason": "stop"}]}
        await exchange.stream(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(chunk).encode())
    else:
        await exchange.answer(whole_answer())


class Site:
    """One gateway, and the engines before which it stands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = AsyncExitStack()

    async def engine(self, name: str, **how: Any) -> Engine:
        return await self._stack.enter_async_context(Engine(name, script=answer, ports=(), **how))

    async def start(self, *engines: Mapping[str, Any], ready: set[str], **sections: Any) -> None:
        file = self._folder / "warmroute.yaml"
        settings = {
            "listen": {"port": 0, "receipts": True},
            "admin": {"port": 0},
            "models": {MODEL: {"tokenizer": "demo"}},
            "policy": {"name": "round_robin"},
            "engines": [dict(engine) for engine in engines],
            **sections,
        }
        file.write_text(json.dumps(settings))
        found = config.load(file, flags={"state_dir": str(self._folder / "state")}, environ={})
        self.notes = found.notes
        self.running = await self._stack.enter_async_context(Running(found, admin="inline", drain_s=1.0))
        self.client = await self._stack.enter_async_context(
            httpx.AsyncClient(trust_env=False, verify=False, timeout=20)
        )
        await self.until_state(dict.fromkeys(ready, "ready"))

    async def fleet(self) -> dict[str, dict[str, Any]]:
        """As the admin API shows it, by instance."""
        answer = await self.client.get(f"{self.running.admin_url}/admin/v1/fleet")
        assert answer.status_code == 200
        return {row["instance"]: row for row in answer.json()["data"]}

    async def until_state(self, wanted: Mapping[str, str]) -> None:
        """Until each instance has that health, or gives that reason, and it is known how prompts are read."""
        for _ in range(1_000):
            fleet = await self.fleet()
            rows = {name: fleet.get(name, {"health": "", "reason": ""}) for name in wanted}
            models = (await self.running.live.readiness())["models"].values()
            settled = all(model["prompts"]["state"] not in ("LOADING", "UNCHECKED") for model in models)
            if settled and all(what == rows[n]["health"] or what in rows[n]["reason"] for n, what in wanted.items()):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"the fleet never came to {wanted}: {await self.fleet()}")

    async def ask(self, body: Any) -> httpx.Response:
        return await self.client.post(self.running.url + CHAT, json=body)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def declared(engine: Engine, **tls: Any) -> dict[str, Any]:
    return {"id": engine.name, "url": engine.url, **({"tls": tls} if tls else {})}


# https://github.com/BerriAI/litellm/issues/19616, …/9340, …/10717
@on_both_loops
async def test_a_ca_and_a_client_certificate_of_its_own_for_each_engine_on_every_path(
    site: Site, ca: Authority, other_ca: Authority
) -> None:
    ours = other_ca.issue("gateway.test")
    a = await site.engine("A", tls=server_context(ca.issue("a.test")))
    b = await site.engine("B", tls=server_context(other_ca.issue("IP:127.0.0.1"), client_ca=other_ca))
    c = await site.engine("C", tls=server_context(ca))  # signed by itself, and nobody was told to trust it
    await site.start(
        declared(a, ca=str(ca.cert), server_name="a.test"),
        declared(b, ca=str(other_ca.cert), **ours.files),
        declared(c),
        ready={"A", "B"},
    )
    served = set()
    for body in (WHOLE, WHOLE, STREAMED, STREAMED):
        answer = await site.ask(body)
        assert answer.status_code == 200
        served.add((answer.headers["x-warmroute-instance"], body is STREAMED))
        assert answer.text.endswith("data: [DONE]\n\n") or body is WHOLE
    assert served == {("A", False), ("B", False), ("A", True), ("B", True)}
    assert set(a.asked) >= PATHS
    assert set(b.asked) >= PATHS

    await site.until_state({c.url: "tls_verify_failed"})
    row = (await site.fleet())[c.url]
    assert (row["health"], row["reason"]) == (
        "pending", "tls_verify_failed: the engine's certificate is not accepted: it is self-signed (name it in tls.ca)"
    )  # fmt: skip
    assert (c.seen, c.asked) == ([], [])
    assert site.notes == ()


@on_both_loops
async def test_an_engine_that_is_not_trusted_does_not_even_join(site: Site, ca: Authority, other_ca: Authority) -> None:
    stranger = await site.engine("C", tls=server_context(other_ca.issue("IP:127.0.0.1")))
    other_name = await site.engine("D", tls=server_context(ca.issue("d.test")))
    asks = await site.engine("E", tls=server_context(ca.issue("IP:127.0.0.1"), client_ca=ca))
    plain = await serve(lambda request, responder: responder.send(200, (), b""))
    plain_url = f"https://127.0.0.1:{plain.port}"
    trust = {"ca": str(ca.cert)}
    await site.start(
        *(declared(engine, **trust) for engine in (stranger, other_name, asks)),
        {"url": plain_url},
        ready=set(),
    )
    await site.until_state(
        {
            stranger.url: "tls_verify_failed: the engine's certificate is not accepted: its CA is not known here",
            other_name.url: "tls_verify_failed: the engine's certificate is not accepted: it is not for this address",
            asks.url: "it may ask for another client certificate (tls.cert)",
            plain_url: "tls_handshake_failed: the engine does not speak TLS",
        }
    )
    answer = await site.ask(WHOLE)
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_error"
    assert "127.0.0.1" not in answer.text
    assert "tls" not in answer.text
    assert all(engine.asked == engine.seen == [] for engine in (stranger, other_name, asks))
    plain.close()


@on_both_loops
async def test_without_verification_only_where_it_is_said_and_loudly(site: Site, ca: Authority) -> None:
    a = await site.engine("A", tls=server_context(ca.issue("elsewhere.test")))
    b = await site.engine("B", tls=server_context(ca.issue("elsewhere.test")))
    await site.start(declared(a, verify=False), declared(b), ready={"A"})
    await site.until_state({b.url: "tls_verify_failed"})
    assert (await site.ask(WHOLE)).status_code == 200
    assert [note for note in site.notes if "INSECURE: A " in note and "verify: false" in note] == list(site.notes)
    assert (b.asked, b.seen) == ([], [])


@on_both_loops
async def test_certificates_of_both_sides_are_renewed_without_a_restart(
    site: Site, tmp_path: Path, ca: Authority, other_ca: Authority
) -> None:
    """The engine goes over to another CA, for its own certificate and for ours."""
    trusted = Pair(tmp_path / "trusted.pem", tmp_path / "trusted.key")
    trusted.cert.write_bytes(ca.cert.read_bytes())
    trusted.key.write_bytes(b"")
    shown, ours = ca.issue("IP:127.0.0.1"), ca.issue("gateway.test")
    client_ca = tmp_path / "client-ca.pem"
    client_ca.write_bytes(ca.cert.read_bytes())
    certificates = ServerContext(ServerTls(**shown.files, client_ca=str(client_ca)))
    a = await site.engine("A", tls=certificates.context)
    await site.start(declared(a, ca=str(trusted.cert), **ours.files), ready={"A"}, timeouts={"connect_s": 3})
    assert (await site.ask(WHOLE)).status_code == 200

    shown.replaced_by(other_ca.issue("IP:127.0.0.1"))
    client_ca.write_bytes(other_ca.cert.read_bytes())
    certificates.look()
    a.hang_up()
    await site.until_state({"A": "tls_verify_failed"})
    answer = await site.ask(WHOLE)
    assert answer.status_code in (502, 503)
    assert "127.0.0.1" not in answer.text
    assert len(a.seen) == 1

    trusted.replaced_by(other_ca)
    ours.replaced_by(other_ca.issue("gateway.test"))
    await site.until_state({"A": "ready"})
    assert (await site.ask(STREAMED)).status_code == 200
    assert len(a.seen) == 2


@on_both_loops
async def test_a_request_for_an_engine_whose_certificate_has_just_gone_bad_goes_to_another(
    site: Site, ca: Authority, other_ca: Authority
) -> None:
    shown = ca.issue("IP:127.0.0.1")
    certificates = ServerContext(ServerTls(**shown.files))
    a = await site.engine("A", tls=certificates.context)
    b = await site.engine("B", tls=server_context(ca.issue("IP:127.0.0.1")))
    await site.start(declared(a, ca=str(ca.cert)), declared(b, ca=str(ca.cert)), ready={"A", "B"})
    shown.replaced_by(other_ca.issue("IP:127.0.0.1"))
    certificates.look()  # connections that are open stay: health is still asked over one
    served = [await site.ask(WHOLE) for _ in range(2)]
    assert [(answer.status_code, answer.headers["x-warmroute-instance"]) for answer in served] == [(200, "B")] * 2
    assert a.seen == []
    assert (await site.fleet())["A"]["reason"] == "tls_verify_failed"
