"""Every request is in the ledger, once, whatever becomes of the gateway and its database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

from router.store.database import open_database
from tests.ledger_drill import Engines, Gateway, Known, compare, drill, launched, made_requests
from tests.servers import Postgres


async def test_requests_while_the_database_is_away_and_the_gateway_is_killed(
    tmp_path: Path, postgres: Postgres, postgres_url: str
) -> None:
    dice = random.Random(7)
    known = made_requests(240, dice)
    engines = Engines(known, dice)
    async with launched(engines.all):
        gateway = Gateway(tmp_path, engines.all, postgres_url)
        await gateway.start()

        async def stop_database() -> None:
            postgres.stop()

        async def kill() -> None:
            await gateway.end(signal.SIGKILL)
            await gateway.start()

        async def start_database() -> None:
            await asyncio.to_thread(postgres.start)

        try:
            events = {40: stop_database, 120: kill, 200: start_database}
            await drill(gateway, known, at_once=16, events=events)
        finally:
            if not postgres.is_ready():
                postgres.start()
        await gateway.end(signal.SIGTERM)
        database = open_database(postgres_url)
        found = await compare(database, known, engines.all[0])
        await database.aclose()
    assert not found.mistakes, "\n".join(found.mistakes[:20])
    assert found.finishes["complete"] > 150
    assert found.finishes["client_gone"] > 5
    assert found.finishes["upstream_failed"] > 0
    assert found.finishes["unknown"] > 0


def writer_of(gateway: int) -> int:
    """The one process that it has started for Python of ours (its admin API is off)."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == gateway and b"spawn_main" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    (writer,) = found
    return writer


async def test_a_writer_that_dies_is_begun_again(tmp_path: Path, sqlite_url: str) -> None:
    """And a gateway that is told to end writes what is left, although the signal reaches its writer, too."""
    known = {n: Known(n, "whole", 0) for n in range(20)}
    engines = Engines(known, random.Random(1))
    async with launched(engines.all):
        gateway = Gateway(tmp_path, engines.all, sqlite_url)
        await gateway.start()
        os.kill(writer_of(gateway.process.pid), signal.SIGKILL)
        await drill(gateway, known, at_once=4, events={})
        await gateway.end(signal.SIGTERM)
        database = open_database(sqlite_url)
        found = await compare(database, known, engines.all[0])
        await database.aclose()
    assert not found.mistakes, "\n".join(found.mistakes)
    assert found.finishes == {"complete": 20}
    assert "begun again" in "".join(gateway.log)
