"""A trace through the gateway's own brain and simulated engines, in virtual time.

Only the engines and the clock are simulated: fleet, index, bookings, waiting room and policy are those of the gateway.
What engines say (first tokens, ends, KV events, load) reaches the brain late, as it does in life.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

import msgspec

from router.core import (
    Ask,
    Booking,
    Cleared,
    EngineFacts,
    Instance,
    Load,
    Lost,
    Outcome,
    Policy,
    Prompt,
    Removed,
    Stored,
    Usage,
)
from router.errors import NoEngine, WarmrouteError
from router.lab.engine import DoesNotFit, EngineRequest, StepResult
from router.lab.fleet_model import Engine, EngineSpec, KeyCopies
from router.lab.traces import Trace, TraceRequest
from router.routing.bookings import Bookings
from router.routing.brain import Brain, Placed
from router.routing.confidence import Confidence
from router.routing.fleet import Fleet, Health
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches
from router.routing.room_lanes import Waiting
from router.routing.room_rule import RoomRule
from router.routing.sent import SentIndex
from router.routing.waiting_room import RoomLimits, RoomStats

MODEL = "m"
_LOAD_EVERY_S = 1.0
_RETRY_S = 1.0
_PATIENCE_S = 600.0


class Outage(msgspec.Struct, frozen=True):
    """An engine that dies, and comes back empty."""

    engine: int
    at_s: float
    back_s: float


class Setup(msgspec.Struct, frozen=True):
    """What a trace is replayed on. Times in seconds."""

    engines: Sequence[EngineSpec]
    room: RoomRule | None = None  # None: placed at arrival
    room_limits: RoomLimits = RoomLimits()
    signal_delay_s: float = 0.015  # first tokens and ends
    event_delay_s: float = 0.005  # KV events
    load_delay_s: float = 0.05
    event_loss: float = 0.0  # share of KV event batches that never arrive
    not_streamed: float = 0.0  # share of requests without a first token to be seen
    outages: Sequence[Outage] = ()


class Served(msgspec.Struct, gc=False):
    """What became of one request. Times in seconds of the replay's clock; None: that never happened."""

    id: str
    tenant: str
    turn: int
    arrived_at: float
    input_tokens: int
    output_tokens: int
    solo_s: float  # prefill of the whole prompt on the fastest engine, idle and empty
    placed_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    engine: int = -1
    hit_tokens: int = 0  # delivered
    predicted_hit_tokens: int = 0
    best_hit_tokens: int = 0  # of any candidate when it was placed
    retries: int = 0
    refused: str = ""  # why it was not served


class Replayed(msgspec.Struct):
    """One policy's run over one trace."""

    policy: str
    served: list[Served]
    ended_at: float  # when the last answer was complete
    busy_s: list[float]  # by engine
    preemptions: int
    duplicate_share: float  # of block copies in the caches, averaged over the run: those beyond the first
    room: RoomStats | None


class _Going:
    """A request on its way."""

    __slots__ = ("booking", "engine", "request", "served", "streams", "trace")

    def __init__(self, trace: TraceRequest, served: Served, *, streams: bool) -> None:
        self.trace = trace
        self.served = served
        self.streams = streams
        self.booking: Booking | None = None
        self.engine: Engine | None = None
        self.request: EngineRequest | None = None


class Replay:
    """`policy` by name and as made. `progress` is called now and then with the number of requests that have ended."""

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        policy: Policy,
        *,
        name: str,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.now = 0.0
        self._trace = trace
        self._setup = setup
        self._name = name
        self._dice = random.Random(seed)
        self._progress = progress
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        self._served: list[Served] = []
        self._going: dict[EngineRequest, _Going] = {}
        self._by_id: dict[str, list[TraceRequest]] = {}
        self._ended = 0
        self._ended_at = 0.0
        self._copies: list[KeyCopies] = []
        self._holders: dict[int, int] = {}  # of each block known to us, how many engines
        self._duplicates: list[float] = []
        self._build(policy, random.Random(seed + 1))

    def _build(self, policy: Policy, dice: random.Random) -> None:
        setup, size, clock = self._setup, self._trace.block_size, lambda: self.now
        self._fleet = Fleet()
        self._index = BlockIndex(b"replay", clock=clock, max_bytes=1 << 34)
        bookings = Bookings[Placed]()
        self._recent = RecentDispatches(clock=clock)
        self._brain = Brain(
            fleet=self._fleet,
            index=self._index,
            sent=SentIndex(self._index, clock=clock),
            recent=self._recent,
            bookings=bookings,
            policies={self._name: policy},
            default_policy=self._name,
            clock=clock,
            dice=dice,
        )
        self._bookings = bookings
        if setup.room is not None:
            rule = msgspec.structs.replace(setup.room, signal_delay_s=setup.signal_delay_s)
            self._brain.open_room(self._at, rule=rule, limits=setup.room_limits, every_policy=True)
        self._engines: list[Engine] = []
        for n, spec in enumerate(setup.engines):
            id = f"e{n}"
            engine = Engine(id, spec, block_size=size, at=self._at, stepped=self._stepped)
            self._engines.append(engine)
            self._copies.append(KeyCopies())
            instance = Instance(id=id, url=f"http://{id}", engine="simulated", model=MODEL)
            self._fleet.add(instance, now=0.0, rates=spec.profile.rates)
            facts = EngineFacts(
                served=(MODEL,),
                block_size=size,
                capacity_tokens=engine.model.capacity_tokens,
                max_running_requests=engine.model.max_num_seqs,
            )
            self._fleet.learn(id, facts, now=0.0)
            self._fleet.set_health(id, Health.READY, "", now=0.0)
            rank = self._fleet.ranks(id)[0]
            rank.slot = self._index.open(id, 0, model=MODEL, block_size=size)
            rank.confidence = Confidence(clock=clock)
        self._rates = {spec.profile.rates for spec in setup.engines}
        self._numbers = {engine.id: n for n, engine in enumerate(self._engines)}

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heappush(self._calls, (when if when > self.now else self.now, next(self._serial), call))

    # -- the run

    def run(self) -> Replayed:
        for request in self._trace.requests:
            if request.after is None:
                self._at(request.at, partial(self._arrive, request))
            else:
                self._by_id.setdefault(request.after, []).append(request)
        for outage in self._setup.outages:
            self._at(outage.at_s, partial(self._die, outage.engine))
            self._at(outage.back_s, partial(self._come_back, outage.engine))
        self._at(_LOAD_EVERY_S, self._report_loads)
        total = len(self._trace.requests)
        calls = self._calls
        while calls and self._ended < total:
            self.now, _, call = heappop(calls)
            call()
        room = self._brain.room
        return Replayed(
            self._name,
            self._served,
            self._ended_at,
            [engine.busy_s for engine in self._engines],
            sum(engine.preemptions + engine.model.preemptions for engine in self._engines),
            sum(self._duplicates) / len(self._duplicates) if self._duplicates else 0.0,
            None if room is None else room.stats,
        )

    # -- requests

    def _arrive(self, request: TraceRequest) -> None:
        tokens = request.input_tokens
        served = Served(
            request.id,
            request.tenant,
            request.turn,
            self.now,
            request.input_tokens,
            request.output_tokens,
            min(rates.c0_ms + rates.prefill_ms(tokens, tokens) for rates in self._rates) / 1e3,
        )
        self._served.append(served)
        self._place(_Going(request, served, streams=self._dice.random() >= self._setup.not_streamed), ())

    def _place(self, going: _Going, exclude: tuple[str, ...]) -> None:
        self._brain.sweep(self.now)
        ask = self._ask(going, exclude)
        room = self._brain.room
        try:
            if room is None:
                placed: Booking | Waiting = self._brain.book(ask, self._brain.look(ask, self.now), self.now)
            else:
                placed = room.place(ask, self.now)
        except NoEngine as error:
            self._try_again(going, error)
        except WarmrouteError as error:
            self._refuse(going, error)
        else:
            if isinstance(placed, Booking):
                self._send(going, placed)
            else:
                placed.settle = partial(self._settled, going)

    def _ask(self, going: _Going, exclude: tuple[str, ...]) -> Ask:
        request, size = going.trace, self._trace.block_size
        keys = array("Q", request.blocks[: request.input_tokens // size])
        prompt = Prompt(request.input_tokens, request.input_tokens, {size: keys}, turn=request.turn)
        return Ask(
            request.id,
            MODEL,
            prompt,
            tenant=request.tenant,
            session=request.session or None,
            priority=request.priority,
            stream=going.streams,
            max_output_tokens=request.output_tokens,
            exclude=exclude,
        )

    def _settled(self, going: _Going, placed: Booking | WarmrouteError) -> None:
        if isinstance(placed, Booking):
            self._send(going, placed)
        elif isinstance(placed, NoEngine):
            self._try_again(going, placed)
        else:
            self._refuse(going, placed)

    def _try_again(self, going: _Going, error: NoEngine) -> None:
        """No engine is alive: clients try again, for a while."""
        if self.now - going.served.arrived_at < _PATIENCE_S:
            self._at(self.now + _RETRY_S, partial(self._place, going, ()))
        else:
            self._refuse(going, error)

    def _send(self, going: _Going, booking: Booking) -> None:
        trace, served = going.trace, going.served
        number = self._numbers[booking.instance]
        engine = self._engines[number]
        served.placed_at, served.engine = self.now, number
        served.predicted_hit_tokens = booking.predicted_hit_tokens
        served.best_hit_tokens = booking.best_hit_tokens
        going.booking, going.engine = booking, engine
        going.request = EngineRequest.from_hashes(
            trace.id,
            trace.input_tokens,
            output_tokens=trace.output_tokens,
            hashes=trace.blocks,
            block_size=self._trace.block_size,
        )
        self._going[going.request] = going
        if not engine.alive:  # nobody knows yet
            self._at(self.now + self._setup.signal_delay_s, partial(self._failed, going))
            return
        try:
            engine.submit(going.request, self.now)
        except DoesNotFit:
            del self._going[going.request]
            self._brain.release(booking.id, self._refused(going))
            self._refuse(going, WarmrouteError("does not fit", code="does_not_fit"))

    def _refuse(self, going: _Going, error: WarmrouteError) -> None:
        going.served.refused = error.code or type(error).__name__
        self._over(going)

    def _over(self, going: _Going) -> None:
        self._ended += 1
        self._ended_at = self.now
        if self._progress is not None and not self._ended % 100:
            self._progress(self._ended)
        for follower in self._by_id.pop(going.trace.id, ()):
            self._at(self.now + follower.think_s, partial(self._arrive, follower))

    # -- what engines do

    def _stepped(self, engine: Engine, result: StepResult, now: float) -> None:
        signals: list[tuple[_Going, bool]] = []  # ... is over
        for request in result.first:
            going = self._going[request]
            if going.served.first_token_at is None:
                going.served.first_token_at = now
                going.served.hit_tokens = request.cached_tokens or 0
                if going.streams:
                    signals.append((going, False))
        for request in result.finished:
            going = self._going.pop(request)
            going.served.finished_at = now
            signals.append((going, True))
        if signals:
            self._at(now + self._setup.signal_delay_s, partial(self._told, signals))
        if result.events:
            number = self._numbers[engine.id]
            if self._setup.event_loss and self._dice.random() < self._setup.event_loss:
                self._at(now + self._setup.event_delay_s, partial(self._gap, number))
            else:
                self._at(now + self._setup.event_delay_s, partial(self._heard, number, result.events))

    def _told(self, signals: Sequence[tuple[_Going, bool]]) -> None:
        for going, over in signals:
            booking = going.booking
            if booking is None:
                continue  # its engine died in between
            if over:
                self._brain.release(booking.id, self._outcome(going, failed=False))
                self._over(going)
            else:
                self._brain.progress(booking.id)

    def _outcome(self, going: _Going, *, failed: bool) -> Outcome:
        served, booking = going.served, going.booking
        first, placed = served.first_token_at, served.placed_at
        assert booking is not None, "only what was placed has an outcome"
        assert placed is not None, "what is booked has been placed"
        return Outcome(
            served.id, MODEL, served.tenant, booking.instance, 0,
            502 if failed else 200,
            "upstream_failed" if failed else "complete",
            None if failed else Usage(served.input_tokens, served.output_tokens, served.hit_tokens),
            served.input_tokens,
            booking.best_hit_tokens,
            booking.predicted_hit_tokens,
            None if failed else served.hit_tokens,
            "none" if failed else "usage",
            served.arrived_at,
            placed - served.arrived_at,
            None if first is None or not going.streams else first - served.arrived_at,
            self.now - served.arrived_at,
            going.streams,
            alone=booking.alone,
            error="engine_no_answer" if failed else "",
        )  # fmt: skip

    def _refused(self, going: _Going) -> Outcome:
        """The engine's word that it can't be: nothing was computed, and nothing is learned."""
        outcome = self._outcome(going, failed=False)
        return msgspec.structs.replace(outcome, status=400, usage=None, delivered_hit_tokens=None, ttft_s=None)

    def _heard(self, number: int, events: Sequence[object]) -> None:
        rank = self._fleet.ranks(f"e{number}")[0]
        slot, copies = rank.slot, self._copies[number]
        if slot is None or not self._engines[number].alive:
            return
        for event in events:
            if isinstance(event, Stored):
                new = copies.store(event.hashes)
                self._index.hold(slot, new)
                for key in new:
                    self._holders[key] = self._holders.get(key, 0) + 1
                if rank.booked.awaited and event.hashes:
                    self._bookings.computed(rank.booked, event.hashes[-1], self.now)
            elif isinstance(event, Removed):
                gone = copies.remove(event.hashes)
                self._index.drop(slot, gone)
                self._unhold(gone)
            elif isinstance(event, Cleared):
                self._forget(number)
        if rank.confidence is not None:
            rank.confidence.heard()

    def _unhold(self, keys: Iterable[int]) -> None:
        for key in keys:
            if self._holders[key] > 1:
                self._holders[key] -= 1
            else:
                del self._holders[key]

    def _gap(self, number: int) -> None:
        """Batches are missing for good: what is known is doubted until hits confirm it."""
        confidence = self._fleet.ranks(f"e{number}")[0].confidence
        if confidence is not None:
            confidence.lost(Lost("gap", "lost in the replay"))

    def _report_loads(self) -> None:
        for number, engine in enumerate(self._engines):
            model = engine.model
            load = Load(self.now, model.running, model.waiting, model.kv_usage)
            self._at(self.now + self._setup.load_delay_s, partial(self._take_load, number, load))
        copies = sum(map(len, self._copies))
        if copies:
            self._duplicates.append(1 - len(self._holders) / copies)
        self._at(self.now + _LOAD_EVERY_S, self._report_loads)

    def _take_load(self, number: int, load: Load) -> None:
        self._fleet.hear(self._fleet.ranks(f"e{number}")[0], load)

    # -- engines that die

    def _forget(self, number: int) -> None:
        rank = self._fleet.ranks(f"e{number}")[0]
        self._unhold(self._copies[number])
        self._copies[number] = KeyCopies()
        self._recent.forget(rank.target)
        if rank.slot is not None:
            self._index.forget(rank.slot)

    def _die(self, number: int) -> None:
        engine = self._engines[number]
        engine.die()
        lost = [going for going in self._going.values() if going.engine is engine]
        self._at(self.now + self._setup.signal_delay_s, partial(self._lost, number, lost))

    def _lost(self, number: int, lost: Sequence[_Going]) -> None:
        if not self._engines[number].alive:  # else it is back already
            self._fleet.set_health(f"e{number}", Health.DOWN, "died", now=self.now)
            self._forget(number)
        for going in lost:
            self._failed(going)

    def _failed(self, going: _Going) -> None:
        booking, request = going.booking, going.request
        if booking is None or request is None or self._going.pop(request, None) is None:
            return
        self._brain.release(booking.id, self._outcome(going, failed=True))
        going.booking = None
        if (
            going.served.first_token_at is not None and going.streams
        ):  # the client has seen part of an answer: it is broken off
            self._refuse(going, WarmrouteError("broken off", code="broken_off"))
            return
        if going.served.retries:
            self._refuse(going, WarmrouteError("failed twice", code="engine_no_answer"))
            return
        going.served.retries = 1
        self._place(going, (booking.instance,))

    def _come_back(self, number: int) -> None:
        engine = self._engines[number]
        engine.restart()
        self._forget(number)
        self._fleet.set_health(engine.id, Health.READY, "", now=self.now)
        if self._brain.room is not None:
            self._brain.room.wake(self.now)
