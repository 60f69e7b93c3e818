"""Real engines on this machine's CPU, started by scripts that stand outside the project.

The folder (`--engines DIR`) holds `start_vllm.sh` and `start_sglang.sh`, each with `start N` and `stop`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

PORTS = {"vllm": 18101, "sglang": 18201}
PIDS = {"vllm": "pids/vllm-{}", "sglang": "pids-sglang/sglang-{}"}


class CannotStart(Exception):
    """Why there are no engines here."""


class RealEngines:
    """`count` servers of one kind, from `start` to `stop`."""

    def __init__(
        self, kind: str, scripts: Path, *, count: int = 2, memory: int = 1, arguments: Mapping[str, str] | None = None
    ) -> None:
        """`memory`: KV cache of each, in multiples of 16,384 tokens. `arguments`: further ones, by kind."""
        self.kind = kind
        self.count = count
        self._script = scripts / f"start_{kind}.sh"
        self._home = Path(os.environ.get("ENGINES_DIR", Path.home() / ".cache/warmroute-engines"))
        self._environment = {**os.environ, "KV_MIB": str(16 * memory), "SGL_TOKENS": str(16_384 * memory)}
        if arguments and kind in arguments:
            self._environment["VLLM_ARGS" if kind == "vllm" else "SGL_ARGS"] = arguments[kind]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{PORTS[self.kind] + i}" for i in range(self.count)]

    def start(self) -> None:
        if not self._script.is_file():
            raise CannotStart(f"there is no {self._script.name} in {self._script.parent}")
        done = subprocess.run(
            [self._script, "start", str(self.count)], env=self._environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CannotStart(f"{self._script.name} failed: {done.stderr.strip().splitlines()[-1:]}")

    def stop(self) -> None:
        if self._script.is_file():
            subprocess.run([self._script, "stop"], env=self._environment, capture_output=True, check=False)

    def pid(self, i: int) -> int:
        return int((self._home / PIDS[self.kind].format(i)).read_text())

    def kill(self, i: int) -> tuple[list[str], dict[str, str]]:
        """SIGKILL to the server and its children. Returns what `restart` needs."""
        pid = self.pid(i)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        environment = dict(
            line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0") if "=" in line
        )
        os.killpg(pid, signal.SIGKILL)
        return command, environment

    def restart(self, i: int, how: tuple[list[str], dict[str, str]], *, wait_s: float = 240) -> None:
        command, environment = how
        log = open(self._home / f"logs/{self.kind}-{i}-again.log", "wb")  # noqa: SIM115 (the child keeps it)
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        (self._home / PIDS[self.kind].format(i)).write_text(str(process.pid))
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            try:
                if httpx.get(self.urls[i] + "/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(1)
            if process.poll() is not None:
                break
        raise CannotStart(f"{self.kind}-{i} did not come back")

    def keep_to_one_core(self) -> None:
        """All of their threads, and us to the others: else they spin on every core, and we wait for seconds for one."""
        first, *others = sorted(os.sched_getaffinity(0))
        if not others:
            return
        groups = {self.pid(i) for i in range(self.count)}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
                if os.getpgid(int(process.name)) in groups:
                    for thread in (process / "task").iterdir():
                        os.sched_setaffinity(int(thread.name), {first})
        os.sched_setaffinity(0, others)

    def forget(self) -> None:
        """Every engine's prefix cache, emptied."""
        path = "/reset_prefix_cache" if self.kind == "vllm" else "/flush_cache"
        for url in self.urls:
            httpx.post(url + path, timeout=30).raise_for_status()
