"""A request that failed, and was tried again or not, leaves nothing that only the garbage collector finds.

When an engine of hundreds of streams goes, all that belongs to them would stay in memory until a collection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.faults.deployment import Deployment
from tests.faults.engine import Script, Wrong, well
from tests.faults.test_resume import Fleet, cuts, stalls
from tests.flows.site import until
from tests.garbage import gathered

TIMES = 5


async def fails(call: Wrong, number: int) -> None:
    await call.refuse(500)


async def hangs_up(call: Wrong, number: int) -> None:
    call.reset()


async def breaks_off(call: Wrong, number: int) -> None:
    await call.begin()
    await call.tokens(0, 40)
    await asyncio.sleep(0.02)
    call.reset()


def every_second(fault: Script) -> Script:
    async def script(call: Wrong, number: int) -> None:
        await (fault if number % 2 else well)(call, number)

    return script


async def one_engine(deployment: Deployment, script: Script, **settings: object) -> None:
    await deployment.start(await deployment.engine(script), **settings)  # type: ignore[arg-type]


async def two_that_go_on_for_each_other(deployment: Deployment) -> None:
    await Fleet(*[cuts] * (TIMES + 1)).start(deployment)


async def two_of_which_none_goes_on(deployment: Deployment) -> None:
    await Fleet(then=cuts).start(deployment)


DEPLOYMENTS: dict[str, Callable[[Deployment], Awaitable[None]]] = {
    "fails": partial(one_engine, script=fails),
    "fails, then serves": partial(one_engine, script=every_second(fails)),
    "hangs up": partial(one_engine, script=hangs_up),
    "hangs up, then serves": partial(one_engine, script=every_second(hangs_up)),
    "breaks off": partial(one_engine, script=breaks_off),
    "breaks off, another goes on": two_that_go_on_for_each_other,
    "breaks off, another would and does not": two_of_which_none_goes_on,
    "stalls": partial(one_engine, script=stalls, timeouts={"between_s": 0.1}),
}


@pytest.mark.parametrize("kind", DEPLOYMENTS)
async def test_a_request_that_failed_leaves_no_garbage(deployment: Deployment, kind: str) -> None:
    await DEPLOYMENTS[kind](deployment)
    await deployment.ask()  # what is made once for all requests
    with gathered() as left:
        for _ in range(TIMES):
            await deployment.ask()
        await until(deployment.is_well, what="nothing is booked")
        asked = len(deployment.outcomes)
    assert asked == TIMES + 1
    assert not left
