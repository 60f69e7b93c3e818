"""The quickstart as its README tells it: its configuration, and its client against a real gateway."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from router import config
from router.app import Running
from router.cli import check
from router.lab.options import SimEngineOptions
from router.lab.server import SimEngineServer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


def test_its_configuration_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    check.check(EXAMPLE / "warmroute.yaml")
    assert capsys.readouterr().out.startswith("ok: 2 engine(s), models named: demo")


async def test_its_client_finds_earlier_turns_cached(tmp_path: Path) -> None:
    first, second = SimEngineServer(SimEngineOptions(speed=50)), SimEngineServer(SimEngineOptions(speed=50))
    async with first, second:
        found = _configuration(tmp_path, first.url, second.url)
        async with Running(found, admin="off") as gateway:
            printed = await _run_client(gateway.url)
    cached = [int(line.split(", ")[1].split()[0]) for line in printed.splitlines()]
    assert len(cached) == 3
    assert cached[0] == 0
    assert min(cached[1:]) > 400


def _configuration(tmp_path: Path, *urls: str) -> config.Config:
    """The example's own file, at ports that are free here."""
    text = (EXAMPLE / "warmroute.yaml").read_text()
    for address, url in zip(("http://127.0.0.1:8101", "http://127.0.0.1:8102"), urls, strict=True):
        assert address in text
        text = text.replace(address, url)
    file = tmp_path / "warmroute.yaml"
    file.write_text(text)
    return config.load(file, flags={"port": 0, "state_dir": str(tmp_path / "state")}, environ={})


async def _run_client(url: str) -> str:
    source = (EXAMPLE / "client.py").read_text()
    assert "http://127.0.0.1:4000" in source
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source.replace("http://127.0.0.1:4000", url), stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()
