"""Requests are placed when an engine has room for them, not when they arrive.

place ──somebody is free, nobody waits──> booked at once
  └────> in line, or held for the engine that has the cache ──an engine is free──> booked, its siblings with it

Order of precedence: priority, then the tenant that has had least, then the place in line (`room_rule.py`). The tenant
whose answers fill most of the engines' memory leaves room there for the others (`tenant_memory.py`). The clock is
handed in: the gateway's, or a replay's virtual one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from router.core import Ask, Booking, Candidate
from router.errors import NoEngine, RoomFull, WaitedTooLong, WarmrouteError
from router.routing.fleet import Rank
from router.routing.room_lanes import Lane, LaneName, SetAside, Target, Waiting, nothing
from router.routing.room_memory import (
    FULL,
    NOTHING,
    Needed,
    has_memory,
    is_full,
    lacking,
    lasting_tokens,
    needed_by,
    still_lacks,
)
from router.routing.room_rule import RoomRule
from router.routing.tenant_memory import EXPECTED_OUTPUT_TOKENS, TenantMemory
from router.routing.tenant_shares import TenantShares

FAMILY = 16
"""Siblings that leave together; what comes behind them is looked at anew: no engine is to get hundreds at once."""
SET_ASIDE = 8
"""After so many that nobody can take just now, those behind them wait too: no look is to become a look at all."""
LOOKS = 16
"""After so many looks in vain in one lane the rest of it waits for the next change: none is to become a look at all."""
AGAIN_AT_ONCE = 16
LOOK_AGAIN_S = 0.5
"""Engines come back, estimates run out: what nothing reports is looked at so often while somebody waits."""


class Look(msgspec.Struct, frozen=True, gc=False):
    """Who can serve a request and what each holds of it, as things stand. `candidates` in the order of `ranks`."""

    ranks: Sequence[Rank]
    candidates: tuple[Candidate, ...]
    filtered: Mapping[str, str]


class Desk(Protocol):
    """What the room asks of the brain. `due`: when `sweep` has something to do next."""

    @property
    def due(self) -> float: ...

    def sweep(self, now: float) -> None:
        """Ends prefills that show their end by their time alone."""
        ...

    def ranks(self, model: str, lora: str | None) -> Sequence[Rank]:
        """Who serves a model now, whatever the request."""
        ...

    def memory(self, model: str) -> TenantMemory:
        """What of the KV memory of a model's engines each tenant holds and will hold."""
        ...

    def look(self, ask: Ask, now: float) -> Look:
        """Raises NoEngine."""
        ...

    def book(self, ask: Ask, look: Look, now: float, *, among: Sequence[int] | None) -> Booking:
        """One of those candidates, or of those with these indices, chosen by the policy."""
        ...


class RoomLimits(msgspec.Struct, frozen=True):
    requests: int = 10_000
    body_bytes: int = 1 << 30
    wait_s: float = 600.0  # a request that is not placed by then is refused


class RoomStats(msgspec.Struct):
    """Running totals."""

    placed_at_once: int = 0
    placed: int = 0  # after a wait
    refused: int = 0  # at arrival
    expired: int = 0
    left: int = 0  # their clients
    longest_wait_s: float = 0.0


class _Verdict(NamedTuple):
    """`free`: indices of candidates that could take it now. `held_for`: for whom it waits all the same."""

    free: Sequence[int]
    held_for: Target | None = None
    gain_ms: float = 0.0


class WaitingRoom:
    """`call_at(when, call)` calls back once at clock time `when`, or as soon as possible after it.

    waiting: who waits, by age. What engines tell need not be said while that is nobody.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        call_at: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float],
        rule: RoomRule | None = None,
        limits: RoomLimits | None = None,
    ) -> None:
        self.rule = rule or RoomRule()
        self.limits = limits or RoomLimits()
        self.stats = RoomStats()
        self.gap_s = self.rule.gap_s
        self._desk = desk
        self._call_at = call_at
        self._clock = clock
        self._shares = TenantShares()
        self._lanes: dict[LaneName, Lane] = {}
        self.waiting: dict[Waiting, None] = {}
        self._twins: dict[tuple[LaneName, int, int], dict[Waiting, None]] = {}
        self._body_bytes = 0
        self._unfit: dict[Waiting, None] = {}  # that no free engine could take when they were looked at, by age
        self._looked_again_at = -inf
        self._rested: dict[Target, float] = {}  # when a rank that finished a prefill may begin the next
        self._due = inf  # when we are called back
        self.lacking_memory = 0  # who waits and found none when it was looked at last

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def held(self) -> int:
        """Of those who wait, how many wait for one engine while another is free or freer."""
        return sum(lane.held for lane in self._lanes.values())

    def reconfigure(self, rule: RoomRule, limits: RoomLimits) -> None:
        """Who waits already keeps its place in line."""
        self.rule, self.limits = rule, limits
        self.gap_s = min(self.gap_s, rule.gap_s)

    def oldest_s(self, now: float) -> float:
        """How long the one has waited that has waited longest."""
        oldest = next(iter(self.waiting), None)
        return 0.0 if oldest is None else now - oldest.arrived_at

    # -- in

    def place(self, ask: Ask, now: float) -> Booking | Waiting:
        """The booking, if there is room; else who waits, whose `settle` is to be set before anything else happens.

        Raises NoEngine, and RoomFull for a request that would not be placed in time.
        """
        look = self._desk.look(ask, now)
        self._desk.memory(ask.model).came(ask.tenant, now)
        if not self.waiting and self._all_have_room(look.ranks, ask, now):  # mostly so: there is nothing to weigh
            self.stats.placed_at_once += 1
            return self._book(ask, look, None, now)
        waiting = Waiting(ask, now)
        verdict = self._judge(waiting, look, now)
        if not self.waiting and verdict.free and verdict.held_for is None:
            self.stats.placed_at_once += 1
            return self._book(ask, look, verdict.free, now)
        self._enter(waiting)
        self._work(now)
        if waiting.booking is not None:
            self.stats.placed_at_once += 1
            return waiting.booking
        refusal = self._refusal(waiting, look)
        if refusal is not None:
            self.stats.refused += 1
            self._leave(waiting)
            raise refusal
        return waiting

    def _refusal(self, waiting: Waiting, look: Look) -> RoomFull | None:
        """Why it may not stay: it stands in line already."""
        if waiting.ask.exclude:  # it was let in before
            return None
        limits = self.limits
        backlog_s = self._backlog_s(waiting, look)
        if len(self.waiting) > limits.requests or self._body_bytes > limits.body_bytes:
            return RoomFull("Too many requests are waiting for an engine.", retry_after_s=max(1.0, backlog_s))
        if backlog_s > limits.wait_s:
            return RoomFull("No engine would be free in time.", retry_after_s=backlog_s - limits.wait_s + 1.0)
        return None

    def _backlog_s(self, waiting: Waiting, look: Look) -> float:
        """Until everything is computed that waited before it and is not less urgent, by all engines together."""
        ask = waiting.ask
        lanes = [lane for lane in self._lanes.values() if lane.name.priority >= ask.priority]
        waiting_ms = sum([lane.waiting_ms for lane in lanes if lane.name.model == ask.model]) - waiting.prefill_ms
        return (waiting_ms + sum([c.booked_prefill_ms for c in look.candidates])) / len(look.candidates) / 1e3

    def _enter(self, waiting: Waiting) -> None:
        ask = waiting.ask
        engines = max(1, len(self._desk.ranks(ask.model, ask.lora)))
        backlog_s = self._waiting_ms(ask.model) / engines / 1e3
        waiting.yields_s = self.rule.longest_head_start_s(backlog_s, self.limits.wait_s)
        waiting.place = self._place_in_line(waiting)
        waiting.cancel = lambda: self._cancel(waiting)
        name = LaneName(ask.model, ask.lora, ask.priority, ask.tenant)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name)
        lane.enter(waiting)
        self.waiting[waiting] = None
        self._body_bytes += ask.body_bytes
        twins = _name_of_prompt(waiting, name)
        if twins is not None:
            self._twins.setdefault(twins, {})[waiting] = None

    def _place_in_line(self, waiting: Waiting) -> float:
        if waiting.ask.exclude:  # its engine failed it: it has waited once already
            return -inf
        return self.rule.place_in_line(waiting.arrived_at, waiting.prefill_ms, waiting.yields_s)

    # -- out

    def _leave(self, waiting: Waiting) -> None:
        del self.waiting[waiting]
        waiting.cancel = nothing  # what was there holds the request that holds it
        self._unfit.pop(waiting, None)
        self._body_bytes -= waiting.ask.body_bytes
        lane = waiting.lane
        assert lane is not None, "who waits stands in a lane"
        self._note_lacks(waiting, None)
        twins = _name_of_prompt(waiting, lane.name)
        if twins is not None:
            del self._twins[twins][waiting]
            if not self._twins[twins]:
                del self._twins[twins]
        lane.leave(waiting)
        if not lane.size:
            del self._lanes[lane.name]

    def _cancel(self, waiting: Waiting) -> None:
        if waiting in self.waiting:
            self.stats.left += 1
            self._leave(waiting)

    def _fail(self, waiting: Waiting, error: WarmrouteError) -> None:
        self._leave(waiting)
        if waiting.settle is not None:
            waiting.settle(error)

    def _send(self, waiting: Waiting, look: Look, among: Sequence[int], now: float) -> Booking:
        self._leave(waiting)
        booking = waiting.booking = self._book(waiting.ask, look, among, now)
        if waiting.may_crowd:
            _note_crowded(booking, look, now)
        if waiting.settle is not None:
            self.stats.placed += 1
            self.stats.longest_wait_s = max(self.stats.longest_wait_s, now - waiting.arrived_at)
            waiting.settle(booking)
        return booking

    def _book(self, ask: Ask, look: Look, among: Sequence[int] | None, now: float) -> Booking:
        booking = self._desk.book(ask, look, now, among=among)
        self._shares.serve(ask.tenant, booking.predicted_prefill_ms)
        return booking

    # -- what engines tell

    def prefill_ended(self, rank: Rank, prefill_ms: float, now: float) -> None:
        """A prefill of ours is over on `rank`, or given up."""
        if not self.waiting:
            return
        rested = now + self._rest_s(rank, prefill_ms / 1e3, now)
        if rested > self._rested.get(rank.target, -inf):
            self._rested[rank.target] = rested
        self.wake(now)

    def _rest_s(self, rank: Rank, prefill_s: float, now: float) -> float:
        """How long it rests after a prefill, which is added to what those who decode there are owed."""
        rule, booked, engines = self.rule, rank.booked, 1 + len(rank.peers)
        if booked.requests - len(booked.prefills) <= engines:  # it was in nobody's way
            return 0.0
        share = rule.prefill_share(_step_ms(rank))
        rank.owed_s = rule.owed_s(rank.owed_s, now - rank.owed_at, prefill_s / engines, share)
        rank.owed_at = now
        model = rank.instance.model
        pressure = rule.pressure(self._waiting_ms(model), len(self._desk.ranks(model, None)))
        return rule.rest_s(rank.owed_s, share, self.gap_s, pressure)

    def answered(self, tenant: str, work_ms: float) -> None:
        """A request of the tenant is over, which took so much beyond its prefill."""
        self._shares.charge(tenant, work_ms)

    def timed(self, *, ttft_s: float, tpot_s: float, solo_s: float) -> None:
        """How long an answer took for its first token, and for each further one; its prefill alone takes `solo_s`."""
        rule = self.rule
        slow, late = tpot_s > rule.tpot_s, ttft_s > rule.ttft_s + 2 * solo_s
        self.gap_s = rule.next_gap_s(self.gap_s, slow=slow, late=late)

    def wake(self, now: float) -> None:
        """Something may have changed. What a turn of the loop brings is looked at once, after it."""
        if self.waiting:
            self._call_back(now)

    # -- at work

    def _call_back(self, when: float) -> None:
        if when < self._due:
            self._due = when
            self._call_at(when, partial(self._called, when))

    def _called(self, when: float) -> None:
        if when == self._due:  # else an earlier call has taken its place
            self._due = inf
            self._work(self._clock())

    def _work(self, now: float) -> None:
        """Place whom there is room for, and be called back when that may be so for others."""
        if now >= self._desk.due:
            self._desk.sweep(now)
        self._expire(now)
        if self._unfit and now >= self._looked_again_at + LOOK_AGAIN_S:
            self._look_again(now)
        set_aside = SetAside()
        while self._send_next(set_aside, now):
            pass
        for waiting in set_aside.all:
            if waiting.lane is not None:
                waiting.lane.line_up(waiting)
        if self.waiting:
            self._call_back(self._next_change(now))

    def _look_again(self, now: float) -> None:
        """What was in their way may be over: an engine was suspected, or its memory was full."""
        self._looked_again_at = now
        for waiting in list(islice(self._unfit, AGAIN_AT_ONCE)):
            del self._unfit[waiting]
            if waiting.lane is not None:
                waiting.lane.line_up(waiting)

    def _expire(self, now: float) -> None:
        while (oldest := next(iter(self.waiting), None)) is not None:
            if now - oldest.arrived_at < self.limits.wait_s:
                return
            self.stats.expired += 1
            self._fail(oldest, WaitedTooLong("No engine was free in time.", retry_after_s=1.0))

    def _send_next(self, set_aside: SetAside, now: float) -> bool:
        """Place the first who can be. False: nobody can."""
        lanes = list(self._lanes.values())
        if len(lanes) > 1:
            lanes.sort(key=self._precedence)
        return any(self._send_first(lane, set_aside, now) for lane in lanes)

    def _precedence(self, lane: Lane) -> tuple[float, ...]:
        return (-lane.name.priority, self._shares.start(lane.name.tenant))

    def _send_first(self, lane: Lane, set_aside: SetAside, now: float) -> bool:
        ranks = self._desk.ranks(lane.name.model, lane.name.lora)
        idle = [self._is_free(rank, now) for rank in ranks]
        free = [rank for rank, is_idle in zip(ranks, idle, strict=True) if is_idle]
        if not free and ranks:
            return False
        targets, looks = [rank.target for rank in free], 0
        self._let_go(lane, ranks, now)
        while (waiting := lane.first(targets)) is not None and self._may_pass(waiting, set_aside):
            looks += 1
            if looks > LOOKS:
                return False
            if now < waiting.lacks_until and still_lacks(waiting.lacks, free, now):
                self._put_aside(waiting, self._for_the_soonest(ranks, idle, now), set_aside)
                continue
            try:
                look = self._desk.look(waiting.ask, now)
            except NoEngine as error:
                self._fail(waiting, error)
                continue
            self._desk.memory(waiting.ask.model).came(waiting.ask.tenant, now)
            before = waiting.place
            verdict = self._judge(waiting, look, now)
            waiting.place = self._place_in_line(waiting)
            if waiting.place > before:
                lane.line_up(waiting)  # its prefix has gone: others may come first now
                if lane.first(targets) is not waiting:
                    continue
            if verdict.free and verdict.held_for is None:
                self._send_with_twins(lane, waiting, look, verdict.free, now)
                return True
            self._put_aside(waiting, verdict, set_aside)
        return False

    def _put_aside(self, waiting: Waiting, verdict: _Verdict, set_aside: SetAside) -> None:
        """Out of the line, for an engine or until all have been looked at."""
        lane = waiting.lane
        assert lane is not None, "who waits stands in a lane"
        if verdict.held_for is not None:
            lane.hold(waiting, verdict.held_for, verdict.gain_ms)
            if not verdict.free:
                self._unfit[waiting] = None
        else:
            lane.take_out(waiting)
            set_aside.add(waiting)

    def _may_pass(self, waiting: Waiting, set_aside: SetAside) -> bool:
        """Whether it may go before those that nobody can take just now."""
        before = set_aside.before(waiting)
        return len(before) < SET_ASIDE and all([waiting.arrived_at < w.arrived_at + w.yields_s for w in before])

    def _send_with_twins(self, lane: Lane, waiting: Waiting, look: Look, among: Sequence[int], now: float) -> None:
        """Siblings of a best-of-n go where the first goes: there its prompt is about to be held."""
        name = _name_of_prompt(waiting, lane.name)
        booking = self._send(waiting, look, among, now)
        for twin in list(islice(self._twins.get(name, ()), FAMILY)) if name is not None else ():
            try:
                look = self._desk.look(twin.ask, now)
            except NoEngine:
                return
            same = [
                i
                for i, (rank, c) in enumerate(zip(look.ranks, look.candidates, strict=True))
                if (c.instance, c.rank) == (booking.instance, booking.rank) and not _runs_all_it_can(rank)
            ]
            if same:
                self._judge(twin, look, now)
                self._send(twin, look, same, now)

    def _let_go(self, lane: Lane, ranks: Sequence[Rank], now: float) -> None:
        """Whom it does not pay any more to hold."""
        targets = lane.targets()
        if not targets:
            return
        by_target = {rank.target: rank for rank in ranks}
        eagerness = self.rule.eagerness(self.rule.pressure(self._waiting_ms(lane.name.model), len(ranks)))
        for target in targets:
            rank = by_target.get(target)
            pays_ms = inf if rank is None else self._busy_ms(rank, now) / eagerness + _turn_ms(rank)
            lane.let_go(target, pays_ms)

    def _judge(self, waiting: Waiting, look: Look, now: float) -> _Verdict:
        tokens, ranks, candidates = waiting.ask.prompt.tokens, look.ranks, look.candidates
        work = [c.rates.prefill_ms(tokens - c.hit_tokens, tokens) for c in candidates]
        least = min(work)
        if waiting.lane is not None:
            waiting.lane.revalue(waiting, least)
            waiting_ms = self._waiting_ms(waiting.ask.model)
        else:
            waiting.prefill_ms = least
            waiting_ms = self._waiting_ms(waiting.ask.model) + least
        idle = [self._is_free(rank, now) for rank in ranks]
        needed = needed_by(waiting.ask, self._desk.memory(waiting.ask.model))
        may_crowd = waiting.may_crowd = self._may_crowd(waiting, ranks, now)
        waiting.leads = needed.grown > 0
        self._note_lacks(waiting, None)
        free = [
            i
            for i, (rank, candidate) in enumerate(zip(ranks, candidates, strict=True))
            if (idle[i] or self._can_join(rank, candidate, tokens))
            and (
                has_memory(rank, needed, candidate.hit_tokens, now)
                or (may_crowd and needed.now >= self.rule.patient_share * rank.capacity_tokens)
            )
        ]
        if not free:
            if any(idle):
                self._note_lacks(waiting, lacking(needed, candidates), until=now + LOOK_AGAIN_S)
            return self._for_the_soonest(ranks, idle, now)
        if len(free) == len(ranks) or not self.rule.hold:
            return _Verdict(free)
        best = min(free, key=work.__getitem__)
        there, hit = candidates[best].rates, candidates[best].hit_tokens
        eagerness = self.rule.eagerness(self.rule.pressure(waiting_ms, len(ranks)))
        held_for, gain_ms, most = None, 0.0, 0.0
        for i, (rank, candidate) in enumerate(zip(ranks, candidates, strict=True)):
            if candidate.hit_tokens <= hit or idle[i]:
                continue
            lasting = lasting_tokens(rank, candidate)
            if lasting > hit:
                # Only what is cached counts: to wait for an engine that seems a little faster, all would wait.
                gain = work[best] - there.prefill_ms(tokens - lasting, tokens)
                profit = eagerness * (gain - self._ahead_ms(rank)) - self._busy_ms(rank, now)
                if profit > most:
                    held_for, gain_ms, most = rank.target, gain, profit
        return _Verdict(free, held_for, gain_ms)

    def _may_crowd(self, waiting: Waiting, ranks: Sequence[Rank], now: float) -> bool:
        """Whether it may be sent where there is no memory for it: the engine makes room as answers end, and lets nobody
        else in until then. So but few engines at a time are to be kept busy that way.
        """
        waited_s = now - waiting.arrived_at
        if waited_s <= self.rule.memory_patience_s:
            return False
        crowded = sum([rank.crowded_by in rank.booked.prefills for rank in ranks])
        share = max(self.rule.crowded_share, 2 * waited_s / self.limits.wait_s)  # it is not to be refused in the end
        return crowded < max(1, int(share * len(ranks)))

    def _note_lacks(self, waiting: Waiting, lacks: Needed | None, *, until: float = 0.0) -> None:
        if waiting.lane is not None:
            self.lacking_memory += (lacks is not None) - (waiting.lacks is not None)
            waiting.lacks, waiting.lacks_until = lacks, until

    def _for_the_soonest(self, ranks: Sequence[Rank], idle: Sequence[bool], now: float) -> _Verdict:
        """Nobody who is free can take it: for the busy one that will be free first, if any is busy."""
        busy = [rank for rank, is_idle in zip(ranks, idle, strict=True) if not is_idle]
        if not busy:
            return _Verdict(())
        return _Verdict((), min(busy, key=lambda rank: self._busy_ms(rank, now) + self._ahead_ms(rank)).target, inf)

    def _waiting_ms(self, model: str) -> float:
        return sum([lane.waiting_ms for lane in self._lanes.values() if lane.name.model == model])

    def _busy_ms(self, rank: Rank, now: float) -> float:
        prefill_ms = rank.booked.prefill_ms(now) / (1 + len(rank.peers))
        return self.rule.busy_ms(rank.factor.rates, prefill_ms, _step_ms(rank))

    def _ahead_ms(self, rank: Rank) -> float:
        """Until those who are held for it have had their turns. 0: it works on fewer than it can, and takes several.

        What waits makes a hold worth more where every token computed twice costs the others, and less here: another
        engine has further turns to give.
        """
        turn_ms = _turn_ms(rank)
        return turn_ms * (1 + sum([lane.held_for(rank.target) for lane in self._lanes.values()])) if turn_ms else 0.0

    def _is_free(self, rank: Rank, now: float) -> bool:
        rule, tokens = self.rule, rank.booked.prefill_tokens // (1 + len(rank.peers))
        if tokens and tokens >= rule.free_tokens and tokens >= rule.takes_tokens(rank.factor.rates, _step_ms(rank)):
            return False
        if _runs_all_it_can(rank):
            return False
        return now >= self._rested.get(rank.target, -inf) and not is_full(rank, now)

    def _all_have_room(self, ranks: Sequence[Rank], ask: Ask, now: float) -> bool:
        """Whether `_judge` would find everybody free, as far as a glance tells: a fifth of what it costs to ask each.

        False: it has to be asked.
        """
        if self._rested and self._soonest_rested(now) < inf:
            return False
        few, needed = self.rule.free_tokens, needed_by(ask, self._desk.memory(ask.model))
        for rank in ranks:
            booked, usage = rank.booked, rank.load.kv_usage
            if booked.prefill_tokens >= few or booked.requests >= rank.max_running:
                return False
            if usage and booked.requests:
                pinned = usage * rank.capacity_tokens + booked.fresh_tokens - rank.fresh_tokens_then
                if pinned + needed.now > FULL * rank.capacity_tokens:
                    return False
            if needed.grown and not has_memory(rank, needed, 0, now):
                return False
        return True

    def _can_join(self, rank: Rank, candidate: Candidate, tokens: int) -> bool:
        """Its prompt is being computed there for a sibling: behind that it takes hardly any time of the engine's."""
        if _runs_all_it_can(rank):
            return False
        return 2 * candidate.expected_tokens >= tokens and tokens - candidate.hit_tokens <= self.rule.join_tokens

    def _next_change(self, now: float) -> float:
        """When some engine has rested, or something is to be looked at again in any case."""
        return min(max(now, min(now + LOOK_AGAIN_S, self._desk.due)), self._soonest_rested(now))

    def _soonest_rested(self, now: float) -> float:
        """Of those that still rest. Those that have rested are forgotten."""
        self._rested = {target: rested for target, rested in self._rested.items() if rested > now}
        return min(self._rested.values(), default=inf)


def _step_ms(rank: Rank) -> float:
    """What a token takes those who decode there, while nothing is prefilled. 0: nobody does."""
    return _step_of_ms(rank, rank.booked.requests - len(rank.booked.prefills))


def _step_of_ms(rank: Rank, decoding: int) -> float:
    """The same once so many of its requests decode."""
    booked, rates, engines = rank.booked, rank.factor.rates, 1 + len(rank.peers)
    if decoding <= 0:
        return 0.0
    context = booked.kv_tokens * decoding / booked.requests
    return rates.c0_ms + (rates.c3_ms * context + rates.c4_ms * decoding) / engines


def _runs_all_it_can(rank: Rank) -> bool:
    """Whoever comes waits until an answer ends, behind those that wait there already."""
    return rank.booked.requests >= rank.max_running * (1 + len(rank.peers))


def _turn_ms(rank: Rank) -> float:
    """From one end of an answer to the next where it works on all it can; 0 where it does not."""
    if not _runs_all_it_can(rank):
        return 0.0
    step_ms = _step_of_ms(rank, rank.booked.requests)
    return EXPECTED_OUTPUT_TOKENS * step_ms / (rank.max_running * (1 + len(rank.peers)))


def _note_crowded(booking: Booking, look: Look, now: float) -> None:
    """If it was sent where there is no memory for it."""
    for rank in look.ranks:
        if rank.target == (booking.instance, booking.rank) and not has_memory(rank, NOTHING, 0, now):
            rank.crowded_by = booking.id


def _name_of_prompt(waiting: Waiting, lane: LaneName) -> tuple[LaneName, int, int] | None:
    """Equal for requests of one lane that ask the same. None: nothing is known of the prompt."""
    prompt = waiting.ask.prompt
    if waiting.ask.exclude:
        return None
    if prompt.text_keys:
        return (lane, prompt.text_keys[-1][0], prompt.tokens)
    keys = next(iter(prompt.keys.values()), None)
    return (lane, keys[-1], prompt.tokens) if keys else None
