"""The way to Redis: one connection, on which everything goes in order and waits for no longer than it may.

What is put in line within one turn of the loop is sent together. Whatever has no answer after `timeout_s`, counted from
when it was put in line, has failed, and so has all behind it: the line is down then, nobody waits for it any more, and
it is tried again every `BEAT_S` until it answers in time. What was to be said meanwhile is said before anything else.

A beat, every `BEAT_S`, tells other gateways that this one is alive, and counts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from redis.asyncio import Connection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

log = logging.getLogger("warmroute")

SCRIPT = Path(__file__).with_name("counters.lua").read_bytes()
BEAT_S = 0.5
ALIVE_S = 5.0
"""A gateway that was not heard for so long has no share any more."""
_CONNECT_S = 1.0
_SENT_AT_ONCE = 16  # about half a millisecond of the loop
_REPLICAS = b"warmroute:gateways"
_GONE = (RedisError, OSError, EOFError, TimeoutError, ValueError)
_BLOCKED = ("noscript", "unknown command", "unknown script", "no permissions", "noperm")


class Errand(Protocol):
    """One call of the script. `keys` and `arguments` as `counters.lua` has them."""

    @property
    def keys(self) -> Sequence[bytes]: ...
    @property
    def arguments(self) -> Sequence[bytes]: ...
    def answered(self, reply: bytes) -> None: ...
    def failed(self) -> None: ...


class Line:
    """`is_up`: only then is anything put in line.

    gateways: how many there are, and which of them this one is, from 0 on: as of the last beat.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        name: str,
        catch_up: Callable[[], Awaitable[None]],
        on_fall: Callable[[tuple[int, int]], None],
    ) -> None:
        """`name`: of this gateway. `catch_up`: called each time the line is usable again, before it is up. `on_fall`:
        told `gateways` each time it is no longer. Raises ValueError for a url that is none."""
        pool = ConnectionPool.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0), socket_connect_timeout=_CONNECT_S)
        self._connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
        self._timeout_s = timeout_s
        self._name = name.encode()
        self._catch_up = catch_up
        self._on_fall = on_fall
        self._waiting: deque[tuple[float, Errand]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._fell = asyncio.Event()
        self._sha = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest().encode()
        self._has_evalsha = True
        self._loop = asyncio.get_running_loop()
        self._is_closing = False
        self.is_up = False
        self.gateways = (1, 0)
        self.falls = 0

    async def start(self) -> None:
        """Up, if Redis answers now."""
        await self._rise()
        self._beating = asyncio.ensure_future(self._beat_on())

    async def aclose(self) -> None:
        """What is in line is still sent, as far as it is answered in time."""
        self._is_closing = True
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._sender is not None:
            await asyncio.gather(self._sender, return_exceptions=True)
        self.is_up = False
        await self._disconnect()

    def put(self, errand: Errand) -> None:
        self._waiting.append((self._loop.time(), errand))
        if self._sender is None:
            self._sender = self._loop.create_task(self._send_all())

    async def run(self, errands: Sequence[Errand]) -> None:
        """While the line is not up: at once. Raises what `put` would take for a fall."""
        for first in range(0, len(errands), _SENT_AT_ONCE):
            until = self._loop.time() + self._timeout_s
            await self._exchange(errands[first : first + _SENT_AT_ONCE], until)

    # -- one after the other

    async def _send_all(self) -> None:
        waiting = self._waiting
        try:
            while waiting:
                until = waiting[0][0] + self._timeout_s
                errands = [waiting.popleft()[1] for _ in range(min(len(waiting), _SENT_AT_ONCE))]
                try:
                    await self._exchange(errands, until)
                except Exception as error:  # even one of ours: nobody may wait for ever
                    await self._fall(error, errands)
        finally:
            self._sender = None

    async def _exchange(self, errands: Sequence[Errand], until: float) -> None:
        """Sends, and hands each its answer; those that got none are told nothing here."""
        async with asyncio.timeout_at(until):
            replies = await self._call(errands)
        for errand, reply in zip(errands, replies, strict=True):
            errand.answered(reply)

    async def _call(self, errands: Sequence[Errand]) -> list[bytes]:
        """EVALSHA, which needs no SCRIPT LOAD: what Redis does not know by its name yet it is sent whole, once."""
        if self._has_evalsha:
            replies = await self._ask(errands, b"EVALSHA", self._sha)
            refused = [reply for reply in replies if isinstance(reply, ResponseError)]
            if not refused:
                return replies
            said = str(refused[0]).lower()
            if len(refused) < len(replies) or not (type(refused[0]).__name__ == "NoScriptError" or _is_blocked(said)):
                raise refused[0]
            self._has_evalsha = type(refused[0]).__name__ == "NoScriptError"
        replies = await self._ask(errands, b"EVAL", SCRIPT)
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply
        return replies

    async def _ask(self, errands: Sequence[Errand], command: bytes, script: bytes) -> list[Any]:
        connection = self._connection
        packed = b"".join([_packed((command, script, b"%d" % len(e.keys), *e.keys, *e.arguments)) for e in errands])
        await connection.send_packed_command(packed, check_health=False)
        replies: list[Any] = []
        for _ in errands:
            try:
                replies.append(await connection.read_response(disable_decoding=True))
            except ResponseError as error:
                replies.append(error)
        return replies

    # -- up and down

    async def _beat_on(self) -> None:
        while not self._is_closing:
            if self.is_up:
                self.put(self._beat())
            elif await self._rise():
                continue
            self._fell.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._fell.wait()

    async def _rise(self) -> bool:
        try:
            if not self._connection.is_connected:
                async with asyncio.timeout(_CONNECT_S):
                    await self._connection.connect()  # type: ignore[no-untyped-call]
            await self.run([self._beat()])
            await self._catch_up()
        except _GONE as error:
            if not self.falls:
                self._begin_outage(error)
            await self._disconnect()
            return False
        if self.falls:
            log.info("Redis answers again: limits are shared")
        self.is_up = True
        return True

    async def _fall(self, error: Exception, errands: Sequence[Errand]) -> None:
        """Nobody is kept waiting: whoever asked goes on without an answer."""
        if self.is_up:
            self._begin_outage(error)
        rest = [errand for _, errand in self._waiting]
        self._waiting.clear()
        for errand in (*errands, *rest):
            errand.failed()
        await self._disconnect()
        self._fell.set()

    def _begin_outage(self, error: Exception) -> None:
        self.is_up = False
        self.falls += 1
        self._on_fall(self.gateways)
        log.warning("Redis does not answer: limits go by without_redis (%s)", type(error).__name__)

    def _beat(self) -> Errand:
        return _Beat(self._name, self._count)

    def _count(self, names: Sequence[bytes]) -> None:
        self.gateways = (max(1, len(names)), names.index(self._name) if self._name in names else 0)

    async def _disconnect(self) -> None:
        with contextlib.suppress(*_GONE):
            await self._connection.disconnect(nowait=True)


class _Beat:
    keys = (_REPLICAS,)

    def __init__(self, name: bytes, count: Callable[[Sequence[bytes]], None]) -> None:
        self.arguments = (b"beat", name, b"%d" % (ALIVE_S * 1000))
        self._count = count

    def answered(self, reply: bytes) -> None:
        self._count(sorted(reply.split()))

    def failed(self) -> None:
        pass


def _is_blocked(said: str) -> bool:
    return any(word in said for word in _BLOCKED)


def _packed(parts: Sequence[bytes]) -> bytes:
    """A command as Redis reads it (RESP)."""
    return b"*%d\r\n%b" % (len(parts), b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts]))
