"""20,000 requests of every kind while the database is away for 20 s and the gateway is killed: what the ledger says.

python -m tests.bench.ledger_chaos [--requests 20000] [--away-s 20] [--at-once 64]

Streams, answers that clients leave, engines that are busy, break off, or break an answer off (`tests/ledger_drill.py`),
through `warmroute serve` on a PostgreSQL from a wheel. Fails where a row is missing, is there twice, or is not what the
engine counted, to the token.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg

from router.store.database import open_database
from router.store.migrate import upgrade
from tests.bench.table import Row, report
from tests.ledger_drill import Engines, Gateway, compare, drill, launched, made_requests
from tests.servers import Postgres

TAKES_S = 150


def run(requests: int = 20_000, away_s: float = 20.0, at_once: int = 64) -> dict[str, Any]:
    server = Postgres()
    try:
        server.start()
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(_run(Path(folder), server, requests, away_s, at_once))
    finally:
        server.close()


async def _run(folder: Path, server: Postgres, requests: int, away_s: float, at_once: int) -> dict[str, Any]:
    connection = await asyncpg.connect(server.url("postgres"))
    await connection.execute("CREATE DATABASE ledger")
    await connection.close()
    url = server.url("ledger")
    database = open_database(url)
    await upgrade(database)
    await database.aclose()
    dice = random.Random(1)
    known = made_requests(requests, dice)
    engines = Engines(known, dice)
    downs: list[asyncio.Future[None]] = []

    async def outage() -> None:
        server.stop()
        await asyncio.sleep(away_s)
        await asyncio.to_thread(server.start)

    async def begin_outage() -> None:
        downs.append(asyncio.ensure_future(outage()))

    async def kill() -> None:
        await gateway.end(signal.SIGKILL)
        await gateway.start()

    began = time.monotonic()
    async with launched(engines.all):
        gateway = Gateway(folder, engines.all, url)
        await gateway.start()
        events = {requests // 4: begin_outage, requests // 3: kill}
        await drill(gateway, known, at_once=at_once, events=events)
        took = time.monotonic() - began
        await asyncio.gather(*downs)
        await asyncio.sleep(3)  # the writer tries again within two
        await gateway.end(signal.SIGTERM)
        database = open_database(url)
        found = await compare(database, known, engines.all[0])
        await database.aclose()
    for mistake in found.mistakes[:20]:
        print(mistake)
    if found.mistakes:
        raise SystemExit(f"{len(found.mistakes)} of {requests} requests are not in the ledger as they should be")
    return {"requests": requests, "took_s": round(took, 1), "mistakes": 0, "finishes": dict(found.finishes)}


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    yield Row("requests", figures["requests"], "")
    for finish, count in sorted(figures["finishes"].items()):
        yield Row(f"rows: {finish}", count, "")
    yield Row("not as they should be", figures["mistakes"], "", target="0")
    yield Row("took", figures["took_s"], "s")


if __name__ == "__main__":
    report(__doc__, run, rows)
