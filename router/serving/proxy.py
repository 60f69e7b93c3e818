"""Requests to engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.core import Booking
from router.http.messages import header_lines
from router.serving.attempt import Attempt
from router.serving.call import Call
from router.serving.deadlines import Deadlines
from router.serving.engines import Engines
from router.serving.reply import Reply


class Proxy:
    """Sends requests to engines."""

    def __init__(self, engines: Engines, *, first_byte_s: float = 600.0) -> None:
        self._engines = engines
        self._deadlines = Deadlines(first_byte_s=first_byte_s, loop=asyncio.get_running_loop())

    def begin(self, call: Call, booking: Booking, reply: Reply, *, on_first_token: Callable[[int], None]) -> Attempt:
        """Send `call` to the engine that was booked; its answer goes to `reply`. Raises EngineUnreachable.

        `on_first_token` is called with the booking's id.
        """
        engine = self._engines.get(booking.instance)
        route = engine.route(call.path, booking.rank if booking.target_rank else None)
        attempt = Attempt(call, reply, booking.id, on_first_token=on_first_token, deadlines=self._deadlines)
        lines = b"%b\r\nx-request-id: %b" % (route.lines, reply.upstream_id)
        if call.forwarded:
            lines += header_lines(call.forwarded)
        attempt.exchange = engine.pool.post(lines, call.upstream_body(booking.served, route.fields), attempt)
        self._deadlines.set_first_byte(attempt)
        return attempt

    def close(self) -> None:
        self._deadlines.close()
