"""https:// from end to end: the official client, the admin API in its own process, and what doctor says."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, AsyncOpenAI, DefaultAsyncHttpxClient

from router import tls
from router.admin.serve import AdminSettings, run
from router.cli.doctor import examine_all
from router.tls import ServerTls
from router.wire import WireServer, live_methods
from tests.cases.engine import Engine, Exchange, whole_answer
from tests.certificates import Authority, Pair, client_context, needs_openssl, server_context, shown_serial
from tests.flows.recording_engine import RecordingEngine
from tests.flows.site import Client, Site, until
from tests.router.admin.test_api import FakeLive

pytestmark = needs_openssl

QUESTION: Any = [{"role": "user", "content": "Hello"}]


async def gateway(site: Site, listen: dict[str, Any], admin: dict[str, Any] | None = None) -> Client:
    engine = await site.enter(RecordingEngine())
    sections = {"listen": {"tls": listen}, **({"admin": {"tls": admin}} if admin else {})}
    return await site.gateway({"url": engine.url, "model": "own"}, models={"*": {"tokenizer": "none"}}, **sections)


async def sdk(site: Site, client: Client, ca: Pair, shows: Pair | None = None) -> AsyncOpenAI:
    trusting = client_context(ca, shows=shows)
    return await site.sdk(client, http_client=DefaultAsyncHttpxClient(trust_env=False, verify=trusting))


async def test_the_official_client_over_tls(site: Site, ca: Authority) -> None:
    client = await gateway(site, ca.issue("IP:127.0.0.1").files)
    assert client.running.url.startswith("https://127.0.0.1:")
    openai = await sdk(site, client, ca)
    whole = await openai.chat.completions.create(model="own", messages=QUESTION)
    assert whole.choices[0].message.content == "well"
    stream = await openai.chat.completions.create(model="own", messages=QUESTION, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == "well"
    raw = await client.http.post(
        client.running.url + "/v1/chat/completions", json={"model": "own", "messages": QUESTION}
    )
    assert (raw.status_code, raw.http_version) == (200, "HTTP/1.1")
    assert (await client.http.get(client.running.url + "/v1/models")).json()["data"][0]["id"] == "own"


async def test_clients_show_a_certificate_of_the_right_ca(site: Site, ca: Authority, other_ca: Authority) -> None:
    client = await gateway(site, {**ca.issue("IP:127.0.0.1").files, "client_ca": str(ca.cert)})
    ours = await sdk(site, client, ca, ca.issue("client.test"))
    assert (await ours.models.list()).data[0].id == "own"
    for wrong in (other_ca.issue("client.test"), None):
        with pytest.raises(APIConnectionError):
            await (await sdk(site, client, ca, wrong)).models.list()


async def test_a_renewed_certificate_is_served_by_a_running_gateway(
    site: Site, ca: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.02)
    inference, admin = ca.issue("IP:127.0.0.1"), ca.issue("IP:127.0.0.1")
    client = await gateway(site, inference.files, admin.files)

    async def serials() -> list[int]:
        """Of new connections."""
        found = []
        for url in (client.running.url + "/healthz", f"{client.running.admin_url}/healthz"):
            async with httpx.AsyncClient(trust_env=False, verify=client_context(ca)) as fresh:
                answer = await fresh.get(url)
                shown = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
                found.append(shown_serial(shown))
        return found

    before = await serials()
    inference.replaced_by(ca.issue("IP:127.0.0.1"))
    admin.replaced_by(ca.issue("IP:127.0.0.1"))

    async def renewed() -> bool:
        return all(now > then for now, then in zip(await serials(), before, strict=True))

    await until(renewed, what="the new certificates are shown")


async def test_the_admin_api_over_tls_in_a_process_of_its_own(
    tmp_path: Path, ca: Authority, other_ca: Authority
) -> None:
    wire = WireServer(live_methods(FakeLive()))
    await wire.start(tmp_path / "live")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    settings = ServerTls(**ca.issue("IP:127.0.0.1").files, client_ca=str(ca.cert))
    process = context.Process(target=run, args=(str(tmp_path / "live"), AdminSettings("127.0.0.1", 0, settings), there))
    process.start()
    try:
        assert here.poll(20)
        url = f"https://127.0.0.1:{here.recv()}/healthz"
        async with httpx.AsyncClient(trust_env=False, verify=client_context(ca, shows=ca.issue("me"))) as client:
            assert (await client.get(url)).json() == {"status": "ok"}
        async with httpx.AsyncClient(trust_env=False, verify=client_context(ca)) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(url)
    finally:
        here.close()
        process.join(10)
        process.kill()
        await wire.stop()
    assert process.exitcode == 0


async def test_doctor_asks_over_tls_and_tells_what_is_not_trusted(
    site: Site, ca: Authority, other_ca: Authority
) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}

    async def script(exchange: Exchange) -> None:
        await exchange.answer(whole_answer(usage))

    async def engine(name: str, pair: Pair, **how: Any) -> dict[str, Any]:
        made: Engine = await site.enter(Engine(name, script=script, ports=(), tls=server_context(pair, **how)))
        return {"id": name, "url": made.url}

    well = await engine("A", ca.issue("a.test"), client_ca=ca)
    strange = await engine("B", other_ca.issue("IP:127.0.0.1"))
    loose = await engine("C", other_ca.issue("elsewhere.test"))
    trust = {"ca": str(ca.cert)}
    found = await examine_all(
        site.configured(
            well | {"tls": {**trust, "server_name": "a.test", **ca.issue("doctor.test").files}},
            strange | {"tls": trust},
            loose | {"tls": {"verify": False}},
        )
    )
    by_engine = {(finding.engine, finding.check): finding for finding in found}
    assert (by_engine["A", "tls"].state, by_engine["A", "tls"].seen) == (
        "ok", f"its certificate is accepted, by {ca.cert}"
    )  # fmt: skip
    assert by_engine["A", "parity"].state == "ok"
    assert by_engine["A", "cached counts"].seen == "8 of 9 tokens when asked again"
    assert by_engine["B", "tls"].state == "fail"
    assert by_engine["B", "tls"].seen.startswith("tls_verify_failed: ")
    assert "ca (whom to trust)" in by_engine["B", "tls"].mend
    assert ("B", "reachable") not in by_engine
    assert (by_engine["C", "tls"].state, by_engine["C", "reachable"].state) == ("warn", "ok")
