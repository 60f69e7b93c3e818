"""The simulated engine's command: its flags are its options, and its ports are announced."""

from __future__ import annotations

import inspect

import pytest

from router.cli import main
from router.cli import sim_engine as command
from router.lab.options import SimEngineOptions
from router.lab.server import SimEngineServer


def _taken(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> SimEngineOptions:
    taken: list[SimEngineOptions] = []
    monkeypatch.setattr(command, "run", lambda options, ready: taken.append(options))
    with pytest.raises(SystemExit) as ended:
        main(["sim-engine", *arguments])
    assert ended.value.code == 0
    return taken[0]


def test_every_option_has_a_flag() -> None:
    flags = set(inspect.signature(command.sim_engine).parameters)
    renamed = {"loras": "lora"}
    assert {renamed.get(field, field) for field in SimEngineOptions.__struct_fields__} <= flags


def test_without_flags_all_is_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _taken(monkeypatch) == SimEngineOptions()


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    options = _taken(monkeypatch, "--port", "8101", "--lora", "a", "--lora", "b", "--speed", "4", "--no-replay")
    assert (options.port, options.loras, options.speed, options.replay_port) == (8101, ("a", "b"), 4.0, None)
    assert options.events_port == 0
    silent = _taken(monkeypatch, "--no-events")
    assert (silent.events_port, silent.replay_port) == (None, None)


def test_a_wrong_value_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim-engine", "--profile", "h1000"])
    assert ended.value.code == 2
    assert "unknown profile 'h1000'" in capsys.readouterr().err


async def test_it_announces_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    async with SimEngineServer(SimEngineOptions()) as engine:
        command.announce(engine)
        printed = capsys.readouterr().out
        assert printed == f"engine {engine.url}\nevents {engine.events_endpoint}\nreplay {engine.replay_endpoint}\n"
