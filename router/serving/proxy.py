"""Requests to engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.core import Booking
from router.serving.attempt import Attempt
from router.serving.call import Call
from router.serving.deadlines import Deadlines
from router.serving.engines import Engines
from router.serving.reply import Reply


class Proxy:
    """Sends requests to engines."""

    def __init__(self, engines: Engines, *, first_byte_s: float = 600.0) -> None:
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(first_byte_s=first_byte_s, loop=self._loop)

    def begin(self, call: Call, booking: Booking, reply: Reply, *, on_first_token: Callable[[], None]) -> Attempt:
        """Send `call` to the engine that was booked; its answer goes to `reply`. Raises EngineUnreachable."""
        engine = self._engines.get(booking.instance)
        upstream = engine.upstream(booking.rank if booking.target_rank else None)
        attempt = Attempt(
            call,
            reply,
            answer=self._loop.create_future(),
            on_first_token=on_first_token,
            deadlines=self._deadlines,
        )
        exchange = engine.pool.send(
            b"POST",
            call.path.encode("ascii"),
            [*upstream.headers, (b"x-request-id", reply.upstream_id), *call.trace],
            call.upstream_body(booking.served, upstream.fields),
            attempt,
        )
        attempt.begin(exchange)
        self._deadlines.set_first_byte(attempt)
        return attempt

    def close(self) -> None:
        self._deadlines.close()
