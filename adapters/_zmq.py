"""The sockets under an event stream: a SUB for each rank, its monitor, and a DEALER while a replay runs.

Frames (vLLM 0.9 to 0.33, SGLang 0.4.6 to 0.5.23): the publisher sends `topic | sequence, 8 bytes big-endian | msgpack`.
A replay is asked with `"" | start, 8 bytes`; without the empty frame the engine never answers. The answers are
`"" | topic | sequence | msgpack`, the topic only since vLLM 0.26 and SGLang 0.5.22, so that they are read from the
right; the end is an empty payload.

Sockets are read through their file descriptor on the running loop (asyncio or uvloop), without threads.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from time import perf_counter
from typing import Any

import zmq

from adapters._stream import EventStream, Item
from router.core import EventSource
from router.errors import EngineUnreachable

Socket = zmq.Socket[bytes]
Context = zmq.Context[zmq.Socket[bytes]]

_SLICE_S = 0.001  # the longest the loop is kept at one go
_NOBLOCK = int(zmq.NOBLOCK)  # a plain int: converting the enum costs more than the read
_RCVMORE = int(zmq.RCVMORE)
_CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)

Put = Callable[..., None]
"""put(size in bytes, method of the stream, its arguments …)"""


def new_context() -> Context:
    """One context for all engines of an adapter. A source takes up to four sockets; libzmq allows 1,023 by default."""
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 65_536)
    return context


class Follower:
    """Follows one source: `items` yields its batches in order, and what is lost.

    `max_bytes` bounds what waits to be decoded; past it batches are dropped, which shows as a gap and is replayed.
    """

    def __init__(
        self,
        context: Context,
        source: EventSource,
        after: int | None,
        *,
        clock: Callable[[], float],
        max_bytes: int = 64 << 20,
        timeout_s: float = 5.0,
    ) -> None:
        self._context = context
        self._source = source
        self._stream = EventStream(after, can_replay=source.replay is not None, clock=clock)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._queue: deque[tuple[int, Callable[..., Iterable[Item]], tuple[Any, ...]]] = deque()
        self._queued_bytes = 0
        self._arrived = asyncio.Event()
        self._subscription: _Subscription | None = None
        self._replay: _Replay | None = None

    async def items(self) -> AsyncGenerator[Item]:
        """Endless. Raises `EngineUnreachable` when the endpoint is no address. To be closed with `aclose()`."""
        self._subscription = _Subscription(
            self._context, self._source, self._stream, self._put, timeout_s=self._timeout_s
        )
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                until = perf_counter() + _SLICE_S
                for item in self._queued_items():
                    if item is not None:
                        yield item
                    if perf_counter() >= until:
                        await asyncio.sleep(0)
                        until = perf_counter() + _SLICE_S
        finally:
            self.close()

    def close(self) -> None:
        """Closes the sockets; `items` yields nothing more."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        self._close_replay()
        self._queue.clear()

    def _put(self, size: int, call: Callable[..., Iterable[Item]], *arguments: Any) -> None:
        if self._queued_bytes + size > self._max_bytes:
            return
        self._queued_bytes += size
        self._queue.append((size, call, arguments))
        if not self._arrived.is_set():
            self._arrived.set()

    def _queued_items(self) -> Iterator[Item | None]:
        """What the queue brings; a None after each entry, which may bring nothing, so that the caller can pause."""
        while self._queue:
            size, call, arguments = self._queue.popleft()
            self._queued_bytes -= size
            yield from call(*arguments)
            if self._stream.wanted is not None or (self._replay is not None and not self._stream.replaying):
                self._follow_stream()
            yield None

    def _follow_stream(self) -> None:
        """Start and stop the replay as the stream wants it."""
        self._close_replay()
        start, self._stream.wanted = self._stream.wanted, None
        is_open = self._subscription is not None
        if is_open and start is not None and self._source.replay is not None:
            self._replay = _Replay(
                self._context, self._source.replay, start, stream=self._stream, put=self._put, timeout_s=self._timeout_s
            )

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None


class _Subscription:
    """The SUB socket, and the monitor that tells when its connection comes and goes."""

    def __init__(
        self, context: Context, source: EventSource, stream: EventStream, put: Put, *, timeout_s: float
    ) -> None:
        self._stream = stream
        self._put = put
        self._connected = False
        self._in_step = False  # whether messages have been seen to have three frames since the connection came
        self._socket = socket = context.socket(zmq.SUB)
        _configure(socket)
        socket.subscribe(source.topic)
        self._monitor = socket.get_monitor_socket(_CONNECTED | _DISCONNECTED)
        self._recv = socket.recv
        _connect(socket, source.endpoint, and_close=self._monitor)
        self._monitor_reader = SocketReader(self._monitor, self._read_monitor)
        self._reader = SocketReader(socket, self._read, first=self._monitor_reader.drain)
        self._no_connection = asyncio.get_running_loop().call_later(timeout_s, self._say_silent)

    def close(self) -> None:
        self._no_connection.cancel()
        self._socket.disable_monitor()
        self._monitor_reader.close()
        self._reader.close()

    def _read(self) -> None:
        if not self._in_step:
            frames = self._socket.recv_multipart(_NOBLOCK)
            self._in_step = len(frames) == 3
            sequence, payload = frames[-2:] if len(frames) > 1 else (b"", b"")
        else:  # three plain reads: to ask for RCVMORE after each would cost five times as much
            recv = self._recv
            recv(_NOBLOCK)
            sequence = recv(_NOBLOCK)
            payload = recv(_NOBLOCK)
        if len(sequence) == 8:
            self._put(len(payload), self._stream.live, int.from_bytes(sequence, "big"), payload)
        else:
            self._in_step = False
            while self._socket.getsockopt(_RCVMORE):
                self._recv(_NOBLOCK)

    def _read_monitor(self) -> None:
        event = int.from_bytes(self._monitor.recv_multipart(_NOBLOCK)[0][:2], sys.byteorder)
        if event == _CONNECTED:
            self._no_connection.cancel()
            self._connected, self._in_step = True, False
            self._put(0, self._stream.connected)
        elif event == _DISCONNECTED and self._connected:
            self._connected = False
            self._put(0, self._stream.disconnected, "connection lost")

    def _say_silent(self) -> None:
        self._put(0, self._stream.disconnected, "no connection")


class _Replay:
    """One replay request and its answers. `timeout_s` is the longest silence; what comes after `close` is ignored."""

    def __init__(
        self, context: Context, endpoint: str, start: int, *, stream: EventStream, put: Put, timeout_s: float
    ) -> None:
        self._stream = stream
        self._put = put
        self._timeout_s = timeout_s
        self._closed = False
        self._silent = True  # since the timer was set
        self._socket = context.socket(zmq.DEALER)
        _configure(self._socket)
        _connect(self._socket, endpoint)
        self._socket.send_multipart([b"", start.to_bytes(8, "big")], _NOBLOCK)
        self._reader = SocketReader(self._socket, self._read)
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._check)

    def close(self) -> None:
        self._closed = True
        self._timer.cancel()
        self._reader.close()

    def _read(self) -> None:
        frames = self._socket.recv_multipart(_NOBLOCK)
        self._silent = False
        payload = frames[-1]
        if not payload:
            self._put(0, self._unless_closed, self._stream.replay_ended)
        elif len(frames) > 1 and len(frames[-2]) == 8:
            sequence = int.from_bytes(frames[-2], "big")
            self._put(len(payload), self._unless_closed, self._stream.replayed, sequence, payload)

    def _check(self) -> None:
        if self._silent:
            self._put(0, self._unless_closed, self._stream.replay_failed, "no answer to the replay request")
            return
        self._silent = True
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)

    def _unless_closed(self, call: Callable[..., Iterable[Item]], *arguments: Any) -> Iterable[Item]:
        return () if self._closed else call(*arguments)


class SocketReader:
    """Calls `read` until it raises `zmq.Again`, whenever the socket may have something to read.

    A ZMQ descriptor is edge-triggered: it tells of changes, not of what is waiting, and any use of the socket may
    swallow one. So there is a first round without a call, and EVENTS is looked at after every round.
    `first` is called before each round.
    """

    def __init__(self, socket: Socket, read: Callable[[], None], *, first: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._read = read
        self._first = first
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.drain)
        self._loop.call_soon(self.drain)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def drain(self) -> None:
        if self._socket.closed:  # a round that was already due when the socket was closed
            return
        if self._first is not None:
            self._first()
        read, until = self._read, perf_counter() + _SLICE_S
        try:
            while perf_counter() < until:
                read()
        except zmq.Again:
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
        self._loop.call_soon(self.drain)


def _configure(socket: Socket) -> None:
    socket.linger = 0
    socket.rcvhwm = 0  # the bound is ours (`Follower.max_bytes`); libzmq would drop without a word
    socket.ipv6 = True
    socket.reconnect_ivl = 100
    socket.reconnect_ivl_max = 2_000
    socket.tcp_keepalive = 1  # a host that has gone without a FIN is noticed after 25 s
    socket.tcp_keepalive_idle = 10
    socket.tcp_keepalive_intvl = 5
    socket.tcp_keepalive_cnt = 3


def _connect(socket: Socket, endpoint: str, *, and_close: Socket | None = None) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        if and_close is not None:
            socket.disable_monitor()
            and_close.close(linger=0)
        socket.close(linger=0)
        raise EngineUnreachable("the engine's event endpoint cannot be used", detail=str(error)) from None
