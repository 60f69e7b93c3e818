"""Processes under measurement: the gateway on one core, everything that loads it on the other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

GATEWAY_CORE, LOAD_CORE = 0, min(1, (os.cpu_count() or 1) - 1)
ENGINE_PORTS = (9101, 9102, 9103, 9104)
EVENTS_PORT = 9501
PORT = 14100

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Measured:
    """A process; `cpu_s` is its own time so far, without its children's."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.contextmanager
def running(arguments: list[str], *, core: int, log: Path) -> Iterator[Measured]:
    """`python -m …` on one core until the block ends."""
    with open(log, "wb") as output:
        process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=output, stderr=output)
    os.sched_setaffinity(process.pid, {core})
    try:
        yield Measured(process, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, *, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")


@contextlib.contextmanager
def fake_engines(*arguments: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["tests.bench.fake_engine", "--ports", ",".join(map(str, ENGINE_PORTS)), *arguments]
        with running(command, core=LOAD_CORE, log=Path(folder) / "log"):
            wait_for(f"http://127.0.0.1:{ENGINE_PORTS[0]}/health", seconds=10)
            yield


def engine(i: int) -> dict[str, Any]:
    """A fake engine as configured: with an event source, whether or not anything comes from it."""
    source = {"rank": 0, "endpoint": f"tcp://127.0.0.1:{EVENTS_PORT + i}"}
    return {"url": f"http://127.0.0.1:{ENGINE_PORTS[i]}", "kind": "vllm", "block_size": 16, "events": [source]}


def written_config(
    folder: Path, *, port: int, engines: list[dict[str, Any]], model: str, tokenize: str, policy: str
) -> Path:
    """A configuration file with everything on: demo tokenizer and template, events, metrics, admin API."""
    config = {
        "listen": {"port": port},
        "admin": {"port": port + 1000},
        "state_dir": str(folder / "state"),
        "models": {model: {"tokenizer": "demo", "parity": "off", "tokenize": tokenize}},
        "policy": {"name": policy},
        "engines": engines,
    }
    file = folder / "warmroute.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@contextlib.contextmanager
def gateway(
    *,
    tokenize: str = "auto",
    policy: str = "kv_aware",
    engines: list[dict[str, Any]] | None = None,
    model: str = "fake",
) -> Iterator[Measured]:
    """`warmroute serve` before the fake engines, or those given."""
    engines = engines or [engine(i) for i in range(len(ENGINE_PORTS))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = written_config(folder, port=PORT, engines=engines, model=model, tokenize=tokenize, policy=policy)
        with running(["router", "serve", "-c", str(file)], core=GATEWAY_CORE, log=folder / "log") as measured:
            try:
                wait_for(f"http://127.0.0.1:{PORT + 1000}/readyz")
            except TimeoutError:
                print(measured.log.read_text()[-2000:], file=sys.stderr)
                raise
            time.sleep(1.5)  # every engine has been looked at
            yield measured


def load(kind: str, *arguments: str, port: int = PORT) -> dict[str, Any]:
    """One run of the load generator."""
    command = [sys.executable, "-m", "tests.bench.load", kind, "--port", str(port), *arguments]
    done = subprocess.run(
        command, capture_output=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {LOAD_CORE})
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    assert not figures["errors"], f"{figures['errors']} of {kind} failed"
    return figures


def set_pace(**pace: float) -> None:
    query = "&".join(f"{name}={value}" for name, value in pace.items())
    urllib.request.urlopen(f"http://127.0.0.1:{ENGINE_PORTS[0]}/_set?{query}", timeout=5).read()
