"""The demo as a whole: simulated engines, the gateway, sample traffic, and what is shown of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys

import httpx
import pytest

from router.cli import demo
from router.cli.keyboard import pressed
from router.cli.traffic import Traffic
from router.lab.options import SimEngineOptions
from router.lab.server import SimEngineServer

PLAN = demo.Plan(engines=2, port=0, admin_port=0, speed=50, seconds=3, traffic=True, people=6, policy=None)


async def test_caches_fill_and_answers_come_from_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = await demo.run(PLAN)
    printed = capsys.readouterr().out
    assert {row["health"] for row in rows} == {"ready"}
    assert sum(row["index_blocks"] for row in rows) > 0
    assert max(row["hit_rate"] or 0 for row in rows) > 0.3
    assert max(row["ttft_p50_s"] or 0 for row in rows) > 0
    assert "2 simulated engines behind one base_url" in printed
    assert "failed" not in printed
    assert "sample traffic on: " in printed


async def test_what_is_printed_to_try_works(capsys: pytest.CaptureFixture[str]) -> None:
    """The curl line's URL and body, while the demo runs; then ctrl-c."""
    running = asyncio.create_task(demo.run(PLAN._replace(traffic=False, seconds=30)))
    printed = ""
    while "curl" not in printed:
        await asyncio.wait((running,), timeout=0.1)
        assert not running.done()
        printed += capsys.readouterr().out
    url = printed.partition("curl ")[2].split()[0]
    body = printed.partition("-d '")[2].partition("'\n")[0]
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(url, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0
    os.kill(os.getpid(), signal.SIGINT)
    rows = await running
    assert len(rows) == 2


async def test_traffic_is_conversations_that_grow() -> None:
    async with SimEngineServer(SimEngineOptions(speed=200)) as engine:
        traffic = Traffic(engine.url, "demo", people=3, speed=100, dice=random.Random(1))
        switch = demo.Switch(traffic, on=True)
        async with switch:
            for _ in range(500):
                if traffic.answered >= 20:
                    break
                await asyncio.sleep(0.02)
            assert switch.on
            switch.toggle()
            assert not switch.on
        assert traffic.answered >= 20
        assert traffic.failed == 0
        async with httpx.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"{engine.url}/metrics")).text
    counts = dict(line.split(" ") for line in page.splitlines() if not line.startswith("#") and line.count(" ") == 1)
    hits = [float(value) for name, value in counts.items() if name.startswith("vllm:prefix_cache_hits_total")]
    assert sum(hits) > 0


async def test_traffic_counts_what_is_refused() -> None:
    async with SimEngineServer(SimEngineOptions()) as engine:
        traffic = Traffic(engine.url, "no-such-model", people=1, speed=1000, dice=random.Random(1))
        async with demo.Switch(traffic, on=True):
            for _ in range(500):
                if traffic.failed:
                    break
                await asyncio.sleep(0.02)
    assert (traffic.answered, traffic.failed > 0) == (0, True)


async def test_keys_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    heard: list[str] = []
    came = asyncio.Event()

    def hear() -> None:
        heard.append("t")
        came.set()

    with os.fdopen(terminal, "rb", buffering=0) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pressed({"t": hear}) as there_is_one:
            assert there_is_one
            os.write(keyboard, b"xt")
            await came.wait()
    os.close(keyboard)
    assert heard == ["t"]


def test_no_terminal_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pressed({}) as there_is_one:
            assert not there_is_one
