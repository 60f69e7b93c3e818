"""Requests to engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from router.core import Booking
from router.errors import EngineUnreachable
from router.http.messages import header_lines
from router.serving.apis import Translation
from router.serving.attempt import Attempt
from router.serving.call import Call
from router.serving.deadlines import Deadlines
from router.serving.engines import Engine, Engines
from router.serving.reply import Reply

ALIVE_S = 1.0


class Proxy:
    """Sends requests to engines."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._deadlines = Deadlines(loop=asyncio.get_running_loop())

    def begin(
        self,
        call: Call,
        booking: Booking,
        reply: Reply,
        *,
        on_first_token: Callable[[int], None],
        first_byte_s: float,
        age_s: float,
    ) -> Attempt:
        """Send `call` to the engine that was booked; its answer goes to `reply`. Raises EngineUnreachable.

        `on_first_token` is called with the booking's id. `first_byte_s`: how long it is waited for, by default as long
        as the call's limits say. `age_s`: how long ago the call came.
        """
        engine = self._engines.get(booking.instance)
        attempt = Attempt(call, reply, booking.id, on_first_token=on_first_token)
        otherwise = call.api.otherwise
        if otherwise is not None:
            send = partial(self._send, attempt, call, booking, reply, engine, first_byte_s, age_s)
            unsalted = call.caller.salt is not None and call.path not in engine.salted
            attempt.translate(otherwise, send, booking.tokens, lacks=engine.lacks, at_once=unsalted)
        self._send(attempt, call, booking, reply, engine, first_byte_s, age_s, attempt.translation)
        return attempt

    def _send(
        self,
        attempt: Attempt,
        call: Call,
        booking: Booking,
        reply: Reply,
        engine: Engine,
        first_byte_s: float,
        age_s: float,
        translation: Translation | None,
    ) -> None:
        """Raises BadRequest for what cannot be translated."""
        route = engine.route(
            call.path if translation is None else translation.path, booking.rank if booking.target_rank else None
        )
        lines = b"%b\r\nx-request-id: %b" % (route.lines, reply.upstream_id)
        if call.forwarded:
            lines += header_lines(call.forwarded)
        owned = route.fields
        if call.caller.salt is not None and (route.salted or "cache_salt" in call.fields):
            owned = {**owned, "cache_salt": b'"%b"' % str(call.salt).encode()}
        if translation is None:
            body = call.upstream_body(booking.served, owned)
        else:
            body = translation.body(call.fields, booking.served, owned)
        attempt.watch = self._deadlines.begin(attempt, call.limits, first_byte_s=first_byte_s, age_s=age_s)
        attempt.exchange = engine.pool.post(lines, body, attempt)

    async def is_there(self, instance: str) -> bool:
        """Whether an engine that broke off still takes connections."""
        try:
            return await self._engines.get(instance).pool.answers(within_s=ALIVE_S)
        except EngineUnreachable:
            return False

    def unable_to(self, call: Call) -> tuple[str, ...]:
        """Instances that cannot go on with what `call` begins."""
        return self._engines.without_continuing() if call.fields.get("continue_final_message") else ()

    def close(self) -> None:
        self._deadlines.close()
