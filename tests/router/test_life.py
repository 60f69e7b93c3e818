"""What signals do."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from router.errors import Conflict
from router.life import Signals


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


async def nothing() -> None: ...


async def sent(number: signal.Signals, event: asyncio.Event) -> None:
    os.kill(os.getpid(), number)
    await asyncio.wait_for(event.wait(), 5)


@pytest.mark.parametrize(("first", "at_once"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
async def test_the_first_ends_the_second_hurries_the_third_kills(first: signal.Signals, at_once: bool) -> None:
    with Signals(nothing).heard() as told:
        await sent(first, told.stop)
        assert (told.at_once, told.hurry.is_set()) == (at_once, False)
        await sent(signal.SIGINT, told.hurry)
        assert told.at_once is at_once
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is signal.SIG_DFL


async def test_each_sighup_reloads(caplog: pytest.LogCaptureFixture) -> None:
    reloads = 0
    happened = asyncio.Event()

    async def reload() -> None:
        nonlocal reloads
        reloads += 1
        happened.set()
        if reloads == 2:
            raise Conflict("There is nothing to reload.")

    with Signals(reload).heard() as told:
        await sent(signal.SIGHUP, happened)
        happened.clear()
        await sent(signal.SIGHUP, happened)
        assert not told.stop.is_set()
    assert reloads == 2
    await asyncio.sleep(0)
    assert [record.message for record in caplog.records] == ["There is nothing to reload."]
