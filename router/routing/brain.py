"""The one place that decides: `core.Placement` over what is known of the fleet.

place     who can serve (fleet) → who holds the prefix (holdings) → snapshot → decision → booking
          with a waiting room, once an engine has room for it (`waiting_room.py`)
release   booking back → what was delivered against what was said: confidence, side tables, rates
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from router.core import Ask, Booking, Decision, Outcome, Policy, Prompt, Snapshot
from router.errors import BadRequest, Forbidden, NoEngine, WarmrouteError
from router.routing.access import NO_SALT, NOT_APART, TAKES_NO
from router.routing.answers import Answers
from router.routing.bookings import LEASE_FACTOR, Bookings, Record
from router.routing.decide import LEAST_BOOKED, decide
from router.routing.fleet import Fleet, Rank
from router.routing.footprint import Footprints
from router.routing.holdings import Holdings, promised_tokens
from router.routing.index import BlockIndex
from router.routing.receipts import Receipts
from router.routing.recent import RecentDispatches
from router.routing.room_lanes import Waiting
from router.routing.room_rule import RoomRule
from router.routing.sent import SentIndex
from router.routing.shadow import Shadows
from router.routing.tenant_memory import TenantMemory, expected_output
from router.routing.waiting_room import Look, RoomLimits, WaitingRoom

FURTHER_ATTEMPTS = 8
RETRY_AFTER_S = 2.0
UNREACHABLE_S = 5.0
"""How long a rank is avoided whose engine refused a request: the watch knows more by then."""
MEMORY_BOUND = 0.9
"""Share of KV memory in use from which on a request may wait for memory: that says nothing of how fast prefill is."""
TELLING_TOKENS = 8
"""Shorter answers say more of one step than of the time per token."""
FAILURES_TO_SUSPECT = 3
BUSY_S = 1.0
BUSY_AT_MOST_S = 60.0
"""How long a rank is avoided that said it is busy: as long as it asked for, within these bounds."""
UNREACHABLE = {
    "engine_unreachable": "refused a connection",
    "EngineUnreachable": "refused a connection",
    "tls_verify_failed": "tls_verify_failed",
    "tls_handshake_failed": "tls_handshake_failed",
    "tls_files": "tls_files",
}
"""Errors that say nothing was sent, and what is shown of the rank for them."""
BUSY = frozenset({"engine_429", "engine_503"})
STUCK = 3
STUCK_S = 5.0
COMPARE_S = 1.0
"""So many requests without a first token, the oldest for so long beyond what was thought, while others of the model
answer: the rank is avoided before the lease of any of them has run out. Looked for no more often than this."""
NO_FAULT = frozenset({"engine_404", "total_timeout", "relay_gone", "internal_error"})
"""It lacks a model or a route, the client gave it little time, or the gateway itself failed: nothing is wrong with what
else it does."""
REFUSES_US = frozenset({"engine_401", "engine_403"})

_NO_KEYS: Sequence[int] = ()


class Placed(msgspec.Struct, eq=False):
    """What is remembered of a booking until it is released."""

    rank: Rank
    ask: Ask
    keys: Sequence[int]
    hit_tokens: int
    promised_tokens: int
    alone: bool
    work_ms: float  # its prefill by the prior of its rank


class Brain:
    """`policies` by name, `default_policy` among them; `model_policies`: public model name → policy name.

    `clock` is monotonic. Lives on one event loop, and nothing in here waits. `room`: where requests wait until an
    engine has room for them (`open_room`); None: they are placed as they come.

    `ttft_slo_ms`: the objective for a prompt of so many tokens, from its placement on; None: there is none. `shadows`:
    policies that are told of every decision and take no part in it. `footprints`: what each domain of isolation fills.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: BlockIndex,
        sent: SentIndex,
        recent: RecentDispatches,
        bookings: Bookings[Placed],
        policies: Mapping[str, Policy],
        default_policy: str,
        model_policies: Mapping[str, str] | None = None,
        ttft_slo_ms: Callable[[int], float] | None = None,
        shadows: Shadows | None = None,
        footprints: Footprints | None = None,
        decided: Callable[[float], None] = lambda took_us: None,
        ended: Callable[[Ask, Outcome], None] = lambda ask, outcome: None,
        clock: Callable[[], float],
        dice: random.Random,
    ) -> None:
        self.policy_failures: dict[str, int] = {}
        self._fleet = fleet
        self._index = index
        self._sent = sent
        self._recent = recent
        self._bookings = bookings
        self._policies = policies
        self._default = default_policy
        self._by_model = model_policies or {}
        self._ttft_slo_ms = ttft_slo_ms
        self._shadows = shadows
        self._footprints = footprints
        self._decided = decided
        self._ended = ended
        self._clock = clock
        self._dice = dice
        self._answers = Answers(clock=clock)
        self._receipts = Receipts()
        self._memories: dict[str, TenantMemory] = {}  # by model, as soon as somebody can serve it
        self.room: WaitingRoom | None = None
        self._every_policy = False
        self._joint: set[str] = set()
        self._all_joint = False
        self._compare_at = 0.0
        unknown = {default_policy, *self._by_model.values()} - set(policies)
        if unknown:
            raise ValueError(f"no such policy: {', '.join(sorted(unknown))}")

    def reconfigure(
        self,
        *,
        policies: Mapping[str, Policy],
        default_policy: str,
        model_policies: Mapping[str, str],
        ttft_slo_ms: Callable[[int], float] | None,
        shadows: Shadows | None,
    ) -> None:
        """For all decisions from now on; who waits in the room is placed by the new policies too."""
        self._policies, self._default, self._by_model = policies, default_policy, model_policies
        self._ttft_slo_ms, self._shadows = ttft_slo_ms, shadows
        self._find_joint_ones()

    def _find_joint_ones(self) -> None:
        self._joint = {
            name for name, policy in self._policies.items() if self._every_policy or getattr(policy, "joint", False)
        }
        self._all_joint = len(self._joint) == len(self._policies)

    def open_room(
        self,
        call_at: Callable[[float, Callable[[], None]], object],
        *,
        rule: RoomRule | None = None,
        limits: RoomLimits | None = None,
        every_policy: bool = False,
    ) -> WaitingRoom:
        """From now on requests wait for an engine that has room. `call_at(when, call)`: a timer by `clock`.

        Those of a policy that is not `joint` do not (policies/README.md), unless it is for `every_policy`.
        """
        self._every_policy = every_policy
        self._find_joint_ones()
        self.room = room = WaitingRoom(self, call_at=call_at, clock=self._clock, rule=rule, limits=limits)
        self._bookings.prefill_ended = _tell_room(room)
        return room

    # --- core.Placement

    async def place(self, ask: Ask) -> Booking:
        """Raises `NoEngine` when nobody can serve the model, and what the waiting room refuses with."""
        placed = self.place_now(ask)
        if isinstance(placed, Booking):
            return placed
        future = asyncio.ensure_future(placed)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:  # placed in this very turn
                self._withdraw(future.result().id)
            raise

    def place_now(self, ask: Ask) -> Booking | Awaitable[Booking]:
        """The booking, or where the request has to wait, a future that gives it. To cancel that is to leave."""
        now = self._clock()
        if now >= self._bookings.due:
            self.sweep(now)
        if self.room is None or not (self._all_joint or self._policy_for(ask) in self._joint):
            return self.book(ask, self.look(ask, now), now)
        waiting = self.room.place(ask, now)
        return waiting if isinstance(waiting, Booking) else self._future_of(waiting)

    def progress(self, booking_id: int) -> None:
        now = self._clock()
        record = self._bookings.first_token(booking_id, now)
        if record is not None:
            rank = record.owner.rank
            if rank.failures < FAILURES_TO_SUSPECT:  # else only a whole answer says that it is well again
                self._fleet.alive(rank)
            if now >= self._compare_at:
                self._compare(rank, now)
            if not record.owner.alone and rank.load.kv_usage < MEMORY_BOUND:
                rank.factor.served(record.owner.work_ms, record.took_us / 1e3)

    def release(self, booking_id: int, outcome: Outcome) -> None:
        now = self._clock()
        record = self._bookings.release(booking_id, now)
        if record is not None:
            placed, room = record.owner, self.room
            self._free_memory(record)
            if outcome.finish == "complete":
                self._fleet.trust(placed.rank)
                self._learn(placed, outcome)
                self._note_length(placed.ask, outcome)
                if placed.rank.continued is not None:
                    self._note_answer(record, outcome)
            else:
                self._note_failed(record, outcome, now)
            if outcome.delivered_hit_tokens is not None:
                self._compare_hits(placed, outcome.delivered_hit_tokens)
            self._ended(placed.ask, outcome)
            if room is not None:
                room.answered(placed.ask.tenant, _decode_ms(record, outcome))
                if outcome.ttft_s is not None:
                    _tell_times(room, record, outcome, outcome.ttft_s)
                if room.waiting:
                    room.wake(now)

    def _compare(self, answering: Rank, now: float) -> None:
        """Engines whose health is green and that answer nobody are told by those that do."""
        self._compare_at = now + COMPARE_S
        for rank in self._fleet.ranks_of(answering.instance.model):
            head = rank.booked.head
            if head is None or rank is answering or len(rank.booked.prefills) < STUCK:
                continue
            patience_s = LEASE_FACTOR * rank.booked.prefill_us / 1e6 + STUCK_S
            if now - max(head.at, rank.booked.head_since) > patience_s:
                self._fleet.suspect(rank, f"{len(rank.booked.prefills)} requests without a first token", now=now)

    def _future_of(self, waiting: Waiting) -> asyncio.Future[Booking]:
        future: asyncio.Future[Booking] = asyncio.get_running_loop().create_future()

        def settle(placed: Booking | WarmrouteError) -> None:
            if future.cancelled():  # in this very turn of the loop
                if isinstance(placed, Booking):
                    self._withdraw(placed.id)
            elif isinstance(placed, WarmrouteError):
                future.set_exception(placed)
            else:
                future.set_result(placed)

        waiting.settle = settle
        future.add_done_callback(partial(_left, waiting))
        return future

    def _withdraw(self, booking_id: int) -> None:
        """A booking that nobody will use."""
        record = self._bookings.release(booking_id, self._clock())
        if record is not None:
            self._free_memory(record)
            self._excuse(record.owner.rank, record)
            self._forget_dispatch(record)

    async def explain(self, ask: Ask) -> Decision:
        now = self._clock()
        look = self.look(ask, now)
        decision = self._choose(ask, self._snapshot_of(ask, look, now), look.filtered)
        return msgspec.structs.replace(decision, took_us=(self._clock() - now) * 1e6)

    # --- for the live view

    def receipt(self, request_id: str) -> Decision | None:
        """How one of the last requests was decided, the last time if it was placed more than once."""
        return self._receipts.get(request_id)

    def sweep(self, now: float) -> None:
        """Ends bookings' prefills whose time is up. `place` calls it when one is due."""
        for record in self._bookings.sweep(now):
            rank = record.owner.rank
            self._fleet.suspect(rank, f"no first token for {now - record.at:.0f} s", now=now)

    # --- deciding

    @property
    def due(self) -> float:
        """When `sweep` has something to do next."""
        return self._bookings.due

    def ranks(self, model: str, lora: str | None) -> Sequence[Rank]:
        """Who serves a model now, whatever the request."""
        return self._fleet.routable(model, lora).ranks

    def memory(self, model: str) -> TenantMemory:
        """What of the memory of a model's engines each tenant will hold."""
        memory = self._memories.get(model)
        if memory is None:
            memory = self._memories[model] = TenantMemory()
        return memory

    def look(self, ask: Ask, now: float) -> Look:
        """Who can serve a request, and what each holds of it. Raises `NoEngine`, `BadRequest` and `ContextTooLong` for
        what no engine takes, and `Forbidden` for a route on which none keeps the caller's cache apart."""
        ranks, filtered = self._fleet.candidates(ask, now=now)
        if not ranks:
            raise _nobody(ask, filtered)
        look = Look(ranks, Holdings(ask, self._index, self._recent, self._answers).candidates(ranks, now), filtered)
        return look if self._footprints is None or not ask.domain else self._bounded(ask, look, self._footprints)

    def _bounded(self, ask: Ask, look: Look, footprints: Footprints) -> Look:
        """Without the ranks that a domain may not fill with what nobody has cached."""
        allowed = footprints.allowed(ask.domain, ask.prompt.tokens, look.ranks, look.candidates)
        if allowed is None:
            return look
        filtered = {rank.id: "its domain fills enough of the caches" for rank in look.ranks}
        ranks = [look.ranks[i] for i in allowed]
        for rank in ranks:
            del filtered[rank.id]
        return Look(ranks, tuple([look.candidates[i] for i in allowed]), {**look.filtered, **filtered})

    def book(self, ask: Ask, look: Look, now: float, *, among: Sequence[int] | None = None) -> Booking:
        """The best of the candidates, or of those with these indices."""
        snapshot = self._snapshot_of(ask, look, now)
        decision = self._choose(ask, snapshot, look.filtered, among)
        took_us = (self._clock() - now) * 1e6
        self._receipts.keep(ask.request_id, decision, now, took_us)
        self._decided(took_us)
        if self._shadows is not None:
            self._shadows.note(snapshot, decision, among)
        return self._book(ask, decision, now, look, output_tokens=snapshot.output_tokens)

    def _snapshot_of(self, ask: Ask, look: Look, now: float) -> Snapshot:
        prompt, objective = ask.prompt, self._ttft_slo_ms
        return Snapshot(  # by position, as all that is made for every request: keywords cost several times as much
            now,
            prompt.tokens,
            look.candidates,
            ask.model,
            ask.tenant,
            ask.session,
            ask.request_class,
            prompt.turn,
            ask.choices,
            expected_output(ask.max_output_tokens),
            _prefix(prompt),
            None if objective is None else objective(prompt.tokens),
        )

    def _choose(
        self, ask: Ask, snapshot: Snapshot, filtered: Mapping[str, str], among: Sequence[int] | None = None
    ) -> Decision:
        name = self._policy_for(ask)
        decision = decide(
            snapshot,
            self._policies[name],
            name=name,
            dice=self._dice,
            filtered=filtered,
            reason=_why_not_by_cache(ask.prompt),
            among=among,
        )
        if decision.policy == LEAST_BOOKED:
            self.policy_failures[name] = self.policy_failures.get(name, 0) + 1
        return decision

    def _policy_for(self, ask: Ask) -> str:
        if ask.policy is not None and ask.policy in self._policies:
            return ask.policy
        return self._by_model.get(ask.model, self._default)

    # --- booking

    def _book(self, ask: Ask, decision: Decision, now: float, look: Look, *, output_tokens: int) -> Booking:
        chosen, prompt = decision.scored[0].candidate, ask.prompt
        rank = look.ranks[look.candidates.index(chosen)]
        output_tokens *= ask.choices
        memory = self.memory(ask.model)
        tokens, size, booked, held = prompt.tokens, rank.block_size, rank.booked, chosen.held_tokens
        keys = prompt.keys.get(size, _NO_KEYS)
        uncached = tokens - chosen.hit_tokens
        promised = promised_tokens(rank, held, tokens) if held else 0
        prefill_ms = chosen.rates.prefill_ms(uncached, tokens)
        answer_tokens = ask.choices * memory.answer_tokens(ask.tenant, ask.max_output_tokens)
        memory.hold(ask.tenant, uncached + answer_tokens)
        record = self._bookings.book(
            booked,
            Placed(rank, ask, keys, chosen.hit_tokens, promised, booked.requests == 0, prefill_ms / rank.factor.value),
            now=now,
            prefill_ms=prefill_ms,
            prefill_tokens=uncached,
            kv_tokens=tokens + output_tokens,
            fresh_tokens=uncached + output_tokens,
            answer_tokens=answer_tokens,
            grown_tokens=self._grown_tokens(rank, uncached + answer_tokens),
            last_key=_last_new_key(rank, prompt, keys, held_tokens=held, size=size),
            streams=ask.stream,
        )
        if rank.suspicion:
            self._fleet.probe(rank, now)
        rank.recent.add(uncached, now)
        rank.dispatches += 1
        if self._footprints is not None and (ask.domain or self._footprints):
            self._footprints.note(ask.domain, rank, uncached)
        self._expect(rank, ask, keys, size, uncached_blocks=uncached // size, now=now)
        return _booking(ask, decision, rank, record, look)

    def _expect(
        self, rank: Rank, ask: Ask, keys: Sequence[int], size: int, *, uncached_blocks: int, now: float
    ) -> None:
        """What it was sent is as good as held there: until events say so, or for good where there are none."""
        prompt = ask.prompt
        if keys or prompt.text_keys:
            self._recent.insert(ask.domain, rank.target, keys, size, text_keys=prompt.text_keys)
        if rank.slot is None or rank.confidence is None:
            return
        if rank.slot_is_assumed:
            if keys:
                self._sent.sent(rank.slot, keys)
        elif prompt.exact:
            rank.confidence.dispatched(uncached_blocks, at=now)

    def _grown_tokens(self, rank: Rank, tokens: int) -> int:
        """What counts of a request that will hold so many.

        Long ones do not: after a while they are sent though there is no memory for them, and would keep out all others.
        """
        share = 1.0 if self.room is None else self.room.rule.patient_share
        return tokens if tokens < share * rank.capacity_tokens else 0

    def _free_memory(self, record: Record[Placed]) -> None:
        ask = record.owner.ask
        self.memory(ask.model).free(ask.tenant, record.prefill_tokens + record.answer_tokens)

    # --- learning

    def _note_length(self, ask: Ask, outcome: Outcome) -> None:
        if outcome.usage is not None:
            self.memory(ask.model).answered(ask.tenant, outcome.usage.output_tokens // ask.choices)

    def _note_failed(self, record: Record[Placed], outcome: Outcome, now: float) -> None:
        """It has not ended well, which need not be the engine's fault."""
        rank = record.owner.rank
        if outcome.ttft_s is None:
            self._excuse(rank, record)
            if outcome.finish == "upstream_failed":
                self._forget_dispatch(record)
        if outcome.finish == "upstream_failed":
            self._note_failure(rank, outcome, now)

    def _note_failure(self, rank: Rank, outcome: Outcome, now: float) -> None:
        error = outcome.error
        if error in BUSY:  # it says so itself, and is well otherwise
            asked_s = outcome.retry_after_s or BUSY_S
            self._fleet.suspect(rank, "said it is busy", now=now, for_s=min(BUSY_AT_MOST_S, max(BUSY_S, asked_s)))
        elif error in UNREACHABLE:
            self._fleet.suspect(rank, UNREACHABLE[error], now=now, for_s=UNREACHABLE_S)
        elif error in REFUSES_US:
            self._fleet.suspect(rank, "refuses the gateway's key", now=now)
        elif error == "engine_died":
            self._fleet.open(rank, "says that its core is dead", now=now)
        elif error not in NO_FAULT:
            rank.failures += 1
            if rank.failures >= FAILURES_TO_SUSPECT:
                self._fleet.open(rank, f"failed {rank.failures} requests in a row", now=now)

    def _forget_dispatch(self, record: Record[Placed]) -> None:
        """It may never have begun what siblings would be sent after."""
        placed = record.owner
        ask = placed.ask
        self._recent.withdraw(ask.domain, placed.rank.target, placed.keys, text_keys=ask.prompt.text_keys)

    def _excuse(self, rank: Rank, record: Record[Placed]) -> None:
        """What was given up before its first token need not show in events."""
        if rank.confidence is not None:
            head = rank.booked.head
            rank.confidence.withdrawn(record.at, next_at=head.at if head is not None else None)

    def _learn(self, placed: Placed, outcome: Outcome) -> None:
        """How fast the engine is, from a whole answer."""
        rank, delivered, tokens = placed.rank, outcome.delivered_hit_tokens, outcome.input_tokens
        uncached = max(0, tokens - (placed.hit_tokens if delivered is None else delivered))
        if not placed.ask.stream:
            whole_ms = (outcome.took_s - outcome.queue_s) * 1e3
            if whole_ms < rank.factor.rates.prefill_ms(uncached, tokens):  # it is faster than thought, if not how fast
                rank.factor.observe(uncached, tokens, ttft_ms=whole_ms)
        elif placed.alone and outcome.ttft_s is not None:
            rank.factor.observe(uncached, tokens, ttft_ms=(outcome.ttft_s - outcome.queue_s) * 1e3)

    def _note_answer(self, record: Record[Placed], outcome: Outcome) -> None:
        """What it has generated it holds, though it may not say so before the next turn is here."""
        placed, usage = record.owner, outcome.usage
        ask, rank = placed.ask, placed.rank
        if usage is None or ask.choices > 1 or outcome.attempts > 1 or rank.peers:
            return
        if usage.cached_tokens is not None:
            self._answers.delivered(rank, ask.prompt, usage.cached_tokens)
        self._answers.ended(
            rank, ask.prompt, since=record.at, input_tokens=usage.input_tokens, output_tokens=usage.output_tokens
        )

    def _compare_hits(self, placed: Placed, delivered: int) -> None:
        rank = placed.rank
        if not rank.peers:  # else it may be any of them that told
            rank.hits.add(placed.hit_tokens, delivered)
            self._correct(placed, delivered)

    def _correct(self, placed: Placed, delivered: int) -> None:
        """The engine's word against the index's: it loses confidence, or learns what it did not know."""
        rank, keys, slot = placed.rank, placed.keys, placed.rank.slot
        if slot is None or rank.confidence is None:
            return
        size = rank.block_size
        slack = max(size, rank.hit_rule.alignment_tokens)
        rank.confidence.answered(
            predicted_tokens=placed.promised_tokens, delivered_tokens=delivered, slack_tokens=slack
        )
        if not keys:
            return
        if rank.slot_is_assumed:
            self._sent.correct(slot, keys, predicted_tokens=placed.promised_tokens, reported_tokens=delivered)
            if rank.hits.delivered_tokens:  # it does cache: what it has just computed is held, whatever was before
                self._sent.sent(slot, keys)
        elif delivered >= placed.hit_tokens + size:
            self._recent.insert(placed.ask.domain, rank.target, keys[: delivered // size], size)


def _nobody(ask: Ask, filtered: Mapping[str, str]) -> WarmrouteError:
    reasons = filtered.values()
    if filtered and all(why.startswith(NO_SALT) for why in reasons):
        return Forbidden(
            "No engine of the model keeps caches apart on this route.", code="route_not_isolated", detail=NO_SALT
        )
    if filtered and all(why.startswith(TAKES_NO) for why in reasons):
        lacking = sorted({why.removeprefix(TAKES_NO) for why in reasons})
        return BadRequest(
            f"No engine of the model {ask.model!r} takes what this request carries: {', '.join(lacking)}.",
            code="unsupported_content",
        )
    kept_out = filtered and all(why.startswith(NOT_APART) for why in reasons)
    return NoEngine(
        "No engine of the model has been seen to keep this caller's cache apart from others'."
        if kept_out
        else f"No engine can serve the model {ask.model!r} at the moment.",
        detail="; ".join(f"{rank}: {why}" for rank, why in filtered.items()),
        retry_after_s=RETRY_AFTER_S,
    )


def _prefix(prompt: Prompt) -> int:
    for keys in prompt.keys.values():  # sizes ascend: what has a larger block has the smallest too
        if keys:
            return keys[0]
    return prompt.text_keys[0][0] if prompt.text_keys else 0


def _booking(ask: Ask, decision: Decision, rank: Rank, record: Record[Placed], look: Look) -> Booking:
    instance, facts = rank.instance, rank.facts
    best_hit_tokens = 0
    others: dict[str, None] = {}
    for scored in decision.scored:
        candidate = scored.candidate
        if candidate.hit_tokens > best_hit_tokens:
            best_hit_tokens = candidate.hit_tokens
        others[candidate.instance] = None
    if len(decision.scored) < len(look.candidates):  # some had no room just now
        others.update(dict.fromkeys([candidate.instance for candidate in look.candidates]))
    del others[instance.id]
    held = sum([candidate.hit_tokens for candidate in look.candidates]) if best_hit_tokens else 0
    return Booking(
        record.id,
        ask.request_id,
        instance.id,
        rank.rank,
        instance.url,
        rank.served(ask.lora),
        instance.engine,
        facts.rank_targeting and facts.ranks > 1,
        ask.prompt.tokens,
        best_hit_tokens,
        record.owner.hit_tokens,
        record.prefill_us / 1e3,
        record.owner.alone,
        decision.policy,
        tuple(others)[:FURTHER_ATTEMPTS],
        rank.factor.rates,
        held // len(look.candidates),
    )


def _why_not_by_cache(prompt: Prompt) -> str:
    if prompt.source == "none" or not (prompt.text_keys or any(prompt.keys.values())):
        return f"no key: {prompt.reason or 'shorter than a block'}"
    return f"{prompt.source}: {prompt.reason}" if prompt.reason else ""


def _last_new_key(
    rank: Rank, prompt: Prompt, keys: Sequence[int], *, held_tokens: Mapping[str, int], size: int
) -> int | None:
    """The last whole block, if its event will tell that the prefill is over: nothing follows it, and it is not held."""
    if rank.slot_is_assumed or not keys or not prompt.exact:
        return None
    return keys[-1] if not held_tokens or max(held_tokens.values()) < len(keys) * size else None


# The waiting room's side


def _tell_room(room: WaitingRoom) -> Callable[[Record[Placed], float], None]:
    def prefill_ended(record: Record[Placed], now: float) -> None:
        if not room.waiting:
            return
        took_ms = (now - record.at) * 1e3  # at most: an engine faster than thought is not to rest for what it never did
        room.prefill_ended(record.owner.rank, min(record.prefill_us / 1e3, took_ms), now)

    return prefill_ended


def _left(waiting: Waiting, future: asyncio.Future[Booking]) -> None:
    if future.cancelled():
        waiting.cancel()


def _decode_ms(record: Record[Placed], outcome: Outcome) -> float:
    """GPU time of an answer's tokens: what each adds to its step, and its share of the step's fixed time."""
    if outcome.usage is None:
        return 0.0
    rates, batch = record.owner.rank.factor.rates, record.booked.requests + 1
    step = rates.c0_ms / batch + rates.c3_ms * outcome.input_tokens + rates.c4_ms
    return outcome.usage.output_tokens * step


def _tell_times(room: WaitingRoom, record: Record[Placed], outcome: Outcome, ttft_s: float) -> None:
    """Of a streamed answer of some length."""
    usage, tokens = outcome.usage, record.owner.ask.prompt.tokens
    if usage is not None and usage.output_tokens >= TELLING_TOKENS:
        room.timed(
            ttft_s=ttft_s,
            tpot_s=(outcome.took_s - ttft_s) / (usage.output_tokens - 1),
            solo_s=record.owner.rank.factor.rates.prefill_ms(tokens, tokens) / 1e3,
        )
