"""Streams pass untouched, and are accounted for all the same."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from tests.cases.engine import Engine, Exchange, Script, answer_ok, event, streaming
from tests.cases.stand import Stand, case_input, client_bodies, request_head, written

Chunks = Sequence[Mapping[str, Any] | str]
REPLACEMENT = "\ufffd".encode()


def wire(chunks: Chunks) -> bytes:
    return b"".join(map(event, chunks))


def received(body: bytes) -> list[Any]:
    """The chunks a client reads, `[DONE]` as text."""
    data = [line.removeprefix(b"data: ") for line in body.splitlines() if line]
    return [item.decode() if item == b"[DONE]" else json.loads(item) for item in data]


def counts(receipt: Mapping[str, Any]) -> tuple[int, int, int]:
    usage = receipt["usage"]
    return usage["input_tokens"], usage["output_tokens"], usage["cached_tokens"]


# https://github.com/headroomlabs-ai/headroom/pull/2026, https://github.com/nguyenphutrong/quotio/issues/460
async def test_usage_is_recorded_always_and_shown_to_who_asked_for_it(stand: Stand) -> None:
    told, untold = (step["sse"] for step in case_input("01")["upstream"])

    async def script(exchange: Exchange) -> None:
        asked = (exchange.json.get("stream_options") or {}).get("include_usage") is True
        await streaming(told if asked else untold)(exchange)

    await stand.start(Engine("A", script=script))
    (refused,) = client_bodies("01")
    absent = {key: value for key, value in refused.items() if key != "stream_options"}
    asked = refused | {"stream_options": {"include_usage": True}}
    for body, is_told in ((refused, False), (absent, False), (asked, True)):
        answer = await stand.ask(body)
        assert stand.engines["A"].seen[-1].json["stream_options"]["include_usage"] is True
        assert counts(await stand.receipt(answer)) == (120, 1, 112)
        *chunks, done = received(answer.content)
        assert done == "[DONE]"
        usages = [at for at, chunk in enumerate(chunks) if "usage" in chunk or not chunk["choices"]]
        assert usages == ([len(chunks) - 1] if is_told else [])

    others = {"include_usage": False, "continuous_usage_stats": False, "x": [1]}
    await stand.ask(absent | {"stream_options": others})
    assert stand.engines["A"].seen[-1].json["stream_options"] == others | {"include_usage": True}


# https://github.com/ARahim3/mlx-dspark/issues/37, https://github.com/diegosouzapw/OmniRoute/issues/9750
async def test_usage_counts_whatever_else_its_chunk_holds(stand: Stand) -> None:
    """After the finish with a choice, on the finish, alone with usage: null on every other chunk."""
    engine = Engine("A")
    await stand.start(engine)
    (body,) = client_bodies("02")
    variants = [step["sse"] for step in case_input("02")["upstream"]]
    assert len(variants) == 3
    for chunks in variants:
        engine.script = streaming(chunks)
        answer = await stand.ask(body)
        assert answer.content == wire(chunks)
        assert counts(await stand.receipt(answer)) == (65, 251, 64)


# https://github.com/BerriAI/litellm/pull/37792, https://github.com/agno-agi/agno/pull/8880
async def test_deltas_of_parallel_tool_calls_stay_apart(stand: Stand) -> None:
    chunks = case_input("04")["upstream"][0]["sse"]
    await stand.start(Engine("A", script=streaming(chunks)))
    (body,) = client_bodies("04")
    answer = await stand.ask(body)
    assert answer.content == wire(chunks)
    calls: dict[int, dict[str, str]] = {}
    finish = None
    for chunk in received(answer.content)[:-1]:
        (choice,) = chunk["choices"]
        finish = choice["finish_reason"] or finish
        for delta in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(delta["index"], {"name": "", "arguments": ""})
            for field in call:
                call[field] += delta["function"].get(field, "")
    assert {call["name"]: json.loads(call["arguments"]) for call in calls.values()} == {
        "get_a": {"x": 1},
        "get_b": {"y": 2},
    }
    assert finish == "tool_calls"


# https://github.com/api7/aisix/issues/111, https://github.com/musistudio/claude-code-router/pull/1672
async def test_characters_that_the_network_cuts_stay_whole(stand: Stand) -> None:
    """One byte a write; and one cut inside a character of three bytes, one inside one of four."""
    text, done = str(case_input("05")["upstream"][0]["raw_sse_text"]).encode().split(b"data: [DONE]")
    usage = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
    sent = text + usage + b"data: [DONE]" + done
    engine = Engine("A")
    await stand.start(engine)
    (body,) = client_bodies("05")
    for places in (range(1, len(sent)), (sent.index("你".encode()) + 1, sent.index("🌍".encode()) + 2)):
        engine.script = _writing([sent[a:b] for a, b in zip((0, *places), (*places, len(sent)), strict=True)])
        answer = await stand.ask(body | {"stream_options": {"include_usage": True}})
        assert answer.content == sent
        assert REPLACEMENT not in answer.content
        assert counts(await stand.receipt(answer))[:2] == (9, 4)


def _writing(pieces: Sequence[bytes]) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.stream(*pieces)

    return script


# https://github.com/BerriAI/litellm/issues/3276, https://github.com/BerriAI/litellm/issues/5236
class TestTwoChoices:
    CHUNKS: Chunks = case_input("15")["upstream"][0]["sse"]

    async def test_they_pass_interleaved_as_they_came(self, stand: Stand) -> None:
        await stand.start(Engine("A", script=streaming(self.CHUNKS)))
        (body,) = client_bodies("15")
        answer = await stand.ask(body | {"stream_options": {"include_usage": True}})
        assert answer.content == wire(self.CHUNKS)
        assert stand.engines["A"].seen[0].json["stop"] == ["\n\n", "END"]
        assert (await stand.receipt(answer))["finish"] == "complete"

    async def test_each_of_them_is_reserved_for(self, stand: Stand) -> None:
        booked: list[int] = []

        async def script(exchange: Exchange) -> None:
            booked.append((await stand.fleet())[0]["booked_kv_tokens"])
            await answer_ok(exchange)

        await stand.start(Engine("A", script=script))
        (body,) = client_bodies("15")
        await stand.ask(body | {"n": 1})
        await stand.ask(body)
        assert booked[1] - booked[0] == body["max_tokens"]

    async def test_a_stream_cut_after_one_has_finished_is_an_interrupted_one(self, stand: Stand) -> None:
        async def script(exchange: Exchange) -> None:
            await exchange.begin_stream()
            await exchange.chunk(wire(self.CHUNKS[:3]))
            exchange.reset()

        await stand.start(Engine("A", script=script))
        (body,) = client_bodies("15")
        parts: list[bytes] = []
        async with stand.streamed(body) as answer:
            with pytest.raises(httpx.RemoteProtocolError):  # the body never ends, so that no client takes it for whole
                await _read(answer, parts)
        receipt = await stand.receipt(answer)
        assert (receipt["finish"], receipt["events"]) == ("upstream_failed", 3)
        *chunks, last = received(b"".join(parts))
        assert chunks == self.CHUNKS[:3]
        assert last["error"]["type"] == "server_error"


async def _read(answer: httpx.Response, parts: list[bytes]) -> None:
    async for part in answer.aiter_raw():
        parts.append(part)


# https://github.com/theopenco/llmgateway/pull/2334, https://github.com/chenyme/grok2api/pull/1050
class TestKeepAliveCommentsOfAnEngine:
    COMMENT, HALF, REST = (str(step["raw_sse_text"]).encode() for step in case_input("10")["upstream"])

    async def test_they_pass_at_once_and_are_no_token(self, stand: Stand) -> None:
        """Between them, what is there of an event waits for the rest of it."""
        heard, go_on = asyncio.Event(), asyncio.Event()

        async def script(exchange: Exchange) -> None:
            await exchange.begin_stream()
            for _ in range(3):
                await exchange.chunk(self.COMMENT)
                await heard.wait()
                heard.clear()
            await exchange.chunk(self.HALF)
            await go_on.wait()
            await exchange.chunk(self.REST)
            await exchange.chunk(b"")

        await stand.start(Engine(script=script))
        (body,) = client_bodies("10")
        async with stand.streamed(body | {"messages": [{"role": "user", "content": "word " * 100}]}) as answer:
            came, parts = time.monotonic(), answer.aiter_raw()
            for _ in range(3):
                assert await anext(parts) == self.COMMENT
                assert [row["booked_prefills"] for row in await stand.fleet()] == [1]
                heard.set()
            first_part = asyncio.ensure_future(anext(parts))
            await asyncio.sleep(0.05)  # the half event is here by now, if it ever is
            assert not first_part.done()
            waited = time.monotonic() - came
            go_on.set()
            rest = await first_part + b"".join([part async for part in parts])
        assert rest == self.HALF + self.REST
        receipt = await stand.receipt(answer)
        assert receipt["ttft_s"] >= waited
        assert (receipt["finish"], receipt["events"]) == ("complete", 1)

    async def test_ours_come_before_the_first_event_and_never_in_one(self, stand: Stand) -> None:
        go_on, beat = asyncio.Event(), 0.02

        async def script(exchange: Exchange) -> None:
            await exchange.begin_stream()
            await exchange.chunk(b": of the engine\n\n")
            await go_on.wait()
            await exchange.chunk(self.HALF)
            await asyncio.sleep(5 * beat)
            await exchange.chunk(self.REST)
            await exchange.chunk(b"")

        await stand.start(Engine(script=script), model={"keep_alive_comments_s": beat})
        heard = b""
        async with stand.streamed(client_bodies("10")[0]) as answer:
            parts = answer.aiter_raw()
            while heard.count(b": keep-alive\n\n") < 3:
                heard += await anext(parts)
            go_on.set()
            heard += b"".join([part async for part in parts])
        comments, event_, done = heard.partition(self.HALF + self.REST)
        assert comments.replace(b": keep-alive\n\n", b"") == b": of the engine\n\n"
        assert (event_, done) == (self.HALF + self.REST, b"")
        receipt = await stand.receipt(answer)
        assert receipt["ttft_s"] >= 3 * beat
        assert (receipt["finish"], receipt["events"]) == ("complete", 1)

    @pytest.mark.parametrize("cut", [1, 7])
    async def test_wherever_the_network_cuts_them(self, stand: Stand, cut: int) -> None:
        chunk = self.HALF + self.REST.partition(b"\n\n")[0] + b"\n\n"
        sent = self.COMMENT + chunk + self.COMMENT + b": twice\r\n\r\n" + chunk + self.COMMENT + event("[DONE]")
        pieces = [sent[at : at + cut] for at in range(0, len(sent), cut)]
        await stand.start(Engine(script=_writing(pieces)))
        answer = await stand.ask(client_bodies("10")[0])
        assert answer.content == sent
        assert (await stand.receipt(answer))["events"] == 2


# https://github.com/NousResearch/hermes-agent/issues/58471, https://github.com/KarpelesLab/teamclaude/issues/341
async def test_a_line_without_an_end_takes_no_memory_and_ends_as_an_error(stand: Stand) -> None:
    """It passes as it comes; nothing is known of its usage. At most 64 KiB and one read of it (256 KiB) are here."""
    step = case_input("14")["upstream"][0]
    size = int(step["bytes"]) // 4

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(str(step["raw_sse_text"]).encode())
        for _ in range(size // 65_536):
            await exchange.chunk(b"A" * 65_536)
        await exchange.chunk(b"")

    await stand.start(Engine(script=script))
    (body,) = client_bodies("14")
    tail, received_bytes = b"", 0
    tracemalloc.start()
    try:
        async with stand.connection() as (reader, writer):
            writer.write(request_head(body, {}) + written(body))
            while part := await reader.read(65_536):
                received_bytes += len(part)
                tail = (tail + part)[-1_000:]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert received_bytes > size
    assert peak < 4 << 20
    _, _, error = tail.rpartition(b"\n\ndata: ")
    assert json.loads(error.splitlines()[0])["error"]["code"] == "engine_protocol_error"
    assert not tail.endswith(b"0\r\n\r\n")  # the body never ends, so that no client takes it for whole
    (receipt,) = await stand.receipts()
    assert (receipt["finish"], receipt["usage"], receipt["delivered_source"]) == ("upstream_failed", None, "none")
    metrics = await stand.metrics()
    assert metrics['warmroute_errors_total{error="engine_protocol_error",model="m-chat"}'] == 1
