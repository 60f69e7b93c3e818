"""The ledger: what it costs a request, and how fast rows come into a database.

python -m tests.bench.ledger [--rows 30000] [--runs 5] [--seconds 3]

On the loop: the open mark and the end, each one write to a file, beside two bare writes of as many bytes. Rows a
second: from a spool to SQLite, and to a PostgreSQL from a wheel, beside inserting alone. Latency: a gateway with and
without, in turns, on a core of its own; paced (64 connections, each a request every 50 ms) and as fast as it goes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
from sqlalchemy import insert

from router.core import OPEN, Booking, Outcome, Prompt, Usage
from router.serving.call import CHAT, Call
from router.serving.ledger.ledger import Ledger
from router.serving.ledger.reading import Reader
from router.serving.ledger.rows import row_of
from router.serving.ledger.spool import Spool
from router.serving.ledger.writer import BATCH, Writer, WriterSettings
from router.serving.models import Models, ServedModel
from router.serving.pricing import PriceBook
from router.serving.reply import Reply
from router.store.database import Database, open_database
from router.store.migrate import upgrade
from router.store.schema import requests
from tests.bench.processes import LOAD_CORE, fake_engines, gateway, load
from tests.bench.table import Row, report
from tests.servers import NoServer, Postgres

TAKES_S = 180
WRITER_APART = "saturated, writer elsewhere"
SATURATED = "plain", "-c", "16"
LOADS = {
    "paced": ("plain", "-c", "64", "--every-s", "0.05"),
    "saturated, writer on the relay's core": SATURATED,
    WRITER_APART: SATURATED,
}


def run(rows: int = 30_000, runs: int = 5, seconds: float = 3.0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures: dict[str, Any] = {"loop": on_the_loop(folder / "loop")}
        figures["sqlite"] = asyncio.run(into(f"sqlite:///{folder / 'ledger.sqlite'}", folder / "sqlite", rows))
        figures["postgresql"] = into_postgresql(folder / "postgresql", rows)
    figures["latency"] = latency(runs, seconds)
    return figures


# ---------------------------------------------------------------------------------------------------------------------
# On the loop


class Exchange:
    """What the gateway has in hand of one request."""

    def __init__(self) -> None:
        body = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":256}'
        models = Models([ServedModel("m", prompts=None)])  # type: ignore[arg-type]
        self.call = Call(CHAT, body, headers={}, models=models)
        self.prompt = Prompt(1000, 1000, {})
        self.booking = Booking(
            1, "r", "10.0.0.5:8000", 0, "http://x", "m", "vllm", False, 1000, 900, 900, 5.0, True, "p"
        )
        self.usage = Usage(1000, 200, 900)

    def outcome(self, serial: str) -> Outcome:
        return Outcome(
            serial, "m", "", "10.0.0.5:8000", 0, 200, "complete", self.usage, 1000, 900, 900, 900, "usage", time.time(),
            0.001, 0.05, 1.2, True, "exact", "kv_aware", False, 1, "", 201, None, "", 0, OPEN, (), "", serial, CHAT,
        )  # fmt: skip


class _Responder:
    def write(self, data: bytes) -> None: ...


def on_the_loop(folder: Path, count: int = 30_000) -> dict[str, float]:
    spool = Spool(folder, max_bytes=1 << 30)
    ledger, exchange = Ledger(spool), Exchange()
    serials = [f"5f0c9d1a2b3c{n:08x}" for n in range(count)]

    def both(serial: str) -> None:
        reply = Reply(_Responder(), b"", serial, b"", serial)  # type: ignore[arg-type]
        outcome = exchange.outcome(serial)
        began = time.perf_counter_ns()
        ledger.dispatched(
            exchange.call, exchange.prompt, exchange.booking, reply, started_at=1.8e9, asked_model="", attempts=1,
            queue_s=0.001,
        )  # fmt: skip
        ledger.ended(outcome)
        took.append(time.perf_counter_ns() - began)

    took: list[int] = []
    for serial in serials:
        both(serial)
    size = spool.waiting_bytes // count
    spool.close()
    with open(folder / "bare", "ab", buffering=0) as file:
        bare = _times(lambda: _write_twice(file.fileno(), bytes(size // 2)), count)
    return {
        "bytes": size,
        **{f"p{name}_us": _quantile(took, q) for name, q in (("50", 0.5), ("99", 0.99), ("99.9", 0.999))},
        "max_us": max(took) / 1e3,
        "bare_p50_us": _quantile(bare, 0.5),
        "bare_p99_us": _quantile(bare, 0.99),
    }


def _write_twice(file: int, data: bytes) -> None:
    os.write(file, data)
    os.write(file, data)


def _times(call: Callable[[], None], count: int) -> list[int]:
    took = []
    for _ in range(count):
        began = time.perf_counter_ns()
        call()
        took.append(time.perf_counter_ns() - began)
    return took


def _quantile(values: list[int], q: float) -> float:
    return round(sorted(values)[int(len(values) * q)] / 1e3, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Into a database


def into_postgresql(folder: Path, rows: int) -> dict[str, float]:
    try:
        server = Postgres()
    except NoServer as missing:
        print(missing)
        return {}
    try:
        server.start()
        asyncio.run(_create(server.url("postgres")))
        return asyncio.run(into(server.url("ledger"), folder, rows))
    finally:
        server.close()


async def _create(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("CREATE DATABASE ledger")
    await connection.close()


async def into(url: str, folder: Path, rows: int) -> dict[str, float]:
    """The whole way: read, priced, inserted, summed, noted. Beside it the same rows, inserted only."""
    database = open_database(url)
    await upgrade(database)
    fill(folder, rows)
    writer = Writer(WriterSettings(folder=folder), database)
    cpu_s, began = time.process_time(), time.monotonic()
    work = asyncio.ensure_future(writer.run())
    while writer.written < rows:  # noqa: ASYNC110 (as a bystander would see it)
        await asyncio.sleep(0.01)
    took, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
    writer.stop()
    await work
    bare = await _inserted_only(database, folder, min(rows, 6000))
    await database.aclose()
    return {"rows_per_s": round(rows / took), "cpu_us_per_row": round(cpu_s / rows * 1e6, 1), "bare_rows_per_s": bare}


def fill(folder: Path, rows: int, first: int = 0) -> None:
    spool = Spool(folder, max_bytes=8 << 30)
    ledger, exchange = Ledger(spool), Exchange()
    for n in range(first, first + rows):
        serial = f"5f0c9d1a2b3c{n:08x}"
        reply = Reply(_Responder(), b"", serial, b"", serial)  # type: ignore[arg-type]
        ledger.dispatched(
            exchange.call, exchange.prompt, exchange.booking, reply, started_at=1.8e9, asked_model="", attempts=1,
            queue_s=0.001,
        )  # fmt: skip
        ledger.ended(exchange.outcome(serial))
    spool.close()


async def _inserted_only(database: Database, folder: Path, rows: int) -> float:
    fill(folder, rows, first=10**7)
    reader = Reader(folder)
    reader.claim()
    made: list[dict[str, Any]] = []
    while found := reader.read(BATCH):
        made += [row_of(read, PriceBook(), "full_price") for read in found]  # type: ignore[arg-type]
    reader.close()
    began = time.monotonic()
    for first in range(0, len(made), BATCH):
        async with database.write() as connection:
            await connection.execute(insert(requests), made[first : first + BATCH])
    return round(rows / (time.monotonic() - began))


# ---------------------------------------------------------------------------------------------------------------------
# What a client notices


def latency(runs: int, seconds: float) -> dict[str, Any]:
    """Medians of runs that alternate: a single p99 on a shared machine says little."""
    found: dict[str, dict[bool, list[dict[str, Any]]]] = {name: {True: [], False: []} for name in LOADS}
    with fake_engines("--delay-ms", "0"):
        for _ in range(runs):
            for enabled in (True, False):
                with gateway(settings={"ledger": {"enabled": enabled}, "auth": {"mode": "open"}}) as measured:
                    load("plain", "-t", "1")
                    for name, arguments in LOADS.items():
                        if name == WRITER_APART:
                            measured.move_children(LOAD_CORE)
                        before = measured.cpu_s
                        figures = load(*arguments, "-t", str(seconds))
                        figures["cpu_us"] = (measured.cpu_s - before) / figures["requests"] * 1e6
                        found[name][enabled].append(figures)
    return {
        name: {
            f"{'with' if enabled else 'without'}_{quantity}": round(median(one[quantity] for one in ones), 1)
            for enabled, ones in by.items()
            for quantity in ("p50_us", "p99_us", "cpu_us", "requests_per_s")
        }
        for name, by in found.items()
    }


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    loop = figures["loop"]
    yield Row("open mark and end, p50", loop["p50_us"], "µs", loop["bare_p50_us"], "two bare writes", "≤ 15 µs")
    yield Row("open mark and end, p99", loop["p99_us"], "µs", loop["bare_p99_us"], "two bare writes")
    yield Row("open mark and end, p99.9", loop["p99.9_us"], "µs")
    yield Row("in the spool, a request", loop["bytes"], "B")
    for name, target in (("sqlite", 1500), ("postgresql", 3000)):
        if found := figures[name]:
            yield Row(
                f"rows to {name}",
                found["rows_per_s"],
                "/s",
                found["bare_rows_per_s"],
                "inserted only",
                f"≥ {target:,} /s",
            )
            yield Row(f"CPU of the writer, a row to {name}", found["cpu_us_per_row"], "µs")
    for name, found in figures["latency"].items():
        for quantity, unit, target in (
            ("p50_us", "µs", ""), ("p99_us", "µs", "≤ 1.3 ×"), ("cpu_us", "µs", ""), ("requests_per_s", "/s", ""),
        ):  # fmt: skip
            said = quantity.removesuffix("_us").replace("_", " ").replace("cpu", "CPU of the relay, a request")
            label = f"{name}: {said}"
            target = "" if name.endswith("relay's core") else target  # there it takes what they compete for
            yield Row(label, found[f"with_{quantity}"], unit, found[f"without_{quantity}"], "no ledger", target)


if __name__ == "__main__":
    report(__doc__, run, rows)
