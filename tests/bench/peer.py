"""The gateway with everything on, before engines that a benchmark of several gateways has started.

    python -m tests.bench.peer --port 8201 --urls http://127.0.0.1:9001,http://127.0.0.1:9002 [--tokenize always]

Demo tokenizer and chat template, an event source for each engine, policy `kv_aware`, admin API and metrics.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from router import app
from router.config import load
from tests.bench.processes import written_config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--urls", required=True)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--tokenize", default="auto")
    parser.add_argument("--policy", default="kv_aware")
    parser.add_argument(
        "--ledger", choices=("on", "off"), default="on", help="what each request cost; no part of a bare gateway"
    )
    options = parser.parse_args()
    engines = [
        {"url": url, "kind": "vllm", "block_size": 16, "events": [{"endpoint": f"tcp://127.0.0.1:{9601 + i}"}]}
        for i, url in enumerate(options.urls.split(","))
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = written_config(
            Path(folder),
            port=options.port,
            engines=engines,
            model=options.model,
            tokenize=options.tokenize,
            policy=options.policy,
            settings={"ledger": {"enabled": options.ledger == "on"}},
        )
        app.run(load(file))


if __name__ == "__main__":
    main()
