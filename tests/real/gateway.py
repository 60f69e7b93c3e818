"""The gateway as its users start it: a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx


class GatewayProcess:
    """`warmroute serve` on fixed ports, so that clients find it again after a restart."""

    def __init__(
        self, engines: list[str], state: Path, *, policy: str = "kv_aware", port: int = 14000, file: Path | None = None
    ) -> None:
        """`file`: a configuration that names the engines and the ports; else everything is said by flags."""
        self.url = f"http://127.0.0.1:{port}"
        self.admin = f"http://127.0.0.1:{port + 1}"
        self._log = state / "gateway.log"
        self._command = [
            sys.executable, "-m", "router", "serve", "--port", str(port), "--admin-port", str(port + 1),
            "--policy", policy, "--state-dir", str(state), *(f"--engine={url}" for url in engines),
        ]  # fmt: skip
        if file is not None:
            self._command = [sys.executable, "-m", "router", "serve", "-c", str(file)]
        self._engines = len(engines)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> GatewayProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, wait_s: float = 60) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        self.wait_ready(self._engines, wait_s=wait_s)

    def stop(self) -> None:
        """As an operator would: SIGTERM, and wait until it has drained."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def wait_ready(self, engines: int, *, wait_s: float = 60) -> dict[str, Any]:
        """Until so many ranks are ready; the state then."""
        until = time.monotonic() + wait_s
        state: dict[str, Any] = {}
        while time.monotonic() < until:
            try:
                state = httpx.get(self.admin + "/readyz", timeout=5).json()
            except (httpx.HTTPError, ValueError):
                state = {}
            models = list(state.get("models", {}).values())
            loaded = all(model["prompts"]["state"] not in ("LOADING", "UNCHECKED") for model in models)
            if state.get("ready") and loaded and sum(model["ready"] for model in models) >= engines:
                return state
            time.sleep(0.2)
        raise TimeoutError(f"the gateway does not become ready: {state}; see {self._log}")

    def get(self, path: str) -> Any:
        answer = httpx.get(self.admin + path, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str) -> Any:
        answer = httpx.post(self.admin + path, timeout=120)
        answer.raise_for_status()
        return answer.json()
