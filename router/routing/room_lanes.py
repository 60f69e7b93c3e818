"""The queues of the waiting room: who stands in line, and who is held for which engine.

A lane is the line of one (model, adapter, priority, tenant). What is held for an engine stands in two heaps there: by
its place in line, read when that engine is free, and by what it gains there, read when holding may no longer pay. So
nothing is ever searched through: each request is moved a few times, each time in O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from router.core import Ask, Booking
from router.errors import WarmrouteError
from router.routing.room_memory import Needed

Target = tuple[str, int]
"""(instance, rank)"""
Settle = Callable[[Booking | WarmrouteError], None]

_STALE = 64  # entries of moved requests that a heap may hold before they are looked for


class LaneName(NamedTuple):
    model: str
    lora: str | None
    priority: int
    tenant: str


class Waiting:
    """One request in the room.

    place       seconds: what the line is ordered by
    yields_s    what arrives later than this after it does not go before it
    prefill_ms  its own prefill where most of it is held, when last looked at
    lacks       what no free engine's memory had room for then; it counts until `lacks_until`
    may_crowd   it has waited for memory so long that it may be sent where there is none
    leads       its tenant held much more of that memory than others
    settle      called once, with the booking or with why there is none, unless it is cancelled before
    """

    __slots__ = (
        "arrived_at",
        "ask",
        "booking",
        "cancel",
        "held_for",
        "lacks",
        "lacks_until",
        "lane",
        "leads",
        "may_crowd",
        "move",
        "place",
        "prefill_ms",
        "settle",
        "yields_s",
    )

    def __init__(self, ask: Ask, arrived_at: float) -> None:
        self.ask = ask
        self.arrived_at = arrived_at
        self.place = arrived_at
        self.yields_s = 0.0
        self.prefill_ms = 0.0
        self.held_for: Target | None = None
        self.move = 0  # odd while it stands in a heap; what a heap holds of an earlier move is out of date
        self.booking: Booking | None = None
        self.lane: Lane | None = None
        self.lacks: Needed | None = None
        self.lacks_until = 0.0
        self.leads = False
        self.may_crowd = False
        self.settle: Settle | None = None
        self.cancel: Callable[[], None] = nothing


_Entry = tuple[float, int, int, Waiting]
"""(order, serial number, the waiting one's `move` when it was made, it)"""


class _Heap:
    """Smallest first; entries of requests that have moved on are dropped when they are met, or when too many."""

    __slots__ = ("_entries", "live")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.live = 0  # how many should be in here

    def push(self, order: float, serial: int, waiting: Waiting) -> None:
        if len(self._entries) > _STALE + 2 * self.live:
            self._entries = [entry for entry in self._entries if entry[2] == entry[3].move]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (order, serial, waiting.move, waiting))

    def first(self) -> _Entry | None:
        entries = self._entries
        while entries:
            if entries[0][2] == entries[0][3].move:
                return entries[0]
            heapq.heappop(entries)
        return None


class _Held:
    """Those held for one engine."""

    __slots__ = ("by_gain", "by_place")

    def __init__(self) -> None:
        self.by_place = _Heap()
        self.by_gain = _Heap()


class Lane:
    """`size` counts all who wait in it, held ones included; `waiting_ms` is the sum of their prefills."""

    __slots__ = ("_held", "_line", "_serial", "name", "size", "waiting_ms")

    def __init__(self, name: LaneName) -> None:
        self.name = name
        self.size = 0
        self.waiting_ms = 0.0
        self._line = _Heap()
        self._held: dict[Target, _Held] = {}
        self._serial = 0

    def enter(self, waiting: Waiting) -> None:
        waiting.lane = self
        self.size += 1
        self.waiting_ms += waiting.prefill_ms
        self.line_up(waiting)

    def leave(self, waiting: Waiting) -> None:
        self.take_out(waiting)
        waiting.lane = None
        self.size -= 1
        self.waiting_ms = self.waiting_ms - waiting.prefill_ms if self.size else 0.0

    def revalue(self, waiting: Waiting, prefill_ms: float) -> None:
        self.waiting_ms += prefill_ms - waiting.prefill_ms
        waiting.prefill_ms = prefill_ms

    def line_up(self, waiting: Waiting) -> None:
        """Into the line, from wherever it was."""
        self.take_out(waiting)
        waiting.move += 1
        self._line.live += 1
        self._line.push(waiting.place, self._number(), waiting)

    def hold(self, waiting: Waiting, target: Target, gain_ms: float) -> None:
        """Out of the line, until `target` is free or the gain does not pay any more."""
        self.take_out(waiting)
        waiting.move += 1
        waiting.held_for = target
        held = self._held.get(target)
        if held is None:
            held = self._held[target] = _Held()
        serial = self._number()
        held.by_place.live += 1
        held.by_gain.live += 1
        held.by_place.push(waiting.place, serial, waiting)
        held.by_gain.push(gain_ms, serial, waiting)

    def take_out(self, waiting: Waiting) -> None:
        """Out of line and hold; it still counts as waiting."""
        if waiting.move % 2:
            if waiting.held_for is None:
                self._line.live -= 1
            else:
                held = self._held[waiting.held_for]
                held.by_place.live -= 1
                held.by_gain.live -= 1
                if not held.by_place.live:
                    del self._held[waiting.held_for]
                waiting.held_for = None
            waiting.move += 1

    def first(self, free: Iterable[Target]) -> Waiting | None:
        """Who is next, of those in line and those held for an engine that is free."""
        best = self._line.first()
        if self._held:
            for target in free:
                held = self._held.get(target)
                if held is not None:
                    entry = held.by_place.first()
                    if entry is not None and (best is None or entry < best):
                        best = entry
        return None if best is None else best[3]

    def targets(self) -> list[Target]:
        """Engines for which somebody is held."""
        return list(self._held)

    def let_go(self, target: Target, gain_ms: float) -> None:
        """Back into the line: those who gain no more than `gain_ms` by waiting for `target`."""
        while (held := self._held.get(target)) is not None:
            entry = held.by_gain.first()
            if entry is None or entry[0] > gain_ms:
                return
            self.line_up(entry[3])

    def held_for(self, target: Target) -> int:
        """How many are held for `target`."""
        held = self._held.get(target)
        return 0 if held is None else held.by_place.live

    @property
    def held(self) -> int:
        return sum(held.by_place.live for held in self._held.values())

    def _number(self) -> int:
        self._serial += 1
        return self._serial


class SetAside:
    """Those that nobody can take just now: out of their lines while others are looked at."""

    def __init__(self) -> None:
        self.all: list[Waiting] = []
        self._before_everybody: list[Waiting] = []
        self._before_their_lane: dict[Lane | None, list[Waiting]] = {}

    def add(self, waiting: Waiting) -> None:
        self.all.append(waiting)
        if waiting.leads:  # what keeps a tenant from taking still more of the memory keeps nobody else
            self._before_their_lane.setdefault(waiting.lane, []).append(waiting)
        else:
            self._before_everybody.append(waiting)

    def before(self, waiting: Waiting) -> list[Waiting]:
        """Whom it would go before."""
        of_lane = self._before_their_lane.get(waiting.lane)
        return self._before_everybody if of_lane is None else self._before_everybody + of_lane


def nothing() -> None:
    pass
