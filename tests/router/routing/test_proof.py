"""Engines that honour salts, or do not, and tell so in one way or another."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from router.core import EngineFacts, Instance, Load
from router.errors import EngineUnreachable
from router.routing import proof as module
from router.routing.proof import Proof, prove

INSTANCE = Instance("e", "http://e", "vllm", "m")
FACTS = EngineFacts(served=("m",), block_size=16, max_model_tokens=4_096)


class Engine:
    """A prefix cache of whole prompts. `tells`: by which of "events", "usage", "counters"."""

    name = "fake"

    def __init__(self, *tells: str, honours: bool = True, others: int = 0) -> None:
        self.tells = tells
        self.honours = honours
        self.others = others  # tokens that somebody else sends between two looks
        self.probes: list[tuple[int, str]] = []
        self.held: set[tuple[str, tuple[int, ...]]] = set()
        self.prompt_tokens = self.cached_tokens = 0

    async def probe(self, instance: Instance, tokens: list[int], salt: str, rank: int | None) -> int | None:
        self.probes.append((len(tokens), salt))
        name = (salt if self.honours else "", tuple(tokens))
        cached = len(tokens) // 16 * 16 if name in self.held else 0
        self.held.add(name)
        self.prompt_tokens += len(tokens)
        self.cached_tokens += cached
        return cached if "usage" in self.tells else None

    async def load(self, instance: Instance) -> Mapping[int, Load]:
        self.prompt_tokens += self.others
        if "counters" not in self.tells:
            return {0: Load(at=0.0)}
        return {0: Load(0.0, prompt_tokens_total=self.prompt_tokens, cached_tokens_total=self.cached_tokens)}

    async def saw_salt(self, tokens: list[int], salt: str, wait_s: float) -> bool:
        return "events" in self.tells and self.honours and (salt, tuple(tokens)) in self.held


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SETTLE_S", 0.0)


async def proven(engine: Engine, facts: EngineFacts = FACTS) -> Proof:
    return await prove(INSTANCE, engine, facts, engine.saw_salt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tells", "method", "probes"),
    [
        (("events", "usage", "counters"), "events", 2),
        (("events",), "events", 2),
        (("usage", "counters"), "usage", 3),
        (("counters",), "counters", 6),
    ],
)
async def test_is_seen_in_the_order_of_what_is_surest(tells: tuple[str, ...], method: str, probes: int) -> None:
    engine = Engine(*tells)
    found = await proven(engine)
    assert (found.verified, found.method) == (True, method)
    assert len(engine.probes) == probes
    assert {length for length, _ in engine.probes} == {257}  # an external cache keeps chunks of 256


@pytest.mark.parametrize("tells", [("usage",), ("counters",), ("usage", "counters")])
async def test_one_that_ignores_salts_is_refuted(tells: tuple[str, ...]) -> None:
    found = await proven(Engine(*tells, honours=False))
    assert not found.verified
    assert "reuses across cache salts (256 of 257 tokens)" in found.detail


async def test_events_do_not_outweigh_a_hit_across_salts() -> None:
    """As where an external cache behind the engine knows no salts."""
    engine = Engine("events", "usage", honours=False)

    async def saw(tokens: list[int], salt: str, wait_s: float) -> bool:
        return True

    found = await prove(INSTANCE, engine, FACTS, saw)  # type: ignore[arg-type]
    assert not found.verified


async def test_one_that_tells_nothing_is_not_believed_and_the_mend_is_said() -> None:
    found = await proven(Engine())
    assert (found.verified, found.method) == (False, "none")
    assert "--enable-prompt-tokens-details" in found.detail


async def test_counters_tell_nothing_while_others_use_the_engine() -> None:
    assert not (await proven(Engine("counters", others=7))).verified


async def test_no_prompt_is_longer_than_the_engine_takes() -> None:
    engine = Engine("usage")
    await proven(engine, EngineFacts(served=("m",), block_size=16, max_model_tokens=100))
    assert engine.probes[0][0] == 98


async def test_an_engine_that_does_not_answer_is_no_proof() -> None:
    engine = Engine()

    async def dead(*_: object) -> int:
        raise EngineUnreachable("gone")

    engine.probe = dead  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineUnreachable):
        await proven(engine)


async def test_an_adapter_without_a_probe_proves_nothing() -> None:
    class Bare:
        name = "bare"

    found = await prove(INSTANCE, Bare(), FACTS, Engine().saw_salt)  # type: ignore[arg-type]
    assert not found.verified
