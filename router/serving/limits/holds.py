"""What one request has taken of its limits, and the parts that take it."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from router.core import Caller
from router.serving.limits.meters import Meter

Charge = tuple[Meter, int]
"""A limit, and how much of it is wanted."""


class Taken(NamedTuple):
    meter: Meter
    start: int  # of the window it belongs to
    amount: int  # reserved


class CallerLimits(NamedTuple):
    """All limits of one caller, by what they count."""

    requests: tuple[Meter, ...] = ()
    parallel: tuple[Meter, ...] = ()
    tokens: tuple[Meter, ...] = ()
    money: tuple[Meter, ...] = ()


class Hold:
    """taken       in the order of asking
    name        of this request in Redis; "": it was never asked
    unanswered  how often it was asked without an answer so far
    refused     by a limit
    shown       the client has been told what is left
    learns      its answers are as long as the model makes them, and there are so many; 0: they are not
    """

    __slots__ = ("caller", "learns", "limits", "name", "refused", "shown", "taken", "unanswered")

    def __init__(self, caller: Caller, limits: CallerLimits) -> None:
        self.caller = caller
        self.limits = limits
        self.taken: list[Taken] = []
        self.name = ""
        self.unanswered = 0
        self.refused = False
        self.shown = False
        self.learns = 0


class Counters(Protocol):
    """Where is counted: `counters.InThisProcess`, `shared.OverRedis`."""

    def take(self, hold: Hold, charges: Sequence[Charge], now: float) -> Future[None] | None:
        """All of it, or nothing and an error (`Limiter`). A future: it is not known yet."""
        ...

    def settle(self, hold: Hold, actual: Sequence[int]) -> None:
        """Once: what it really was, one amount for each of `hold.taken`."""
        ...

    def figures(self) -> Mapping[str, float]:
        """For operators."""
        ...
