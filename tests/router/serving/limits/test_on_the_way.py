"""Limits on a request's way, over real sockets: what is taken, what the client is told, and that all comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.core import Caller
from router.http.messages import Request
from router.serving.deadlines import TimeLimits
from router.store.limits import Limit
from tests.router.serving.limits.gateways import Gateways
from tests.router.serving.limits.stand import CALLER, MONDAY, limit, money
from tests.router.serving.limits.stand import Stand as Limited
from tests.router.serving.stand import EngineSide, Stand
from tests.router.serving.test_gateway import ANSWER, CHAT, DONE, STREAM, USAGE_CHUNK, chunk, echo, hang

LIMITS = (limit("requests", 5), limit("parallel", 2, ""), limit("tokens", 1000), money("0.01", "1d"))
MESSAGES = {"model": "m-chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
OF_PROMPT = 100  # what the prompt of the stand counts


def identify(request: Request) -> Caller:
    return Caller("ten_b", "proj_b", "key_b") if request.named.get(b"x-api-key") == b"b" else CALLER


async def start(stand: Stand, *scripts: Any, limits: tuple[Limit, ...] = LIMITS, **more: Any) -> Limited:
    limited = Limited(*limits)
    limited.now = MONDAY + 10
    await stand.start(*scripts, limiter=limited.limiter, identify=identify, **more)
    return limited


async def test_what_was_reserved_becomes_what_it_was(stand: Stand) -> None:
    held: list[list[int]] = []

    async def engine(side: EngineSide) -> None:
        held.append(limited.used())
        await side.whole(ANSWER)

    limited = await start(stand, engine)
    answer = await stand.ask(CHAT)
    assert answer.status == 200
    assert held == [[1, 1, OF_PROMPT + 16, OF_PROMPT * 10**6 + 16 * 10**7]]
    assert limited.used() == [1, 0, 121, 8 * 10**6 + 112 * 10**5 + 10**7]  # 120 in, 112 of them cached, 1 out


async def test_every_answer_tells_what_is_left(stand: Stand) -> None:
    await start(stand, echo)
    answer = await stand.ask(CHAT)
    left = {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit")}
    assert left == {
        "x-ratelimit-limit-requests": "5", "x-ratelimit-remaining-requests": "4", "x-ratelimit-reset-requests": "50s",
        "x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": str(1000 - OF_PROMPT - 16),
        "x-ratelimit-reset-tokens": "50s",
    }  # fmt: skip
    assert (await stand.ask(b"no JSON")).headers["x-ratelimit-remaining-requests"] == "3"


async def test_a_stream_tells_too(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.stream(chunk("a"), chunk("", "stop"), USAGE_CHUNK, DONE)

    limited = await start(stand, engine)
    answer = await stand.ask(STREAM)
    assert (answer.headers["x-ratelimit-remaining-requests"], answer.broken) == ("4", False)
    assert limited.used("parallel", "tokens") == [0, 121]


async def test_messages_are_told_in_their_own_words(stand: Stand) -> None:
    await start(stand, echo, limits=(limit("requests", 1),))
    first, second = [await stand.ask(MESSAGES, path="/v1/messages") for _ in range(2)]
    assert first.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert first.headers["anthropic-ratelimit-requests-reset"] == "2026-09-28T00:01:00Z"
    assert (second.status, second.headers["retry-after"]) == (429, "50")
    assert second.json["error"]["type"] == "rate_limit_error"


async def test_too_many_requests(stand: Stand) -> None:
    await start(stand, echo, limits=(limit("requests", 2),))
    answers = [await stand.ask(CHAT) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    refused = answers[-1]
    assert refused.json["error"] == {
        "message": "You have reached the limit of 2 requests per minute of this API key.",
        "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded",
    }  # fmt: skip
    assert refused.headers["retry-after"] == "50"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-should-retry" not in refused.headers
    assert len(stand.engine.seen) == 2
    assert len(stand.prompts.seen) == 2  # it is refused before its prompt is read
    assert (stand.outcomes[-1].status, stand.outcomes[-1].error) == (429, "rate_limit_exceeded")


async def test_a_spent_budget(stand: Stand) -> None:
    limited = await start(stand, echo, limits=(limit("requests", 9), money("0.00028", "1d")))
    answers = [await stand.ask(CHAT) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 429]
    refused = answers[-1]
    assert (refused.json["error"]["code"], refused.json["error"]["type"]) == ("budget_exceeded", "budget_exceeded")
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    assert len(stand.engine.seen) == 1
    assert limited.used("requests") == [1]


async def test_other_callers_are_not_limited(stand: Stand) -> None:
    await start(stand, echo, limits=(limit("requests", 0),))
    answer = await stand.ask(CHAT, headers={"x-api-key": "b"})
    assert (answer.status, [name for name in answer.headers if "ratelimit" in name]) == (200, [])
    assert (await stand.ask(CHAT)).status == 429


@pytest.mark.parametrize("when", ["queue", "prefill", "decode"])
async def test_a_client_that_leaves_gives_back_what_it_did_not_use(stand: Stand, when: str) -> None:
    async def engine(side: EngineSide) -> None:
        if when == "decode":
            await side.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(3):
                await side.chunk(chunk("a"))
        await side.until_gone()

    limited = await start(stand, engine)
    if when == "queue":
        stand.placement.gate = asyncio.Event()
    reader, writer = await stand.send(STREAM)
    if when == "decode":
        await reader.readuntil(b'"a"')
    await stand.until(lambda: bool(stand.placement.asks) and (when == "queue" or bool(stand.engine.seen)))
    assert limited.used("parallel", "tokens") == [1, OF_PROMPT + 16]
    writer.transport.abort()
    await stand.until(lambda: bool(stand.outcomes))
    requests, parallel, tokens, _ = limited.used()
    assert (requests, parallel, stand.outcome.finish) == (1, 0, "client_gone")
    assert tokens == {"queue": 0, "prefill": OF_PROMPT}.get(when, OF_PROMPT + stand.outcome.events)
    assert (stand.outcome.events > 0) is (when == "decode")


async def test_a_failed_request_costs_no_tokens(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(b'{"error": {"message": "x"}}', status=500)

    limited = await start(stand, engine)
    assert (await stand.ask(CHAT)).status == 500
    assert limited.used() == [1, 0, 0, 0]


async def test_of_two_attempts_one_is_charged(stand: Stand) -> None:
    async def busy(side: EngineSide) -> None:
        await side.whole(b'{"error": {"message": "x"}}', status=503)

    limited = await start(stand, busy, echo)
    assert (await stand.ask(CHAT)).status == 200
    assert limited.used("requests", "parallel", "tokens") == [1, 0, 121]


async def test_a_broken_stream_costs_no_tokens(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        await side.chunk(chunk("a"))
        side.reset()

    limited = await start(stand, engine)
    assert (await stand.ask(STREAM)).broken
    assert limited.used() == [1, 0, 0, 0]


async def test_a_request_whose_time_is_over_gives_all_back(stand: Stand) -> None:
    limited = await start(stand, hang, model={"limits": TimeLimits(first_byte_s=0.05)})
    assert (await stand.ask(CHAT)).status == 504
    assert limited.used() == [1, 0, 0, 0]


async def test_what_the_engine_refuses_costs_no_tokens(stand: Stand) -> None:
    async def engine(side: EngineSide) -> None:
        await side.whole(json.dumps({"error": {"message": "no", "code": 400}}).encode(), status=400)

    limited = await start(stand, engine)
    assert (await stand.ask(CHAT)).status == 400
    assert limited.used() == [1, 0, 0, 0]


async def test_an_end_of_the_gateway_gives_all_back(stand: Stand) -> None:
    limited = await start(stand, hang)
    asked = [asyncio.ensure_future(stand.ask(CHAT)) for _ in range(2)]
    await stand.until(lambda: len(stand.engine.seen) == 2)
    assert await stand.edge.end_all() == 2
    assert [answer.status for answer in await asyncio.gather(*asked)] == [503, 503]
    assert limited.used() == [2, 0, 0, 0]


async def test_a_mistake_of_ours_in_settling_spoils_no_answer(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    limited = await start(stand, echo)
    limited.limiter._counts_of = lambda outcome: {}["no such class"]
    assert (await stand.ask(CHAT)).status == 200
    assert "recording an outcome failed: KeyError" in caplog.text


async def test_over_redis(stand: Stand, gateways: Gateways) -> None:
    (limited,) = await gateways.start(1, *LIMITS)
    await stand.start(echo, limiter=limited.limiter, identify=identify)
    answers = [await stand.ask(CHAT) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]
    await limited.told()
    assert limited.used() == [5, 0, 605, 5 * (8 * 10**6 + 112 * 10**5 + 10**7)]
