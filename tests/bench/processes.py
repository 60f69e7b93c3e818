"""Processes under measurement: the gateway on one core, everything that loads it on the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
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

    def move_children(self, core: int) -> None:
        """Give what it has started (of `warmroute serve`: the admin process, the ledger's writer) another core."""
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for child in children.read_text().split():
                for thread in Path(f"/proc/{child}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {core})


def end_cleanly_when_told() -> None:
    """SIGTERM becomes SystemExit, so that whatever a benchmark has started ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def running(arguments: list[str], *, core: int, log: Path, python: str = sys.executable) -> Iterator[Measured]:
    """`python -m …` on one core until the block ends."""
    with open(log, "wb") as output:
        process = subprocess.Popen([python, "-m", *arguments], stdout=output, stderr=output)
    os.sched_setaffinity(process.pid, {core})
    try:
        yield Measured(process, log)
    finally:
        process.send_signal(signal.SIGINT)  # after SIGTERM a gateway would wait for its balancers
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, measured: Measured, *, seconds: float = 60) -> None:
    """Until `url` answers. Raises RuntimeError, with the end of its log, for a process that ended or stays silent.

    A port that another process holds shows here: ours ends, and nobody measures the other by mistake.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until and measured.process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).read()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
            continue
        time.sleep(0.1)
        if measured.process.poll() is None:
            return
    state = "is silent" if measured.process.poll() is None else "has ended (is another process on its port?)"
    raise RuntimeError(f"{url}: what should answer there {state}\n{measured.log.read_text()[-2000:]}")


@contextlib.contextmanager
def fake_engines(*arguments: str, ports: Sequence[int] = ENGINE_PORTS) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["tests.bench.fake_engine", "--ports", ",".join(map(str, ports)), *arguments]
        with running(command, core=LOAD_CORE, log=Path(folder) / "log") as measured:
            wait_for(f"http://127.0.0.1:{ports[0]}/health", measured, seconds=30)
            yield


def engine(i: int) -> dict[str, Any]:
    """A fake engine as configured: with an event source, whether or not anything comes from it."""
    source = {"rank": 0, "endpoint": f"tcp://127.0.0.1:{EVENTS_PORT + i}"}
    return {"url": f"http://127.0.0.1:{ENGINE_PORTS[i]}", "kind": "vllm", "block_size": 16, "events": [source]}


def written_config(
    folder: Path,
    *,
    port: int,
    engines: Sequence[Mapping[str, Any]],
    model: str,
    tokenize: str,
    policy: str,
    further_models: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """A configuration file with everything on: demo tokenizer and template, events, metrics, admin API."""
    config = {
        "listen": {"port": port},
        "admin": {"port": port + 1000},
        "state_dir": str(folder / "state"),
        "models": {model: {"tokenizer": "demo", "parity": "off", "tokenize": tokenize}, **(further_models or {})},
        "policy": {"name": policy},
        "engines": engines,
        **(settings or {}),
    }
    file = folder / "warmroute.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@contextlib.contextmanager
def gateway(
    *,
    tokenize: str = "auto",
    policy: str = "kv_aware",
    engines: Sequence[Mapping[str, Any]] | None = None,
    model: str = "fake",
    further_models: Mapping[str, Any] | None = None,
    module: str = "router",
    settings: Mapping[str, Any] | None = None,
    port: int = PORT,
) -> Iterator[Measured]:
    """`warmroute serve` before the fake engines, or those given."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = written_config(
            folder,
            port=port,
            engines=engines or [engine(i) for i in range(len(ENGINE_PORTS))],
            model=model,
            tokenize=tokenize,
            policy=policy,
            further_models=further_models,
            settings=settings,
        )
        with running([module, "serve", "-c", str(file)], core=GATEWAY_CORE, log=folder / "log") as measured:
            wait_for(f"http://127.0.0.1:{port + 1000}/readyz", measured)
            time.sleep(1.5)  # every engine has been looked at
            yield measured


def metric(name: str) -> float:
    """The sum of the gateway's series of that name, from its metrics page. Raises LookupError where there is none."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{PORT + 1000}/metrics", timeout=10).read().decode()
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    if not lines:
        raise LookupError(name)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def load(kind: str, *arguments: str, port: int = PORT, may_fail: bool = False) -> dict[str, Any]:
    """One run of the load generator. Figures of requests that failed are no figures, unless they are what is asked."""
    command = [sys.executable, "-m", "tests.bench.load", kind, "--port", str(port), *arguments]
    done = subprocess.run(
        command, capture_output=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {LOAD_CORE})
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    assert may_fail or not figures["errors"], f"{figures['errors']} of {kind} failed"
    return figures


def set_pace(**pace: float) -> None:
    query = "&".join(f"{name}={value}" for name, value in pace.items())
    urllib.request.urlopen(f"http://127.0.0.1:{ENGINE_PORTS[0]}/_set?{query}", timeout=5).read()
