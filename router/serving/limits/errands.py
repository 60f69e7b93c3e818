"""What is said to Redis of a request, and what its answers mean: the calls of `counters.lua`."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.errors import WarmrouteError
from router.serving.limits.holds import Charge, Hold, Taken
from router.serving.limits.meters import ALWAYS, Meter
from router.serving.limits.refusals import refusal

Otherwise = Callable[[Hold, Sequence[Charge]], None]


class Used(NamedTuple):
    """What was really used of a limit, in the window between two times."""

    limit: str
    start: int
    ends: int
    amount: int


class Take:
    """`otherwise`: how it is decided without an answer."""

    __slots__ = ("_charges", "_hold", "_otherwise", "arguments", "future", "keys")

    def __init__(
        self, hold: Hold, charges: Sequence[Charge], now: float, *, lease_s: float, otherwise: Otherwise
    ) -> None:
        hold.unanswered += 1
        self._hold = hold
        self._charges = charges
        self._otherwise = otherwise
        self.future: Future[None] = asyncio.get_running_loop().create_future()
        self.keys, prefix = tenant_keys(hold.caller.tenant)
        self.arguments: list[bytes] = [b"take", prefix, hold.name.encode(), b"%d" % (lease_s * 1000)]
        for meter, amount in charges:
            self.arguments += (meter.id.encode(), b"%d" % amount, b"%d" % meter.amount, *_shape(meter, now))

    def answered(self, reply: bytes) -> None:
        """Even where the client has left meanwhile: `settle` comes after it, and gives everything back."""
        hold, future = self._hold, self.future
        hold.unanswered -= 1
        verdict, at, *said = map(int, reply.split())
        full = []
        for (meter, amount), start, ends, used in zip(self._charges, said[::3], said[1::3], said[2::3], strict=False):
            meter.hear(start, ends or ALWAYS, used)
            if verdict == 1:
                hold.taken.append(Taken(meter, start, amount))
            elif used + amount > meter.amount:
                full.append((meter, amount))
        if future.done():
            return
        if full:
            future.set_exception(refusal(full, at / 1000))
        else:
            future.set_result(None)

    def failed(self) -> None:
        if self.future.done():
            return
        try:
            self._otherwise(self._hold, self._charges)
        except WarmrouteError as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


class Settle:
    """`otherwise`: what becomes of it without an answer."""

    __slots__ = ("arguments", "keys", "otherwise", "tenant", "used")

    def __init__(self, tenant: str, name: str, used: Sequence[Used]) -> None:
        self.tenant = tenant
        self.used = used
        self.otherwise: Callable[[Settle], None] = lambda _: None
        self.keys, prefix = tenant_keys(tenant)
        self.arguments: list[bytes] = [b"settle", prefix, name.encode()]
        for limit, start, ends, amount in used:
            self.arguments += (b"%b:%d" % (limit.encode(), start), b"%d" % amount, b"%d" % ends)

    def answered(self, reply: bytes) -> None:
        pass

    def failed(self) -> None:
        self.otherwise(self)


class Renew:
    """`none_left`: told when Redis has no holds of the tenant any more."""

    __slots__ = ("_none_left", "_tenant", "arguments", "keys")

    def __init__(self, tenant: str, names: Sequence[str], *, lease_s: float, none_left: Callable[[str], None]) -> None:
        self._tenant = tenant
        self._none_left = none_left
        self.keys, prefix = tenant_keys(tenant)
        self.arguments = [b"renew", prefix, b"%d" % (lease_s * 1000), *map(str.encode, names)]

    def answered(self, reply: bytes) -> None:
        if reply == b"0":
            self._none_left(self._tenant)

    def failed(self) -> None:
        pass


def tenant_keys(tenant: str) -> tuple[tuple[bytes, bytes], bytes]:
    """Leases and holds; and how its counters are named. The braces put all into one slot of a cluster."""
    prefix = b"warmroute:{%b}:" % tenant.encode()
    return (prefix + b"leases", prefix + b"holds"), prefix


def _shape(meter: Meter, now: float) -> tuple[bytes, ...]:
    """How Redis finds the window by its own clock: length, shift, and where the length is 0 when windows begin."""
    if now >= meter.redis_shape_until:
        window = meter.window
        if window is None:
            meter.redis_shape, meter.redis_shape_until = (b"0", b"0", b""), ALWAYS
        elif window.length_s:
            meter.redis_shape, meter.redis_shape_until = (b"%d" % window.length_s, b"%d" % window.shift_s, b""), ALWAYS
        else:
            begins = window.around(now)
            meter.redis_shape = (b"0", b"0", b"%d %d %d %d" % begins)
            meter.redis_shape_until = begins[2]
    return meter.redis_shape
