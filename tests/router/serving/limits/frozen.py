"""A Redis that accepts connections and answers nothing, as a frozen machine does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import redis as sync_redis


@contextmanager
def frozen(url: str) -> Iterator[None]:
    with sync_redis.Redis.from_url(url) as client:
        process = int(client.info("server")["process_id"])
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)
