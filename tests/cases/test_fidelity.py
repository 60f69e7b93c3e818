"""What a client sends reaches the engine as it was sent."""

from __future__ import annotations

import gzip
import hashlib
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import zstandard

from tests.cases.engine import MODEL, Engine, Exchange
from tests.cases.events import stored
from tests.cases.stand import Stand, case_input, client_bodies, written


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
