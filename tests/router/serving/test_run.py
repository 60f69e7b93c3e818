"""A coroutine without a task: when it goes on, and how it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import pytest

from router.errors import ShuttingDown
from router.serving.run import Run


class Signal:
    def __init__(self) -> None:
        self.on_done: Callable[[], None] | None = None
        self.fired = False

    def __await__(self) -> Generator[Signal, None, str]:
        if not self.fired:
            yield self
        return "signal"

    def fire(self) -> None:
        self.fired = True
        assert self.on_done is not None
        self.on_done()


class Runs:
    """Runs that note what they did."""

    def __init__(self) -> None:
        self.notes: list[object] = []
        self.ended: list[Run] = []

    def start(self, work: Coroutine[Any, Any, None]) -> Run:
        run = Run(work, self.ended.append)
        run.step()
        return run

    async def await_all(self, *things: Any) -> None:
        try:
            for thing in things:
                self.notes.append(await thing)
        except asyncio.CancelledError:
            self.notes.append("cancelled")
            raise
        except ShuttingDown:
            self.notes.append("shutting down")


@pytest.fixture
def runs() -> Runs:
    return Runs()


async def soon(value: str) -> str:
    await asyncio.sleep(0)
    return value


async def until_ended(runs: Runs) -> None:
    async with asyncio.timeout(5):
        while not runs.ended:  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0)


async def test_what_need_not_wait_is_over_at_once(runs: Runs) -> None:
    async def at_once() -> str:
        return "now"

    run = runs.start(runs.await_all(at_once()))
    assert runs.notes == ["now"]
    assert runs.ended == [run]


async def test_a_step_is_taken_where_the_signal_is_given(runs: Runs) -> None:
    first, second = Signal(), Signal()
    run = runs.start(runs.await_all(first, second))
    assert runs.notes == []
    first.fire()
    assert runs.notes == ["signal"]
    assert runs.ended == []
    second.fire()
    assert runs.notes == ["signal", "signal"]
    assert runs.ended == [run]


async def test_futures_and_tasks_are_waited_for(runs: Runs) -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    runs.start(runs.await_all(asyncio.ensure_future(soon("task")), future))
    asyncio.get_running_loop().call_later(0.01, future.set_result, "future")
    await until_ended(runs)
    assert runs.notes == ["task", "future"]


async def test_an_error_of_a_task_is_raised_where_it_is_awaited(runs: Runs) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("of the task")

    async def work() -> None:
        with pytest.raises(ValueError, match="of the task"):
            await asyncio.ensure_future(fail())
        runs.notes.append("went on")

    runs.start(work())
    await until_ended(runs)
    assert runs.notes == ["went on"]


async def test_cancelling_at_a_signal_takes_effect_at_once_and_the_signal_none(runs: Runs) -> None:
    signal = Signal()
    run = runs.start(runs.await_all(signal))
    run.cancel()
    assert runs.notes == ["cancelled"]
    assert runs.ended == [run]
    assert signal.on_done is None
    run.cancel()
    assert runs.ended == [run]


async def test_cancelling_cancels_the_task_that_is_waited_for(runs: Runs) -> None:
    task = asyncio.ensure_future(asyncio.sleep(60))
    run = runs.start(runs.await_all(task))
    await asyncio.sleep(0)
    run.cancel()
    await until_ended(runs)
    assert task.cancelled()
    assert runs.notes == ["cancelled"]


async def test_what_a_task_has_taken_in_spite_of_cancelling_is_not_lost(runs: Runs) -> None:
    """Else a place taken for a client that leaves in this very moment would stay taken."""

    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "booked"
        return "late"

    task = asyncio.ensure_future(stubborn())
    run = runs.start(runs.await_all(task, Signal()))
    await asyncio.sleep(0)
    run.cancel()
    await until_ended(runs)
    assert runs.notes == ["booked", "cancelled"]


async def test_a_task_that_is_done_when_cancelling_comes_is_not_lost(runs: Runs) -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    run = runs.start(runs.await_all(future, Signal()))
    future.set_result("booked")
    run.cancel()
    await until_ended(runs)
    assert runs.notes == ["booked", "cancelled"]


async def test_who_waits_again_after_cancelling_is_cancelled_again(runs: Runs) -> None:
    async def work() -> None:
        for _ in range(2):
            try:
                await Signal()
            except asyncio.CancelledError:
                runs.notes.append("cancelled")

    run = runs.start(work())
    run.cancel()
    assert runs.notes == ["cancelled", "cancelled"]
    assert runs.ended == [run]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_error_that_is_let_out_is_told_to_the_loop(runs: Runs, cancelled: bool) -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    signal = Signal()

    async def work() -> None:
        try:
            await signal
        finally:
            raise ValueError("a mistake")

    run = runs.start(work())
    run.cancel() if cancelled else signal.fire()
    assert runs.ended == [run]
    assert [type(error) for error in told] == [ValueError]


async def test_another_reason_is_raised_where_it_waits(runs: Runs) -> None:
    signal = Signal()
    run = runs.start(runs.await_all(signal))
    run.cancel(ShuttingDown("bye"))
    assert runs.notes == ["shutting down"]
    assert runs.ended == [run]
    assert signal.on_done is None


async def test_another_reason_ends_a_future_too(runs: Runs) -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    run = runs.start(runs.await_all(future))
    run.cancel(ShuttingDown("bye"))
    await until_ended(runs)
    assert future.cancelled()
    assert runs.notes == ["shutting down"]


async def test_what_a_task_has_taken_is_not_lost_to_another_reason(runs: Runs) -> None:
    async def taken() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return "booking"
        return ""

    signal = Signal()
    task = asyncio.ensure_future(taken())
    run = runs.start(runs.await_all(task, signal))
    await asyncio.sleep(0)
    run.cancel(ShuttingDown("bye"))
    await until_ended(runs)
    assert runs.notes == ["booking", "shutting down"]


async def test_the_first_reason_counts(runs: Runs) -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    run = runs.start(runs.await_all(future))
    run.cancel()
    run.cancel(ShuttingDown("bye"))
    await until_ended(runs)
    assert runs.notes == ["cancelled"]
