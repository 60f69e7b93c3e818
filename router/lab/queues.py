"""The two orders an engine keeps: who is admitted next, and what falls due at which step."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)

NEVER = 1 << 62


class Waiting(Protocol[T]):
    """Requests that are not admitted. What was preempted comes before everything else."""

    def __len__(self) -> int: ...
    def append(self, item: T) -> None: ...
    def put_back(self, item: T) -> None: ...
    def peek(self) -> T: ...
    def remove(self, item: T) -> bool: ...


class FirstCome(Generic[T]):
    """First come, first served."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def append(self, item: T) -> None:
        self._items[item] = None

    def put_back(self, item: T) -> None:
        self._items[item] = None
        self._items.move_to_end(item, last=False)

    def peek(self) -> T:
        return next(iter(self._items))

    def remove(self, item: T) -> bool:
        if item not in self._items:
            return False
        del self._items[item]
        return True


class ShortestFirst(Generic[T]):
    """The least work first, as `work` says when the request arrives; equal work first come, first served."""

    __slots__ = ("_arrivals", "_heap", "_present", "_returned", "_work")

    def __init__(self, work: Callable[[T], float]) -> None:
        self._work = work
        self._arrivals = count()
        self._heap: list[tuple[float, int, T]] = []
        self._present: dict[T, int] = {}  # its arrival: an entry of the heap with another one is out of date
        self._returned: FirstCome[T] = FirstCome()

    def __len__(self) -> int:
        return len(self._returned) + len(self._present)

    def append(self, item: T) -> None:
        arrival = next(self._arrivals)
        self._present[item] = arrival
        heapq.heappush(self._heap, (self._work(item), arrival, item))

    def put_back(self, item: T) -> None:
        self._returned.put_back(item)

    def peek(self) -> T:
        if len(self._returned):
            return self._returned.peek()
        while self._present.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def remove(self, item: T) -> bool:
        if self._returned.remove(item):
            return True
        if self._present.pop(item, None) is None:
            return False
        if len(self._heap) > 64 + 2 * len(self._present):  # entries of removed requests do not pile up
            self._heap = [entry for entry in self._heap if self._present.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        return True


class Calendar(Generic[T]):
    """Items by the step at which they fall due."""

    __slots__ = ("_due", "_steps")

    def __init__(self) -> None:
        self._due: dict[int, dict[T, None]] = {}
        self._steps: list[int] = []  # a heap; may name steps that have nothing due any more

    def __len__(self) -> int:
        return sum(map(len, self._due.values()))

    def add(self, step: int, item: T) -> None:
        items = self._due.get(step)
        if items is None:
            self._due[step] = {item: None}
            heapq.heappush(self._steps, step)
        else:
            items[item] = None

    def discard(self, step: int, item: T) -> None:
        items = self._due.get(step)
        if items is None:
            return
        items.pop(item, None)
        if not items:
            del self._due[step]
            if len(self._steps) > 64 + 2 * len(self._due):
                self._steps = sorted(self._due)  # a sorted list is a heap

    def pop(self, step: int) -> dict[T, None] | None:
        return self._due.pop(step, None)

    def next(self) -> int:
        """The earliest step with something due; NEVER if there is none."""
        steps, due = self._steps, self._due
        while steps and steps[0] not in due:
            heapq.heappop(steps)
        return steps[0] if steps else NEVER
