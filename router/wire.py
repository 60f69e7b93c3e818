"""The protocols of `core` between processes: calls and casts over a Unix socket.

A frame is a big-endian u32 length and a MessagePack array `[call, method, arguments]`; `call` 0 is a cast, which is not
answered. A reply is `[call, ok, value]`; when not ok, the value is an error of `router.errors` as `_failure` writes it.
The cast `cancel` with the number of a call ends that call: its caller does not wait for it any more.
Arguments are what `core` defines; an `array('Q')` of block keys travels as its bytes.

What a connection has taken and not given back is given back when it ends: a relay that dies leaves nothing booked.

The socket is a file of mode 0600: whoever may open it may place requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from router import errors
from router.core import Ask, Booking, Decision, Finish, Live, Outcome, Placement

log = logging.getLogger("warmroute.wire")

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")

Handler = Callable[..., Any]
Methods = Mapping[str, tuple[Handler, tuple[Any, ...]]]
"""By name: what is called, and the types of its arguments."""


class Session(NamedTuple):
    """What one connection may call, and what is done when it has ended."""

    methods: Methods
    close: Callable[[], None] = lambda: None


Service = Callable[[], Session]
"""Makes a session for every connection."""


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
    """Offers `service` on a Unix socket."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def start(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # one that a killed process left
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._connected, path=str(path), limit=MAX_FRAME_BYTES)
        finally:
            os.umask(mask)

    async def stop(self) -> None:
        """Ends every connection, and with it what it holds."""
        if self._server is not None:
            self._server.close()
        for writer in self._connections.values():
            writer.close()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            await _Connection(self._service(), writer).serve(reader)
        finally:
            del self._connections[task]


class _Connection:
    """One client: what it has asked for, and its session."""

    def __init__(self, session: Session, writer: asyncio.StreamWriter) -> None:
        self._session = session
        self._writer = writer
        self._calls: dict[int, asyncio.Task[list[Any]]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the other side has gone, or does not speak this protocol."""
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError, ValueError):
                while True:
                    self._take(*_decode_frame(await _read_frame(reader)))
        finally:
            calls = list(self._calls.values())
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            self._session.close()
            self._writer.close()

    def _take(self, call: int, method: str, arguments: list[Any]) -> None:
        if call:
            task = self._calls[call] = asyncio.ensure_future(self._reply(call, method, arguments))
            task.add_done_callback(partial(self._send_reply, call))
        elif method == "cancel":
            if arguments and arguments[0] in self._calls:
                self._calls[arguments[0]].cancel()
        else:
            self._cast(method, arguments)

    def _bound(self, method: str, arguments: list[Any]) -> tuple[Handler, list[Any]]:
        handler, kinds = self._session.methods[method]
        return handler, [_convert(value, kind) for value, kind in zip(arguments, kinds, strict=True)]

    def _cast(self, method: str, arguments: list[Any]) -> None:
        """Nobody waits for an answer, and one cast that fails must not end the calls of others."""
        try:
            handler, values = self._bound(method, arguments)
            handler(*values)
        except Exception as error:
            log.error("the cast %r failed: %s", method, type(error).__name__)

    async def _reply(self, call: int, method: str, arguments: list[Any]) -> list[Any]:
        try:
            handler, values = self._bound(method, arguments)
            result = handler(*values)
            return [call, True, await result if isinstance(result, Awaitable) else result]
        except errors.WarmrouteError as error:
            return [call, False, _failure(error)]
        except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
            return [call, False, _failure(errors.BadRequest(f"{type(error).__name__} in {method!r}"))]
        except Exception as error:
            log.error("the call %r failed: %s", method, type(error).__name__)
            return [call, False, _failure(errors.WarmrouteError("The gateway failed to serve the request."))]

    def _send_reply(self, call: int, task: asyncio.Task[list[Any]]) -> None:
        """Whatever became of a call, it is answered: else the other side would remember it for ever."""
        del self._calls[call]
        reply = [call, False, _failure(errors.ClientGone("cancelled"))] if task.cancelled() else task.result()
        if not self._writer.is_closing():
            _write_frame(self._writer, reply)


class WireClient:
    """Calls and casts; one connection, any number of calls under way. Reconnects with the next call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, tuple[asyncio.Future[Any], Callable[[Any], None] | None]] = {}
        self._last = 0
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def call(self, method: str, *arguments: Any, unwanted: Callable[[Any], None] | None = None) -> Any:
        """The other side's answer, undecoded. Raises what it raised, or `EngineUnreachable` when it is not there.

        Cancelled, it ends the call on the other side, too; `unwanted` takes an answer that was already on its way.
        """
        async with self._connecting:
            if self._writer is None:
                await self._connect()
        assert self._writer is not None
        self._last = call = self._last + 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[call] = (answer, unwanted)
        _write_frame(self._writer, [call, method, arguments])
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled():  # it came in the very moment
                _hand_over(answer, unwanted)
            else:
                self.cast("cancel", call)
            raise

    def cast(self, method: str, *arguments: Any) -> None:
        """Sends without waiting. Lost where there is no connection: whatever it would have ended, that has ended."""
        if self._writer is not None:
            _write_frame(self._writer, [0, method, arguments])

    async def aclose(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _connect(self) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path), limit=MAX_FRAME_BYTES)
        except OSError as error:
            raise errors.EngineUnreachable("the gateway process does not answer", detail=str(error)) from error
        self._writer = writer
        self._reading = asyncio.ensure_future(self._read(reader, writer))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError, ValueError):
                while True:
                    self._take(*_decode_frame(await _read_frame(reader)))
        finally:
            self._writer = None
            writer.close()
            waiting, self._waiting = self._waiting, {}
            for answer, _ in waiting.values():
                if not answer.done():
                    answer.set_exception(errors.EngineUnreachable("the gateway process has gone"))

    def _take(self, call: int, ok: bool, value: Any) -> None:
        answer, unwanted = self._waiting.pop(call, (None, None))
        if answer is None:
            return
        if answer.cancelled():
            if ok and unwanted is not None:
                unwanted(value)
        elif ok:
            answer.set_result(value)
        else:
            answer.set_exception(_error(value))


def _hand_over(answer: asyncio.Future[Any], unwanted: Callable[[Any], None] | None) -> None:
    if answer.exception() is None and unwanted is not None:
        unwanted(answer.result())


def _failure(error: errors.WarmrouteError) -> list[Any]:
    """`[class of error, message, param, code, seconds to retry after]`; `detail` stays where the log is."""
    return [type(error).__name__, error.message, error.param, error.code, error.retry_after_s]


def _error(failure: list[Any]) -> errors.WarmrouteError:
    name, message, param, code, retry_after_s = failure
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.WarmrouteError)) or kind is errors.ConfigError:
        kind = errors.WarmrouteError
    error: errors.WarmrouteError = kind(message, param=param, code=code, retry_after_s=retry_after_s)
    return error


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


def placement_methods(placement: Placement) -> Service:
    """A `Placement` for a `WireServer`. A relay that goes leaves nothing booked."""

    def session() -> Session:
        borrowed = _Borrowed(placement)
        methods: Methods = {
            "place": (borrowed.place, (Ask,)),
            "progress": (placement.progress, (int,)),
            "release": (borrowed.release, (int, Outcome)),
            "explain": (placement.explain, (Ask,)),
        }
        return Session(methods, borrowed.give_back_all)

    return session


class _Borrowed:
    """What one relay has booked and not released. `placement` knows nothing of relays."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._bookings: dict[int, tuple[Ask, Booking]] = {}

    async def place(self, ask: Ask) -> Booking:
        booking = await self._placement.place(ask)
        self._bookings[booking.id] = ask, booking
        return booking

    def release(self, booking_id: int, outcome: Outcome) -> None:
        self._bookings.pop(booking_id, None)
        self._placement.release(booking_id, outcome)

    def give_back_all(self) -> None:
        """Nobody will tell how these ended; the engines may well be working on them still."""
        bookings, self._bookings = self._bookings, {}
        for ask, booking in bookings.values():
            outcome = _unserved(ask, booking, status=502, finish="upstream_failed", error="relay_gone")
            self._placement.release(booking.id, outcome)


class RemotePlacement:
    """`core.Placement` in another process."""

    def __init__(self, client: WireClient) -> None:
        self._client = client

    async def place(self, ask: Ask) -> Booking:
        def give_back(value: Any) -> None:
            unwanted: Booking = _convert(value, Booking)
            outcome = _unserved(ask, unwanted, status=499, finish="client_gone", error="client_gone")
            self.release(unwanted.id, outcome)

        booking: Booking = _convert(await self._client.call("place", ask, unwanted=give_back), Booking)
        return booking

    def progress(self, booking_id: int) -> None:
        self._client.cast("progress", booking_id)

    def release(self, booking_id: int, outcome: Outcome) -> None:
        self._client.cast("release", booking_id, outcome)

    async def explain(self, ask: Ask) -> Decision:
        decision: Decision = _convert(await self._client.call("explain", ask), Decision)
        return decision


def _unserved(ask: Ask, booking: Booking, *, status: int, finish: Finish, error: str) -> Outcome:
    """Of a booking that nothing is known of but that it is over."""
    return Outcome(
        request_id=ask.request_id,
        model=ask.model,
        tenant=ask.tenant,
        instance=booking.instance,
        rank=booking.rank,
        status=status,
        finish=finish,
        usage=None,
        input_tokens=booking.tokens,
        best_hit_tokens=booking.best_hit_tokens,
        predicted_hit_tokens=booking.predicted_hit_tokens,
        delivered_hit_tokens=None,
        delivered_source="none",
        started_at=time.time(),
        queue_s=0.0,
        ttft_s=None,
        took_s=0.0,
        stream=ask.stream,
        prompt_source=ask.prompt.source,
        policy=booking.policy,
        error=error,
        blind_hit_tokens=booking.blind_hit_tokens,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Live: admin → relay and brain


def live_methods(live: Live) -> Service:
    """A `Live` for a `WireServer`."""
    methods: Methods = {
        "live.fleet": (live.fleet, ()),
        "live.explain": (live.explain, (str, bytes, str | None)),
        "live.parity": (live.parity, (str | None,)),
        "live.readiness": (live.readiness, ()),
        "live.instances": (live.instances, ()),
        "live.models": (live.models, ()),
        "live.policies": (live.policies, ()),
        "live.config": (live.config, ()),
        "live.drain": (live.drain, (str,)),
        "live.undrain": (live.undrain, (str,)),
        "live.reload": (live.reload, ()),
        "live.requests": (live.requests, (str | None,)),
        "live.metrics": (live.metrics, ()),
        "live.isolation": (live.isolation, ()),
        "live.trace": (live.trace, (int,)),
    }
    return lambda: Session(methods)


class RemoteLive:
    """`core.Live` in another process."""

    def __init__(self, client: WireClient) -> None:
        self._client = client

    async def fleet(self) -> list[dict[str, Any]]:
        return list(await self._client.call("live.fleet"))

    async def explain(self, path: str, body: bytes, tenant: str | None = None) -> dict[str, Any]:
        return dict(await self._client.call("live.explain", path, body, tenant))

    async def parity(self, model: str | None) -> list[dict[str, Any]]:
        return list(await self._client.call("live.parity", model))

    async def readiness(self) -> dict[str, Any]:
        return dict(await self._client.call("live.readiness"))

    async def instances(self) -> list[dict[str, Any]]:
        return list(await self._client.call("live.instances"))

    async def models(self) -> list[dict[str, Any]]:
        return list(await self._client.call("live.models"))

    async def policies(self) -> list[dict[str, Any]]:
        return list(await self._client.call("live.policies"))

    async def config(self) -> dict[str, Any]:
        return dict(await self._client.call("live.config"))

    async def drain(self, instance_id: str) -> dict[str, Any]:
        return dict(await self._client.call("live.drain", instance_id))

    async def undrain(self, instance_id: str) -> dict[str, Any]:
        return dict(await self._client.call("live.undrain", instance_id))

    async def reload(self) -> dict[str, Any]:
        return dict(await self._client.call("live.reload"))

    async def requests(self, request_id: str | None) -> list[dict[str, Any]]:
        return list(await self._client.call("live.requests", request_id))

    async def metrics(self) -> bytes:
        return bytes(await self._client.call("live.metrics"))

    async def isolation(self) -> dict[str, Any]:
        return dict(await self._client.call("live.isolation"))

    async def trace(self, position: int) -> tuple[list[bytes], int | None]:
        rows, following = await self._client.call("live.trace", position)
        return rows, following
