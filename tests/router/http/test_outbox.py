"""Writes wait for the end of the loop's turn, and nothing gets lost or overtaken by that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from router.http.connection import ServerProtocol
from router.http.messages import ONE_WRITE_BYTES, Limits, Request
from router.http.outbox import AT_ONCE, Outbox
from router.http.responder import Responder

Log = list[tuple[str, Any]]


class _Transport(asyncio.Transport):
    """Notes what it is asked for."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.log.append(("write", bytes(data)))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.log.append(("writelines", list(list_of_data)))

    def write_eof(self) -> None:
        self.log.append(("eof", None))

    def close(self) -> None:
        self.log.append(("close", None))

    def abort(self) -> None:
        self.log.append(("abort", None))

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 7

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


async def test_what_one_turn_writes_goes_out_at_its_end_in_order() -> None:
    log: Log = []
    outbox = Outbox()
    first, second = (outbox.batched(_Transport(log)) for _ in range(2))
    first.write(b"a")
    second.write(b"b")
    first.write(bytearray(b"c"))
    assert log == []
    await asyncio.sleep(0)
    assert log == [("write", b"ac"), ("write", b"b")]
    first.write(b"d")
    await asyncio.sleep(0)
    assert log[2:] == [("write", b"d")]


async def test_what_has_gone_out_does_not_go_out_again() -> None:
    log: Log = []
    transport = Outbox().batched(_Transport(log))
    transport.write(b"a")
    transport.flush()
    await asyncio.sleep(0)
    assert log == [("write", b"a")]


@pytest.mark.parametrize(
    ("end", "noted"), [("close", "close"), ("abort", "abort"), ("write_eof", "eof")], ids=["close", "abort", "eof"]
)
async def test_what_waits_goes_out_before_the_end(end: str, noted: str) -> None:
    log: Log = []
    transport = Outbox().batched(_Transport(log))
    transport.write(b"last words")
    getattr(transport, end)()
    await asyncio.sleep(0)
    assert log == [("write", b"last words"), (noted, None)]


async def test_what_is_large_goes_out_at_once_behind_what_waits() -> None:
    log: Log = []
    transport = Outbox().batched(_Transport(log))
    large = bytes(ONE_WRITE_BYTES)
    transport.write(b"head")
    transport.write(large)
    assert log == [("write", b"head" + large)]
    transport.write(b"more")
    transport.writelines((b"x", large))
    assert log[1:] == [("write", b"more"), ("writelines", [b"x", large])]


async def test_so_many_that_wait_go_out_before_the_turn_ends() -> None:
    log: Log = []
    outbox = Outbox()
    for number in range(AT_ONCE + 1):
        outbox.batched(_Transport(log)).write(b"%d" % number)
    assert log == [("write", b"%d" % number) for number in range(AT_ONCE)]
    await asyncio.sleep(0)
    assert len(log) == AT_ONCE + 1


async def test_what_waits_is_not_sent_yet() -> None:
    transport = Outbox().batched(_Transport([]))
    assert transport.get_write_buffer_size() == 7
    transport.write(b"abc")
    assert transport.get_write_buffer_size() == 10
    await asyncio.sleep(0)
    assert transport.get_write_buffer_size() == 7


async def test_a_connection_that_ended_meanwhile_keeps_nobody_waiting() -> None:
    log: Log = []
    outbox = Outbox()
    gone = _Transport(log)
    outbox.batched(gone).write(b"to nobody")
    outbox.batched(_Transport(log)).write(b"to somebody")
    gone.closing = True
    await asyncio.sleep(0)
    assert log == [("write", b"to somebody")]


async def test_one_that_cannot_be_written_to_keeps_nobody_waiting() -> None:
    log: Log = []
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    mistake = RuntimeError("not to be written to")

    class Broken(_Transport):
        def write(self, data: bytes | bytearray | memoryview) -> None:
            raise mistake

    outbox = Outbox()
    outbox.batched(Broken(log)).write(b"lost")
    outbox.batched(_Transport(log)).write(b"to somebody")
    await asyncio.sleep(0)
    assert log == [("abort", None), ("write", b"to somebody")]
    assert [context["exception"] for context in told] == [mistake]


async def test_a_client_that_shuts_its_side_in_the_turn_of_its_answer_gets_it() -> None:
    """When it has nothing to wait for, the transport closes by itself as soon as it is told so."""
    log: Log = []

    def answer(request: Request, responder: Responder) -> None:
        responder.send(200, [], b"in time")

    connection = ServerProtocol(answer, Limits(), set(), outbox=Outbox())
    connection.connection_made(_Transport(log))
    connection.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    assert log == []
    assert not connection.eof_received()
    [(call, written)] = log
    assert call == "write"
    assert written.endswith(b"\r\n\r\nin time")


async def test_who_has_to_know_is_told_before_anything_goes_out() -> None:
    log: Log = []
    outbox = Outbox(before=lambda: log.append(("before", None)))
    transport = outbox.batched(_Transport(log))
    await asyncio.sleep(0)
    assert log == []
    transport.write(b"a")
    await asyncio.sleep(0)
    transport.writelines((b"b", b"c"))
    assert log == [("before", None), ("write", b"a"), ("before", None), ("writelines", [b"b", b"c"])]
