"""Anthropic's Messages, OpenAI's Responses and forms: what the engine serves natively reaches it as it came."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tests.cases.engine import MODEL, Engine, Exchange
from tests.cases.events import stored
from tests.cases.stand import CHAT, Stand, case_input, written


# https://github.com/BerriAI/litellm/issues/40780, https://github.com/BerriAI/litellm/pull/38657
class TestMessages:
    async def test_pass_and_are_counted_with_what_was_cached(self, stand: Stand) -> None:
        case = case_input("29")
        call, told = case["client"][0], case["upstream"][0]["raw_sse_text"].encode()

        async def script(exchange: Exchange) -> None:
            await exchange.stream(told)

        await stand.start(Engine(script=script))
        sent = written(call["json"])
        answer = await stand.ask(sent, path=call["path"], headers=call["headers"])
        assert answer.content == told
        (seen,) = stand.engines["A"].seen
        assert (seen.path, seen.body) == ("/v1/messages", sent)
        assert "x-api-key" not in seen.headers
        receipt = await stand.receipt(answer)
        counts = {"input_tokens": 72, "output_tokens": 7, "cached_tokens": 32}
        assert receipt["usage"].items() >= counts.items()
        assert (receipt["finish"], receipt["prompt_source"]) == ("complete", "approximate")  # there is an image in it

    async def test_tokens_are_counted_by_the_engine(self, stand: Stand) -> None:
        call = case_input("29")["client"][1]

        async def script(exchange: Exchange) -> None:
            await exchange.answer({"input_tokens": 11})

        await stand.start(Engine(script=script))
        answer = await stand.ask(call["json"], path=call["path"])
        assert answer.json() == {"input_tokens": 11}

    async def test_are_placed_by_the_chat_that_the_engine_makes_of_them(self, stand: Stand) -> None:
        """System blocks, tools and turns take part, and so does a salt."""
        holder, idle = Engine("A", block_size=4), Engine("B", block_size=4)
        await stand.start(idle, holder)
        body = case_input("29")["client"][0]["json"] | {"stream": False}
        body["messages"][0]["content"] = body["messages"][0]["content"][:1]
        tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}}}
        messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "hi"}]
        tokens = await holder.tokens(CHAT, {"messages": messages, "tools": [tool]})
        seq = await holder.port.publish(stored("x", tokens, block_size=4))
        await stand.heard("A", seq)
        found = await stand.explain(body, path="/v1/messages")
        assert found["request"]["tokens"] == len(tokens)
        assert self._hits(found) == {"A": (len(tokens) - 1) // 4 * 4, "B": 0}
        for other in ({"cache_salt": "tenant"}, {"system": "other"}, {"tools": []}):
            assert max(self._hits(await stand.explain(body | other, path="/v1/messages")).values()) < 8

    def _hits(self, found: dict[str, Any]) -> dict[str, int]:
        return {candidate["instance"]: candidate["hit_tokens"] for candidate in found["candidates"]}

    async def test_an_empty_conversation_is_the_engines_to_refuse(self, stand: Stand) -> None:
        call = case_input("29")["client"][2]

        async def script(exchange: Exchange) -> None:
            error = {"type": "BadRequestError", "message": "messages must not be empty"}
            await exchange.answer({"type": "error", "error": error}, status=400)

        await stand.start(Engine(script=script))
        answer = await stand.ask(call["json"], path=call["path"])
        assert answer.status_code == 400
        assert answer.json() == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "messages must not be empty"},
            "request_id": answer.headers["x-request-id"],
        }


# https://github.com/ggml-org/llama.cpp/issues/22044, https://github.com/smg-project/smg/pull/1256
class TestForms:
    async def test_reach_the_engine_byte_for_byte(self, stand: Stand) -> None:
        """The sound is full of what a boundary begins with, and the model comes after it."""
        call = case_input("27")["client"][0]
        sound = bytes.fromhex(call["file"]["bytes"]["repeat_hex"]) * call["file"]["bytes"]["times"]

        async def script(exchange: Exchange) -> None:
            await exchange.answer({"text": hashlib.sha256(exchange.body).hexdigest()})

        await stand.start(Engine(script=script))
        head = b'--XX\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        fields = call["fields"] | {"model": MODEL}
        parts = [head % (name.encode(), b"", value.encode()) for name, value in reversed(fields.items())]
        sent = b"".join((head % (b"file", b'; filename="a"', sound), *parts, b"--XX--\r\n"))
        how = {"content-type": "multipart/form-data; boundary=XX"}
        answer = await stand.ask(sent, path=call["path"], headers=how)
        assert answer.json() == {"text": hashlib.sha256(sent).hexdigest()}
        assert stand.engines["A"].seen[0].headers["content-type"] == how["content-type"]

    async def test_that_are_malformed_are_refused(self, stand: Stand) -> None:
        call = case_input("27")["client"][1]
        await stand.start(Engine())
        answer = await stand.ask(call["body"].encode(), path=call["path"], headers=call["headers"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
        assert stand.engines["A"].seen == []


# https://github.com/AMD-AGI/Infera/pull/143
class TestResponses:
    async def test_turns_of_a_conversation_stay_together(self, stand: Stand) -> None:
        """Twenty conversations, half of them with tools, on two engines that are equally idle."""

        async def script(exchange: Exchange) -> None:
            await exchange.answer({"object": "response", "output": []})

        await stand.start(*(Engine(name, script=script, block_size=4) for name in "AB"))
        instances = []
        text, items = (call["json"] for call in case_input("36")["client"])
        for number in range(20):
            tools = {"tools": [{"type": "function", "name": "f", "parameters": {}}]} if number % 2 else {}
            first = text | tools | {"instructions": f"sys {number}", "input": f"hello from user {number}"}
            second = items | tools | {"instructions": f"sys {number}"}
            second["input"] = [{"role": "user", "content": first["input"]}, *items["input"][1:]]
            if not tools:
                second["input"][1:] = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
            turns = [await self._placed(stand, body) for body in (first, second)]
            assert turns[0][0] == turns[1][0], number
            assert {source for _, source in turns} == {"approximate" if tools else "exact"}
            assert turns[0][1] != "none"
            instances.append(turns[0][0])
        assert set(instances) == {"A", "B"}

    async def _placed(self, stand: Stand, body: dict[str, Any]) -> tuple[str, str]:
        answer = await stand.ask(json.dumps(body).encode(), path="/v1/responses")
        assert answer.status_code == 200
        receipt = await stand.receipt(answer)
        return receipt["instance"], receipt["prompt_source"]

    async def test_none_of_the_cases_is_without_a_key(self, stand: Stand) -> None:
        await stand.start(Engine(block_size=1))
        sources = []
        for call in case_input("36")["client"]:
            found = await stand.explain(call["json"], path=call["path"])
            sources.append(found["request"]["prompt_source"])
        assert sources == ["exact", "approximate"]
