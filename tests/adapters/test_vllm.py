from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, ClassVar

import httpx
import pytest

from adapters.vllm import VllmAdapter
from router.core import Adapter, EventBatch, EventSource, HitRule, Instance, Load, Lost
from router.errors import EngineError, EngineProtocolError, EngineTimeout, EngineUnreachable
from tests.adapters.fake_http import FakeEngine, as_recorded, vllm
from tests.adapters.publisher import Publisher
from tests.adapters.wire import batch, recorded_answer, recorded_bytes, stored

ENGINE = Instance("a", "http://10.0.0.5:8000", "vllm", "public")


def adapter_of(engine: FakeEngine) -> VllmAdapter:
    return VllmAdapter(transport=engine, clock=lambda: 42.0)


async def inspected(engine: FakeEngine, instance: Instance = ENGINE) -> Any:
    adapter = adapter_of(engine)
    try:
        return await adapter.inspect(instance)
    finally:
        await adapter.aclose()


async def loaded(page: bytes) -> Any:
    adapter = adapter_of(FakeEngine(vllm() | {"/metrics": httpx.Response(200, content=page)}))
    try:
        return await adapter.load(ENGINE)
    finally:
        await adapter.aclose()


def sources(**ranks: dict[str, Any]) -> dict[str, httpx.Response]:
    """An answer of /kv_event_sources; r0, r1 … with what differs from the recorded one."""
    recorded = recorded_answer("vllm-0.32.0", "kv-event-sources")["json"]["0"]
    answer = {rank.removeprefix("r"): recorded | config for rank, config in ranks.items()}
    return {"/kv_event_sources": httpx.Response(200, json=answer)}


async def test_it_is_an_adapter() -> None:
    adapter: Adapter = VllmAdapter(transport=FakeEngine({}))
    assert adapter.name == "vllm"
    await adapter.aclose()


class TestInspect:
    async def test_recorded_facts(self) -> None:
        facts = await inspected(FakeEngine(vllm()))
        assert facts.served == ("tiny-qwen3",)
        assert facts.version == "0.32.0"
        assert facts.max_model_tokens == 2048
        assert (facts.block_size, facts.capacity_tokens) == (32, 4096)
        assert facts.hit_rule == HitRule(alignment_tokens=32)
        assert facts.prefix_caching is True
        assert facts.reports_cached is None
        assert facts.model_path == "/models/tiny-qwen3"
        assert facts.boot_id == "1795980178.62"
        assert (facts.ranks, facts.rank_targeting) == (1, False)

    async def test_wildcard_hosts_become_the_engines_own(self) -> None:
        engine = FakeEngine(vllm() | sources(r0={"replay_endpoint": "tcp://0.0.0.0:15701"}))
        facts = await inspected(engine)
        assert facts.sources == (EventSource(0, "tcp://10.0.0.5:15601", "tcp://10.0.0.5:15701", "kv-events"),)
        assert facts.notes == ()

    async def test_wildcard_hosts_of_an_ipv6_engine(self) -> None:
        facts = await inspected(FakeEngine(vllm()), Instance("a", "http://[fd00::5]:8000", "vllm", "m"))
        assert facts.sources[0].endpoint == "tcp://[fd00::5]:15601"

    async def test_ranks_have_sources_of_their_own_and_can_be_targeted(self) -> None:
        engine = FakeEngine(vllm() | sources(r1={"endpoint": "tcp://*:15602"}, r0={}))
        facts = await inspected(engine)
        assert [(source.rank, source.endpoint) for source in facts.sources] == [
            (0, "tcp://10.0.0.5:15601"),
            (1, "tcp://10.0.0.5:15602"),
        ]
        assert (facts.ranks, facts.rank_targeting) == (2, True)

    async def test_loras_are_not_base_models(self) -> None:
        facts = await inspected(FakeEngine(vllm() | {"/v1/models": as_recorded("vllm-0.32.0", "models-lora")}))
        assert (facts.served, facts.loras) == (("tiny-qwen3",), ("tiny-lora",))

    async def test_configured_sources_are_not_asked_for(self) -> None:
        configured = (EventSource(0, "tcp://10.0.0.9:1"),)
        engine = FakeEngine(vllm())
        facts = await inspected(engine, Instance("a", "http://10.0.0.5:8000", "vllm", "m", events=configured))
        assert facts.sources == configured
        assert "/kv_event_sources" not in engine.paths

    async def test_alignment_of_a_hybrid_model(self) -> None:
        page = recorded_bytes("vllm-0.32.0", "metrics.txt")
        page = page.replace(b'cache_hit_alignment_tokens="None"', b'cache_hit_alignment_tokens="528"')
        facts = await inspected(FakeEngine(vllm() | {"/metrics": httpx.Response(200, content=page)}))
        assert facts.hit_rule == HitRule(alignment_tokens=528)

    async def test_capacity_from_blocks_where_tokens_are_not_told(self) -> None:
        page = recorded_bytes("vllm-0.32.0", "metrics.txt").replace(b"kv_cache_size_tokens=", b"another=")
        facts = await inspected(FakeEngine(vllm() | {"/metrics": httpx.Response(200, content=page)}))
        assert facts.capacity_tokens == 128 * 32

    async def test_without_metrics_the_configuration_stands(self) -> None:
        engine = vllm()
        del engine["/metrics"]
        instance = Instance("a", "http://10.0.0.5:8000", "vllm", "m", block_size=16, capacity_tokens=1000)
        facts = await inspected(FakeEngine(engine), instance)
        assert (facts.block_size, facts.capacity_tokens, facts.boot_id) == (16, 1000, None)
        assert facts.hit_rule == HitRule(alignment_tokens=16)

    async def test_an_engine_that_is_not_healthy_is_unreachable(self) -> None:
        with pytest.raises(EngineUnreachable):
            await inspected(FakeEngine(vllm() | {"/health": httpx.Response(503)}))


class TestNotes:
    async def test_an_old_engine_does_not_tell_its_sources(self) -> None:
        engine = vllm()
        del engine["/kv_event_sources"]
        facts = await inspected(FakeEngine(engine))
        assert facts.sources == ()
        assert "0.31" in facts.notes[0]

    @pytest.mark.parametrize("config", [{"enable_kv_cache_events": False}, {"publisher": "null"}, {"publisher": None}])
    async def test_events_that_are_off(self, config: dict[str, Any]) -> None:
        facts = await inspected(FakeEngine(vllm() | sources(r0=config)))
        assert facts.sources == ()
        assert "--kv-events-config" in facts.notes[0]

    async def test_no_source_at_all(self) -> None:
        assert "--kv-events-config" in (await inspected(FakeEngine(vllm() | sources()))).notes[0]

    async def test_an_endpoint_that_vllm_connects_to_is_heard_by_nobody(self) -> None:
        facts = await inspected(FakeEngine(vllm() | sources(r0={"endpoint": "tcp://0.0.0.0:5557"})))
        assert facts.sources == ()
        assert "tcp://*:PORT" in facts.notes[0]

    async def test_no_replay(self) -> None:
        facts = await inspected(FakeEngine(vllm() | sources(r0={"replay_endpoint": None})))
        assert facts.sources[0].replay is None
        assert "replay_endpoint" in facts.notes[0]

    async def test_loopback_of_another_machine(self) -> None:
        facts = await inspected(FakeEngine(vllm()))  # recorded with a replay endpoint on 127.0.0.1
        assert "loopback" in facts.notes[0]
        local = await inspected(FakeEngine(vllm()), Instance("a", "http://127.0.0.1:8000", "vllm", "m"))
        assert local.notes == ()

    async def test_prefix_caching_that_is_off(self) -> None:
        page = recorded_bytes("vllm-0.32.0", "metrics.txt")
        page = page.replace(b'enable_prefix_caching="True"', b'enable_prefix_caching="False"')
        facts = await inspected(FakeEngine(vllm() | {"/metrics": httpx.Response(200, content=page)}))
        assert facts.prefix_caching is False
        assert "--enable-prefix-caching" in facts.notes[0]


class TestKeys:
    async def test_an_open_engine(self) -> None:
        assert (await inspected(FakeEngine(vllm()))).open_without_key is True

    async def test_a_key_that_is_not_needed(self) -> None:
        instance = Instance("a", "http://10.0.0.5:8000", "vllm", "m", api_key="secret")
        assert (await inspected(FakeEngine(vllm()), instance)).open_without_key is True

    async def test_a_key_that_is_needed(self) -> None:
        instance = Instance("a", "http://10.0.0.5:8000", "vllm", "m", api_key="secret")
        assert (await inspected(FakeEngine(vllm(), key="secret"), instance)).open_without_key is False

    async def test_a_wrong_key(self) -> None:
        instance = Instance("a", "http://10.0.0.5:8000", "vllm", "m", api_key="hunter2")
        with pytest.raises(EngineProtocolError, match="refused our key") as caught:
            await inspected(FakeEngine(vllm(), key="secret"), instance)
        assert "hunter2" not in str(caught.value) + caught.value.detail


class TestLoad:
    async def test_recorded_load(self) -> None:
        loads = await loaded(recorded_bytes("vllm-0.32.0", "metrics.txt"))
        assert loads == {
            0: Load(at=42.0, boot_id="1795980178.62", prompt_tokens_total=13819.0, cached_tokens_total=4512.0)
        }

    async def test_ranks_and_models_of_a_made_page(self) -> None:
        lines = [
            'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
            'vllm:num_requests_running{engine="1",model_name="m"} 1.0',
            'vllm:num_requests_waiting{engine="1",model_name="m"} 7.0',
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
            'vllm:num_preemptions_total{engine="1",model_name="m"} 2.0',
        ]
        loads = await loaded("\n".join(lines).encode())
        assert loads == {
            0: Load(at=42.0, running=3, kv_usage=0.25),
            1: Load(at=42.0, running=1, waiting=7, preemptions_total=2.0),
        }

    async def test_ranks_behind_an_external_balancer_count_from_zero(self) -> None:
        page = b'vllm:num_requests_running{engine="2"} 1.0\nvllm:num_requests_running{engine="3"} 5.0\n'
        assert {rank: load.running for rank, load in (await loaded(page)).items()} == {0: 1, 1: 5}

    async def test_a_sleeping_engine(self) -> None:
        page = recorded_bytes("vllm-0.32.0", "metrics.txt")
        asleep = page.replace(b'sleep_state="awake"} 1.0', b'sleep_state="awake"} 0.0')
        assert (await loaded(page))[0].sleeping is False
        assert (await loaded(asleep))[0].sleeping is True

    async def test_a_restart_changes_the_boot_id(self) -> None:
        page = recorded_bytes("vllm-0.32.0", "metrics.txt")
        again = page.replace(
            b"process_start_time_seconds 1.79598017862e+09", b"process_start_time_seconds 1.7959802e+09"
        )
        assert (await loaded(page))[0].boot_id != (await loaded(again))[0].boot_id

    async def test_a_page_of_something_else(self) -> None:
        with pytest.raises(EngineProtocolError):
            await loaded(b"up 1\n")


class TestTokenize:
    async def asked(self, name: str, path: str, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        engine = FakeEngine({"/tokenize": as_recorded("vllm-0.32.0", name)})
        adapter = adapter_of(engine)
        try:
            tokens = await adapter.tokenize(ENGINE, path, body)
        finally:
            await adapter.aclose()
        return tokens, json.loads(engine.requests[0].content)

    async def test_a_completion(self) -> None:
        recorded = recorded_answer("vllm-0.32.0", "tokenize-prompt")
        body = {"model": "public", "prompt": recorded["body"]["prompt"], "max_tokens": 5, "stream": True}
        tokens, sent = await self.asked("tokenize-prompt", "/v1/completions", body)
        assert tokens == recorded["json"]["tokens"]
        assert sent == {"prompt": recorded["body"]["prompt"], "add_special_tokens": True}

    async def test_a_chat_keeps_only_what_tokenize_takes(self) -> None:
        recorded = recorded_answer("vllm-0.32.0", "tokenize-chat-tools")
        body = recorded["body"] | {"model": "public", "temperature": 1, "stream": True, "cache_salt": "s"}
        tokens, sent = await self.asked("tokenize-chat-tools", "/v1/chat/completions", body)
        assert tokens == recorded["json"]["tokens"]
        assert sent == {"messages": body["messages"], "tools": body["tools"]}

    async def test_template_arguments_go_along(self) -> None:
        body = {
            "messages": [],
            "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"},
            "reasoning_effort": "high",
            "documents": [{"text": "x"}],
            "add_generation_prompt": False,
        }
        _, sent = await self.asked("tokenize-chat-kwargs", "/v1/chat/completions", body)
        assert sent["chat_template_kwargs"] == {
            "enable_thinking": False,
            "reasoning_effort": "low",
            "documents": [{"text": "x"}],
        }
        assert sent["add_generation_prompt"] is False

    @pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
    async def test_ids_are_their_own_tokens(self, prompt: list[Any]) -> None:
        adapter = adapter_of(FakeEngine({}))
        assert await adapter.tokenize(ENGINE, "/v1/completions", {"prompt": prompt}) == [1, 2, 3]
        await adapter.aclose()

    async def test_half_a_surrogate_pair_is_sent_on(self) -> None:
        _, sent = await self.asked("tokenize-prompt", "/v1/completions", {"prompt": "\ud83d"})
        assert sent["prompt"] == "\ud83d"

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/completions", {}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/messages", {"messages": []}),
        ],
    )
    async def test_what_has_no_one_list_of_ids(self, path: str, body: dict[str, Any]) -> None:
        with pytest.raises(EngineProtocolError):
            await self.asked("tokenize-prompt", path, body)

    async def test_a_refusal(self) -> None:
        with pytest.raises(EngineProtocolError):
            await self.asked("tokenize-bad", "/v1/completions", {"prompt": "x"})


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "ours"),
        [
            (httpx.ConnectError("http://10.0.0.5 hunter2"), EngineUnreachable),
            (httpx.ReadError("10.0.0.5"), EngineUnreachable),
            (httpx.RemoteProtocolError("10.0.0.5"), EngineUnreachable),
            (httpx.ConnectTimeout("10.0.0.5"), EngineTimeout),
            (httpx.ReadTimeout("10.0.0.5"), EngineTimeout),
            (httpx.DecodingError("10.0.0.5"), EngineProtocolError),
        ],
    )
    async def test_are_ours_and_name_no_host(self, error: Exception, ours: type[EngineError]) -> None:
        with pytest.raises(ours) as caught:
            await inspected(FakeEngine({"/health": error}))
        assert "10.0.0.5" not in str(caught.value)
        assert "hunter2" not in str(caught.value) + caught.value.detail

    @pytest.mark.parametrize(
        "answer",
        [
            httpx.Response(200, content=b"<html>"),
            httpx.Response(200, json=[]),
            httpx.Response(200, json={"data": []}),
            httpx.Response(200, json={"data": [{"id": 5}]}),
            httpx.Response(500),
            httpx.Response(404),
        ],
    )
    async def test_answers_of_another_shape(self, answer: httpx.Response) -> None:
        with pytest.raises(EngineProtocolError):
            await inspected(FakeEngine(vllm() | {"/v1/models": answer}))

    async def test_the_key_is_in_no_log(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, logger="router")
        instance = Instance("a", "http://10.0.0.5:8000", "vllm", "m", api_key="hunter2")
        await inspected(FakeEngine(vllm(), key="hunter2"), instance)
        assert "hunter2" not in caplog.text
        assert "hunter2" not in repr(instance)


async def test_recognises_only_its_own() -> None:
    adapter = adapter_of(FakeEngine(vllm()))
    assert await adapter.recognises(ENGINE) == 1.0
    await adapter.aclose()
    other = adapter_of(FakeEngine({"/v1/models": as_recorded("sglang-0.5.23", "models")}))
    assert await other.recognises(ENGINE) == 0.0
    await other.aclose()
    nothing = adapter_of(FakeEngine({}))
    assert await nothing.recognises(ENGINE) == 0.0
    await nothing.aclose()


async def test_a_request_is_steered_to_a_rank_only_where_one_is_given() -> None:
    adapter = adapter_of(FakeEngine({}))
    assert adapter.upstream(ENGINE, None).headers == ()
    assert adapter.upstream(ENGINE, 2).headers == ((b"x-data-parallel-rank", b"2"),)
    assert adapter.upstream(ENGINE, 2).fields == {}
    await adapter.aclose()


async def test_closing_the_adapter_ends_a_stream_that_is_still_open() -> None:
    async with Publisher() as publisher:
        await publisher.publish(3)
        adapter = adapter_of(FakeEngine({}))
        stream = adapter.events(ENGINE, publisher.source, None)
        await anext(stream)
        await adapter.aclose()
        await publisher.publish(3)
        reading = asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait({reading}, timeout=0.2)
        assert not done
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_events_of_ranks_that_begin_at_two_are_numbered_as_their_sources() -> None:
    async with Publisher() as publisher:
        publisher.published.append(batch(stored(1), rank=3))
        there = {"endpoint": publisher.source.endpoint, "replay_endpoint": publisher.source.replay}
        adapter = adapter_of(FakeEngine(vllm() | sources(r3=there, r2={})))
        engine = Instance("a", "http://127.0.0.1:8000", "vllm", "public")
        facts = await adapter.inspect(engine)
        assert [source.rank for source in facts.sources] == [0, 1]
        stream = adapter.events(engine, facts.sources[1], None)
        item: EventBatch | Lost = await anext(stream)
        assert isinstance(item, EventBatch)
        assert item.rank == 1
        await stream.aclose()
        await adapter.aclose()


class TestIsolation:
    TOKENS: ClassVar = [301, 302, 303]

    async def probed(self, usage: dict[str, Any] | None, rank: int | None = None) -> tuple[int | None, httpx.Request]:
        engine = FakeEngine(vllm() | {"/v1/completions": httpx.Response(200, json={"usage": usage})})
        adapter = adapter_of(engine)
        found = await adapter.probe(ENGINE, self.TOKENS, "salt", rank)
        await adapter.aclose()
        return found, engine.requests[-1]

    async def test_a_probe_is_one_token_under_a_salt(self) -> None:
        cached, request = await self.probed({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}, rank=1)
        assert cached == 2
        assert json.loads(request.content) == {
            "model": "tiny-qwen3",
            "prompt": self.TOKENS,
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": "salt",
        }
        assert request.headers["x-data-parallel-rank"] == "1"

    @pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}])
    async def test_an_engine_may_not_say_what_was_cached(self, usage: dict[str, Any] | None) -> None:
        assert (await self.probed(usage))[0] is None

    async def test_without_completions_it_cannot_be_probed(self) -> None:
        adapter = adapter_of(FakeEngine(vllm()))
        with pytest.raises(EngineProtocolError):
            await adapter.probe(ENGINE, self.TOKENS, "salt", None)
        await adapter.aclose()

    async def test_fields_are_those_of_every_form_a_request_may_have(self) -> None:
        described = {
            "components": {
                "schemas": {"A": {"properties": {"model": {}, "cache_salt": {}}}, "B": {"properties": {"x": {}}}}
            },
            "paths": {
                "/one": {"post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/c/s/A"}}}}}},
                "/two": {
                    "post": {
                        "requestBody": {
                            "content": {
                                "application/json": {"schema": {"anyOf": [{"$ref": "#/c/s/A"}, {"$ref": "#/c/s/B"}]}}
                            }
                        }
                    },
                    "get": {},
                },
                "/none": {"get": {}},
            },
        }
        adapter = adapter_of(FakeEngine({"/openapi.json": httpx.Response(200, json=described)}))
        a, b = frozenset(("model", "cache_salt")), frozenset(("x",))
        assert await adapter.request_fields(ENGINE) == {"/one": [a], "/two": [a, b]}
        await adapter.aclose()

    @pytest.mark.parametrize("answer", [b"no json", b"[]", b'{"paths": {"/x": {"post": 1}}}', b'{"paths": 3}'])
    async def test_an_engine_may_not_describe_itself(self, answer: bytes) -> None:
        for engine in (FakeEngine({}), FakeEngine({"/openapi.json": httpx.Response(200, content=answer)})):
            adapter = adapter_of(engine)
            assert await adapter.request_fields(ENGINE) == {}
            await adapter.aclose()
