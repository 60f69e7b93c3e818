"""A network that does nothing by itself, and a loop that never turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any


class Transport(asyncio.Transport):
    """Keeps what is written. `ended`: our side was shut, or the connection closed."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.written = b""
        self.closed = False
        self.ended = False
        self.reset = False

    def write(self, data: Any) -> None:
        assert not self.ended, "written after the end"
        self.written += data

    def writelines(self, pieces: Iterable[Any]) -> None:
        for piece in pieces:
            self.write(piece)

    def write_eof(self) -> None:
        assert not self.ended
        self.ended = True

    def close(self) -> None:
        self.closed = self.ended = True

    def abort(self) -> None:
        self.reset = True
        self.close()

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        assert not self.closed

    def resume_reading(self) -> None:
        assert not self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


class Loop(asyncio.AbstractEventLoop):
    """What protocols ask of the running loop. Timers are kept, and called by `turn`."""

    def __init__(self) -> None:
        self._timers: list[Callable[[], None]] = []

    def __enter__(self) -> Loop:
        asyncio._set_running_loop(self)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio._set_running_loop(None)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        self._timers.append(lambda: callback(*args))

    def call_exception_handler(self, context: Any) -> None:
        if not isinstance(context["exception"], Planned):
            raise context["exception"]

    def turn(self) -> None:
        timers, self._timers = self._timers, []
        for timer in timers:
            timer()


class Planned(Exception):
    """Raised by a handler on purpose."""
