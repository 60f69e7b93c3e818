"""Requests without tasks.

A task costs a future and a turn of the loop for each step. A request of ours mostly takes two: up to the engine, and
from its answer on. So the first step is taken where the request is read, the second where the answer is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec


class Waited(Protocol):
    """What a run waits for, beside futures: its `__await__` yields the object itself while it is not done."""

    on_done: Callable[[], None] | None


class Run(msgspec.Struct, eq=False):
    """Takes the steps of a coroutine on the loop, each at once when what it waits for is done.

    The coroutine awaits futures, tasks and `Waited`s. It has no current task: what needs one (`asyncio.timeout`, httpx)
    it awaits as a task of its own. `on_end` is called when it has ended, with whatever; an error that it lets out goes
    to the loop's exception handler.
    """

    _coroutine: Coroutine[Any, Any, None]
    _on_end: Callable[[Run], object]
    _waits_for: Any = None
    _reason: BaseException | None = None  # why it is to stop
    _stop_now: bool = False

    def step(self, done: asyncio.Future[Any] | None = None) -> None:
        """Begin. Later steps come by themselves, as callbacks of what is waited for."""
        self._waits_for = None
        coroutine, reason = self._coroutine, self._reason
        try:
            if reason is not None and (self._stop_now or (done is not None and done.cancelled())):
                waited = coroutine.throw(reason)
            else:
                waited = coroutine.send(None)
        except (StopIteration, asyncio.CancelledError):
            reason = self._reason = None  # it knows by which frames it came, and they know it
            self._on_end(self)
            return
        except Exception as error:
            self._on_end(self)
            context = {"message": "serving a request failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
            return
        self._waits_for = waited
        if isinstance(waited, asyncio.Future):
            waited._asyncio_future_blocking = False  # the sign that it was awaited, and not just yielded
            waited.add_done_callback(self.step)
        else:
            waited.on_done = self.step
        if self._reason is not None:  # since before, or by what this step did
            self._stop(waited)

    def cancel(self, reason: Exception | None = None) -> None:
        """Raise CancelledError or `reason` where it waits: now; for a future, which is cancelled too, once it is done.

        A task that ends well in spite of it is not lost: the coroutine gets its result, and the error where it waits
        next. So nothing that a task has taken for it, such as a booking, is forgotten.
        """
        if self._reason is None:
            self._reason = reason or asyncio.CancelledError()
        if self._waits_for is not None:
            self._stop(self._waits_for)

    def _stop(self, waited: Any) -> None:
        self._stop_now = not isinstance(waited, asyncio.Future)
        if self._stop_now:
            waited.on_done = None
            self.step()
        else:
            waited.cancel()
