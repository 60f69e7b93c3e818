"""What is written in one turn of the loop goes out together, at its end.

A write enters the kernel and wakes who reads there. With the work on a request between any two writes, each finds the
kernel's code gone from the processor's caches and its reader asleep again; one behind the other they cost a third, and
the requests themselves less: of the 209 µs of CPU of a saturated gateway's request, 161 were left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from router.http.messages import ONE_WRITE_BYTES

AT_ONCE = 16
"""So many connections wait for the end of the turn at most: under load a turn takes milliseconds."""


class Outbox:
    """Of one loop, for all its connections. `before`: called each time before something goes out."""

    def __init__(self, *, before: Callable[[], None] = lambda: None) -> None:
        self._loop = asyncio.get_running_loop()
        self.before = before
        self._due: list[BatchedTransport] = []

    def batched(self, transport: asyncio.Transport) -> BatchedTransport:
        return BatchedTransport(transport, self)

    def add(self, transport: BatchedTransport) -> None:
        """It has something to send."""
        due = self._due
        due.append(transport)
        if len(due) == 1:
            self._loop.call_soon(self._send)
        elif len(due) >= AT_ONCE:
            self._send()

    def _send(self) -> None:
        due, self._due = self._due, []
        for transport in due:
            try:
                transport.flush()
            except Exception as error:  # whatever it is, it is not to keep the others waiting
                self._loop.call_exception_handler({"message": "writing failed", "exception": error})
                transport.abort()


class BatchedTransport(asyncio.Transport):
    """A transport whose writes wait for the end of the turn, in their order. It is one of `Outbox.batched`.

    What would be costly to join goes out at once, behind what waits; what waits goes out before the transport closes.
    """

    __slots__ = ("_outbox", "_transport", "_waiting")

    def __init__(self, transport: asyncio.Transport, outbox: Outbox) -> None:
        self._transport = transport
        self._outbox = outbox
        self._waiting = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._waiting:
            self._waiting += data
        else:
            self._waiting = bytes(data)  # no copy of what is bytes
            self._outbox.add(self)
        if len(self._waiting) > ONE_WRITE_BYTES:
            self.flush()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.flush()
        self._outbox.before()
        self._transport.writelines(list_of_data)

    def flush(self) -> None:
        """What waits is handed to the system."""
        waiting, self._waiting = self._waiting, b""
        if waiting and not self._transport.is_closing():
            self._outbox.before()
            self._transport.write(waiting)

    def write_eof(self) -> None:
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self.flush()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return len(self._waiting) + self._transport.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
