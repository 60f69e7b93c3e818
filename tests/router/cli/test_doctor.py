"""Doctor before engines that really answer: simulated ones over HTTP and ZMQ."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router import config, plugins
from router.cli import doctor, main
from router.config import Config
from router.lab.options import SimEngineOptions
from router.lab.server import SimEngineServer

VLLM = "adapters.vllm:VllmAdapter"  # by module, so that the test needs no installed package


def _config(tmp_path: Path, *engines: str, **settings: Any) -> Config:
    file = tmp_path / "warmroute.yaml"
    models = {"demo": {"tokenizer": "demo"}}
    declared = [{"url": url, "kind": VLLM, **settings} for url in engines]
    file.write_text(json.dumps({"engines": declared, "models": models}))
    return config.load(file, environ={})


async def test_well_engines_of_different_block_size(tmp_path: Path) -> None:
    small = SimEngineServer(SimEngineOptions(block_size=16, speed=100))
    large = SimEngineServer(SimEngineOptions(block_size=32, speed=100))
    async with small, large:
        findings = await doctor.examine_all(_config(tmp_path, small.url, large.url))
    assert [finding.check for finding in findings if finding.state == "fail"] == []
    well = {finding.check for finding in findings if finding.state == "ok"}
    assert well >= {"reachable", "events", "replay", "prefix caching", "cached counts", "block size", "parity"}
    (across,) = [finding for finding in findings if finding.engine == "*" and finding.check == "block size"]
    assert across.seen.startswith("demo: 16 on ")


async def test_what_an_engine_lacks(tmp_path: Path) -> None:
    options = SimEngineOptions(speed=100, report_cached=False, replay_port=None, api_key="k")
    async with SimEngineServer(options) as engine:
        findings = await doctor.examine_all(_config(tmp_path, engine.url, api_key="k"))
    found = {finding.check: finding for finding in findings}
    assert (found["replay"].state, found["cached counts"].state, found["key"].state) == ("warn", "warn", "ok")
    assert "replay_endpoint" in found["replay"].mend
    assert "--enable-prompt-tokens-details" in found["cached counts"].mend


async def test_an_engine_without_events(tmp_path: Path) -> None:
    async with SimEngineServer(SimEngineOptions(speed=100, events_port=None)) as engine:
        findings = await doctor.examine_all(_config(tmp_path, engine.url))
    (finding,) = [finding for finding in findings if finding.check == "events"]
    assert (finding.state, "--kv-events-config" in finding.mend) == ("warn", True)


def test_the_command_fails_for_an_engine_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        _config(tmp_path, f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "-c", str(tmp_path / "warmroute.yaml"), "--json", str(tmp_path / "out.json")])
    assert ended.value.code == 1
    assert "the engine cannot be reached" in capsys.readouterr().out
    of_engine, of_python = json.loads((tmp_path / "out.json").read_text())
    assert (of_engine["check"], of_engine["state"]) == ("reachable", "fail")
    assert of_python["check"] == "python"


async def test_a_name_that_stands_for_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(group: str, name: str) -> Any:
        return Nowhere if group == plugins.DISCOVERY else plugins_load(group, name)

    plugins_load = plugins.load
    monkeypatch.setattr(plugins, "load", load)
    finding, _ = await doctor.examine_all(_config(tmp_path, "dns+http://no-such-host.invalid:8000"))
    assert (finding.check, finding.state) == ("reachable", "fail")
    assert "cannot be resolved" in finding.seen


class Nowhere:
    """A discovery that finds no address."""

    def __init__(self, name: str, port: int, *, scheme: str) -> None:
        assert (name, port, scheme) == ("no-such-host.invalid", 8000, "http")

    async def changes(self) -> AsyncIterator[set[str]]:
        yield set()
