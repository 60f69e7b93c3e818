"""What a client sends reaches the engine as it was sent."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

from tests.cases.engine import MODEL, Engine, Exchange, Script, answer_ok, event
from tests.cases.events import stored
from tests.cases.stand import Stand, case_input, client_bodies, request_head, written


async def relayed(stand: Stand, body: Any, **how: Any) -> bytes:
    """What the engine received."""
    answer = await stand.ask(body, **how)
    assert answer.status_code == 200, answer.text
    (engine,) = stand.engines.values()
    return engine.seen[-1].body


# https://github.com/vllm-project/router/issues/161, https://github.com/sgl-project/sglang/issues/22740
async def test_fields_that_only_the_engine_knows_pass_byte_for_byte(stand: Stand) -> None:
    await stand.start(Engine(), model={"aliases": ["gpt-x"]})
    (body,) = client_bodies("16")
    odd = body | {"cache_salt": "s", "priority": 3, "null": None, "big": 2**70}
    sent = written(odd)[:-1] + b', "small":1e-400 ,  "\\u006bey": 1.0}'
    assert await relayed(stand, sent) == sent
    # Parsers differ in which of two they take, so that the engine must see both.
    sent = b'{"model": "m-chat", "top_k": 1, "messages": [{"role": "user", "content": "x"}], "top_k":2 }'
    assert await relayed(stand, sent) == sent
    # What we change comes last, and is all we change.
    sent = written(body | {"stream": True})
    assert await relayed(stand, sent) == sent[:-1] + b',"stream_options":{"include_usage":true}}'
    sent = written(body | {"model": "gpt-x"})
    assert await relayed(stand, sent) == sent.replace(b'"model": "gpt-x",', b"")[:-1] + b',"model":"m-chat"}'


# https://github.com/vllm-project/router/issues/275, https://github.com/NovaSky-AI/SkyRL/pull/1421
class TestWhatOnlyTheEngineMayRefuse:
    async def test_it_reaches_the_engine(self, stand: Stand) -> None:
        """A tool without parameters; log probabilities asked by flag where a number is meant."""
        await stand.start(Engine())
        for call in case_input("17")["client"]:
            sent = written(call["json"])
            assert await relayed(stand, sent, path=call["path"]) == sent

    async def test_our_own_refusals_have_the_shape_that_clients_read(self, stand: Stand) -> None:
        await stand.start(Engine())
        for sent in (b"[]", b"{", b'{"model": 3}', b""):
            answer = await stand.ask(sent)
            assert 400 <= answer.status_code < 500
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


# https://github.com/vllm-project/router/issues/298, https://github.com/BerriAI/litellm/issues/40780
async def test_unknown_roles_and_parts_pass_and_are_placed_by_load(stand: Stand) -> None:
    await stand.start(Engine())
    (body,) = client_bodies("18")
    sent = written(body)
    answer = await stand.ask(sent)
    assert stand.engines["A"].seen[0].body == sent
    decision = (await stand.receipt(answer))["decision"]
    assert decision["reason"].startswith("no key: ")
    assert decision["reason"] != "no key: unreadable"  # which would be a mistake of ours
    assert (await stand.metrics())['warmroute_prompt_source_total{model="m-chat",source="none"}'] == 1


# https://github.com/sgl-project/sglang/pull/38983
async def test_an_assistants_turns_come_back_to_the_engine_unchanged(stand: Stand) -> None:
    await stand.start(Engine())
    (body,) = client_bodies("19")
    sent = written(body)
    messages = sent[sent.index(b'"messages"') : sent.index(b', "max_tokens"')]
    assert b'"content": null' in messages
    assert messages in await relayed(stand, sent)


# https://github.com/maximhq/bifrost/issues/3362, https://github.com/Lakr233/FlowDown/issues/273
class TestOrderOfTools:
    async def test_it_stays_as_it_came_and_the_same_bytes_have_the_same_key(self, stand: Stand) -> None:
        await stand.start(Engine(block_size=4))
        first = case_input("21")["client"][0]
        digests = {hashlib.sha256(await relayed(stand, first["json"])).digest() for _ in range(first["times"])}
        assert digests == {hashlib.sha256(written(first["json"])).digest()}
        decisions = [(await stand.explain(first["json"]))["request"] for _ in range(2)]
        receipts = await stand.receipts()
        assert decisions[0] == decisions[1]
        assert {receipt["predicted_hit_tokens"] for receipt in receipts[:-1]} == {
            (decisions[0]["tokens"] - 1) // 4 * 4  # each finds all whole blocks of the one before
        }
        _, reordered = client_bodies("21")
        assert await relayed(stand, reordered) == written(reordered)

    async def test_tools_that_differ_only_in_order_are_counted(self, stand: Stand) -> None:
        await stand.start(Engine())
        for body in client_bodies("21"):
            await stand.ask(body)
        assert (await stand.metrics())['warmroute_tools_key_order_total{model="m-chat"}'] == 1


# https://github.com/vllm-project/production-stack/pull/1037, https://github.com/ray-project/ray/issues/64326
class TestPromptsThatAreNotOneText:
    READ = (
        ("exact", ""),
        ("exact", "exact: batch: the first of 2 prompts"),
        ("exact", "no key: batch: the first of 2 prompts"),  # its first prompt is shorter than a block
        ("none", "no key: an empty prompt"),
        ("none", "no key: a prompt that is neither text nor token ids"),
    )

    async def test_they_pass_and_the_decision_says_how_they_were_read(self, stand: Stand) -> None:
        await stand.start(Engine(block_size=2))
        found = []
        for call in case_input("22")["client"][: len(self.READ)]:
            sent = written(call["json"])
            answer = await stand.ask(sent, path=call["path"])
            assert stand.engines["A"].seen[-1].body == sent
            receipt = await stand.receipt(answer)
            found.append((receipt["prompt_source"], receipt["decision"]["reason"]))
        assert found == list(self.READ)

    async def test_ids_are_their_own_key(self, stand: Stand) -> None:
        call = case_input("22")["client"][0]
        await stand.start(Engine(block_size=2))
        await stand.publish({"seq": 0, "events": [stored("x", [1, 2], block_size=2)]})
        assert await stand.overlap(call["json"]["prompt"]) == {"A": 2}

    async def test_embeddings_of_ids_pass(self, stand: Stand) -> None:
        call = case_input("22")["client"][5]
        await stand.start(Engine())
        sent = written(call["json"])
        await stand.ask(sent, path=call["path"])
        assert [exchange.body for exchange in stand.engines["A"].seen] == [sent]


# https://github.com/BerriAI/litellm/issues/42426, https://github.com/BerriAI/litellm/issues/13088
async def test_embeddings_pass_both_ways_as_they_are_and_are_placed_by_load(stand: Stand) -> None:
    case = case_input("30")
    told = written(case["upstream"][0]["json"])

    async def script(exchange: Exchange) -> None:
        await exchange.answer(told)

    await stand.start(Engine(script=script))
    for call in case["client"]:
        sent = written(call["json"] | {"model": MODEL})
        answer = await stand.ask(sent, path=call["path"])
        assert answer.content == told
        assert stand.engines["A"].seen[-1].body == sent
        receipt = await stand.receipt(answer)
        assert receipt["decision"]["reason"] == "no key: this route's prompt is not read"
        assert (receipt["input_tokens"], receipt["usage"]["output_tokens"]) == (1, 0)


# https://github.com/BerriAI/litellm/pull/24196, https://github.com/anthropics/claude-code/issues/72995
class TestTextThatIsNoText:
    async def test_half_a_surrogate_pair_is_the_engines_to_judge(self, stand: Stand) -> None:
        await stand.start(Engine())
        sent = case_input("23")["client"][0]["raw"].encode()
        assert rb"\ud83d here" in sent
        assert await relayed(stand, sent) == sent
        assert await relayed(stand, sent) == sent  # and the next turn of that conversation
        asked = (await stand.explain(sent))["request"]
        whole = sent.replace(rb"\ud83d here", rb"\ufffd here")
        assert asked == (await stand.explain(whole))["request"]

    async def test_bytes_that_are_no_utf8_are_refused(self, stand: Stand) -> None:
        await stand.start(Engine())
        answer = await stand.ask(bytes.fromhex(case_input("23")["client"][1]["raw_hex"]))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_unicode")
        assert stand.engines["A"].seen == []
        assert (await stand.ask(client_bodies("19")[0])).status_code == 200


# https://github.com/agentgateway/agentgateway/issues/2402, https://github.com/BerriAI/litellm/pull/41567
class TestCompressedBodies:
    BODY = case_input("24")["client"][0]["json"]

    async def test_the_engine_gets_them_plain(self, stand: Stand) -> None:
        await stand.start(Engine())
        sent = written(self.BODY)
        codings: dict[str, Callable[[bytes], bytes]] = {
            "gzip": gzip.compress,
            "deflate": zlib.compress,
            "zstd": zstandard.compress,
            "GZIP ": gzip.compress,
        }
        for coding, compress in codings.items():
            answer = await stand.ask_raw(compress(sent), headers={"content-encoding": coding})
            assert answer.startswith(b"HTTP/1.1 200 ")
            received = stand.engines["A"].seen[-1]
            assert received.body == sent
            assert "content-encoding" not in received.headers
            assert received.headers["content-length"] == str(len(sent))
        assert len(stand.engines["A"].seen) == len(codings)

    async def test_what_cannot_be_decoded_is_refused(self, stand: Stand) -> None:
        await stand.start(Engine())
        cut_short = bytes.fromhex(case_input("24")["client"][4]["raw_hex"])
        for coding, body, status in (("gzip", cut_short, 400), ("br", written(self.BODY), 415)):
            answer = await stand.ask(body, headers={"content-encoding": coding})
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
        assert stand.engines["A"].seen == []

    async def test_a_small_body_that_unfolds_beyond_the_limit_takes_no_memory(self, stand: Stand) -> None:
        await stand.start(Engine(), listen={"port": 0, "max_body_bytes": "1MiB"})
        bomb = _bomb(128 << 20)
        assert len(bomb) < 1 << 20
        tracemalloc.start()
        try:
            answer = await stand.ask(bomb, headers={"content-encoding": "gzip"})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert peak < 8 << 20
        assert (await stand.ask(self.BODY)).status_code == 200


def _bomb(decoded_bytes: int) -> bytes:
    """Zeros, compressed without ever having been in memory."""
    compressor, piece = zlib.compressobj(9, zlib.DEFLATED, 31), bytes(1 << 20)
    pieces = [compressor.compress(piece) for _ in range(decoded_bytes >> 20)]
    return b"".join((*pieces, compressor.flush()))


# https://github.com/vllm-project/production-stack/issues/827
class TestAnAnswerCompressedOnItsWay:
    """We never ask for a coding, so that usage can be read; what a proxy before the engine makes of it is undone."""

    WHOLE = written(case_input("25")["upstream"][0]["json"])
    CALLS = case_input("25")["client"]
    CODINGS = (("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstandard.compress))

    async def _check(self, stand: Stand, call: Any, script: Script) -> None:
        (engine,) = stand.engines.values()
        engine.script = script
        answer = await stand.ask(call["json"], headers=call["headers"])
        assert answer.status_code == 200, answer.text
        assert "content-encoding" not in answer.headers
        assert answer.content == (self._stream() if call["json"].get("stream") else self.WHOLE)
        usage = (await stand.receipt(answer))["usage"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["cached_tokens"]) == (3, 1, 0)
        assert "accept-encoding" not in engine.seen[-1].headers

    def _stream(self, *, with_usage: bool = False) -> bytes:
        chunk = {"choices": [{"index": 0, "delta": {"content": "z"}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": json.loads(self.WHOLE)["usage"]}
        return event(chunk) + (event(usage) if with_usage else b"") + event("[DONE]")

    def _script(self, call: Any, compress: Callable[[bytes], bytes], *headers: str) -> Script:
        stream = bool(call["json"].get("stream"))
        body = compress(self._stream(with_usage=True) if stream else self.WHOLE)
        kind = "text/event-stream" if stream else "application/json"
        lines = [f"content-type: {kind}", f"content-length: {len(body)}", *headers]

        async def script(exchange: Exchange) -> None:
            await exchange.write("\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode() + body)

        return script

    async def test_is_readable_and_counted(self, stand: Stand) -> None:
        await stand.start(Engine())
        for coding, compress in self.CODINGS:
            for call in self.CALLS:
                await self._check(stand, call, self._script(call, compress, f"content-encoding: {coding}"))

    async def test_in_several_members(self, stand: Stand) -> None:
        await stand.start(Engine())

        def in_two(body: bytes) -> bytes:
            return gzip.compress(body[:9]) + gzip.compress(body[9:])

        for call in self.CALLS:
            await self._check(stand, call, self._script(call, in_two, "content-encoding: gzip"))

    async def test_or_only_said_to_be(self, stand: Stand) -> None:
        await stand.start(Engine())
        for coding, _ in self.CODINGS:
            for call in self.CALLS:
                await self._check(stand, call, self._script(call, bytes, f"content-encoding: {coding}"))

    async def test_without_a_word(self, stand: Stand) -> None:
        await stand.start(Engine())
        for call in self.CALLS[:2]:
            await self._check(stand, call, self._script(call, gzip.compress))
        stand.engines["A"].script = self._script(self.CALLS[2], gzip.compress)
        answer = await stand.ask(self.CALLS[2]["json"])  # a stream cannot wait until it is known what it is
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_protocol_error")

    async def test_and_broken_is_an_error(self, stand: Stand) -> None:
        await stand.start(Engine())
        call = self.CALLS[0]
        bomb = _bomb(64 << 20)
        for body, coding in (
            (gzip.compress(self.WHOLE)[:-9], "gzip"),
            (gzip.compress(self.WHOLE)[:-9], ""),
            (gzip.compress(self.WHOLE)[::-1], "gzip"),
            (zstandard.compress(self.WHOLE)[:-3], "zstd"),
            (zstandard.compress(self.WHOLE)[::-1], "zstd"),
            (bomb, "gzip"),
            (gzip.compress(b"") * 500 + gzip.compress(self.WHOLE), "gzip"),
            (zstandard.compress(bytes(64 << 20)), "zstd"),
        ):
            headers = (f"content-encoding: {coding}",) if coding else ()
            stand.engines["A"].script = self._script(call, lambda _, body=body: body, *headers)  # type: ignore[misc]
            answer = await stand.ask(call["json"])
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_protocol_error")
            assert (await stand.receipt(answer))["finish"] == "upstream_failed"


# https://github.com/finch-xu/cc-router/issues/41, https://github.com/sgl-project/sglang/pull/38735
class TestLargeBodies:
    """At most `listen.max_body_bytes`, 64 MiB by default."""

    @staticmethod
    def _expanded(value: Any) -> Any:
        if isinstance(value, dict):
            if "repeat" in value:
                return value.get("prefix", "") + value["repeat"] * value["times"]
            return {key: TestLargeBodies._expanded(each) for key, each in value.items()}
        return [TestLargeBodies._expanded(each) for each in value] if isinstance(value, list) else value

    async def test_below_the_limit_arrive_whole(self, stand: Stand) -> None:
        await stand.start(Engine(), model={"tokenizer": "none"})
        for call in case_input("26")["client"][:2]:
            sent = written(self._expanded(call["json"]))
            assert len(sent) > 1 << 20
            digest = hashlib.sha256(sent).digest()
            assert hashlib.sha256(await relayed(stand, sent)).digest() == digest
            assert hashlib.sha256(await self._uploaded(stand, sent)).digest() == digest

    async def _uploaded(self, stand: Stand, sent: bytes) -> bytes:
        """In chunks, once the gateway has said that it wants them."""
        head = request_head(b"", {"expect": "100-continue", "transfer-encoding": "chunked"})
        async with stand.connection() as (reader, writer):
            writer.write(head.replace(b"content-length: 0\r\n", b""))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            for at in range(0, len(sent), 300_000):
                part = sent[at : at + 300_000]
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        return stand.engines["A"].seen[-1].body

    async def test_take_twice_their_size(self, stand: Stand) -> None:
        """What came, and what a parser makes of it: the third copy is the engine's, in this process too."""
        held = 0

        async def script(exchange: Exchange) -> None:
            nonlocal held
            held, _ = tracemalloc.get_traced_memory()
            await answer_ok(exchange)

        await stand.start(Engine(script=script), model={"tokenizer": "none"})
        sent = written(self._expanded(client_bodies("26")[1]))
        async with stand.connection() as (reader, writer):
            tracemalloc.start()
            try:
                writer.write(request_head(sent, {}))
                for at in range(0, len(sent), 65_536):
                    writer.write(sent[at : at + 65_536])
                    await writer.drain()
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            finally:
                tracemalloc.stop()
        assert held < 3.2 * len(sent)

    @pytest.mark.parametrize("announced", [True, False])
    async def test_above_the_limit_are_refused_logged_and_counted(
        self, stand: Stand, announced: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As soon as it is known: at the head, if that tells the length."""
        await stand.start(Engine(), listen={"port": 0, "access_log": True, "cors": {"origins": ["https://a"]}})
        size = client_bodies("26")[2]["messages"][0]["content"]["times"]
        framing = {"content-length": str(size)} if announced else {"transfer-encoding": "chunked"}
        head = request_head(b"", {"x-request-id": "too-large", "origin": "https://a", **framing})
        with caplog.at_level(logging.INFO):
            async with stand.connection() as (reader, writer):
                writer.write(head if announced else head.replace(b"content-length: 0\r\n", b""))
                if not announced:
                    await self._send_without_end(reader, writer)
                answer = await reader.read()
        lines, _, body = answer.partition(b"\r\n\r\n")
        assert lines.startswith(b"HTTP/1.1 413 ")
        assert b"\r\nx-request-id: too-large" in lines
        assert b"\r\naccess-control-allow-origin: https://a" in lines
        assert json.loads(body)["error"]["code"] == "request_too_large"
        assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
        (receipt,) = await stand.receipts()
        assert (receipt["status"], receipt["error"]) == (413, "request_too_large")
        (access,) = [record.message for record in caplog.records if record.name == "warmroute.access"]
        assert (json.loads(access)["status"], json.loads(access)["request_id"]) == (413, "too-large")
        assert any(record.name == "warmroute.http" and "413" in record.message for record in caplog.records)
        metrics = await stand.metrics()
        assert metrics['warmroute_http_refused_total{status="413"}'] == 1
        assert metrics['warmroute_requests_total{finish="complete",model="unknown",status="413"}'] == 1
        assert stand.engines["A"].seen == []

    async def _send_without_end(self, reader: Any, writer: Any) -> None:
        part = b"100000\r\n%b\r\n" % bytes(1 << 20)
        while not (reader.at_eof() or reader._buffer):
            writer.write(part)
            await writer.drain()


# https://github.com/vllm-project/router/pull/114, https://github.com/BerriAI/litellm/issues/13088
class TestHeaders:
    CALL = case_input("31")["client"][0]
    TRACE = CALL["headers"]["traceparent"]

    async def _told(self, stand: Stand, **headers: str) -> dict[str, str]:
        """What the engine got of these, and of the case's."""
        body = self.CALL["json"]
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with stand.connection() as (reader, writer):
            writer.write(request_head(body, {**self.CALL["headers"], **named, "accept-encoding": "gzip"}))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(written(body))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        found = dict(stand.engines["A"].seen[-1].headers)
        for ours in ("host", "content-length", "content-type", "accept", "x-request-id"):
            del found[ours]
        return found

    async def test_of_a_client_only_those_of_its_trace_reach_the_engine(self, stand: Stand) -> None:
        await stand.start(Engine())
        secret = {"authorization": "Bearer s", "x_api_key": "s", "api_key": "s", "x_real_ip": "1.2.3.4"}
        found = await self._told(stand, tracestate="a=b", baggage="user=7", forwarded="for=1.2.3.4", **secret)
        assert found == {"traceparent": self.TRACE, "tracestate": "a=b"}

    async def test_and_those_that_the_operator_names(self, stand: Stand) -> None:
        await stand.start(Engine(), listen={"port": 0, "forward_headers": ["X-Custom-App", "baggage"]})
        found = await self._told(stand, baggage="user=7")
        assert found == {"traceparent": self.TRACE, "x-custom-app": "ok", "baggage": "user=7"}

    async def test_what_connection_names_is_for_us_alone(self, stand: Stand) -> None:
        await stand.start(Engine(), listen={"port": 0, "forward_headers": ["x-hop", "x-custom-app"]})
        found = await self._told(stand, connection="close, X-Hop ,tracestate", tracestate="a=b")
        assert found == {"traceparent": self.TRACE, "x-custom-app": "ok"}

    @pytest.mark.parametrize("stream", [False, True])
    async def test_of_an_engine_only_its_content_type_reaches_the_client(self, stand: Stand, stream: bool) -> None:
        lines = case_input("31")["upstream"][0]["headers"] | {"set-cookie": "a=b", "x-request-id": "theirs"}

        async def script(exchange: Exchange) -> None:
            kind = "text/event-stream" if stream else "application/json"
            head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, "content-type": kind}.items())
            await exchange.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode())
            done = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
            await exchange.chunk(event(done) + event("[DONE]") if stream else b"{}")
            await exchange.chunk(b"")

        await stand.start(Engine(script=script))
        answer = await stand.ask(self.CALL["json"] | {"stream": stream}, headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
        told = set(answer.headers) - {"content-type", "x-request-id", "x-warmroute-predicted-tokens"}
        assert told == {"cache-control"} | (
            {"transfer-encoding", "x-accel-buffering"} if stream else {"content-length"}
        )
        assert "secret-host-7" not in str(answer.headers)


async def test_json_nested_without_end_is_refused(stand: Stand) -> None:
    """And what is merely deep reaches the engine, spliced or not."""
    await stand.start(Engine(), model={"aliases": ["other"]})
    for depth in (1_100, 100_000, 5_000_000):
        for opening in (b"[", b'{"a":'):
            answer = await stand.ask(b'{"model": "m-chat", "messages": ' + opening * depth)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
            inner, closing = (b"", b"]") if opening == b"[" else (b"1", b"}")
            whole = opening * depth + inner + closing * depth
            answer = await stand.ask(b'{"model": "m-chat", "messages": %b}' % whole)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    for model in (b"m-chat", b"other"):
        for depth in (10, 500, 1_000):
            deep = b'{"model": "%b", "stream": true, "messages": %b%b}' % (model, b"[" * depth, b"]" * depth)
            assert b"[" * depth in await relayed(stand, deep)
            twice = deep[:-1] + b', "model": "%b"}' % model
            assert b"[" * depth in await relayed(stand, twice)
