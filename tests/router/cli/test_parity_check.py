"""Doctor's parity check, with an engine that reads as we do and one that doesn't."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from router import config
from router.cli.checkup import Finding
from router.cli.parity_check import check_parity
from router.core import EngineFacts, Instance
from router.errors import EngineProtocolError
from router.serving.prompt import load_prompts

INSTANCE = Instance("e1", "http://engine", "vllm", "m")
FACTS = EngineFacts(("m",))


class Tokenizing:
    """What the check uses of an adapter. spoil: what is added to every answer."""

    name = "vllm"

    def __init__(self, *, spoil: list[int] | None = None, able: bool = True) -> None:
        self._spoil = spoil or []
        self._able = able
        with ThreadPoolExecutor(1) as executor:
            self._prompts = load_prompts("m", tokenizer="demo", secret=b"s", block_sizes=tuple, executor=executor)

    async def tokenize(self, _: Instance, path: str, body: Mapping[str, Any]) -> list[int]:
        if not self._able:
            raise EngineProtocolError("the engine has no /tokenize")
        assert self._prompts.dialect is not None
        return self._prompts.token_ids(path, body, self._prompts.dialect) + self._spoil


async def _finding(adapter: Tokenizing, *, tokenizer: str | None = "demo", facts: EngineFacts = FACTS) -> Finding:
    found = config.from_flags(["http://engine"], flags={"tokenizer": tokenizer}, environ={})
    return await check_parity(found, INSTANCE, facts, adapter)  # type: ignore[arg-type]


async def test_an_engine_that_reads_as_we_do() -> None:
    finding = await _finding(Tokenizing())
    assert finding.state == "ok"
    assert "probes agree" in finding.seen


async def test_one_token_more_is_a_failure_with_its_mend() -> None:
    finding = await _finding(Tokenizing(spoil=[7]))
    assert finding.state == "fail"
    assert "differs from token" in finding.seen
    assert "tokenizer directory" in finding.mend


async def test_an_engine_that_cannot_tokenize() -> None:
    assert (await _finding(Tokenizing(able=False))).state == "warn"


@pytest.mark.parametrize("tokenizer", ["engine", "none"])
async def test_nothing_to_compare_where_the_engine_tokenizes(tokenizer: str) -> None:
    assert (await _finding(Tokenizing(), tokenizer=tokenizer)).state == "skip"


async def test_without_a_tokenizer_the_mend_says_where_to_put_one() -> None:
    facts = msgspec.structs.replace(FACTS, model_path="/models/not/here")
    finding = await _finding(Tokenizing(), tokenizer=None, facts=facts)
    assert finding.state == "skip"
    assert "models.m.tokenizer" in finding.mend
