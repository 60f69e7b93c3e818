"""`warmroute observe`: what is measured of engines nobody asks through us, and what is simulated beside it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router import config
from router.cli import main, observe
from router.cli.figures import terminal
from router.cli.observation import Observed, Observer, Seen, Tally
from router.cli.observation import observe as observe_engines
from router.config import Config
from router.core import Instance, Load
from router.errors import ConfigError, EngineError
from router.lab.options import SimEngineOptions
from router.lab.server import SimEngineServer
from router.roster import load_adapters

VLLM = "adapters.vllm:VllmAdapter"  # by module, so that the test needs no installed package
BLOCK = 16


# --- counters


def load(at: float, prompt: float = 0.0, cached: float = 0.0, **more: Any) -> Load:
    return Load(at, prompt_tokens_total=prompt, cached_tokens_total=cached, **more)


def test_what_counters_grew_by_while_they_were_watched() -> None:
    tally = Tally()
    for word in (load(10.0, 1_000, 500), load(10.0, 1_000, 500), load(12.0, 1_400, 800), load(14.0, 2_000, 1_250)):
        tally.add(word)
    assert tally.prompt_tokens_per_s == 250.0
    assert tally.hit_rate == 0.75
    assert tally.hit_rate_ever == 0.625


def test_a_counter_that_fell_began_anew() -> None:
    tally = Tally()
    for word in (load(10.0, 1_000, 500), load(11.0, 1_200, 600), load(12.0, 300, 0), load(13.0, 400, 50)):
        tally.add(word)
    assert (tally.prompt_tokens, tally.cached_tokens) == (600, 150)
    assert tally.hit_rate == 0.25


def test_an_engine_that_does_not_count_has_no_rate() -> None:
    tally = Tally()
    for at in (1.0, 2.0):
        tally.add(load(at, running=3, waiting=1))
    assert (tally.prompt_tokens_per_s, tally.hit_rate, tally.hit_rate_ever) == (None, None, None)
    assert (tally.running, tally.waiting) == (3.0, 1.0)
    assert (Tally().running, Tally().hit_rate_ever) == (0.0, None)


# --- engines


async def ask(engine: SimEngineServer, prompt: str, tokens: int = 1) -> int:
    """Straight to the engine, past everybody. Returns the prompt's length in tokens."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = (await client.post(f"{engine.url}/v1/completions", json=body)).json()
    return int(answer["usage"]["prompt_tokens"])


async def until(condition: Callable[[], bool], meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
    for _ in range(1_000):
        if condition():
            return
        if meanwhile is not None:
            await meanwhile()
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


def essay(subject: str) -> str:
    return " ".join(f"{subject} {number} and so on" for number in range(60))


def configured(folder: Path, *engines: dict[str, Any]) -> Config:
    file = folder / "warmroute.yaml"
    file.write_text(json.dumps({"engines": [{"kind": VLLM} | engine for engine in engines]}))
    return config.load(file, environ={})


async def test_what_lies_on_several_engines_is_counted() -> None:
    """Both hold one prompt, one of them another: from before we came, as replayed, and while we are there."""
    adapters = load_adapters()
    a, b = (SimEngineServer(SimEngineOptions(speed=100, block_size=BLOCK)) for _ in range(2))
    async with a, b:
        shared = await ask(a, essay("shared")) // BLOCK
        instances = [Instance(name, engine.url, "vllm", "demo") for name, engine in (("a", a), ("b", b))]
        observer = Observer(instances, adapters, index_bytes=1 << 26)
        await observer.start()
        stop = asyncio.Event()
        watching = asyncio.create_task(observer.watch(60.0, stop))
        try:
            await until(lambda: observer.observed({}).blocks >= shared)
            assert observer.observed({}).duplicate_share == 0
            assert await ask(b, essay("shared")) // BLOCK == shared
            alone = await ask(b, essay("alone")) // BLOCK
            await until(lambda: observer.observed({}).blocks >= 2 * shared + alone)
            seen = observer.observed({"http://c": "not there"})
        finally:
            stop.set()
            await watching
            await observer.stop()
            for adapter in adapters.values():
                await adapter.aclose()
    assert (seen.blocks, seen.distinct_blocks) == (2 * shared + alone, shared + alone)
    assert seen.duplicate_share == shared / (2 * shared + alone)
    assert seen.shared_share == shared / (shared + alone)
    assert seen.left_out == {"http://c": "not there"}
    at_a, at_b = seen.ranks
    assert (at_a.instance, at_a.model, at_a.health, at_a.block_size) == ("a", "demo", "ready", BLOCK)
    assert (at_a.blocks, at_b.blocks) == (shared, shared + alone)
    assert (at_a.elsewhere, at_b.elsewhere) == (1.0, shared / (shared + alone))
    assert at_a.capacity_tokens is not None
    assert at_a.filled == shared * BLOCK / at_a.capacity_tokens


async def test_the_hit_rate_is_the_engines_own() -> None:
    adapters = load_adapters()
    async with SimEngineServer(SimEngineOptions(speed=100, block_size=BLOCK)) as engine:
        tokens = await ask(engine, essay("warm"))
        observer = Observer([Instance("a", engine.url, "vllm", "demo")], adapters, index_bytes=1 << 26)
        await observer.start()
        stop = asyncio.Event()
        watching = asyncio.create_task(observer.watch(60.0, stop))
        try:
            await until(lambda: observer.observed({}).ranks[0].hit_rate_ever == 0.0)  # it has told what was before
            assert await ask(engine, essay("warm")) == tokens
            await until(lambda: observer.observed({}).ranks[0].hit_rate is not None)
            (seen,) = observer.observed({}).ranks
        finally:
            stop.set()
            await watching
            await observer.stop()
            for adapter in adapters.values():
                await adapter.aclose()
    cached = (tokens - 1) // BLOCK * BLOCK
    assert seen.hit_rate == cached / tokens
    assert seen.hit_rate_ever == cached / (2 * tokens)
    assert seen.prompt_tokens_per_s is not None
    assert seen.prompt_tokens_per_s > 0


async def test_what_was_replayed_is_no_event_rate() -> None:
    adapters = load_adapters()
    async with SimEngineServer(SimEngineOptions(speed=100, block_size=BLOCK)) as engine:
        before = await ask(engine, essay("before")) // BLOCK
        observer = Observer([Instance("a", engine.url, "vllm", "demo")], adapters, index_bytes=1 << 26)
        await observer.start()
        stop = asyncio.Event()
        watching = asyncio.create_task(observer.watch(3.0, stop))
        try:
            await until(lambda: observer.observed({}).blocks >= before)
            assert observer.observed({}).ranks[0].stored_per_s is None  # it is too soon to tell
            await until(lambda: observer.observed({}).ranks[0].stored_per_s is not None)
            assert observer.observed({}).ranks[0].stored_per_s == 0
            await ask(engine, essay("meanwhile"))
            await until(lambda: observer.observed({}).blocks > before)
            (seen,) = observer.observed({}).ranks
        finally:
            stop.set()
            await watching
            await observer.stop()
            for adapter in adapters.values():
                await adapter.aclose()
    assert seen.stored_per_s is not None
    assert seen.stored_per_s > 0
    assert seen.removed_per_s == 0


async def test_an_engine_without_events_and_one_that_is_not_there(tmp_path: Path) -> None:
    async with SimEngineServer(SimEngineOptions(speed=100, events_port=None)) as silent:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
            nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
            found = configured(tmp_path, {"url": silent.url}, {"url": nowhere})
            seen = await observe_engines(found, 1.0, asyncio.Event(), model=None)
    (rank,) = seen.ranks
    assert (rank.model, rank.health) == ("demo", "ready")
    assert (rank.blocks, rank.filled, rank.stored_per_s, rank.elsewhere) == (None, None, None, None)
    assert (seen.blocks, seen.duplicate_share) == (0, 0.0)
    assert list(seen.left_out) == [nowhere]


async def test_models_apart(tmp_path: Path) -> None:
    a, b = (SimEngineServer(SimEngineOptions(speed=100, model=model)) for model in ("a", "b"))
    async with a, b:
        found = configured(tmp_path, {"url": a.url}, {"url": b.url, "model": "public"})
        seen = await observe_engines(found, 0.5, asyncio.Event(), model="public")
        assert [rank.model for rank in seen.ranks] == ["public"]
        with pytest.raises(ConfigError, match="the engines serve a, public: name one with --model"):
            await observe_engines(found, 0.5, asyncio.Event(), model=None, one_model=True)
        with pytest.raises(EngineError) as nobody:
            await observe_engines(found, 0.5, asyncio.Event(), model="c")
        assert nobody.value.detail == "they serve a, public"


# --- the command


@pytest.fixture
def engines() -> Iterator[list[str]]:
    """Two, in a loop of their own: the command has the main thread's."""
    urls: list[str] = []
    ready, done = threading.Event(), threading.Event()

    async def run() -> None:
        a, b = (SimEngineServer(SimEngineOptions(speed=100, capacity_tokens=20_000)) for _ in range(2))
        async with a, b:
            for engine in (a, b):
                await ask(engine, essay("shared"))
                urls.append(engine.url)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(20)
    yield urls
    done.set()
    thread.join()


def command(folder: Path, urls: list[str], *arguments: str) -> int:
    configured(folder, *({"url": url} for url in urls))
    with pytest.raises(SystemExit) as ended:
        main(["observe", "-c", str(folder / "warmroute.yaml"), "--seconds", "1", *arguments])
    return int(ended.value.code or 0)


def trace(file: Path, requests: int = 60) -> Path:
    """Three prefixes of ten blocks, each asked for in turn, with a block of its own behind."""
    rows = [
        {
            "timestamp": number * 400,
            "input_length": 700,
            "output_length": 10,
            "hash_ids": [*range(number % 3 * 10, number % 3 * 10 + 10), 100 + number],
            "block_size": 64,
        }
        for number in range(requests)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_what_is_printed_and_written(engines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = trace(tmp_path / "load.jsonl"), tmp_path / "out.json"
    assert command(tmp_path, engines, "--load", str(file), "--json", str(out), "--seconds", "3") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the engines' own events and counters" in printed
    assert "50% of what is held is a further copy of a block another engine has" in printed
    assert "100% of the different blocks lie on several engines" in printed
    assert "simulated: 60 requests of load on 2 engines as fast as llama-3.1-8b-h100" in printed
    written = json.loads(out.read_text())
    assert [rank["health"] for rank in written["measured"]["ranks"]] == ["ready", "ready"]
    assert written["measured"]["duplicate_share"] == 0.5
    simulated = written["simulated"]
    assert simulated["capacity_tokens"] == [19_968, 19_968]  # the engines' own, in whole blocks of the trace
    assert [run["policy"] for run in simulated["runs"]] == ["round_robin", "least_requests", "kv_aware:room"]
    by_policy = {run["policy"]: run["hit_rate"] for run in simulated["runs"]}
    # Each prefix is computed once by cache, and by turns once on each engine: 57 and 54 of 60 requests hit ten blocks.
    assert by_policy["kv_aware:room"] == pytest.approx(57 * 640 / (60 * 700))
    assert by_policy["round_robin"] == pytest.approx(54 * 640 / (60 * 700))
    assert f"hit rate {54 * 640 / 42_000:.1%} → {57 * 640 / 42_000:.1%}" in printed


def test_without_a_load_nothing_is_simulated(
    engines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, engines, "--json", "-") == 0
    written = json.loads(capsys.readouterr().out)
    assert written["simulated"] is None
    assert written["measured"]["blocks"] > 0


def test_a_block_larger_than_an_engine(engines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.jsonl"
    row = {"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1], "block_size": 30_000}
    file.write_text(json.dumps(row))
    assert command(tmp_path, engines, "--load", str(file)) == 2
    assert "can't hold a block of load" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--load", "nowhere.jsonl"), "nowhere.jsonl: No such file or directory"),
        (("--load", "warmroute.yaml"), "warmroute.yaml: no trace format known"),
        (("--profile", "h1000"), "--profile h1000: known are llama-3.1-8b-h100"),
    ],
)
def test_mistakes_are_told_before_anything_is_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert command(tmp_path, ["http://127.0.0.1:9"], *arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_ctrl_c_ends_the_watching_and_shows_what_was_seen(
    engines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*arguments: Any, **more: Any) -> Observed:
        asyncio.get_running_loop().call_later(1.0, os.kill, os.getpid(), signal.SIGINT)
        return await observe_engines(*arguments, **more)

    monkeypatch.setattr(observe, "observe_engines", interrupted)
    assert command(tmp_path, engines, "--seconds", "600") == 0
    assert "blocks are known" in capsys.readouterr().out


def test_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(tmp_path, ["http://127.0.0.1:9"]) == 1
    printed = capsys.readouterr()
    assert "there is no engine to watch" in printed.err
    assert "http://127.0.0.1:9: " in printed.err


# --- words


def test_what_is_not_known_is_a_dash_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Seen(
        instance="[::1]:8000", rank=1, model="m", health="ready", reason="", capacity_tokens=None, block_size=16,
        blocks=None, filled=None, pinned=0.25, running=1.5, waiting=0.0, stored_per_s=None, removed_per_s=None,
        prompt_tokens_per_s=None, hit_rate=None, hit_rate_ever=None, elsewhere=None,
    )  # fmt: skip
    observe.show(Observed(30.0, [silent], 0, 0, 0.0, 0.0, {"http://b": "refused"}), None, terminal())
    printed = " ".join(capsys.readouterr().out.split())
    assert "[::1]:8000/1 – – 25% – – – – – – 1.5 0.0 ready, publishes no KV events" in printed
    assert "left out: http://b: refused" in printed
    assert "No KV block is known" in printed
