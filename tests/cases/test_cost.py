"""What requests cost: each token once, at the price of its class, and never more than is known."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from decimal import Decimal
from typing import Any

from sqlalchemy import insert, select, update

from router.store.database import open_database
from router.store.schema import changes, prices, requests
from tests.cases.engine import MODEL, Engine, Exchange, event, streaming, whole_answer
from tests.cases.stand import CHAT, Stand, case_input, client_bodies, request_head, written

FULL = {"uncached_input": "1.25", "cache_read": "0.31", "output": "10"}


async def rows(stand: Stand, url: str, count: int) -> list[dict[str, Any]]:
    """So many rows as the database has them, oldest first."""
    found: list[dict[str, Any]] = []
    database = open_database(url)

    async def are_there() -> bool:
        async with database.read() as connection:
            read = await connection.execute(select(requests).order_by(requests.c.at))
            found[:] = [dict(row) for row in read.mappings()]
        return len(found) >= count

    await stand.until(are_there, what=f"{count} rows")
    await database.aclose()
    assert len(found) == count
    return found


async def set_price(url: str, per_million: dict[str, str]) -> None:
    """For everybody and every model."""
    database = open_database(url)
    row = {
        "id": "price_1", "model": "*", "tenant": None, "currency": "USD", "per_million": per_million,
        "valid_from": 0.0, "valid_to": None, "created_at": 0.0, "revision": 1,
    }  # fmt: skip
    async with database.write() as connection:
        await connection.execute(update(changes).values(revision=1))
        await connection.execute(insert(prices).values(row))
    await database.aclose()


def hello(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}


def counts(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """Uncached input, read from the cache, media, output."""
    return tuple(row[f"{name}_tokens"] for name in ("uncached_input", "cache_read", "media_input", "output"))  # type: ignore[return-value]


# https://github.com/BerriAI/litellm/issues/14849, https://github.com/BerriAI/litellm/issues/22984
async def test_each_token_is_billed_once_in_its_class(stand: Stand, sqlite_url: str) -> None:
    case = case_input("82")
    usages = iter(case["usage_samples"])

    async def script(exchange: Exchange) -> None:
        await exchange.answer(whole_answer(next(usages)))

    said = case["prices_per_million"]
    await set_price(
        sqlite_url,
        {"uncached_input": said["input"], "cache_read": said["cached_input"], "output": said["output"]},
    )
    await stand.start(Engine("A", script=script), store={"url": sqlite_url})
    for _ in case["usage_samples"]:
        await stand.ask(hello())
    openai, anthropic, pictures, too_many, untold = await rows(stand, sqlite_url, 5)
    assert openai["cost"] == anthropic["cost"] == Decimal("0.1036623")
    assert counts(openai) == counts(anthropic) == (5005, 257955, 0, 1744)
    assert openai["cost_without_cache"] == Decimal("0.34614")
    assert counts(pictures) == (0, 900, 100, 10)  # a cached picture is cached, and not a picture too
    assert (counts(too_many), too_many["estimated"]) == ((0, 10, 0, 1), True)
    assert (counts(untold), untold["cached_known"], untold["cost"]) == ((10, 0, 0, 0), False, Decimal("0.0000125"))
    assert {row["price"] for row in (openai, anthropic, pictures, too_many, untold)} == {"price_1"}


# https://github.com/vllm-project/vllm/issues/44377, https://github.com/vllm-project/vllm/issues/16162
async def test_what_an_engine_does_not_say_is_not_zero(stand: Stand, sqlite_url: str) -> None:
    usages = iter(case_input("83")["usage_samples"])

    async def script(exchange: Exchange) -> None:
        await exchange.answer(whole_answer(next(usages)))

    await set_price(sqlite_url, FULL)
    await stand.start(Engine("A", script=script), store={"url": sqlite_url})
    for _ in range(4):
        await stand.ask(hello())
    found = await rows(stand, sqlite_url, 4)
    assert [row["cached_known"] for row in found] == [False, False, True, False]
    assert {counts(row) for row in found} == {(100, 0, 0, 1)}
    assert {row["estimated"] for row in found} == {False}
    assert {row["cost"] for row in found} == {Decimal("0.000135")}
    metrics = await stand.metrics()
    assert sum(count for name, count in metrics.items() if "cached_unknown_requests_total" in name) == 3


# https://github.com/BerriAI/litellm/issues/14457, https://github.com/BerriAI/litellm/pull/33736
async def test_an_answer_that_is_left_is_billed_as_far_as_it_came(stand: Stand, sqlite_url: str) -> None:
    """After 37 events; before the first; a whole one before it came."""
    chunks = [event(chunk) for chunk in case_input("84")["upstream"][0]["sse"][:37]]
    assert len(chunks) == 37
    left = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if len(stand.engines["A"].seen) == 1:
            await exchange.begin_stream()
            for chunk in chunks:
                await exchange.chunk(chunk)
        await exchange.until_gone()
        left.set()

    await stand.start(Engine("A", script=script), store={"url": sqlite_url})
    bodies = client_bodies("84")
    for body in bodies:
        left.clear()
        async with stand.connection() as (reader, writer):
            writer.write(request_head(body, {}) + written(body))
            if body is bodies[0]:
                received = b""
                while received.count(b"data: ") < 37:
                    received += await reader.read(65536)
            await stand.until(seen(stand.engines["A"], bodies.index(body) + 1))
        await left.wait()
    found = await rows(stand, sqlite_url, 3)
    prompt = len(await stand.engines["A"].tokens(CHAT, bodies[0]))
    assert [counts(row) for row in found] == [(prompt, 0, 0, 37), (prompt, 0, 0, 0), (prompt, 0, 0, 0)]
    for row in found:
        assert (row["finish"], row["estimated"], row["cached_known"]) == ("client_gone", True, False)


def seen(engine: Engine, count: int) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        return len(engine.seen) == count

    return is_so


async def test_an_explicit_zero_stays_zero(stand: Stand, sqlite_url: str) -> None:
    zero = {
        "prompt_tokens": 9,
        "completion_tokens": 0,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    choice = {"index": 0, "delta": {"content": "t"}, "finish_reason": "stop"}
    chunks = [{"choices": [choice]}, {"choices": [], "usage": zero}, "[DONE]"]
    await stand.start(Engine("A", script=streaming(chunks)), store={"url": sqlite_url})
    await stand.ask(hello(stream=True))
    (row,) = await rows(stand, sqlite_url, 1)
    assert (counts(row), row["estimated"], row["cached_known"]) == ((9, 0, 0, 0), False, True)


# https://github.com/bytedance/deer-flow/issues/3353
async def test_a_locked_database_and_a_full_disk_fail_no_request(stand: Stand, sqlite_url: str) -> None:
    await stand.start(Engine("A"), store={"url": sqlite_url})
    (body,) = client_bodies("88")

    async def ask_some() -> None:
        answers = await asyncio.gather(*[stand.ask(body) for _ in range(20)])
        assert {answer.status_code for answer in answers} == {200}

    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as other:
        other.execute("BEGIN IMMEDIATE")
        await ask_some()
        other.rollback()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file takes another byte
    try:
        await ask_some()
        held = (await stand.metrics())["warmroute_ledger_spool_held_bytes"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert held > 0
    found = await rows(stand, sqlite_url, 40)
    assert len({row["id"] for row in found}) == 40
    assert (await stand.metrics())["warmroute_ledger_spool_lost_total"] == 0
