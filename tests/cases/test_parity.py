"""The gateway reads a prompt as its engine does, or says that it does not."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from router.config import load
from router.errors import ConfigError
from tests.cases.engine import MODEL, Engine, Exchange, whole_answer
from tests.cases.events import stored
from tests.cases.stand import (
    CHAT,
    COMPLETIONS,
    Stand,
    case_input,
    client_bodies,
    kv_steps,
    written,
)

IS_COMPARED = {"parity": "enforce"}


async def hold(stand: Stand, engine: Engine, tokens: list[int]) -> None:
    seq = await engine.port.publish(stored(str(tokens), tokens, block_size=engine.block_size))
    await stand.heard(engine.name, seq)


# https://github.com/sgl-project/sglang/pull/27386, https://github.com/vllm-project/production-stack/pull/1045
class TestATemplatedPrompt:
    def _tokenizer(self, folder: Path) -> Path:
        """Whole words only; its ids are those of the case: <s> 1, [INST] 3, [/INST] 4, and numbers are themselves."""
        words = {"<unk>": 0, "<s>": 1, "[INST]": 3, "[/INST]": 4} | {str(number): number for number in range(5, 100)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        template = "<s> {% for message in messages %}[INST] {{ message.content }} [/INST] {% endfor %}5 6 7 8"
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return folder

    async def test_goes_where_its_own_tokens_are_held(self, stand: Stand, tmp_path: Path) -> None:
        """In the engine's cache are the template's tokens, not those of the message's text."""
        holder, idle = Engine("A"), Engine("B")
        await stand.start(holder, idle, model={"tokenizer": str(self._tokenizer(tmp_path))})
        await stand.publish(next(kv_steps("33")))
        (body,) = client_bodies("33")
        body["messages"][0]["content"] = "20 21"
        decision = await stand.explain(body)
        assert {c["instance"]: c["hit_tokens"] for c in decision["candidates"]} == {"A": 8, "B": 0}
        assert (await stand.ask(body)).headers["x-warmroute-predicted-tokens"] == "8"
        assert (len(holder.seen), len(idle.seen)) == (1, 0)

    async def test_chats_and_completions_are_read_as_the_engine_reads_them(self, stand: Stand) -> None:
        holder = Engine("A")
        await stand.start(holder, Engine("B"), model=IS_COMPARED)
        assert (await stand.prompts())["state"] == "EXACT"
        bodies: dict[str, dict[str, Any]] = {
            CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "tokens 20 21 … and some more of them"}]},
            COMPLETIONS: {"model": MODEL, "prompt": "tokens 20 21 … and some more of them"},
        }
        for path, body in bodies.items():
            tokens = await holder.tokens(path, body)
            await hold(stand, holder, tokens)
            best = (await stand.explain(body, path=path))["candidates"][0]
            assert (best["instance"], best["held_tokens"]) == ("A", {"gpu": len(tokens) // 4 * 4})


# https://github.com/AMD-AGI/Infera/pull/143, https://github.com/vllm-project/production-stack/pull/1062
class TestDegradation:
    USAGE = case_input("34")["upstream"][0]["usage"]

    def _engines(self, usage: Mapping[str, Any]) -> tuple[Engine, Engine]:
        async def script(exchange: Exchange) -> None:
            await exchange.answer(whole_answer(usage))

        return Engine("A", script=script), Engine("B", script=script)

    def test_a_tokenizer_that_is_not_there_is_a_mistake_of_the_configuration(self, tmp_path: Path) -> None:
        path = case_input("34")["gateway_config"]["tokenizer_path"]
        file = tmp_path / "warmroute.yaml"
        file.write_text(json.dumps({"engines": [{"url": "http://h:1"}], "models": {MODEL: {"tokenizer": path}}}))
        with pytest.raises(ConfigError, match=r"models\.m-chat\.tokenizer: there is no tokenizer\.json in '/nonexist"):
            load(file, environ={})

    async def test_a_tokenizer_that_cannot_be_used_is_said_once_and_requests_are_served(
        self, stand: Stand, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "tokenizer.json").write_text("{}")
        call = case_input("34")["client"][0]
        engines = self._engines(self.USAGE)
        with caplog.at_level(logging.INFO):
            await stand.start(*engines, model={**IS_COMPARED, "tokenizer": str(tmp_path)})
            state = await stand.prompts()
            assert state["state"] == "DEGRADED"
            assert "tokenizer" in state["reason"]
            for _ in range(call["times"]):
                assert (await stand.ask(call["json"])).status_code == 200
        assert len(engines[0].seen) + len(engines[1].seen) == call["times"]
        said = [record for record in caplog.records if "DEGRADED" in record.getMessage()]
        assert [record.levelno for record in said] == [logging.WARNING]

    async def test_a_model_without_a_tokenizer_is_placed_by_load(self, stand: Stand) -> None:
        call = case_input("34")["client"][0]
        engines = self._engines(self.USAGE)
        await stand.start(*engines, model={"tokenizer": "none"})
        assert (await stand.prompts())["state"] == "DEGRADED"
        await asyncio.gather(*(stand.ask(call["json"]) for _ in range(20)))
        assert min(len(engine.seen) for engine in engines) > 0

    @pytest.mark.parametrize("off_by", [0, 1])
    async def test_a_prompt_that_the_engine_counts_otherwise_three_times_in_a_row(
        self, stand: Stand, off_by: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        (body,) = (call["json"] for call in case_input("34")["client"])
        engine = Engine("A")
        count = len(await engine.tokens(CHAT, body))
        states = []

        async def script(exchange: Exchange) -> None:
            await exchange.answer(whole_answer({"prompt_tokens": count + off_by, "completion_tokens": 1}))

        engine.script = script
        await stand.start(engine, model=IS_COMPARED)
        for _ in range(5):
            states.append((await stand.prompts())["state"])
            assert (await stand.ask(body)).status_code == 200
        assert states == (["EXACT"] * 3 + ["DEGRADED"] * 2 if off_by else ["EXACT"] * 5)
        said = [record for record in caplog.records if "DEGRADED" in record.getMessage()]
        assert len(said) == off_by
        if off_by:
            assert f"{count + 1} tokens where we count {count}" in (await stand.prompts())["reason"]


# https://github.com/AMD-AGI/Infera/pull/143, https://github.com/vllm-project/semantic-router/issues/3573
async def test_fields_that_change_the_prompt_change_its_key_or_leave_it_without_one(stand: Stand) -> None:
    """Compared block by block: the engine holds what it makes of each body, and all of that must be found."""
    engine = Engine("A", block_size=1)
    await stand.start(engine, model=IS_COMPARED)
    found = []
    for body in client_bodies("35"):
        asked = (await stand.explain(body))["request"]
        if asked["prompt_source"] == "none":
            found.append(asked["reason"])
            continue
        tokens = await engine.tokens(CHAT, body)
        await hold(stand, engine, tokens)
        decision = await stand.explain(body)
        assert decision["request"]["tokens"] == len(tokens)
        found.append(decision["candidates"][0]["held_tokens"]["gpu"] - len(tokens))
    assert found == [0] * 6 + ["the client brings its own chat template"]


# https://github.com/llm-d/llm-d-router/issues/1389, https://github.com/llm-d/llm-d-router/pull/1494
class TestSalts:
    async def _explained(self, stand: Stand, salt: str | None) -> list[dict[str, Any]]:
        body, _ = client_bodies("40")
        found = await stand.explain(body | ({"cache_salt": salt} if salt else {}), path=COMPLETIONS)
        return sorted(found["candidates"], key=lambda candidate: str(candidate["instance"]))

    async def test_a_prefix_is_found_by_its_own_salt_only(self, stand: Stand) -> None:
        holder, other = Engine("A"), Engine("B")
        await stand.start(holder, other)
        await stand.publish(next(kv_steps("40")))
        first, second = client_bodies("40")
        assert [c["hit_tokens"] for c in await self._explained(stand, "salt-T1")] == [4, 0]
        for salt in ("salt-T2", None):
            on_a, on_b = await self._explained(stand, salt)
            assert (on_a["hit_tokens"], on_a["held_tokens"]) == (0, {})
            assert on_a["cost"] == on_b["cost"], "it must be free to go to B"
        answers = [
            await stand.ask(body | {"cache_salt": salt}, path=COMPLETIONS)
            for body, salt in ((second, "salt-T2"), (first, "salt-T1"), (second, "salt-T3"))
        ]
        assert [answer.headers["x-warmroute-predicted-tokens"] for answer in answers] == ["0", "4", "0"]
        theirs = {name: value for name, value in answers[2].headers.items() if name not in ("x-request-id", "date")}
        before = {name: value for name, value in answers[0].headers.items() if name not in ("x-request-id", "date")}
        assert theirs == before, "that T1 was served in between shows nowhere"


# https://github.com/vllm-project/vllm/pull/51875, https://github.com/LMCache/LMCache/issues/1139
async def test_engines_that_hash_differently_are_matched_by_their_tokens(stand: Stand) -> None:
    await stand.start(Engine("A"), Engine("B"))
    for step in kv_steps("42"):
        await stand.publish(step)
    (body,) = client_bodies("42")
    assert await stand.overlap(body["prompt"]) == {"A": 8, "B": 4}
    await stand.ask(body, path=COMPLETIONS)
    assert len(stand.engines["A"].seen) == 1


# https://github.com/RightNow-AI/openfang/issues/73, https://github.com/anthropics/claude-code/issues/15395
class TestPromptsBeyondAscii:
    BODIES = client_bodies("96")

    def _engines(self, stand: Stand) -> tuple[Engine, Engine]:
        """They announce every prompt they compute, as engines do."""
        held: dict[str, set[str]] = {"A": set(), "B": set()}

        def computing(name: str) -> Engine:
            engine = Engine(name, block_size=16)

            async def script(exchange: Exchange) -> None:
                tokens = await engine.tokens(exchange.path, exchange.json)
                chains = [str(tokens[:end]) for end in range(16, len(tokens) + 1, 16)]
                new = [at for at, chain in enumerate(chains) if chain not in held[name]]
                if new:
                    held[name].update(chains)
                    await engine.port.publish(
                        stored("", tokens[16 * new[0] :], block_size=16)
                        | {
                            "block_hashes": chains[new[0] :],
                            "parent_block_hash": chains[new[0] - 1] if new[0] else None,
                        }
                    )
                await exchange.answer(whole_answer({"prompt_tokens": len(tokens), "completion_tokens": 1}))

            engine.script = script
            return engine

        return computing("A"), computing("B")

    async def test_they_pass_unchanged_and_come_back_to_where_they_were(self, stand: Stand) -> None:
        first, second = self._engines(stand)
        await stand.start(first, second, model=IS_COMPARED)
        assert len(self.BODIES) == 32
        rounds = []
        for _ in range(2):
            instances = []
            for body in self.BODIES:
                answer = await stand.ask(body)
                assert answer.status_code == 200
                instances.append((await stand.receipts())[0]["instance"])
            rounds.append(instances)
        assert sorted(x.body for x in (*first.seen, *second.seen)) == sorted(map(written, self.BODIES * 2))
        assert rounds[0] == rounds[1]
        assert set(rounds[0]) == {"A", "B"}
        assert (await stand.prompts())["state"] == "EXACT"  # each count of the engine was ours

    async def test_composed_and_decomposed_letters_are_different_prefixes(self, stand: Stand) -> None:
        engine = Engine("A", block_size=4)
        await stand.start(engine, model=IS_COMPARED)
        one, other = self.BODIES[8], self.BODIES[12]
        await hold(stand, engine, await engine.tokens(CHAT, one))
        template = await engine.tokens(CHAT, {"messages": [{"role": "user", "content": ""}]})
        assert (await stand.explain(one))["candidates"][0]["held_tokens"]["gpu"] > 60
        held = (await stand.explain(other))["candidates"][0]["held_tokens"]
        assert held.get("gpu", 0) <= len(template)

    async def test_without_a_tokenizer_their_keys_are_cut_the_same_way_every_time(self, stand: Stand) -> None:
        """Four bytes of UTF-8 stand for a token, wherever in a character they end."""
        await stand.start(Engine("A", ports=[], block_size=16), model={"tokenizer": "none"}, engine={"block_size": 16})
        for body in self.BODIES * 2:
            assert (await stand.ask(body)).status_code == 200
        again, first = (receipts := await stand.receipts())[:32], receipts[32:]
        assert [r["input_tokens"] for r in again] == [r["input_tokens"] for r in first]
        assert [r["predicted_hit_tokens"] for r in again] == [(r["input_tokens"] - 1) // 16 * 16 for r in again]
        assert {r["prompt_source"] for r in again} == {"approximate"}
