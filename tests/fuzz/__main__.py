"""`make fuzz`: a million inputs over all targets, in shares, as many targets at a time as there are cores.

What is worth keeping stays in `.fuzz/corpus`, from where the next run goes on; findings are named files in
`.fuzz/findings`, and make the command fail. A finding that is a fault becomes a seed in `tests/fuzz/corpus`, and a test
with the right value where the code is tested.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.targets import SHARES

_RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs in all")
    parser.add_argument("--only", action="append", choices=list(SHARES), help="a target; may be repeated")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="corpus and findings")
    options = parser.parse_args()
    shares = {name: share for name, share in SHARES.items() if not options.only or name in options.only}
    whole = sum(shares.values())
    (options.folder / "findings").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        hunts = [
            pool.submit(_hunt, name, options.runs * share // whole, options.folder) for name, share in shares.items()
        ]
    findings = sorted(path.name for path in (options.folder / "findings").iterdir() if path.suffix != ".txt")
    print(f"{sum(hunt.result()[0] for hunt in hunts):,} inputs, {len(findings)} findings in {options.folder}/findings")
    for name in findings:
        print(f"  {name}")
    return 1 if findings or not all(hunt.result()[1] for hunt in hunts) else 0


def _hunt(name: str, runs: int, folder: Path) -> tuple[int, bool]:
    """How many inputs it was, and whether the hunt came to its end."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz.hunt", name, str(runs), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    told = _RUNS.search(result.stderr)
    done = int(told[1]) if told else 0
    print(f"{name:<16} {done:>9,} inputs {time.monotonic() - began:7.1f} s", flush=True)
    if result.returncode:
        print(result.stderr[-2000:], file=sys.stderr)
    return done, result.returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
