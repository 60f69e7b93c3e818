from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from adapters.openai import OpenAIAdapter
from router.core import Adapter, EventSource, Instance, Load, Upstream
from router.errors import EngineProtocolError, EngineUnreachable
from tests.adapters.fake_http import Answer, FakeEngine, as_recorded

ENGINE = Instance("o", "http://10.0.0.8:8080", "openai", "public")
LLAMA = {
    "/v1/models": as_recorded("llama-cpp-python-0.3.36", "models"),
    "/health": as_recorded("llama-cpp-python-0.3.36", "health"),
    "/slots": as_recorded("llama-cpp-python-0.3.36", "slots"),
    "/tokenize": as_recorded("llama-cpp-python-0.3.36", "tokenize"),
}
TRANSFORMERS = {
    "/v1/models": as_recorded("transformers-serve-5.19.0", "models"),
    "/health": as_recorded("transformers-serve-5.19.0", "health"),
}


async def inspected(answers: dict[str, Any], instance: Instance = ENGINE) -> Any:
    adapter = OpenAIAdapter(transport=FakeEngine(answers))
    try:
        return await adapter.inspect(instance)
    finally:
        await adapter.aclose()


async def loaded(answers: dict[str, Any]) -> Any:
    adapter = OpenAIAdapter(transport=FakeEngine(answers), clock=lambda: 42.0)
    try:
        return await adapter.load(ENGINE)
    finally:
        await adapter.aclose()


async def tokenized(answers: dict[str, Any], path: str, body: dict[str, Any]) -> Any:
    adapter = OpenAIAdapter(transport=FakeEngine(answers))
    try:
        return await adapter.tokenize(ENGINE, path, body)
    finally:
        await adapter.aclose()


async def test_it_is_an_adapter() -> None:
    adapter: Adapter = OpenAIAdapter(transport=FakeEngine({}))
    assert adapter.name == "openai"
    assert adapter.upstream(ENGINE, 1) == Upstream()
    await adapter.aclose()


class TestInspect:
    async def test_recorded_llama_cpp_python(self) -> None:
        facts = await inspected(LLAMA)
        assert (facts.served, facts.ranks, facts.sources, facts.notes) == (("tiny",), 1, (), ())
        assert (facts.capacity_tokens, facts.block_size, facts.prefix_caching) == (None, None, None)

    async def test_recorded_transformers_serve_without_a_list_of_models(self) -> None:
        facts = await inspected(TRANSFORMERS)
        assert facts.served == ("public",)
        assert "/v1/models" in facts.notes[0]
        named = await inspected(TRANSFORMERS, Instance("o", "http://10.0.0.8:1", "openai", "public", served="org/m"))
        assert named.served == ("org/m",)

    async def test_slots_of_llama_cpp_are_its_capacity(self) -> None:
        slots = httpx.Response(200, json=[{"id": 0, "n_ctx": 4096}, {"id": 1, "n_ctx": 4096}])
        facts = await inspected(LLAMA | {"/slots": slots})
        assert (facts.capacity_tokens, facts.max_model_tokens, facts.max_running_requests) == (8192, 4096, 2)

    async def test_info_of_tgi(self) -> None:
        told = {"version": "3.3.6", "max_total_tokens": 8192, "max_batch_total_tokens": 65536}
        info = httpx.Response(200, json=told | {"max_concurrent_requests": 128})
        facts = await inspected(LLAMA | {"/info": info})
        assert (facts.version, facts.capacity_tokens, facts.max_model_tokens) == ("3.3.6", 65536, 8192)
        assert facts.max_running_requests == 128

    async def test_what_the_operator_says_wins(self) -> None:
        sources = (EventSource(0, "tcp://10.0.0.8:5557"),)
        instance = Instance("o", "http://10.0.0.8:1", "openai", "m", events=sources, block_size=64, capacity_tokens=99)
        facts = await inspected(LLAMA, instance)
        assert (facts.sources, facts.block_size, facts.capacity_tokens) == (sources, 64, 99)

    @pytest.mark.parametrize("answer", [httpx.Response(200, json={"x": 1}), httpx.Response(200, text="<html>")])
    async def test_other_pages_under_these_names_tell_nothing(self, answer: httpx.Response) -> None:
        facts = await inspected(LLAMA | {"/slots": answer, "/info": answer})
        assert (facts.capacity_tokens, facts.version) == (None, None)

    async def test_nothing_that_is_an_engine(self) -> None:
        with pytest.raises(EngineProtocolError):
            await inspected({})


class TestLoad:
    @pytest.mark.parametrize("answers", [LLAMA, TRANSFORMERS, {"/health": httpx.Response(401)}])
    async def test_is_empty_where_the_engine_answers(self, answers: dict[str, Answer]) -> None:
        assert await loaded(answers) == {0: Load(at=42.0)}

    async def test_an_engine_whose_worker_has_died(self) -> None:
        with pytest.raises(EngineUnreachable):
            await loaded({"/health": httpx.Response(503)})

    async def test_an_engine_that_is_gone(self) -> None:
        with pytest.raises(EngineUnreachable):
            await loaded({"/health": httpx.ConnectError("refused")})


def llama_cpp_tokenize(request: httpx.Request) -> httpx.Response:
    """llama.cpp's form: `content`, and an empty list where there is none."""
    content = json.loads(request.content).get("content", "")
    return httpx.Response(200, json={"tokens": [ord(character) for character in content]})


def vllm_tokenize(request: httpx.Request) -> httpx.Response:
    body = json.loads(request.content)
    return httpx.Response(200, json={"tokens": [7] if "messages" in body else [ord(c) for c in body["prompt"]]})


class TestTokenize:
    @pytest.mark.parametrize("server", [llama_cpp_tokenize, vllm_tokenize])
    async def test_a_completion(self, server: Answer) -> None:
        assert await tokenized({"/tokenize": server}, "/v1/completions", {"prompt": "AB"}) == [65, 66]
        assert await tokenized({}, "/v1/completions", {"prompt": [1, 2]}) == [1, 2]

    async def test_a_chat_in_vllms_form(self) -> None:
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert await tokenized({"/tokenize": vllm_tokenize}, "/v1/chat/completions", body) == [7]

    async def test_a_chat_by_way_of_llama_cpps_template(self) -> None:
        body = {"messages": [{"role": "user", "content": "x"}]}
        answers = {"/tokenize": llama_cpp_tokenize, "/apply-template": httpx.Response(200, json={"prompt": "<x>"})}
        assert await tokenized(answers, "/v1/chat/completions", body) == [60, 120, 62]

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    async def test_an_engine_that_does_not(self, path: str) -> None:
        with pytest.raises(EngineProtocolError):
            await tokenized(LLAMA, path, {"messages": [], "prompt": "x"})


async def test_recognises_any_list_of_models_but_modestly() -> None:
    adapter = OpenAIAdapter(transport=FakeEngine(LLAMA))
    assert 0 < await adapter.recognises(ENGINE) < 1
    await adapter.aclose()
    nothing = OpenAIAdapter(transport=FakeEngine({}))
    assert await nothing.recognises(ENGINE) == 0
    await nothing.aclose()
