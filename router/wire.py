"""The protocols of `core` between processes: calls and casts over a Unix socket.

A frame is a big-endian u32 length and a MessagePack array `[call, method, arguments]`; `call` 0 is a cast, which is not
answered. A reply is `[call, ok, value]`; when not ok, the value is `[class of error, message]` from `router.errors`.
Arguments are what `core` defines; an `array('Q')` of block keys travels as its bytes.

The socket is a file of mode 0600: whoever may open it may place requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from array import array
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from router import errors
from router.core import Ask, Booking, Decision, Live, Outcome, Placement

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")

Handler = Callable[..., Any]


def _plain(value: object) -> object:
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"{type(value)!r} does not travel")


def _typed(kind: type, value: object) -> object:
    if kind is array:
        keys = array("Q")
        keys.frombytes(value)  # type: ignore[arg-type]
        return keys
    raise NotImplementedError(f"{kind!r} does not travel")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode_frame = msgspec.msgpack.Decoder(tuple[int, Any, Any]).decode


def _convert(value: object, kind: Any) -> Any:
    return msgspec.convert(value, kind, dec_hook=_typed)


class WireServer:
    """Serves `methods` (name → (callable, types of its arguments)) on a Unix socket."""

    def __init__(self, methods: Mapping[str, tuple[Handler, tuple[Any, ...]]]) -> None:
        self._methods = methods
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # one that a killed process left
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._connection, path=str(path), limit=MAX_FRAME_BYTES)
        finally:
            os.umask(mask)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for writer in list(self._writers):
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                call, method, arguments = _decode_frame(await _read_frame(reader))
                if call == 0:
                    self._cast(method, arguments)
                    continue
                task = asyncio.ensure_future(self._answer(writer, call, method, arguments))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError, ValueError):
            pass  # the other side has gone, or does not speak this protocol
        finally:
            self._writers.discard(writer)
            writer.close()

    def _arguments(self, method: str, arguments: list[Any]) -> tuple[Handler, list[Any]]:
        handler, kinds = self._methods[method]
        return handler, [_convert(value, kind) for value, kind in zip(arguments, kinds, strict=True)]

    def _cast(self, method: str, arguments: list[Any]) -> None:
        handler, values = self._arguments(method, arguments)
        handler(*values)

    async def _answer(self, writer: asyncio.StreamWriter, call: int, method: str, arguments: list[Any]) -> None:
        try:
            handler, values = self._arguments(method, arguments)
            result = handler(*values)
            reply = [call, True, await result if isinstance(result, Awaitable) else result]
        except errors.WarmrouteError as error:
            reply = [call, False, [type(error).__name__, error.message]]
        except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
            reply = [call, False, ["BadRequest", f"{type(error).__name__} in {method!r}"]]
        _write_frame(writer, reply)


class WireClient:
    """Calls and casts; one connection, any number of calls under way. Reconnects with the next call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def call(self, method: str, *arguments: Any) -> Any:
        """The other side's answer, undecoded. Raises what it raised, or `EngineUnreachable` when it is not there."""
        async with self._connecting:
            if self._writer is None:
                await self._connect()
        assert self._writer is not None
        self._last += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._last] = answer
        _write_frame(self._writer, [self._last, method, arguments])
        return await answer

    def cast(self, method: str, *arguments: Any) -> None:
        """Sends without waiting. Lost when there is no connection: what is cast must also end by a lease."""
        if self._writer is not None:
            _write_frame(self._writer, [0, method, arguments])

    async def aclose(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _connect(self) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(str(self._path), limit=MAX_FRAME_BYTES)
        except OSError as error:
            raise errors.EngineUnreachable("the gateway process does not answer", detail=str(error)) from error
        self._reading = asyncio.ensure_future(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                call, ok, value = _decode_frame(await _read_frame(reader))
                waiting = self._waiting.pop(call, None)
                if waiting is None or waiting.done():
                    continue
                if ok:
                    waiting.set_result(value)
                else:
                    kind = getattr(errors, str(value[0]), errors.WarmrouteError)
                    waiting.set_exception(kind(value[1]))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError, ValueError):
            pass
        finally:
            self._writer = None
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(errors.EngineUnreachable("the gateway process has gone"))
            self._waiting.clear()


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(4))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


def _write_frame(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    body = _encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


# ---------------------------------------------------------------------------------------------------------------------
# Placement: relay → brain


def placement_methods(placement: Placement) -> dict[str, tuple[Handler, tuple[Any, ...]]]:
    """What a `WireServer` needs to serve a `Placement`."""
    return {
        "place": (placement.place, (Ask,)),
        "progress": (placement.progress, (int,)),
        "release": (placement.release, (int, Outcome)),
        "explain": (placement.explain, (Ask,)),
    }


class RemotePlacement:
    """`core.Placement` in another process."""

    def __init__(self, client: WireClient) -> None:
        self._client = client

    async def place(self, ask: Ask) -> Booking:
        booking: Booking = _convert(await self._client.call("place", ask), Booking)
        return booking

    def progress(self, booking_id: int) -> None:
        self._client.cast("progress", booking_id)

    def release(self, booking_id: int, outcome: Outcome) -> None:
        self._client.cast("release", booking_id, outcome)

    async def explain(self, ask: Ask) -> Decision:
        decision: Decision = _convert(await self._client.call("explain", ask), Decision)
        return decision


# ---------------------------------------------------------------------------------------------------------------------
# Live: admin → relay and brain


def live_methods(live: Live) -> dict[str, tuple[Handler, tuple[Any, ...]]]:
    """What a `WireServer` needs to serve a `Live`."""
    return {
        "live.fleet": (live.fleet, ()),
        "live.explain": (live.explain, (str, bytes)),
        "live.parity": (live.parity, (str | None,)),
        "live.readiness": (live.readiness, ()),
        "live.requests": (live.requests, (str | None,)),
        "live.metrics": (live.metrics, ()),
    }


class RemoteLive:
    """`core.Live` in another process."""

    def __init__(self, client: WireClient) -> None:
        self._client = client

    async def fleet(self) -> list[dict[str, Any]]:
        return list(await self._client.call("live.fleet"))

    async def explain(self, path: str, body: bytes) -> dict[str, Any]:
        return dict(await self._client.call("live.explain", path, body))

    async def parity(self, model: str | None) -> list[dict[str, Any]]:
        return list(await self._client.call("live.parity", model))

    async def readiness(self) -> dict[str, Any]:
        return dict(await self._client.call("live.readiness"))

    async def requests(self, request_id: str | None) -> list[dict[str, Any]]:
        return list(await self._client.call("live.requests", request_id))

    async def metrics(self) -> bytes:
        return bytes(await self._client.call("live.metrics"))
