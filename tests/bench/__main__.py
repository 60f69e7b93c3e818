"""Speed of every hot step, each beside its baseline.

    python -m tests.bench [NAME …] [--json FILE] [--tokenizer DIR] [--sglang-router PYTHON] [--peers FOLDER]

Runs the named benchmarks, or all but `crowd`, `ledger`, `ledger_chaos` and `reports`, one after the other, each in a
process of its own: about 8 minutes, and nothing else should run on the machine meanwhile. Each also runs alone
(`python -m tests.bench.NAME`).

--tokenizer      a folder with a model's tokenizer.json for `decision`; by default the demo's
--sglang-router  the Python of an environment with sglang-router, which `turns` then measures beside us
--peers          a folder with the run_peers.py of a side-by-side comparison of gateways; ours takes part (2 min)
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.bench.processes import end_cleanly_when_told

BENCHMARKS = (
    "calls", "place", "limits", "decision", "index", "events", "slices", "lab", "http_relay", "relay", "turns",
    "stalls", "streaming_share", "agreement",
)  # fmt: skip
BY_NAME = ("crowd", "ledger", "ledger_chaos", "reports")
"""Run only when named: they take their time, or ask whether something breaks, and not how fast it is."""
REPOSITORY = Path(__file__).resolve().parents[2]
PEER_NAMES = ("direct", "vllm-router rr", "sglang-router cache", "warmroute", "warmroute-always")
PEERS_TAKE_S = 150


def main() -> int:
    options = _options()
    end_cleanly_when_told()
    names = options.names or BENCHMARKS
    total = sum(takes_s(name) for name in names) + (PEERS_TAKE_S if options.peers else 0)
    load = ", ".join(f"{average:.2f}" for average in os.getloadavg())
    print(f"{len(names)} benchmarks, about {total // 60}:{total % 60:02} min; load average {load}", flush=True)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            figures[name] = _run(name, _arguments(name, options), Path(folder) / name)
        if options.peers:
            figures["peers"] = _run_peers(options.peers, Path(folder) / "peers")
        elif not options.names:
            print("\npeers: not compared, since no folder with a run_peers.py was given (--peers FOLDER)")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    failed = [name for name, found in figures.items() if found is None]
    if failed:
        print("FAILED:", ", ".join(failed))
    return 1 if failed else 0


def takes_s(name: str) -> int:
    seconds: int = import_module(f"tests.bench.{name}").TAKES_S
    return seconds


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*BENCHMARKS, *BY_NAME)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokenizer")
    parser.add_argument("--sglang-router")
    parser.add_argument("--peers", type=Path)
    options = parser.parse_args()
    if unknown := set(options.names) - {*BENCHMARKS, *BY_NAME}:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join((*BENCHMARKS, *BY_NAME))}")
    return options


def _arguments(name: str, options: argparse.Namespace) -> list[str]:
    if name == "decision" and options.tokenizer:
        return ["--tokenizer", options.tokenizer]
    if name == "turns" and options.sglang_router:
        return ["--sglang-router", options.sglang_router]
    return []


def _run(name: str, arguments: list[str], file: Path) -> dict[str, Any] | None:
    """Its figures as it wrote them; None when it failed. Its table goes to our output."""
    print(f"\n{name}: about {takes_s(name)} s …", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", f"tests.bench.{name}", "--json", str(file), *arguments]
    if not _succeeds(command):
        return None
    figures: dict[str, Any] = json.loads(file.read_text())
    return {**figures, "took_s": round(time.monotonic() - began, 1)}


def _run_peers(folder: Path, file: Path) -> dict[str, Any] | None:
    script = folder.resolve() / "run_peers.py"
    if not script.is_file():
        print(f"\npeers: not compared, since there is no run_peers.py in {folder}")
        return {}
    print(f"\npeers: about {PEERS_TAKE_S} s …", flush=True)
    ours = shlex.join(["env", "-C", str(REPOSITORY), sys.executable, "-m", "tests.bench.peer"])
    ours += " --port {port} --urls {urls}"
    commands = [f"warmroute={ours}", f"warmroute-always={ours} --tokenize always"]
    command = [sys.executable, str(script), "--only", ",".join(PEER_NAMES), "--runs", "1", "--quick", "--wait", "5"]
    command += ["--tries", "1", "--out", str(file), *(part for value in commands for part in ("--cmd", value))]
    if not _succeeds(command):
        return None
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def _succeeds(command: list[str]) -> bool:
    """Whether it ended well. When we are told to end it is told too, and given the time to end what it has started."""
    process = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        return process.wait() == 0
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
