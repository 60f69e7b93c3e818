"""Tests that run on asyncio's loop and on uvloop, which has a TLS of its own: `serve` uses the second."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import pytest
import uvloop


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Arguments that are async context managers are entered on the loop, and left there after the test."""

    async def whole(arguments: dict[str, Any]) -> None:
        async with AsyncExitStack() as stack:
            for argument in arguments.values():
                if isinstance(argument, AbstractAsyncContextManager):
                    await stack.enter_async_context(argument)
            await test(**arguments)

    def run_test(*, run: Callable[[Coroutine[Any, Any, None]], None], **arguments: Any) -> None:
        run(whole(arguments))

    parameters = list(inspect.signature(test).parameters.values())
    run = inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY)
    run_test.__signature__ = inspect.Signature([*parameters, run])  # type: ignore[attr-defined]
    run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
    return pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])(run_test)
