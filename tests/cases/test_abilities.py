"""Engines of one model that cannot all do the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.engine import Engine, Exchange, Script, whole_answer
from tests.cases.stand import COMPLETIONS, Stand, case_input, ids_body

# What engines can see is told by nobody in any protocol we know, so an operator has to say it: labels stand for whatever
# the configuration will have.
UNKNOWN = "the gateway does not know what kinds of content an engine takes"


# https://github.com/getainode/ainode/issues/83
class TestImages:
    CALL = case_input("60")["client"][0]
    TEXT, BOTH = case_input("60")["upstream"]

    def _text_only(self) -> Script:
        refusal = self.TEXT["on_image"]

        async def script(exchange: Exchange) -> None:
            if b"image_url" in exchange.body:
                await exchange.answer(refusal["json"], status=refusal["status"])
            else:
                await exchange.answer(whole_answer())

        return script

    @pytest.mark.xfail(strict=True, reason=UNKNOWN)
    async def test_go_to_an_engine_that_takes_them(self, stand: Stand) -> None:
        text, both = Engine(self.TEXT["id"], script=self._text_only()), Engine(self.BOTH["id"])
        await stand.start(text, both)
        answers = [await stand.ask(self.CALL["json"]) for _ in range(self.CALL["times"])]
        assert {answer.status_code for answer in answers} == {200}
        assert (len(text.seen), len(both.seen)) == (0, self.CALL["times"])

    @pytest.mark.xfail(strict=True, reason=UNKNOWN)
    async def test_that_nobody_takes_are_refused_here(self, stand: Stand) -> None:
        text = Engine(self.TEXT["id"], script=self._text_only())
        await stand.start(text)
        answer = await stand.ask(self.CALL["json"])
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
        assert text.seen == []

    async def test_that_an_engine_refuses_are_not_tried_elsewhere(self, stand: Stand) -> None:
        """A 400 is for the client: it is told why, and no second engine is asked."""
        engines = [Engine(name, script=self._text_only()) for name in ("A", "B")]
        await stand.start(*engines)
        answer = await stand.ask(self.CALL["json"])
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == self.TEXT["on_image"]["json"]["error"]["message"]
        assert sum(len(engine.seen) for engine in engines) == 1

    async def test_leave_text_to_both(self, stand: Stand) -> None:
        engines = [Engine(self.TEXT["id"], script=self._text_only()), Engine(self.BOTH["id"])]
        await stand.start(*engines)
        body = {**self.CALL["json"], "messages": [{"role": "user", "content": "hello"}]}
        for number in range(self.CALL["times"]):
            text = [{"role": "user", "content": f"{number} hello"}]
            assert (await stand.ask({**body, "messages": text})).status_code == 200
        assert min(len(engine.seen) for engine in engines) > 0


# https://github.com/getainode/ainode/issues/83
class TestLength:
    def _engine(self, name: str, *, capacity_tokens: int, refuses_from: int | None = None) -> Engine:
        async def script(exchange: Exchange) -> None:
            tokens = len(exchange.json["prompt"])
            if refuses_from is not None and tokens >= refuses_from:
                await exchange.answer({"error": {"message": "too long", "code": 400}}, status=400)
            else:
                await exchange.answer(whole_answer())

        return Engine(name, script=script, capacity_tokens=capacity_tokens)

    def _body(self, tokens: int) -> dict[str, Any]:
        return ids_body(list(range(100, 100 + tokens)))

    async def test_decides_before_cost_does(self, stand: Stand) -> None:
        """The engine for which it is too long has nothing to do, the other one much."""
        short, long = self._engine("SHORT", capacity_tokens=1_000), self._engine("LONG", capacity_tokens=100_000)
        await stand.start(short, long)
        for _ in range(20):
            assert (await stand.ask(self._body(2_000), path=COMPLETIONS)).status_code == 200
        assert (len(short.seen), len(long.seen)) == (0, 20)

    @pytest.mark.xfail(
        strict=True, reason="a prompt that fits no engine goes to one all the same, for its answer to be the client's"
    )
    async def test_that_fits_nobody_is_refused_here(self, stand: Stand) -> None:
        short = self._engine("SHORT", capacity_tokens=1_000, refuses_from=1_000)
        await stand.start(short)
        answer = await stand.ask(self._body(2_000), path=COMPLETIONS)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
        assert short.seen == []
