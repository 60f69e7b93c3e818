"""Engines of one model that cannot all do the same."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.cases.engine import Engine, Exchange, Script, whole_answer
from tests.cases.stand import COMPLETIONS, Stand, case_input, ids_body


# https://github.com/getainode/ainode/issues/83
class TestImages:
    """SGLang tells whether it sees images (0.5.23: has_image_understanding). The engines here, made after vLLM 0.32,
    tell nothing of it: the operator says it."""

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

    async def test_go_to_an_engine_that_takes_them(self, stand: Stand) -> None:
        text = Engine(self.TEXT["id"], script=self._text_only(), lacks=["image"])
        both = Engine(self.BOTH["id"])
        await stand.start(text, both)
        answers = [await stand.ask(self.CALL["json"]) for _ in range(self.CALL["times"])]
        assert {answer.status_code for answer in answers} == {200}
        assert (len(text.seen), len(both.seen)) == (0, self.CALL["times"])

    async def test_that_nobody_takes_are_refused_here(self, stand: Stand) -> None:
        text = Engine(self.TEXT["id"], script=self._text_only(), lacks=["image"])
        await stand.start(text)
        answer = await stand.ask(self.CALL["json"])
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_content"
        assert "image" in answer.json()["error"]["message"]
        assert text.seen == []

    async def test_wait_for_the_engine_that_takes_them_rather_than_being_refused(self, stand: Stand) -> None:
        """It is away for now: that is no fault of the client's."""
        text = Engine(self.TEXT["id"], script=self._text_only(), lacks=["image"])
        await stand.start(text, both := Engine(self.BOTH["id"]))
        both.asleep = True

        async def is_asleep() -> bool:
            return (await stand.ask(self.CALL["json"])).status_code == 503

        await stand.until(is_asleep)
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
        for number in range(self.CALL["times"]):
            text = [{"role": "user", "content": f"{number} hello"}]
            assert (await stand.ask({**self.CALL["json"], "messages": text})).status_code == 200
        assert min(len(engine.seen) for engine in engines) > 0


# https://github.com/getainode/ainode/issues/83
class TestLength:
    """What fits is known before anything is sent."""

    def _body(self, tokens: int) -> dict[str, Any]:
        return ids_body(list(range(100, 100 + tokens)))

    async def test_decides_before_cost_does(self, stand: Stand) -> None:
        """The engine for which it is too long has nothing to do, the other one much."""
        over = asyncio.Event()

        async def script(exchange: Exchange) -> None:
            if len(exchange.json["prompt"]) > 10_000:
                await over.wait()
            await exchange.answer(whole_answer())

        short, long = Engine("SHORT", capacity_tokens=1_000), Engine("LONG", script=script, capacity_tokens=100_000)
        await stand.start(short, long, waiting_room={"enabled": False})
        busy = asyncio.ensure_future(stand.ask(self._body(20_000), path=COMPLETIONS))

        async def is_busy() -> bool:
            return len(long.seen) == 1

        await stand.until(is_busy)
        for _ in range(20):
            assert (await stand.ask(self._body(2_000), path=COMPLETIONS)).status_code == 200
        assert (len(short.seen), len(long.seen)) == (0, 21)
        found = await stand.explain(self._body(2_000), path=COMPLETIONS)
        assert found["filtered"] == {"SHORT/0": "2000 tokens do not fit"}
        over.set()
        await busy

    async def test_that_fits_nobody_is_refused_here(self, stand: Stand) -> None:
        short = Engine("SHORT", max_model_tokens=1_000)
        await stand.start(short)
        answer = await stand.ask(self._body(2_000), path=COMPLETIONS)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["message"] == "The model takes at most 1000 tokens; this prompt has 2000."
        assert short.seen == []
        assert (await stand.ask(self._body(1_000), path=COMPLETIONS)).status_code == 200

    async def test_that_no_cache_holds_is_the_engines_to_judge(self, stand: Stand) -> None:
        """How much its cache holds is not how long a prompt may be: some layers keep but a window of it."""
        short = Engine("SHORT", capacity_tokens=1_000)
        await stand.start(short)
        assert (await stand.ask(self._body(2_000), path=COMPLETIONS)).status_code == 200
