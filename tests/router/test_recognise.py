"""Which adapter an engine gets that is configured by its URL alone."""

from __future__ import annotations

import pytest

from router.config import Engine
from router.core import Instance
from router.errors import EngineError, EngineProtocolError, EngineTimeout, EngineUnreachable
from router.roster import recognise

URL = "http://engine:8000"


class Knows:
    def __init__(self, score: float | EngineError) -> None:
        self._score = score

    async def recognises(self, instance: Instance) -> float:
        if isinstance(self._score, EngineError):
            raise self._score
        return self._score


async def recognised(**scores: float | EngineError) -> str:
    return await recognise(Engine(url=URL), URL, {name: Knows(score) for name, score in scores.items()})


async def test_who_knows_it_best() -> None:
    assert await recognised(openai=0.1, sglang=1.0, vllm=0.0) == "sglang"
    assert await recognised(openai=0.1, sglang=0.0, vllm=0.0) == "openai"
    with pytest.raises(EngineProtocolError):
        await recognised(openai=0.0, sglang=0.0)


@pytest.mark.parametrize("fault", [EngineTimeout("slow"), EngineUnreachable("restarting")])
async def test_an_engine_too_busy_to_say_what_it_is_is_not_taken_for_the_next_best(fault: EngineError) -> None:
    """As an `openai` it would be without events for as long as it is there."""
    with pytest.raises(type(fault)):
        await recognised(openai=0.1, sglang=fault, vllm=0.0)
    assert await recognised(openai=fault, sglang=1.0, vllm=fault) == "sglang"


async def test_an_adapter_that_does_not_understand_the_answer_has_had_one() -> None:
    assert await recognised(openai=0.1, other=EngineProtocolError("no such page")) == "openai"
