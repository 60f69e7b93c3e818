"""`warmroute`, whose relay writes how many tasks it has to its standard error on SIGUSR1, for `tests.bench.crowd`."""

from __future__ import annotations

import asyncio
import signal
import sys

from router.cli import main


def _say(*_: object) -> None:
    print(f"tasks {len(asyncio.all_tasks(asyncio.get_running_loop()))}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _say)
    main()
