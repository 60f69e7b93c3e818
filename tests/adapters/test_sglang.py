from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from adapters.sglang import SglangAdapter
from router.core import Adapter, EventSource, HitRule, Instance, Load
from router.errors import EngineProtocolError, EngineUnreachable
from tests.adapters.fake_http import Answer, FakeEngine, as_recorded, changed, sglang
from tests.adapters.wire import recorded_answer

ENGINE = Instance("s", "http://10.0.0.7:30000", "sglang", "public")
KV_EVENTS = recorded_answer("sglang-0.5.23", "server-info")["json"]["kv_events"]


def info(**fields: Any) -> dict[str, Answer]:
    return {"/server_info": changed("sglang-0.5.23", "server-info", **fields)}


async def inspected(engine: FakeEngine, instance: Instance = ENGINE) -> Any:
    adapter = SglangAdapter(transport=engine, clock=lambda: 42.0)
    try:
        return await adapter.inspect(instance)
    finally:
        await adapter.aclose()


async def loaded(engine: FakeEngine) -> Any:
    adapter = SglangAdapter(transport=engine, clock=lambda: 42.0)
    try:
        return await adapter.load(ENGINE)
    finally:
        await adapter.aclose()


async def test_it_is_an_adapter() -> None:
    adapter: Adapter = SglangAdapter(transport=FakeEngine({}))
    assert adapter.name == "sglang"
    assert adapter.upstream(ENGINE, 1).headers == ((b"x-data-parallel-rank", b"1"),)
    await adapter.aclose()


async def test_health_is_never_asked_for_since_it_generates_a_token() -> None:
    engine = FakeEngine(sglang())
    await inspected(engine)
    await loaded(engine)
    assert not {"/health", "/health_generate"} & set(engine.paths)


class TestInspect:
    async def test_recorded_facts(self) -> None:
        facts = await inspected(FakeEngine(sglang()))
        assert facts.served == ("tiny-qwen3",)
        assert facts.version == "0.5.23"
        assert facts.max_model_tokens == 2048
        assert (facts.block_size, facts.capacity_tokens, facts.max_running_requests) == (16, 4096, 2048)
        assert facts.hit_rule == HitRule(alignment_tokens=16)
        assert (facts.prefix_caching, facts.reports_cached) == (True, True)
        assert facts.model_path == "/models/tiny-qwen3"
        assert facts.sources == (EventSource(0, "tcp://10.0.0.7:15801", "tcp://10.0.0.7:15802", "kv-events"),)
        assert facts.open_without_key is True
        assert facts.lacks == ("audio", "image")
        assert facts.tells_answers_late
        assert facts.notes == ()

    @pytest.mark.parametrize(
        ("told", "lacks"),
        [
            ({"has_image_understanding": True, "has_audio_understanding": False}, ("audio",)),
            ({"has_image_understanding": True, "has_audio_understanding": True}, ()),
            ({"has_image_understanding": ..., "has_audio_understanding": ...}, ()),
        ],
    )
    async def test_what_it_takes_beside_text(self, told: dict[str, Any], lacks: tuple[str, ...]) -> None:
        model_info = {"/model_info": changed("sglang-0.5.23", "model-info", **told)}
        assert (await inspected(FakeEngine(sglang() | model_info))).lacks == lacks

    async def test_a_version_that_does_not_tell_what_it_takes(self) -> None:
        engine = sglang()
        del engine["/model_info"]
        assert (await inspected(FakeEngine(engine))).lacks == ()

    async def test_one_that_fails_to_tell_joins_all_the_same(self) -> None:
        facts = await inspected(FakeEngine(sglang() | {"/model_info": httpx.Response(500)}))
        assert (facts.served, facts.lacks) == (("tiny-qwen3",), ())

    async def test_ports_of_ranks_count_up(self) -> None:
        facts = await inspected(FakeEngine(sglang() | info(dp_size=3, kv_events=KV_EVENTS | {"dp_size": 3})))
        assert [(source.rank, source.endpoint, source.replay) for source in facts.sources] == [
            (rank, f"tcp://10.0.0.7:{15801 + rank}", f"tcp://10.0.0.7:{15802 + rank}") for rank in range(3)
        ]
        assert (facts.ranks, facts.rank_targeting) == (3, True)

    async def test_a_version_that_tells_only_its_arguments(self) -> None:
        facts = await inspected(FakeEngine(sglang() | info(kv_events=...)))
        assert facts.sources == (EventSource(0, "tcp://10.0.0.7:15801", "tcp://10.0.0.7:15802", "kv-events"),)

    async def test_a_version_with_the_old_route(self) -> None:
        engine = sglang()
        engine["/get_server_info"] = engine.pop("/server_info")
        assert (await inspected(FakeEngine(engine))).version == "0.5.23"

    async def test_configured_sources_win(self) -> None:
        configured = (EventSource(0, "tcp://10.0.0.9:1", "tcp://10.0.0.9:2"),)
        instance = Instance("s", "http://10.0.0.7:30000", "sglang", "m", events=configured)
        assert (await inspected(FakeEngine(sglang()), instance)).sources == configured

    async def test_a_restart_changes_the_boot_id(self) -> None:
        first = await inspected(FakeEngine(sglang()))
        same = await inspected(FakeEngine(sglang()))
        again = await inspected(FakeEngine(sglang() | info(startup_time={"scheduler_e2e": 5.1})))
        assert first.boot_id == same.boot_id
        assert first.boot_id != again.boot_id
        assert (await inspected(FakeEngine(sglang() | info(startup_time=...)))).boot_id is None

    async def test_an_engine_that_is_not_ready(self) -> None:
        with pytest.raises(EngineUnreachable):
            await inspected(FakeEngine(sglang() | info(status="initializing")))

    @pytest.mark.parametrize("answer", [httpx.Response(200, json=[]), httpx.Response(404), httpx.Response(500)])
    async def test_an_answer_of_another_shape(self, answer: httpx.Response) -> None:
        with pytest.raises(EngineProtocolError):
            await inspected(FakeEngine(sglang() | {"/server_info": answer}))


class TestNotes:
    async def test_pages_of_one_token(self) -> None:
        facts = await inspected(FakeEngine(sglang() | info(page_size=1)))
        assert facts.block_size == 1
        assert "--page-size 16" in facts.notes[0]

    async def test_no_cache_report(self) -> None:
        facts = await inspected(FakeEngine(sglang() | info(enable_cache_report=False)))
        assert facts.reports_cached is False
        assert "--enable-cache-report" in facts.notes[0]

    async def test_no_radix_cache(self) -> None:
        facts = await inspected(FakeEngine(sglang() | info(disable_radix_cache=True)))
        assert facts.prefix_caching is False
        assert "--disable-radix-cache" in facts.notes[0]

    async def test_events_of_a_configuration_made_for_vllm(self) -> None:
        facts = await inspected(
            FakeEngine(sglang() | info(kv_events=None, kv_events_config='{"enable_kv_cache_events":true}'))
        )
        assert facts.sources == ()
        assert '"publisher": "zmq"' in facts.notes[0]

    @pytest.mark.parametrize("config", [None, ..., "no json", "[]"])
    async def test_events_that_are_off(self, config: object) -> None:
        facts = await inspected(FakeEngine(sglang() | info(kv_events=None, kv_events_config=config)))
        assert facts.sources == ()
        assert "--kv-events-config" in facts.notes[0]

    async def test_no_replay(self) -> None:
        told = {key: value for key, value in KV_EVENTS.items() if key != "replay_endpoint_port_base"}
        facts = await inspected(FakeEngine(sglang() | info(kv_events=told)))
        assert facts.sources[0].replay is None
        assert "replay_endpoint" in facts.notes[0]


class TestLoad:
    async def test_recorded_load(self) -> None:
        assert await loaded(FakeEngine(sglang())) == {0: Load(at=42.0)}

    async def test_ranks(self) -> None:
        ranks = [
            {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5},
            {"dp_rank": 1, "num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0},
        ]
        engine = FakeEngine({"/v1/loads": httpx.Response(200, json={"loads": ranks})})
        assert await loaded(engine) == {
            0: Load(at=42.0, running=3, waiting=1, kv_usage=0.5),
            1: Load(at=42.0, running=4),
        }

    async def test_an_old_version_tells_it_in_its_metrics(self) -> None:
        engine = sglang()
        del engine["/v1/loads"]
        assert await loaded(FakeEngine(engine)) == {
            0: Load(at=42.0, kv_usage=0.07, prompt_tokens_total=12176.0, cached_tokens_total=3488.0)
        }

    @pytest.mark.parametrize("answer", [{}, {"loads": []}, {"loads": [1]}, []])
    async def test_an_answer_of_another_shape(self, answer: object) -> None:
        with pytest.raises(EngineProtocolError):
            await loaded(FakeEngine({"/v1/loads": httpx.Response(200, json=answer)}))

    async def test_no_load_at_all(self) -> None:
        with pytest.raises(EngineProtocolError, match="--enable-metrics"):
            await loaded(FakeEngine({}))


class TestTokenize:
    async def asked(self, path: str, body: dict[str, Any], *, instance: Instance = ENGINE, **answers: Any) -> Any:
        engine = FakeEngine({key.replace("_", "/"): value for key, value in answers.items()})
        adapter = SglangAdapter(transport=engine)
        try:
            tokens = await adapter.tokenize(instance, path, body)
        finally:
            await adapter.aclose()
        return tokens, json.loads(engine.requests[-1].content)

    @pytest.mark.parametrize("route", ["_tokenize", "_v1_tokenize"])
    async def test_a_completion(self, route: str) -> None:
        recorded = recorded_answer("sglang-0.5.23", "tokenize-prompt")
        answers = {route: as_recorded("sglang-0.5.23", "tokenize-prompt")}
        tokens, sent = await self.asked("/v1/completions", recorded["body"] | {"max_tokens": 1}, **answers)
        assert tokens == recorded["json"]["tokens"]
        assert sent == recorded["body"]

    async def test_a_chat(self) -> None:
        recorded = recorded_answer("sglang-0.5.23", "tokenize-chat-tools")
        instance = Instance("s", "http://10.0.0.7:30000", "sglang", "public", served="tiny-qwen3")
        tokens, sent = await self.asked(
            "/v1/chat/completions",
            recorded["body"] | {"model": "public", "temperature": 1, "cache_salt": "s"},
            instance=instance,
            _tokenize=as_recorded("sglang-0.5.23", "tokenize-chat-tools"),
        )
        assert tokens == recorded["json"]["tokens"]
        assert sent == recorded["body"]

    async def test_no_such_route(self) -> None:
        with pytest.raises(EngineProtocolError):
            await self.asked("/v1/completions", {"prompt": "x"})


async def test_recognises_only_its_own() -> None:
    adapter = SglangAdapter(transport=FakeEngine(sglang()))
    assert await adapter.recognises(ENGINE) == 1.0
    await adapter.aclose()
    other = SglangAdapter(transport=FakeEngine({"/v1/models": as_recorded("vllm-0.32.0", "models")}))
    assert await other.recognises(ENGINE) == 0.0
    await other.aclose()
