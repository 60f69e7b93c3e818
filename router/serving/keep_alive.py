"""Comments that keep the connection of a waiting stream alive, for models that ask for them.

Load balancers cut connections on which nothing moves, most of them after 60 s; a prompt may wait and be computed for
longer. The first comment commits the answer to status 200, so what fails after it is said in the stream. It is no part
of an answer: another engine may still be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.serving.reply import Reply

COMMENT = b": keep-alive\n\n"


class KeepAlive:
    """Every `every_s` seconds, until an engine's answer has begun.

    `is_amid`: whether part of an event is here already. Its rest is about to come, and clients should not have to wait
    for it twice.
    """

    def __init__(
        self, reply: Reply, every_s: float, *, is_amid: Callable[[], bool], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._reply = reply
        self._every_s = every_s
        self._is_amid = is_amid
        self._loop = loop
        self._timer = loop.call_later(every_s, self._beat)

    def stop(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        if self._reply.started:
            return
        if not self._is_amid():
            self._reply.comment(COMMENT)
        self._timer = self._loop.call_later(self._every_s, self._beat)
