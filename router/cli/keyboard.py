"""Single keys from a terminal, without Enter, on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping


@contextlib.contextmanager
def pressed(actions: Mapping[str, Callable[[], None]]) -> Iterator[bool]:
    """Calls the action of a key when it is pressed. Yields whether there is a terminal to press keys at."""
    if not sys.stdin.isatty():
        yield False
        return
    descriptor = sys.stdin.fileno()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in os.read(descriptor, 64).decode(errors="replace"):
            if key in actions:
                actions[key]()

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield True
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
