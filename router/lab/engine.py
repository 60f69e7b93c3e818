"""The engine model: what vLLM's scheduler and prefix cache do, and how long each step takes.

No I/O and no clock: `step(now)` runs one engine step and says how long it took. The simulated engine server sleeps that
long, a replay adds it to virtual time.

    waiting --admit--> partial (prompt computed chunk by chunk, at most one) --> decoding --> finished
       ^------------------------------- preempted ---------------------------------/

A decode step costs the same Python time for one sequence and for a thousand: a decoding sequence is a start step (its
context at step t is t - start), so sums over the batch need no loop, and what happens to it later (a block fills, its
last token comes) stands in a calendar.

Scheduler and cache rules: vLLM v1 (0.24 to 0.33). Step time: `router.lab.profiles.step_ms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Literal

import msgspec

from router.core import Cleared, KVEvent, Removed, Stored
from router.lab.block_pool import BlockPool
from router.lab.profiles import Profile, step_ms
from router.lab.queues import Calendar, FirstCome, ShortestFirst, Waiting
from router.lab.sequences import EngineRequest, block_hashes, root_hash

__all__ = ["DoesNotFit", "EngineModel", "EngineRequest", "Order", "StepResult", "block_hashes", "root_hash"]

Order = Literal["first_come", "shortest_first"]


class DoesNotFit(ValueError):
    """A request that the engine could never finish: prompt and answer need more blocks than there are."""


class StepResult(msgspec.Struct, gc=False):
    """What one step did, or several quiet ones (`leap`): true when `duration_ms` have passed, not before.

    Every sequence of `decoded` produced `steps` tokens, every one of `first` a single token at the end of its prefill
    (its first one, unless it had been preempted). `finished` are some of those.
    """

    duration_ms: float
    steps: int = 1
    prefill_tokens: int = 0
    first: Sequence[EngineRequest] = ()
    decoded: Sequence[EngineRequest] = ()
    finished: Sequence[EngineRequest] = ()
    preempted: Sequence[EngineRequest] = ()
    events: Sequence[KVEvent] = ()


class _Leap(msgspec.Struct, gc=False):
    """Quiet steps just taken: what `interrupt` needs to take some of them back."""

    now: float
    steps: int
    context: int


class EngineModel:
    """One engine, or one data-parallel rank of it."""

    def __init__(
        self,
        profile: Profile,
        *,
        block_size: int = 16,
        capacity_tokens: int | None = None,
        max_num_seqs: int | None = None,
        max_batched_tokens: int | None = None,
        order: Order = "first_come",
        reserve_whole: bool = True,
        record_events: bool = True,
    ) -> None:
        """None: as the profile says. Raises ValueError for limits with which a running request could starve.

        reserve_whole: admit a request only when its whole prompt would fit, not just its first chunk (vLLM's
        `scheduler_reserve_full_isl`, on by default; without it a full engine thrashes).
        """
        self._rates = profile.rates
        self.max_num_seqs = profile.max_num_seqs if max_num_seqs is None else max_num_seqs
        self._max_batched_tokens = profile.max_batched_tokens if max_batched_tokens is None else max_batched_tokens
        blocks = (profile.capacity_tokens if capacity_tokens is None else capacity_tokens) // block_size
        if block_size < 1 or blocks < 1 or self.max_num_seqs < 1:
            raise ValueError("block_size, capacity and max_num_seqs must be positive")
        if self._max_batched_tokens < self.max_num_seqs:
            raise ValueError("max_batched_tokens must not be less than max_num_seqs")
        self.block_size = block_size
        self.pool = BlockPool(blocks)
        self.queried_tokens = 0  # of prompts looked up
        self.hit_tokens = 0
        self.preemptions = 0
        self._waiting: Waiting[EngineRequest] = (
            FirstCome() if order == "first_come" else ShortestFirst(self._uncached_tokens)
        )
        self._partial: EngineRequest | None = None
        self._decoding: dict[EngineRequest, None] = {}  # in the order of admission
        self._decoding_list: list[EngineRequest] | None = []  # the same for results; None when out of date
        self._start_sum = 0
        self._block_calendar: Calendar[EngineRequest] = Calendar()
        self._end_calendar: Calendar[EngineRequest] = Calendar()
        self._step = 0
        self._admissions = 0
        self._reserve_whole = reserve_whole
        self._blocked_at = -1  # pool.changes when the head of the queue did not fit
        self._record_events = record_events
        self._events: list[KVEvent] = []
        self._leap: _Leap | None = None

    @property
    def capacity_tokens(self) -> int:
        return self.pool.total * self.block_size

    @property
    def running(self) -> int:
        return len(self._decoding) + (self._partial is not None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """0..1, the share of blocks that requests hold."""
        return self.pool.used / self.pool.total

    def produced(self, request: EngineRequest) -> int:
        """Output tokens so far."""
        if request in self._decoding:
            return self._step - request.start + 1 - request.prompt_tokens
        return request.produced

    def submit(self, request: EngineRequest) -> None:
        """Puts a request into the queue. After a leap, call `interrupt` first. Raises DoesNotFit."""
        most = request.prompt_tokens + request.output_tokens - 1  # the last token is never computed
        if self._blocks_for(most) > self.pool.total:
            raise DoesNotFit(f"{most} tokens, room for {self.capacity_tokens}")
        self._waiting.append(request)
        self._blocked_at = -1

    def abort(self, request: EngineRequest) -> bool:
        """Takes a request out, wherever it is; its blocks stay cached. False if it isn't here (any more)."""
        if self._waiting.remove(request):
            self._blocked_at = -1  # another may be at the head now, and fit
            return True
        if request is self._partial:
            self._partial = None
        elif request in self._decoding:
            self._leave_batch(request)
        else:
            return False
        self._release(request)
        return True

    def reset_cache(self) -> bool:
        """Forgets every block; the event goes out with the next step. False, and nothing done, while any is in use."""
        if not self.pool.clear():
            return False
        if self._record_events:
            self._events.append(Cleared())
        return True

    def step(self, now: float = 0.0, *, leap: bool = False) -> StepResult | None:
        """Runs one step that starts at `now` (seconds). None when there is nothing to run.

        leap: take quiet steps (every sequence just decodes one more token) in one go, up to the next step in which
        something happens. `interrupt` takes back those that an arrival prevents.
        """
        self._leap = None
        if leap and (steps := self._quiet_steps()) > 1:
            return self._take(_Leap(now, steps, self._context))
        if not self._decoding and self._partial is None and not self._waiting:
            return None
        return self._run_step()

    def interrupt(self, at: float) -> StepResult:
        """Takes back the steps of the last leap that start at `at` or later: the leap as it really was.

        Call it between a leap and its end, before `submit` or `abort`.
        """
        leap = self._leap
        if leap is None:
            raise RuntimeError("the last step was no leap")
        self._step -= leap.steps
        steps = self._steps_before((at - leap.now) * 1000.0, leap.context)
        return self._take(_Leap(leap.now, min(steps, leap.steps), leap.context))

    # One step --------------------------------------------------------------------------------------------------------

    def _run_step(self) -> StepResult:
        preempted = self._grow_decoding()
        decoding, context, decoded = len(self._decoding), self._context, self._decoding_now()
        budget = self._max_batched_tokens - decoding
        chunks: list[tuple[int, int]] = []  # new tokens, tokens before them
        whole: list[EngineRequest] = []  # whose prompt is computed by this step
        if self._partial is not None:
            budget -= self._continue_partial(budget, chunks, whole, preempted)
        if not preempted:  # vLLM admits nobody in a step that had to preempt
            self._admit(budget, chunks, whole)
        prefill_tokens = sum(new for new, _ in chunks)
        duration = step_ms(
            self._rates,
            prefill_tokens=prefill_tokens,
            attention=sum(new * (before + new / 2) for new, before in chunks),
            decoding=decoding,
            context=context,
        )
        finished = self._finish_decoding()
        self._step += 1
        for request in whole:
            if request.produced + 1 == request.output_tokens:
                request.produced += 1
                self._release(request)
                finished.append(request)
            else:
                self._start_decoding(request)
        events, self._events = self._events, []
        return StepResult(duration, 1, prefill_tokens, whole, decoded, finished, preempted, events)

    def _grow_decoding(self) -> list[EngineRequest]:
        """Registers blocks that fill in this step and takes those it needs. Returns whom that preempted."""
        preempted: list[EngineRequest] = []
        due = self._block_calendar.pop(self._step)
        if due is None:
            return preempted
        for request in sorted(due, key=_admission) if len(due) > 1 else due:
            if request not in self._decoding:
                continue  # preempted by an older one just now
            index, offset = divmod(self._step - request.start, self.block_size)
            if offset == 0 and not self._make_room(request, preempted):
                continue
            if offset == self.block_size - 1:
                self._register(request, index, index + 1)
            to_fill = self.block_size - 1 - offset
            request.due = self._step + (to_fill or 1)
            self._block_calendar.add(request.due, request)
        return preempted

    def _make_room(self, request: EngineRequest, preempted: list[EngineRequest]) -> bool:
        """One more block for a decoding sequence, if need be at the cost of the youngest. False if that is itself."""
        while not self.pool.can_take((), 1):
            victim = self._partial or next(reversed(self._decoding))
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        self._take_blocks(request, [], 1)
        return True

    def _continue_partial(
        self, budget: int, chunks: list[tuple[int, int]], whole: list[EngineRequest], preempted: list[EngineRequest]
    ) -> int:
        request = self._partial
        assert request is not None
        new = min(self._known_tokens(request) - request.computed, budget)
        fresh = self._blocks_for(request.computed + new) - len(request.blocks)
        if new and not self.pool.can_take((), fresh):
            self._preempt(request)  # it is the youngest itself
            preempted.append(request)
            return 0
        if new:
            self._compute(request, [], new, chunks, whole)
        return new

    def _admit(self, budget: int, chunks: list[tuple[int, int]], whole: list[EngineRequest]) -> None:
        """Admits waiting requests while there is budget, a seat and memory for the head of the queue."""
        waiting, pool = self._waiting, self.pool
        while budget and waiting and not self._head_must_wait(len(whole)):
            request = waiting.peek()
            known = self._known_tokens(request)
            hits = pool.lookup(request.hashes, (known - 1) // self.block_size)
            cached = len(hits) * self.block_size
            new = min(known - cached, budget)
            must_fit = known if self._reserve_whole else cached + new
            if not pool.can_take(hits, self._blocks_for(must_fit) - len(hits)):
                self._blocked_at = pool.changes
                return
            waiting.remove(request)
            self._admissions += 1
            request.admission = self._admissions
            request.computed = cached
            if request.cached_tokens is None:
                request.cached_tokens = cached
                self.queried_tokens += request.prompt_tokens
                self.hit_tokens += cached
            self._compute(request, hits, new, chunks, whole)
            budget -= new

    def _head_must_wait(self, admitted: int) -> bool:
        """No seat, or no memory since the last time anything about that changed."""
        return self.running + admitted >= self.max_num_seqs or self._blocked_at == self.pool.changes

    def _compute(
        self,
        request: EngineRequest,
        hits: list[int],
        new: int,
        chunks: list[tuple[int, int]],
        whole: list[EngineRequest],
    ) -> None:
        """Schedules one chunk: its full blocks can be hit from now on, though the step only begins."""
        before = request.computed
        done = before + new
        self._take_blocks(request, hits, self._blocks_for(done) - len(request.blocks) - len(hits))
        self._register(request, before // self.block_size, done // self.block_size)
        request.computed = done
        chunks.append((new, before))
        if done == self._known_tokens(request):
            whole.append(request)
            self._partial = None
        else:
            self._partial = request

    def _finish_decoding(self) -> list[EngineRequest]:
        finished = self._end_calendar.pop(self._step)
        if finished is None:
            return []
        for request in finished:
            self._leave_batch(request)
            request.produced = request.output_tokens
            self._release(request)
        return list(finished)

    # The batch of decoding sequences ---------------------------------------------------------------------------------

    @property
    def _context(self) -> int:
        return len(self._decoding) * self._step - self._start_sum

    def _decoding_now(self) -> list[EngineRequest]:
        if self._decoding_list is None:
            self._decoding_list = list(self._decoding)  # a new list: results keep the old one
        return self._decoding_list

    def _start_decoding(self, request: EngineRequest) -> None:
        request.start = self._step - request.computed
        offset = request.computed % self.block_size
        request.due = self._step if offset == 0 else self._step + self.block_size - 1 - offset
        request.ends = request.start + request.prompt_tokens + request.output_tokens - 2
        self._block_calendar.add(request.due, request)
        self._end_calendar.add(request.ends, request)
        self._decoding[request] = None
        self._decoding_list = None
        self._start_sum += request.start

    def _leave_batch(self, request: EngineRequest) -> None:
        request.produced = self.produced(request)
        del self._decoding[request]
        self._decoding_list = None
        self._start_sum -= request.start
        self._block_calendar.discard(request.due, request)
        self._end_calendar.discard(request.ends, request)

    def _preempt(self, request: EngineRequest) -> None:
        """Gives up its blocks; it comes back at the head of the queue and computes prompt and answer so far again."""
        if request is self._partial:
            self._partial = None
        else:
            self._leave_batch(request)
        self._release(request)
        request.computed = 0
        self._waiting.put_back(request)
        self.preemptions += 1

    # Quiet steps -----------------------------------------------------------------------------------------------------

    def _quiet_steps(self) -> int:
        """Steps from here on in which nobody is admitted, fills a block, needs one or finishes."""
        if self._partial is not None or not self._decoding:
            return 0
        if self._waiting and not self._head_must_wait(0):
            return 0
        return min(self._block_calendar.next(), self._end_calendar.next()) - self._step

    def _take(self, leap: _Leap) -> StepResult:
        self._step += leap.steps
        self._leap = leap
        duration = self._quiet_ms(leap.steps, leap.context)
        return StepResult(duration, leap.steps, decoded=self._decoding_now() if leap.steps else ())

    def _quiet_ms(self, steps: int, context: int) -> float:
        """`steps` decode steps from `context` on: an arithmetic series, since each adds one token a sequence."""
        decoding = len(self._decoding)
        one = step_ms(self._rates, prefill_tokens=0, attention=0.0, decoding=decoding, context=context)
        return steps * one + self._rates.c3_ms * decoding * steps * (steps - 1) / 2

    def _steps_before(self, elapsed_ms: float, context: int) -> int:
        """How many quiet steps start before `elapsed_ms`."""
        if elapsed_ms <= 0:
            return 0
        square = self._rates.c3_ms * len(self._decoding) / 2
        linear = self._quiet_ms(1, context) - square
        root = (sqrt(linear * linear + 4 * square * elapsed_ms) - linear) / (2 * square) if square else 0.0
        last = int(root if square else elapsed_ms / linear)  # the step under way; off by one at most, by rounding
        while self._quiet_ms(last, context) >= elapsed_ms:
            last -= 1
        while self._quiet_ms(last + 1, context) < elapsed_ms:
            last += 1
        return last + 1

    # Blocks ----------------------------------------------------------------------------------------------------------

    def _known_tokens(self, request: EngineRequest) -> int:
        """What the next token needs computed: the prompt, and after a preemption the answer so far."""
        return request.prompt_tokens + request.produced

    def _uncached_tokens(self, request: EngineRequest) -> int:
        hits = self.pool.lookup(request.hashes, (request.prompt_tokens - 1) // self.block_size)
        return request.prompt_tokens - len(hits) * self.block_size

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _take_blocks(self, request: EngineRequest, hits: list[int], fresh: int) -> None:
        evicted: list[int] = []
        request.blocks += self.pool.take(hits, fresh, evicted)
        if evicted and self._record_events:
            self._events.append(Removed(evicted))

    def _register(self, request: EngineRequest, first: int, end: int) -> None:
        """Blocks first .. end-1 of the sequence are full; those without a name cannot be cached."""
        hashes = request.hashes[first:end]
        for block, block_hash in zip(request.blocks[first:end], hashes, strict=False):
            self.pool.register(block, block_hash)
        if hashes and self._record_events:
            size = self.block_size
            self._events.append(
                Stored(
                    hashes=list(hashes),
                    parent=request.hashes[first - 1] if first else None,
                    tokens=list(request.tokens[first * size : (first + len(hashes)) * size]),
                    block_size=size,
                    lora=request.lora,
                    salt=request.salt,
                )
            )

    def _release(self, request: EngineRequest) -> None:
        self.pool.release(request.blocks)
        request.blocks = []


def _admission(request: EngineRequest) -> int:
    return request.admission
