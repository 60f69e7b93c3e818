"""Simulated engines as a replay sees them: a model, what it is doing, and how long its word takes to reach us."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from router.lab.engine import EngineModel, EngineRequest, Order, StepResult
from router.lab.profiles import Profile

At = Callable[[float, Callable[[], None]], None]
"""Call something at a time of the replay's clock, seconds."""


class EngineSpec(msgspec.Struct, frozen=True):
    """One engine. None: as the profile says."""

    profile: Profile
    capacity_tokens: int | None = None
    max_batched_tokens: int | None = None  # the chunk: prefill tokens a step
    max_num_seqs: int | None = None
    order: Order = "first_come"

    def model(self, block_size: int) -> EngineModel:
        chunk = self.max_batched_tokens
        seqs = self.profile.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs
        return EngineModel(
            self.profile,
            block_size=block_size,
            capacity_tokens=self.capacity_tokens,
            max_batched_tokens=chunk,
            max_num_seqs=min(seqs, chunk) if chunk is not None else seqs,
            order=self.order,
        )


class Engine:
    """Runs one model on the replay's clock. `stepped` is called at the end of every step, or of several quiet ones."""

    def __init__(
        self,
        id: str,
        spec: EngineSpec,
        *,
        block_size: int,
        at: At,
        stepped: Callable[[Engine, StepResult, float], None],
    ) -> None:
        self.id = id
        self.spec = spec
        self.alive = True
        self.busy_s = 0.0
        self.preemptions = 0
        self._block_size = block_size
        self._at = at
        self._stepped = stepped
        self._doing: tuple[float, StepResult] | None = None  # since when, and what
        self._serial = 0
        self.model = spec.model(block_size)

    def submit(self, request: EngineRequest, now: float) -> None:
        """Raises DoesNotFit."""
        self._cut(now)
        self.model.submit(request)
        if self._doing is None:
            self._begin(now)

    def abort(self, request: EngineRequest, now: float) -> None:
        self._cut(now)
        self.model.abort(request)

    def die(self) -> None:
        """Everything it held and did is gone."""
        self.alive = False
        self._serial += 1
        self._doing = None

    def restart(self) -> None:
        self.alive = True
        self.preemptions += self.model.preemptions
        self.model = self.spec.model(self._block_size)

    def _cut(self, now: float) -> None:
        """Quiet steps taken in advance end where somebody comes in between."""
        if self._doing is not None and self._doing[1].steps > 1:
            self._expect(self._doing[0], self.model.interrupt(now))

    def _begin(self, now: float) -> None:
        result = self.model.step(now, leap=True)
        if result is None:
            self._doing = None
        else:
            self._expect(now, result)

    def _expect(self, began: float, result: StepResult) -> None:
        self._doing = (began, result)
        self._serial += 1
        serial, ends = self._serial, began + result.duration_ms / 1e3
        self._at(ends, lambda: self._end(serial, ends))

    def _end(self, serial: int, now: float) -> None:
        if serial != self._serial or self._doing is None:
            return  # it was cut, or the engine died
        result = self._doing[1]
        self.busy_s += result.duration_ms / 1e3
        self._doing = None
        self._stepped(self, result, now)
        if self._doing is None and self.alive:
            self._begin(now)


class KeyCopies:
    """Which of an engine's announcements change what can be hit: a block may have several physical copies."""

    __slots__ = ("_copies",)

    def __init__(self) -> None:
        self._copies: dict[int, int] = {}

    def store(self, hashes: Sequence[int]) -> list[int]:
        """Those that were not there."""
        copies = self._copies
        new = []
        for name in hashes:
            count = copies.get(name, 0)
            copies[name] = count + 1
            if not count:
                new.append(name)
        return new

    def remove(self, hashes: Sequence[int]) -> list[int]:
        """Those of which none is left."""
        copies = self._copies
        gone = []
        for name in hashes:
            count = copies.get(name, 0)
            if count > 1:
                copies[name] = count - 1
            elif count:
                del copies[name]
                gone.append(name)
        return gone

    def __iter__(self) -> Iterator[int]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)
