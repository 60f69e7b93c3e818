"""The request flow, end to end: from a client's bytes to the engine that should have them, and back."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest

from router.app import Running
from router.errors import ConfigError, WarmrouteError
from tests.flows.site import CHAT, COMPLETIONS, Answer, Client, Site, chat, essay, name, said, until

DEMO = {"tokenizer": "demo"}


# --- by cache


async def test_the_same_prompt_goes_to_the_engine_that_has_it(site: Site) -> None:
    engines = [await site.engine() for _ in range(3)]
    client = await site.gateway(*engines)
    prompts = [chat(essay(subject)) for subject in ("rivers", "lakes", "seas", "ponds", "wells", "springs")]
    first = [await client.ask(body) for body in prompts]
    assert [answer.cached for answer in first] == [0] * 6
    assert len({answer.instance for answer in first}) > 1  # else it would prove nothing
    for _ in range(2):
        await client.caught_up(*engines)
        again = [await client.ask(body) for body in prompts]
        assert [answer.instance for answer in again] == [answer.instance for answer in first]
        assert [answer.predicted for answer in again] == [answer.cached for answer in again]
        assert min(answer.cached for answer in again) > 100


async def test_a_conversation_that_grows_pays_for_its_new_text_only(site: Site) -> None:
    engines = [await site.engine() for _ in range(2)]
    client = await site.gateway(*engines)
    messages = [said(essay("conversation"))]
    answers: list[Answer] = []
    for turn in range(5):
        answer = await client.ask(chat(*messages, max_tokens=40))
        answers.append(answer)
        messages += [said(answer.said, role="assistant"), said(f"question {turn} of many")]
        await client.caught_up(*engines)
    assert len({answer.instance for answer in answers}) == 1
    assert [answer.predicted for answer in answers] == [answer.cached for answer in answers]
    for before, after in pairwise(answers):
        read_before = before.json["usage"]["total_tokens"]
        assert 0 <= read_before - after.cached < 32  # all that was read and said before, in whole blocks


async def test_a_salt_keeps_the_same_text_apart(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine)
    mine, yours = (chat(essay("secrets"), cache_salt=salt) for salt in ("mine", "yours"))
    await client.ask(mine)
    await client.caught_up(engine)
    other = await client.ask(yours)
    own = await client.ask(mine)
    assert (other.predicted, other.cached) == (0, 0)
    assert own.predicted == own.cached > 100


async def test_explain_says_where_the_request_then_goes(site: Site) -> None:
    engines = [await site.engine() for _ in range(3)]
    client = await site.gateway(*engines)
    for subject in ("tea", "coffee", "cocoa", "milk"):
        body = chat(essay(subject))
        for _ in range(2):
            before = await client.running.live.requests(None)
            explained = await client.explain(body)
            assert await client.running.live.requests(None) == before  # it sends nothing
            answer = await client.ask(body)
            best = explained["candidates"][0]["cost"]["value"]
            tied = [each for each in explained["candidates"] if each["cost"]["value"] == pytest.approx(best)]
            assert answer.instance in {candidate["instance"] for candidate in tied}
            assert len(tied) == 1 or not answer.predicted
            assert tied[0]["hit_tokens"] == answer.predicted
            await client.caught_up(*engines)
    ids = {"model": "demo", "prompt": list(range(5, 69)), "max_tokens": 2}
    await client.ask(ids, COMPLETIONS)
    await client.caught_up(*engines)
    assert sorted((await client.hits(ids, COMPLETIONS)).values()) == [0, 0, 48]


async def test_the_first_sibling_of_a_burst_follows_before_any_event(site: Site) -> None:
    """A prefix is computed once, even if its first two requests come within one prefill."""
    engines = [await site.engine(speed=0.02) for _ in range(2)]  # a step takes 330 ms
    client = await site.gateway(*engines)
    shared = said(essay("siblings", 400), role="system")
    first = asyncio.create_task(client.ask(chat(shared, "one", max_tokens=1)))

    async def booked() -> bool:
        return any(row["booked_requests"] for row in (await client.rows()).values())

    await until(booked, what="the first is on its way")
    second = await client.ask(chat(shared, "two", max_tokens=1))
    assert second.instance == (await first).instance
    assert second.predicted > 500


async def test_every_answer_has_a_receipt(site: Site) -> None:
    engines = [await site.engine() for _ in range(2)]
    client = await site.gateway(*engines)
    body = chat(essay("receipts"))
    await client.ask(body)
    await client.caught_up(*engines)
    answer = await client.ask(body)
    receipt = await client.receipt(answer.id)
    assert (receipt["status"], receipt["finish"], receipt["error"]) == (200, "complete", "")
    assert receipt["instance"] == answer.instance
    assert receipt["predicted_hit_tokens"] == receipt["delivered_hit_tokens"] == answer.cached
    assert receipt["delivered_source"] == "usage"
    candidates = receipt["decision"]["candidates"]
    assert {candidate["instance"] for candidate in candidates} == {name(engine) for engine in engines}
    for candidate in candidates:
        cost = candidate["cost"]
        assert sum(cost["parts"].values()) == pytest.approx(cost["value"])
    assert candidates[0]["instance"] == answer.instance
    refused = await client.post(chat("hello", model="nobody"))
    assert (await client.receipt(refused.id))["error"] == "model_not_found"


async def test_a_receipt_tells_how_long_the_decision_took(site: Site) -> None:
    client = await site.gateway(await site.engine())
    answer = await client.ask(chat("hello"))
    assert (await client.receipt(answer.id))["decision"]["took_us"] > 0


# --- names


async def test_two_models_and_their_aliases(site: Site) -> None:
    alpha, beta = await site.engine(model="alpha"), await site.engine(model="beta")
    client = await site.gateway(alpha, beta, models={"alpha": {**DEMO, "aliases": ["small", "gpt-4o-mini"]}})
    text = essay("names")
    for model, engine in (("alpha", alpha), ("small", alpha), ("gpt-4o-mini", alpha), ("beta", beta)):
        answer = await client.ask(chat(text, model=model))
        assert answer.instance == name(engine)
    await client.caught_up(alpha, beta)
    again = await client.ask(chat(text, model="small"))
    assert again.predicted == again.cached > 100  # an alias has no cache of its own
    missing = chat(text)
    del missing["model"]
    answer = await client.post(missing)
    assert (answer.status, answer.json["error"]["code"]) == (400, "missing_model")


async def test_where_there_is_one_model_nobody_must_name_it(site: Site) -> None:
    engine = await site.engine(model="org/only-one")
    client = await site.gateway(engine)
    body = chat(essay("unnamed"))
    del body["model"]
    await client.ask(body)
    assert (await client.ask(body)).cached > 100


async def test_one_public_name_over_engines_that_call_it_otherwise(site: Site) -> None:
    engines = [await site.engine(model="org/model-7b"), await site.engine(model="model-7b-awq")]
    client = await site.gateway(*({"url": engine.url, "model": "chat"} for engine in engines))
    answers = [await client.ask(chat(essay(f"mixed {n}"), model="chat")) for n in range(8)]
    assert {answer.instance for answer in answers} == {name(engine) for engine in engines}
    await client.caught_up(*engines)
    again = [await client.ask(chat(essay(f"mixed {n}"), model="chat")) for n in range(8)]
    assert [answer.instance for answer in again] == [answer.instance for answer in answers]
    assert all(answer.predicted == answer.cached > 100 for answer in again)


async def test_an_adapter_goes_to_who_has_it_and_has_a_cache_of_its_own(site: Site) -> None:
    plain, tuned = await site.engine(), await site.engine(loras=("tuned",))
    client = await site.gateway(plain, tuned)
    text = essay("adapters")
    first = await client.ask(chat(text, model="tuned"))
    await client.caught_up(tuned)
    again = await client.ask(chat(text, model="tuned"))
    assert first.instance == again.instance == name(tuned)
    assert again.predicted == again.cached > 100
    base = await client.hits(chat(text))
    assert base == {name(plain): 0, name(tuned): 0}


async def test_with_and_without_v1(site: Site) -> None:
    client = await site.gateway(await site.engine())
    body = chat(essay("paths"))
    await client.ask(body, CHAT)
    assert (await client.ask(body, "/chat/completions")).cached > 100
    assert (await client.ask({"model": "demo", "prompt": "x", "max_tokens": 1}, "/completions")).status == 200
    listings = [(await client.http.get(client.running.url + path)).json() for path in ("/v1/models", "/models")]
    assert listings[0] == listings[1]
    assert (await client.http.get(client.running.url + "/v2/models")).status_code == 404


# --- around it


async def test_browsers_of_known_origins(site: Site) -> None:
    client = await site.gateway(await site.engine(), listen={"cors": {"origins": ["https://chat.example"]}})
    url, ours = client.running.url + CHAT, {"origin": "https://chat.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = await client.http.options(url, headers={**ours, **asked})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    for body, status in ((chat("hello"), 200), (chat("hello", model="nobody"), 404)):
        answer = await client.post(body, **ours)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, ours["origin"])
    stranger = await client.post(chat("hello"), origin="https://elsewhere.example")
    assert "access-control-allow-origin" not in stranger.headers


async def test_health_on_both_ports(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine)
    for url in (client.running.url, client.running.admin_url):
        assert (await client.http.get(f"{url}/healthz")).json() == {"status": "ok"}
        ready = await client.http.get(f"{url}/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        assert ready.json()["models"]["demo"]["prompts"]["state"] == "EXACT"
    await site.killed(engine)

    async def unready() -> bool:
        return (await client.http.get(f"{client.running.url}/readyz")).status_code == 503

    await until(unready, what="it is not ready any more")
    assert (await client.http.get(f"{client.running.admin_url}/readyz")).json()["models"]["demo"]["ready"] == 0
    assert (await client.http.get(f"{client.running.url}/healthz")).status_code == 200


async def test_the_access_log_tells_everything_but_the_prompt(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    client = await site.gateway(await site.engine(), listen={"access_log": True})
    with caplog.at_level(logging.INFO):
        answers = [
            await client.post(chat("xyzzy", user="plugh"), authorization="Bearer sesame"),
            await client.post(chat("xyzzy", stream=True)),
            await client.post(chat("xyzzy", model="nobody")),
            await client.post(b'{"messages": "xyzzy'),
        ]
    lines = [json.loads(record.message) for record in caplog.records if record.name == "warmroute.access"]
    assert [line["request_id"] for line in lines] == [answer.id for answer in answers]
    assert [line["status"] for line in lines] == [200, 200, 404, 400]
    assert [line["output_tokens"] for line in lines] == [8, 8, None, None]
    assert lines[1]["ttft_s"] > 0
    for secret in ("xyzzy", "plugh", "sesame", "nobody"):
        assert secret not in caplog.text


async def test_the_access_log_tells_who_the_client_is_and_nothing_else_does(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """By the word of a balancer that is trusted; nobody else is believed."""
    engine = await site.engine()
    for trusted, told in (("127.0.0.0/8", ["203.0.113.9", "https"]), ("192.0.2.0/24", ["127.0.0.1", None])):
        caplog.clear()
        async with site.running(engine, listen={"access_log": True, "trusted_proxies": [trusted]}) as client:
            with caplog.at_level(logging.INFO):
                answer = await client.ask(chat("x"), x_forwarded_for="6.6.6.6, 203.0.113.9", x_forwarded_proto="https")
            (access,) = [record.message for record in caplog.records if record.name == "warmroute.access"]
            line = json.loads(access)
            assert [line["client"], line["scheme"]] == told
            receipt = json.dumps(await client.receipt(answer.id))
            metrics = (await client.http.get(f"{client.running.admin_url}/metrics")).text
        others = [record.getMessage() for record in caplog.records if record.name != "warmroute.access"]
        for place in (receipt, metrics, "".join(m for m in others if "HTTP Request" not in m)):
            assert "203.0.113.9" not in place
            assert "6.6.6.6" not in place


async def test_behind_a_balancer_that_speaks_the_proxy_protocol(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    listen = {"access_log": True, "trusted_proxies": ["127.0.0.1"], "proxy_protocol": True}
    engine = await site.engine()
    body = json.dumps(chat("x")).encode()
    async with site.running(engine, listen=listen) as client:
        address = urlsplit(client.running.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        with caplog.at_level(logging.INFO, "warmroute.access"):
            writer.write(b"PROXY TCP4 203.0.113.9 10.0.0.1 51000 443\r\n")
            writer.write(b"POST %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" % CHAT.encode())
            writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    (access,) = [record.message for record in caplog.records if record.name == "warmroute.access"]
    assert json.loads(access)["client"] == "203.0.113.9"


async def test_the_metrics_add_up(site: Site) -> None:
    engine = await site.engine()
    client = await site.gateway(engine)
    answers = [await client.ask(chat(essay("sums"))) for _ in range(3)]
    page = (await client.http.get(f"{client.running.admin_url}/metrics")).text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[0] != "#"}
    own = f'{{instance="{name(engine)}",model="demo"}}'
    assert values['warmroute_requests_total{finish="complete",model="demo",status="200"}'] == 3
    assert values[f"warmroute_delivered_hit_tokens_total{own}"] == sum(answer.cached for answer in answers)
    assert values[f"warmroute_predicted_hit_tokens_total{own}"] == sum(answer.predicted for answer in answers)
    assert values[f"warmroute_input_tokens_total{own}"] == sum(a.json["usage"]["prompt_tokens"] for a in answers)


# --- policies


async def test_another_policy_by_configuration(site: Site) -> None:
    engines = [await site.engine() for _ in range(2)]
    client = await site.gateway(*engines, policy={"name": "round_robin"})
    answers = [await client.ask(chat(essay("turns"))) for _ in range(6)]
    assert Counter(answer.instance for answer in answers) == {name(engine): 3 for engine in engines}
    assert (await client.receipt(answers[-1].id))["decision"]["policy"] == "round_robin"


async def test_a_model_may_have_a_policy_of_its_own(site: Site) -> None:
    engines = [await site.engine(model=model) for model in ("alpha", "alpha", "beta")]
    client = await site.gateway(*engines, models={"alpha": {**DEMO, "policy": "session"}})
    sticky = [await client.ask(chat(essay(f"s {n}"), model="alpha"), x_session_id="one") for n in range(6)]
    assert len({answer.instance for answer in sticky}) == 1
    for model, policy in (("alpha", "session"), ("beta", "kv_aware")):
        answer = await client.ask(chat("hello", model=model))
        assert (await client.receipt(answer.id))["policy"] == policy


async def test_a_weight_that_the_policy_does_not_have_is_refused_at_start(site: Site) -> None:
    found = site.configured({"url": "http://127.0.0.1:9"}, policy={"weights": {"nonsense": 1.0}})
    with pytest.raises(ConfigError, match=r"policy\.weights: .*nonsense"):
        async with Running(found):
            pass


async def test_a_port_in_use_is_said_in_one_line(site: Site) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    found = site.configured({"url": "http://127.0.0.1:9"}, listen={"host": "127.0.0.1", "port": port})
    async with taken:
        with pytest.raises(WarmrouteError, match=f"^Cannot listen on 127.0.0.1:{port}: Address already in use$"):
            async with Running(found):
                pass


# --- many at once


async def test_aborts_of_every_kind_leave_nothing_booked(site: Site) -> None:
    engines = [await site.engine(speed=20) for _ in range(2)]
    client = await site.gateway(*engines)
    await asyncio.gather(*(_leave(client, kind) for kind in range(50)))

    async def idle() -> bool:
        return all(engine.model.running == engine.model.waiting == 0 for engine in engines)

    await until(idle, what="the engines are idle")
    await until(client.nothing_booked, what="nothing is booked")
    finishes = Counter(receipt["finish"] for receipt in await client.running.live.requests(None))
    assert finishes["complete"] == 10
    assert finishes["client_gone"] >= 20  # those that left before we had read them are none of ours
    assert set(finishes) == {"complete", "client_gone"}
    assert (await client.ask(chat("still there"))).status == 200


async def _leave(client: Client, kind: int) -> None:
    """Half a body, no wait, some wait, the first chunk, the whole answer: and gone."""
    how = kind % 5
    body = chat(essay(f"abort {kind % 7}"), max_tokens=300, stream=kind % 2 == 0 or how == 3)
    reader, writer = await _sent(client, json.dumps(body).encode(), part=0.5 if how == 0 else 1.0)
    if how == 2:
        await asyncio.sleep(0.01)
    if how == 3:
        await reader.read(1)
    if how == 4:
        await _read_whole(reader)
    writer.transport.abort()


async def _sent(client: Client, body: bytes, *, part: float = 1.0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A chat request, or the first `part` of its body, on its way."""
    port = int(client.running.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body[: int(len(body) * part)])
    return reader, writer


async def _read_whole(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    if b"chunked" in head:
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))


async def test_two_hundred_at_once(site: Site) -> None:
    engines = [await site.engine() for _ in range(3)]
    client = await site.gateway(*engines)
    prompts = [essay(f"crowd {n}") for n in range(20)]
    bodies = [chat(prompts[n % 20], f"and {n}", max_tokens=4, stream=n % 2 == 0) for n in range(200)]
    await asyncio.gather(*(_ask_alone(client, body) for body in bodies))
    assert await client.nothing_booked()
    receipts: list[dict[str, Any]] = await client.running.live.requests(None)
    assert len({receipt["request_id"] for receipt in receipts}) == 200
    assert {(receipt["status"], receipt["finish"]) for receipt in receipts} == {(200, "complete")}
    assert {receipt["usage"]["output_tokens"] for receipt in receipts} == {4}
    assert {receipt["instance"] for receipt in receipts} == {name(engine) for engine in engines}
    assert sum(receipt["delivered_hit_tokens"] for receipt in receipts) > 100 * 100


async def _ask_alone(client: Client, body: dict[str, Any]) -> None:
    """Over a connection of its own, without a client library: two hundred of those take longer than the gateway."""
    reader, writer = await _sent(client, json.dumps(body).encode())
    await _read_whole(reader)
    writer.close()
