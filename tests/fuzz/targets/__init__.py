"""The readers of bytes from outside, and what they promise for any bytes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

CORPUS = Path(__file__).parents[1] / "corpus"

SHARES = {
    "http_server": 17,
    "http_connection": 13,
    "http_client": 17,
    "request_body": 12,
    "beginnings": 3,
    "engine_answer": 10,
    "event_stream": 15,
    "kv_events": 4,
    "kv_stream": 3,
    "metrics_page": 3,
    "content_coding": 1,
    "trace_lines": 1,
    "configuration": 1,
}
"""Targets, and how many inputs of a hundred each gets: most where strangers write the bytes."""


class Target(NamedTuple):
    name: str
    run: Callable[[bytes], None]
    words: tuple[bytes, ...]

    def corpus(self) -> list[Path]:
        return sorted((CORPUS / self.name).iterdir())


def load(name: str) -> Target:
    module = import_module(f"{__name__}.{name}")
    return Target(name, module.target, module.WORDS)
