"""Requests that came together take each stage side by side, and none waits for one that has gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.serving.run import Run
from router.serving.stages import AT_ONCE, FEW, Stages


class Walk:
    """Requests of three stages, which note when they come to which."""

    def __init__(self) -> None:
        self.stages = Stages()
        self.stages.here = FEW + 1
        self.notes: list[tuple[str, int]] = []
        self.ended = 0

    def start(self, name: str) -> Run:
        run = Run(self._go(name), self._end)
        run.step()
        return run

    async def _go(self, name: str) -> None:
        self.notes.append((name, 0))
        for stage in (1, 2):
            await self.stages.next()
            self.notes.append((name, stage))

    def _end(self, _: Run) -> None:
        self.ended += 1


async def turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_those_that_came_together_go_side_by_side() -> None:
    walk = Walk()
    walk.start("a")
    walk.start("b")
    await turns_of_the_loop(1)
    assert walk.notes == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert walk.ended == 2


async def test_few_do_not_wait_for_each_other() -> None:
    walk = Walk()
    walk.stages.here = FEW
    walk.start("a")
    assert walk.notes == [("a", 0), ("a", 1), ("a", 2)]


async def test_no_more_than_a_group_at_a_time() -> None:
    walk = Walk()
    for i in range(AT_ONCE + 2):
        walk.start(str(i))
    await turns_of_the_loop(1)
    assert walk.ended == AT_ONCE, "a whole group, to its last stage"
    await turns_of_the_loop(1)
    assert walk.ended == AT_ONCE + 2
    walk.start("later")
    await turns_of_the_loop(1)
    assert walk.ended == AT_ONCE + 3, "those that come after a pause are served as before"


async def test_one_that_is_cancelled_waits_no_more_and_nobody_waits_for_it() -> None:
    walk = Walk()
    gone, stays = walk.start("gone"), walk.start("stays")
    gone.cancel()
    assert walk.ended == 1
    await turns_of_the_loop(1)
    assert [note for note in walk.notes if note[0] == "gone"] == [("gone", 0)]
    assert (walk.ended, walk.notes[-1]) == (2, ("stays", 2))
    stays.cancel()  # it is over: nothing happens
    assert walk.ended == 2


async def test_what_fails_keeps_nobody_waiting() -> None:
    walk, told = Walk(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    def fail(_: Run) -> None:
        raise ValueError("an end that fails")

    broken = Run(walk._go("broken"), fail)
    broken.step()
    walk.start("well")
    await turns_of_the_loop(1)
    assert walk.notes[-1] == ("well", 2)
    assert [type(context["exception"]) for context in told] == [ValueError]


@pytest.mark.parametrize("late", [1, 5])
async def test_who_comes_while_others_are_under_way_is_served_in_the_next_turn(late: int) -> None:
    walk = Walk()
    walk.start("first")
    await turns_of_the_loop(1)
    for i in range(late):
        walk.start(f"late {i}")
    await turns_of_the_loop(1)
    assert walk.ended == 1 + late
