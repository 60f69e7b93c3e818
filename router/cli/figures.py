"""Where figures go: a table for people, JSON for programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

PIPE_WIDTH = 160
"""Columns where there is no terminal: a table cut at 80 columns helps nobody in a log."""


def terminal() -> Console:
    """Standard output; wide enough for a table when it is a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=max(console.width, PIPE_WIDTH), highlight=False)


def write_json(file: Path, figures: Any) -> None:
    """One indented document; "-" is standard output."""
    data = orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if str(file) == "-":
        sys.stdout.write(data.decode())
    else:
        file.write_bytes(data)
