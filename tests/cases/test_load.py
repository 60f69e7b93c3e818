"""What engines have to do decides where requests go, from the moment they are sent until they have ended."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from math import inf
from typing import Any

import pytest

from router.routing import learn
from router.routing.recent import RecentDispatches
from tests.cases import engine as scripted
from tests.cases.engine import Engine, Exchange, event, whole_answer
from tests.cases.events import stored
from tests.cases.stand import CHAT, COMPLETIONS, Stand, case_input, client_bodies, ids_body

GENERATE = "/inference/v1/generate"
TOKEN = event({"choices": [{"index": 0, "delta": {"content": "a"}, "text": "a", "finish_reason": None}]})
END = event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]}) + event("[DONE]")

AT_ARRIVAL: Mapping[str, Any] = {"waiting_room": {"enabled": False}}
BOTH_WAYS = [pytest.param({}, id="in_the_room"), pytest.param(AT_ARRIVAL, id="at_arrival")]
UNTIL_TOKENIZED = {"prompt": {"wait_ms": 20_000}}  # so that lengths are exact, however slow the machine


class Slow:
    """Answers one request for every `answer_one`. To a stream it gives a first token for every `start_one`."""

    def __init__(self) -> None:
        self._starts = asyncio.Semaphore(0)
        self._answers = asyncio.Semaphore(0)

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.json.get("stream"):
            await self._starts.acquire()
            await exchange.begin_stream()
            await exchange.chunk(TOKEN)
            await self._answers.acquire()
            await exchange.chunk(END)
            await exchange.chunk(b"")
        else:
            await self._answers.acquire()
            await exchange.answer(whole_answer())

    def start_one(self) -> None:
        self._starts.release()

    def answer_one(self) -> None:
        self._answers.release()

    def answer_all(self) -> None:
        for _ in range(1_000):
            self.start_one()
            self.answer_one()


class Caching:
    """Answers at once, and announces the blocks of the prompt as an engine does that had nothing of it."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.last_seq: int | None = None
        self._names = map(str, count())

    async def __call__(self, exchange: Exchange) -> None:
        engine = self.engine
        assert engine is not None
        tokens = await engine.tokens(exchange.path, exchange.json)
        if engine.ports:
            blocks = stored(f"{engine.name}.{next(self._names)}", tokens, block_size=engine.block_size)
            self.last_seq = await engine.port.publish(blocks)
        await exchange.answer(whole_answer())


def with_slow_engines(*names: str, **options: Any) -> tuple[list[Engine], list[Slow]]:
    scripts = [Slow() for _ in names]
    return [Engine(name, script=script, **options) for name, script in zip(names, scripts, strict=True)], scripts


def numbered(body: Mapping[str, Any], number: object) -> dict[str, Any]:
    """The case's `$i`, and `$uuid`."""
    text = json.dumps(body).replace("$i", str(number)).replace("$uuid", str(number))
    found: dict[str, Any] = json.loads(text)
    return found


def seen(engines: Sequence[Engine]) -> list[int]:
    return [len(engine.seen) for engine in engines]


def tokens_of_its_own(tokens: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(100, 1_000) for _ in range(tokens)]


def asking(stand: Stand, body: Any, *, path: str = CHAT) -> asyncio.Future[Any]:
    return asyncio.ensure_future(stand.ask(body, path=path))


async def all_placed_or_waiting(stand: Stand, engines: Sequence[Engine], requests: int) -> None:
    async def so_many() -> bool:
        page = await stand.metrics()
        waiting = page.get("warmroute_room_waiting", 0) + page.get("warmroute_room_held", 0)
        return sum(seen(engines)) + waiting == requests

    await stand.until(so_many, what=f"a place for {requests} requests")


async def have_seen(stand: Stand, engines: Sequence[Engine], counts: Sequence[int]) -> None:
    async def they_have() -> bool:
        return seen(engines) == list(counts)

    await stand.until(they_have, what=f"{counts} requests on the engines")


async def booked(stand: Stand) -> dict[str, tuple[int, int, float, int]]:
    """By engine: requests, prefills, ms of prefill, KV tokens."""
    return {
        row["instance"]: (
            row["booked_requests"],
            row["booked_prefills"],
            row["booked_prefill_ms"],
            row["booked_kv_tokens"],
        )
        for row in await stand.fleet_rows()
    }


# https://github.com/vllm-project/production-stack/pull/1035, https://github.com/sgl-project/sglang/pull/32195
class TestAPopularPrefix:
    @pytest.mark.parametrize(
        "path",
        [
            CHAT,
            COMPLETIONS,
            GENERATE,
        ],
    )
    async def test_counts_as_load_on_every_route(self, stand: Stand, path: str) -> None:
        engines, (script,) = with_slow_engines("A")
        await stand.start(*engines, **UNTIL_TOKENIZED)
        chat, text = client_bodies("52")
        asked = asking(stand, chat if path == CHAT else text, path=path)
        await stand.until(partial(self._is_sent_or_refused, engines[0], asked))
        ((requests, prefills, prefill_ms, kv_tokens),) = (await booked(stand)).values()
        assert (requests, prefills) == (1, 1)
        assert prefill_ms > 0
        assert kv_tokens >= 8_000  # as many as the words of the prompt
        script.answer_all()
        assert (await asked).status_code == 200

    async def _is_sent_or_refused(self, engine: Engine, asked: asyncio.Future[Any]) -> bool:
        return bool(engine.seen) or asked.done()

    async def test_that_is_too_busy_gives_way_to_a_shorter_part_of_it(self, stand: Stand) -> None:
        """A holds the whole prompt and has much to do; B holds the first half of it, C nothing."""
        engines, scripts = with_slow_engines("A", "B", "C")
        await stand.start(*engines)
        prompt, long = tokens_of_its_own(2_048, 1), tokens_of_its_own(10_000, 2)
        held = (prompt, prompt[:1_024])
        for engine, tokens in zip(engines, held, strict=False):
            seq = await engine.port.publish(stored(engine.name, tokens, block_size=engine.block_size))
            await stand.heard(engine.name, seq)
        seq = await engines[0].port.publish(stored("long", long[:400], block_size=engines[0].block_size))
        await stand.heard("A", seq)
        asked = [asking(stand, ids_body(long), path=COMPLETIONS)]
        await have_seen(stand, engines, [1, 0, 0])
        asked.append(asking(stand, ids_body([*prompt, 7]), path=COMPLETIONS))
        await have_seen(stand, engines, [1, 1, 0])
        for script in scripts:
            script.answer_all()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]


# https://github.com/sgl-project/sglang/pull/14305, https://github.com/sgl-project/sglang/pull/14532
class TestAMiss:
    """A has much to do and holds little, B has nothing to do and holds much."""

    async def _start(self, stand: Stand, *, busy_tokens: int, stream: bool, **sections: Any) -> asyncio.Future[Any]:
        told_a, told_b = case_input("53")["upstream"]
        engines, _ = with_slow_engines("A", "B")
        await stand.start(*engines, **sections)
        busy = tokens_of_its_own(busy_tokens, 1)
        await self._hold(stand, engines[0], busy[: told_a["kv_blocks"] * engines[0].block_size])
        await self._hold(stand, engines[1], tokens_of_its_own(told_b["kv_blocks"] * engines[1].block_size, 2))
        asked = asking(stand, ids_body(busy) | {"stream": stream, "max_tokens": 16}, path=COMPLETIONS)
        await have_seen(stand, engines, [1, 0])
        return asked

    async def _hold(self, stand: Stand, engine: Engine, tokens: list[int]) -> None:
        """In batches of 1,000 blocks."""
        size, parent, seq = engine.block_size, None, None
        step = 1_000 * size
        for n, at in enumerate(range(0, len(tokens), step)):
            part = tokens[at : at + step]
            seq = await engine.port.publish(stored(f"{n}", part, block_size=size, parent=parent))
            parent = f"{n}" if len(part) == size else f"{n}.{len(part) // size - 1}"
        await stand.heard(engine.name, seq)

    @pytest.mark.parametrize("sections", BOTH_WAYS)
    @pytest.mark.parametrize("decodes", [False, True])
    async def test_goes_to_the_idle_engine(self, stand: Stand, decodes: bool, sections: Mapping[str, Any]) -> None:
        told = case_input("53")
        busy = await self._start(stand, busy_tokens=told["upstream"][0]["inflight_tokens"], stream=True, **sections)
        a, b = stand.engines.values()
        if decodes:
            assert isinstance(a.script, Slow)
            a.script.start_one()
            await stand.until(partial(self._decodes, stand, "A"))
        b.script = scripted.answer_ok
        (call,) = told["client"]
        for number in range(call["times"]):
            assert (await stand.ask(numbered(call["json"], number))).status_code == 200
        assert seen([a, b]) == [1, call["times"]]
        assert {row["instance"]: row["index_blocks"] for row in await stand.fleet()} == {"A": 10, "B": 50_000}
        assert isinstance(a.script, Slow)
        a.script.answer_all()
        await busy

    async def _decodes(self, stand: Stand, engine: str) -> bool:
        requests, prefills, *_ = (await booked(stand))[engine]
        return (requests, prefills) == (1, 0)

    async def test_goes_to_either_once_they_have_as_much_to_do(self, stand: Stand) -> None:
        asked = [await self._start(stand, busy_tokens=3_000, stream=False, **AT_ARRIVAL)]
        engines = list(stand.engines.values())
        for number in range(16):
            body = ids_body(tokens_of_its_own(500, 10 + number))
            asked.append(asking(stand, body, path=COMPLETIONS))
            await all_placed_or_waiting(stand, engines, number + 2)
            if number < 5:
                assert seen(engines) == [1, number + 1]
        a, b = seen(engines)
        assert abs((3_000 + (a - 1) * 500) - b * 500) <= 500
        for engine in engines:
            assert isinstance(engine.script, Slow)
            engine.script.answer_all()
        await asyncio.gather(*asked)


# https://github.com/ai-dynamo/dynamo/pull/8276, https://github.com/ai-dynamo/dynamo/pull/1869
class TestSiblings:
    @pytest.mark.parametrize("sections", BOTH_WAYS)
    async def test_go_where_the_first_of_them_went(self, stand: Stand, sections: Mapping[str, Any]) -> None:
        """No event tells of it yet."""
        call = case_input("56")["client"][0]
        told = case_input("56")["upstream"]
        engines, scripts = with_slow_engines(*(row["id"] for row in told), block_size=16)
        tokens = await engines[0].tokens(CHAT, call["json"])
        rates = {"c1_ms": told[0]["prefill_ms"] / len(tokens), "c2_ms": 0}
        await stand.start(*engines, engine={"rates": rates}, **UNTIL_TOKENIZED, **sections)
        asked = [asking(stand, call["json"]) for _ in range(call["concurrent"])]
        await all_placed_or_waiting(stand, engines, call["concurrent"])
        for script in scripts:
            script.answer_all()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert len([engine for engine in engines if engine.seen]) <= 2

    async def test_are_not_sent_after_one_that_failed(self, stand: Stand) -> None:
        await self._send_one(stand, status=500)
        assert await self._hits(stand) == {"A": 0, "B": 0}

    async def test_are_not_sent_after_one_of_long_ago(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("router.app.RecentDispatches", partial(RecentDispatches, ttl_s=2.0))
        await self._send_one(stand, status=200)

        async def is_forgotten() -> bool:
            return await self._hits(stand) == {"A": 0, "B": 0}

        await stand.until(is_forgotten, what="that nothing is expected any more")

    async def _send_one(self, stand: Stand, *, status: int) -> None:
        """Its prompt is expected to be held where it was sent, while it is under way."""
        while_under_way: list[list[int]] = []

        async def script(exchange: Exchange) -> None:
            while_under_way.append(sorted((await self._hits(stand)).values()))
            await exchange.answer(whole_answer(), status=status)

        await stand.start(Engine("A", script=script), Engine("B", script=script), **UNTIL_TOKENIZED)
        (body,) = client_bodies("56")
        assert (await stand.ask(body)).status_code >= status
        ((elsewhere, there),) = while_under_way
        assert elsewhere == 0
        assert there > 50_000

    async def _hits(self, stand: Stand) -> dict[str, int]:
        (body,) = client_bodies("56")
        return {c["instance"]: c["hit_tokens"] for c in (await stand.explain(body))["candidates"]}


# https://github.com/AMD-AGI/Infera/pull/103
@pytest.mark.parametrize("events", [True, False])
async def test_sessions_that_come_one_at_a_time_are_spread_and_stay(
    stand: Stand, events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are alike; by how long they take here, on a busy machine, one may seem the faster, and gets more."""
    monkeypatch.setattr(learn, "MEASURABLE_MS", inf)
    (call,) = case_input("57")["client"]
    scripts = [Caching(), Caching()]
    engines = [
        Engine(name, script=script, block_size=16, ports=None if events else ())
        for name, script in zip("AB", scripts, strict=True)
    ]
    for engine, script in zip(engines, scripts, strict=True):
        script.engine = engine
    # A session's first turn takes 20 ms; what all sessions have in common, less than a third of a millisecond.
    await stand.start(*engines, engine={"rates": {"c1_ms": 0.02}})
    chats = [_Session(call["json"], number) for number in range(call["sessions"])]
    for turn in range(call["turns"]):
        for chat in chats:
            before = seen(engines)
            await stand.ask(chat.turn(turn))
            chat.engines += [n for n in range(2) if seen(engines)[n] > before[n]]
            for engine, script in zip(engines, scripts, strict=True):
                if script.last_seq is not None:
                    await stand.heard(engine.name, script.last_seq)
    assert {len(chat.engines) for chat in chats} == {call["turns"]}
    assert {len(set(chat.engines)) for chat in chats} == {1}
    on_a = sum(chat.engines[0] == 0 for chat in chats) / len(chats)
    assert 0.4 <= on_a <= 0.6


class _Session:
    """A conversation. `engines`: the engine of each turn so far."""

    def __init__(self, body: Mapping[str, Any], number: int) -> None:
        self._body = numbered(body, number)
        self._said: list[dict[str, str]] = []
        self.engines: list[int] = []

    def turn(self, number: int) -> dict[str, Any]:
        """The body of the next turn: all that was said, and the case's message."""
        if self._said:
            self._said.append({"role": "assistant", "content": "ok"})
        (message,) = self._body["messages"]
        self._said.append({**message, "content": message["content"].replace("$t", str(number))})
        return {**self._body, "messages": list(self._said)}


# https://github.com/sgl-project/sglang-omni/issues/921, https://github.com/vllm-project/vllm/pull/49174
async def test_what_an_engine_holds_is_read_and_long_prompts_go_where_they_fit(stand: Stand) -> None:
    told = {row["id"]: row["kv_capacity_tokens"] for row in case_input("58")["upstream"]}
    engines = [Engine(name, capacity_tokens=tokens) for name, tokens in told.items()]
    await stand.start(*engines)
    assert {row["instance"]: row["capacity_tokens"] for row in await stand.fleet()} == told
    for number in range(8):
        await stand.ask(ids_body(tokens_of_its_own(told["SMALL"] + 1, number)), path=COMPLETIONS)
    assert {engine.name: len(engine.seen) for engine in engines} == {"BIG": 8, "SMALL": 0}


# https://github.com/smg-project/smg/pull/1714
class TestALongPrefill:
    @pytest.mark.parametrize("sections", BOTH_WAYS)
    async def test_counts_from_its_dispatch_on(self, stand: Stand, sections: Mapping[str, Any]) -> None:
        """Eight at the same time are two to an engine: at once, or as soon as its first one is over."""
        (call,) = case_input("59")["client"]
        engines, scripts = with_slow_engines(*(row["id"] for row in case_input("59")["upstream"]))
        # Of a whole answer nothing tells the first token: a prefill is over when it should be, here after a minute.
        await stand.start(*engines, engine={"rates": {"c1_ms": 1, "c2_ms": 0}}, **UNTIL_TOKENIZED, **sections)
        asked = [asking(stand, numbered(call["json"], number)) for number in range(call["concurrent"])]
        await all_placed_or_waiting(stand, engines, call["concurrent"])
        if not sections:
            assert seen(engines) == [1, 1, 1, 1]
            for script in scripts:
                script.answer_one()
        await have_seen(stand, engines, [2, 2, 2, 2])
        for script in scripts:
            script.answer_all()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert seen(engines) == [2, 2, 2, 2]

    async def test_becomes_decode_at_its_first_token(self, stand: Stand) -> None:
        (call,) = case_input("59")["client"]
        engines, (script,) = with_slow_engines("I0")
        await stand.start(*engines, **UNTIL_TOKENIZED)
        asked = asking(stand, numbered(call["json"], 0) | {"stream": True})
        await have_seen(stand, engines, [1])
        requests, prefills, prefill_ms, kv_tokens = (await booked(stand))["I0"]
        assert (requests, prefills) == (1, 1)
        assert prefill_ms > 0
        assert kv_tokens > 60_000
        script.start_one()

        async def decodes() -> bool:
            return (await booked(stand))["I0"] == (1, 0, 0.0, kv_tokens)

        await stand.until(decodes, what="its decode")
        script.answer_one()
        await asked

        async def is_over() -> bool:
            return (await booked(stand))["I0"] == (0, 0, 0.0, 0)

        await stand.until(is_over, what="its end")
