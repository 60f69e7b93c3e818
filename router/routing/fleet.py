"""The engines we know, rank by rank: what they are, how they are, and which of them can serve a request.

A cache lives in a data-parallel rank, so a rank is what a request is placed on. Ranks behind one URL that requests
cannot be steered to are placed on as one: the first stands for all of them (`Rank.peers`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from router.core import Ask, EngineFacts, EventSource, HitRule, Instance, Load, Need, Rates
from router.errors import ContextTooLong
from router.routing.access import OWNER, Unverified, access_of, closed_to
from router.routing.bookings import Booked
from router.routing.confidence import Confidence
from router.routing.learn import HitRecord, Pace, PrefillFactor, Recent
from router.routing.slots import Slot

ASSUMED_BLOCK_SIZE = 64
"""For engines without events: it only has to cut what we believe we sent them, and every block costs time."""

INHERITED_S = 600.0
"""How long prompts unknown to us are looked up after an engine joined with a cache it got from others: by then their
conversations have come by."""

UNSEEN_LOOK_S = 0.1
"""So long what `Fleet.unseen_counts` found holds: it is asked for every request, and looks at every rank."""

STALE_LOAD_S = 5.0
"""What an engine said of its memory longer ago says nothing."""

SUSPECT_S = 30.0
"""How long a rank is avoided after it let a lease run out, while others can serve."""

PROBE_S = 10.0
"""So long one request is waited for that finds out whether a rank serves again; then another may."""

OPEN_S = 5.0
OPEN_AT_MOST_S = 20.0
"""How long a rank is avoided that fails its requests: doubled each time it does so again, up to this."""

LEAST_SHARE = 0.2
"""With fewer than this share of the ranks above suspicion, all are used: what is left would not bear the load."""

FIRST_WINDOW, LAST_WINDOW = 1, 64
"""Requests at a time for a rank that has come to those that serve: doubled with each first token, then unlimited."""

_CALLERS = 4_096
"""So many kinds of callers are remembered with whom they may use."""

UNKNOWN_FACTS = EngineFacts(served=())

_LONG_AGO = (-inf, False)
CONTINUED = 1024
"""So many continuations of an engine that tells late of its answers: some seconds' worth."""


class Health(StrEnum):
    UNKNOWN = "unknown"  # not heard of yet
    READY = "ready"
    SLEEPING = "sleeping"
    DOWN = "down"
    DRAINING = "draining"  # being taken away by the operator or by discovery


class Rank:
    """All state we hold of one (instance, rank). Only `Fleet` changes what decides whether it can be routed to."""

    __slots__ = (
        "booked",
        "caches",
        "capacity_tokens",
        "confidence",
        "continued",
        "crowded_by",
        "dispatches",
        "factor",
        "facts",
        "failures",
        "fits_tokens",
        "fresh_tokens_then",
        "has_events",
        "health",
        "hit_rule",
        "hits",
        "id",
        "in_batch",
        "inherited_at",
        "instance",
        "isolation",
        "kept_apart_on",
        "lacks",
        "last_seq",
        "load",
        "max_running",
        "owed_at",
        "owed_s",
        "peers",
        "price_per_hour",
        "rank",
        "reason",
        "recent",
        "restarted_at",
        "resumes",
        "shares_source",
        "since",
        "slot",
        "slot_is_assumed",
        "sources",
        "suspect_until",
        "suspected",
        "suspicion",
        "target",
        "unconfirmed",
        "window",
    )

    # Facts, of which `take` tells what they are.
    instance: Instance
    facts: EngineFacts
    hit_rule: HitRule
    caches: bool  # prefixes at all
    sources: tuple[EventSource, ...]  # where its instance publishes KV events
    shares_source: bool  # with its sibling ranks: only the batches tell whose they are
    has_events: bool
    capacity_tokens: int  # 0: unknown
    max_running: float  # requests at a time; inf: unknown
    fits_tokens: float  # the longest prompt it can serve
    lacks: frozenset[Need]
    price_per_hour: float  # its share of what the instance costs; 0: not told

    def __init__(
        self, instance: Instance, rank: int, *, rates: Rates | None, now: float, pace: Pace | None = None
    ) -> None:
        self.id = f"{instance.id}/{rank}"
        self.target = (instance.id, rank)
        self.rank = rank
        self.health = Health.UNKNOWN
        self.reason = "not heard of yet"
        self.since = now
        self.resumes = (self.health, self.reason)  # when it drains no more: what its polls say meanwhile
        self.suspect_until = -inf
        self.suspicion = ""
        self.suspected = 0  # times in a row
        self.window = inf  # requests of ours at a time
        self.load = Load(at=now)
        self.owed_s = 0.0  # by prefills to those who decode, as it was at `owed_at` (room_rule.py)
        self.owed_at = now
        self.crowded_by = 0  # the last booking that the waiting room sent here without memory for it
        self.fresh_tokens_then = 0  # what we had booked when it told that load
        self.peers: tuple[Rank, ...] = ()  # further ranks that a request sent here may end up on
        self.booked: Booked[Any] = Booked()
        self.recent = Recent()
        self.factor = PrefillFactor(pace or Pace(rates))
        self.hits = HitRecord()
        self.slot: Slot | None = None  # what it holds; the feed opens it
        self.slot_is_assumed = False  # filled by what we send there, for want of events
        self.confidence: Confidence | None = None  # comes with the slot
        self.continued: OrderedDict[int, float] | None = None  # see `told_after`; None: it tells of answers in time
        self.last_seq: int | None = None  # of the batch its slot stands at
        self.in_batch = False  # the slot is somewhere after `last_seq`
        self.unconfirmed = False  # the slot is a saved one, its engine has not yet shown that it goes on from there
        self.restarted_at = -inf  # when its events showed a new process
        self.inherited_at = -inf  # when it last showed blocks before we had sent it anything
        self.dispatches = 0
        self.failures = 0  # requests of ours in a row that the engine took and failed
        self.kept_apart_on: frozenset[str] = frozenset()  # routes where it has been seen to honour cache salts
        self.isolation = ""  # how that was seen, or why not
        self.take(instance, UNKNOWN_FACTS)

    def take(self, instance: Instance, facts: EngineFacts) -> None:
        """What the operator and the engine say, and what follows from it for every request."""
        self.instance = instance
        self.facts = facts
        unit = instance.hit_alignment_tokens or facts.block_size or instance.block_size or 1
        self.hit_rule = _in_whole_blocks(facts.hit_rule, unit)
        self.caches = facts.prefix_caching is not False
        self.sources = facts.sources if instance.events is None else instance.events
        self.shares_source = facts.ranks > 1 and len(self.sources) == 1
        self.has_events = self.shares_source or any(source.rank == self.rank for source in self.sources)
        self.capacity_tokens = facts.capacity_tokens or instance.capacity_tokens or 0
        self.max_running = instance.max_running_requests or facts.max_running_requests or inf
        self.fits_tokens = min(facts.max_model_tokens or inf, self.capacity_tokens or inf)
        self.lacks = frozenset((*instance.lacks, *facts.lacks))
        self.price_per_hour = (instance.price_per_hour or 0.0) / max(1, facts.ranks)
        if not (facts.tells_answers_late and self.has_events):
            self.continued = None
        elif self.continued is None:
            self.continued = OrderedDict()

    def tell_after(self, key: int, now: float) -> None:
        """Its events have told of blocks that follow the one with this key."""
        continued = self.continued
        if continued is not None:
            continued[key] = now
            if len(continued) > CONTINUED:
                continued.popitem(last=False)

    def told_after(self, key: int) -> float:
        """When its events last told of blocks that follow the one with this key, if that is not long ago."""
        return -inf if self.continued is None else self.continued.get(key, -inf)

    @property
    def block_size(self) -> int:
        """Of the keys it is looked up by: as its events show it, else as the operator or the engine says."""
        slot = self.slot
        if slot is not None and slot.block_size is not None:
            return slot.block_size
        told = self.facts.block_size if self.has_events else None
        return told or self.instance.block_size or ASSUMED_BLOCK_SIZE

    def pinned_tokens(self, now: float) -> float | None:
        """Of its KV memory: its last word, and what we placed there since, less what ended. None: not told lately."""
        if not self.load.kv_usage or not self.capacity_tokens or now - self.load.at > STALE_LOAD_S:
            return None
        return self.load.kv_usage * self.capacity_tokens + self.booked.fresh_tokens - self.fresh_tokens_then

    def served(self, lora: str | None) -> str:
        """The engine's own name of what is asked for."""
        if lora is not None:
            return lora
        return self.instance.served or (self.facts.served[0] if self.facts.served else self.instance.model)


class Routable(NamedTuple):
    """Who can serve a model as things stand, whatever the request."""

    ranks: tuple[Rank, ...]
    filtered: Mapping[str, str]  # rank id -> why not
    fits_tokens: float  # prompts no longer than this fit every one of them


class Fleet:
    """Instances come and go at run time; everything here is cheap enough to be done between two requests.

    `unverified`: what becomes of engines that have not been seen to honour cache salts (`config.Isolation`).
    """

    def __init__(self, *, unverified: Unverified = "refuse") -> None:
        self.unverified = unverified
        self._members: dict[str, list[Rank]] = {}
        self._routable: dict[tuple[str, str | None], Routable] = {}
        self._open_to: dict[tuple[object, ...], Routable] = {}
        self._owned = False  # some engine is for one tenant alone
        self._differ = False  # some engine lacks what others may have
        self._sizes: dict[str, frozenset[int]] = {}
        self._unseen: dict[str, tuple[float, bool]] = {}  # by model: until when, and what was found
        self._suspects: dict[str, Rank] = {}
        self._starting: dict[str, Rank] = {}  # with a window
        self._proven: set[str] = set()  # models of which some rank has answered
        self._paces: dict[tuple[str, str, Rates | None], Pace] = {}  # by model, adapter and what was said of them

    def __iter__(self) -> Iterator[Rank]:
        for ranks in self._members.values():
            yield from ranks

    def _changed(self) -> None:
        self._owned = any(OWNER in ranks[0].instance.labels for ranks in self._members.values())
        self._differ = any(rank.lacks for rank in self)
        self._routable.clear()
        self._open_to.clear()
        self._sizes.clear()
        self._unseen.clear()

    # --- instances

    def add(self, instance: Instance, *, now: float, rates: Rates | None = None) -> None:
        """Makes an instance known. One that is known keeps its ranks, unless its URL or its model changed."""
        known = self._members.get(instance.id)
        if known and (known[0].instance.url, known[0].instance.model) == (instance.url, instance.model):
            for rank in known:
                rank.take(instance, rank.facts)
                if rates != rank.factor.pace.configured:  # what was learned corrects what was said before
                    rank.factor = PrefillFactor(self._pace(instance, rates))
        else:
            self._members[instance.id] = [Rank(instance, 0, rates=rates, now=now, pace=self._pace(instance, rates))]
        self._changed()

    def remove(self, instance_id: str) -> Sequence[Rank]:
        """Forgets an instance; returns its ranks, whose slots are the caller's to close. Bookings end by themselves."""
        self._changed()
        ranks = self._members.pop(instance_id, [])
        for rank in ranks:
            self._suspects.pop(rank.id, None)
            self._starting.pop(rank.id, None)
        return ranks

    def ranks_of(self, model: str) -> list[Rank]:
        return [rank for rank in self if rank.instance.model == model]

    def instances(self) -> list[Instance]:
        return [ranks[0].instance for ranks in self._members.values()]

    def ranks(self, instance_id: str) -> Sequence[Rank]:
        return tuple(self._members.get(instance_id, ()))

    def rank(self, instance_id: str, rank: int) -> Rank | None:
        ranks = self._members.get(instance_id, ())
        return ranks[rank] if 0 <= rank < len(ranks) else None

    def learn(self, instance_id: str, facts: EngineFacts, *, now: float) -> Sequence[Rank]:
        """Takes over what the engine says it is. Returns ranks that it no longer has."""
        ranks = self._members[instance_id]
        if facts.boot_id != ranks[0].facts.boot_id or facts.version != ranks[0].facts.version:
            self.keep_apart(instance_id, frozenset(), "a new process, not yet seen to honour cache salts")
        count = max(1, facts.ranks)
        for number in range(len(ranks), count):
            ranks.append(self._sibling(ranks[0], number, now))
        gone = ranks[count:]
        del ranks[count:]
        for rank in ranks:
            rank.take(rank.instance, facts)
            rank.peers = ()
        if not facts.rank_targeting:
            ranks[0].peers = tuple(ranks[1:])
        self._changed()
        return gone

    def _pace(self, instance: Instance, rates: Rates | None) -> Pace:
        return self._paces.setdefault((instance.model, instance.engine, rates), Pace(rates))

    def _sibling(self, first: Rank, number: int, now: float) -> Rank:
        rates = first.factor.pace.configured
        rank = Rank(first.instance, number, rates=rates, now=now, pace=self._pace(first.instance, rates))
        rank.health, rank.reason = first.health, first.reason
        rank.kept_apart_on, rank.isolation = first.kept_apart_on, first.isolation
        return rank

    # --- isolation

    def keep_apart(self, instance_id: str, on: frozenset[str], seen: str) -> None:
        """On which routes it honours cache salts, and how that was seen, or why it was not."""
        for rank in self._members.get(instance_id, ()):
            rank.kept_apart_on, rank.isolation = on, seen
        self._open_to.clear()

    def _routable_by(self, ask: Ask) -> Routable:
        """Who can serve the model and may be used by whoever asks."""
        if not (ask.isolated_on or self._owned or ask.labels or (ask.needs and self._differ)):
            return self.routable(ask.model, ask.lora)
        kind = (ask.model, ask.lora, *access_of(ask))
        found = self._open_to.get(kind)
        if found is None:
            ranks, filtered, _ = self.routable(ask.model, ask.lora)
            objections = {rank.id: why for rank in ranks if (why := closed_to(rank, ask, self.unverified))}
            left = tuple(rank for rank in ranks if rank.id not in objections)
            fits_tokens = min([rank.fits_tokens for rank in left], default=inf)
            found = Routable(left, {**filtered, **objections}, fits_tokens)
            if len(self._open_to) >= _CALLERS:
                self._open_to.clear()
            self._open_to[kind] = found
        return found

    # --- health and load

    def set_health(self, instance_id: str, health: Health, reason: str, *, now: float, rank: int | None = None) -> bool:
        """Whether its health changed. A draining instance stays so until `undrain`, or until it is removed."""
        changed = False
        self._sizes.clear()
        for each in self._members.get(instance_id, ()):
            if rank not in (None, each.rank):
                continue
            drains = each.health is Health.DRAINING and health is not Health.DRAINING
            before = each.resumes[0] if drains else each.health
            if before is not health:
                changed = True
                if health is Health.READY and each.instance.model in self._proven:
                    each.window = FIRST_WINDOW
                    self._starting[each.id] = each
            if drains:
                each.resumes = (health, reason)
                continue
            if before is not health:
                each.since = now
            each.health, each.reason = health, reason
        if changed:
            self._changed()
        return changed

    def drain(self, instance_id: str, reason: str, *, now: float) -> None:
        """No new requests. Those that run go on, and what it holds stays known: its events are still heard."""
        for rank in self._members.get(instance_id, ()):
            if rank.health is not Health.DRAINING:
                rank.resumes = (rank.health, rank.reason)
                rank.health, rank.since = Health.DRAINING, now
            rank.reason = reason
        self._changed()

    def undrain(self, instance_id: str, *, now: float) -> None:
        """It is what its polls have said meanwhile."""
        for rank in self._members.get(instance_id, ()):
            if rank.health is Health.DRAINING:
                (rank.health, rank.reason), rank.since = rank.resumes, now
        self._changed()

    def hear(self, rank: Rank, load: Load) -> None:
        """The engine's word on itself."""
        rank.load = load
        rank.fresh_tokens_then = rank.booked.fresh_tokens

    def suspect(self, rank: Rank, reason: str, *, now: float, for_s: float = SUSPECT_S) -> None:
        """Avoid `rank` for a while, as long as others can serve: it took a request and gave no sign of life."""
        if self.rank(rank.instance.id, rank.rank) is rank:
            rank.suspect_until = now + for_s
            rank.suspicion = reason
            self._suspects[rank.id] = rank

    def open(self, rank: Rank, reason: str, *, now: float) -> None:
        """Avoid a rank that fails what it is sent: longer each time, until it has answered one of the requests that
        are sent there now and then (`probe`)."""
        for_s = min(OPEN_AT_MOST_S, OPEN_S * 2**rank.suspected)
        rank.suspected = min(rank.suspected + 1, 8)
        self.suspect(rank, reason, now=now, for_s=for_s)

    def probe(self, rank: Rank, now: float) -> None:
        """A request is sent there. If the rank was suspected, no other is before that is answered or long overdue."""
        if rank.id in self._suspects and now >= rank.suspect_until:
            rank.suspect_until = now + PROBE_S

    def trust(self, rank: Rank) -> None:
        """It has answered, to the end."""
        rank.failures = rank.suspected = 0
        if self._suspects or self._starting or rank.instance.model not in self._proven:
            self.alive(rank)

    def alive(self, rank: Rank) -> None:
        """It has begun an answer. Whether it can end one is not known yet."""
        if self._suspects:
            self._suspects.pop(rank.id, None)
        if self._starting and rank.id in self._starting:
            rank.window *= 2
            if rank.window > LAST_WINDOW:
                rank.window = inf
                del self._starting[rank.id]
        self._proven.add(rank.instance.model)

    # --- who can serve

    def routable(self, model: str, lora: str | None) -> Routable:
        return self._routable.get((model, lora)) or self._find(model, lora)

    def candidates(self, ask: Ask, *, now: float) -> tuple[Sequence[Rank], Mapping[str, str]]:
        """The ranks a request may go to, and why the others not. Empty: nobody can serve it now.

        A prompt that fits nobody, and a fleet of hardly anything but suspects, go to all: the engine's own answer is
        better than one of ours. Raises ContextTooLong for a prompt of known length that no engine of the model takes by
        its own word, whichever of them are there now.
        """
        routable = self._routable_by(ask)
        calm = not self._suspects and not self._starting
        if calm and not ask.exclude and ask.prompt.tokens <= routable.fits_tokens:
            return routable.ranks, routable.filtered
        filtered = dict(routable.filtered)
        excluded = {rank.id: "tried before" for rank in routable.ranks if rank.instance.id in ask.exclude}
        filtered |= excluded
        ranks: Sequence[Rank] = [rank for rank in routable.ranks if rank.id not in excluded]
        tokens = ask.prompt.tokens
        if ask.prompt.exact and tokens > (longest := self._longest(ask.model)):
            raise ContextTooLong.of(tokens, int(longest))
        ranks = _prefer(ranks, lambda r: f"{tokens} tokens do not fit" if tokens > r.fits_tokens else "", filtered)
        if self._suspects:
            ranks = _prefer(ranks, lambda r: self._suspicion(r, now), filtered, least=LEAST_SHARE)
        if self._starting:
            ranks = _prefer(ranks, _busy_starting, filtered)
        return ranks, filtered

    def _suspicion(self, rank: Rank, now: float) -> str:
        if rank.id not in self._suspects:
            return ""
        return "" if now >= rank.suspect_until else rank.suspicion  # then one request finds out: `probe`

    def _find(self, model: str, lora: str | None) -> Routable:
        filtered: dict[str, str] = {}
        ranks: list[Rank] = []
        for members in self._members.values():
            if members[0].instance.model != model:
                continue
            for rank in members[:1] if members[0].peers else members:
                reason = _unfit(rank, lora)
                if reason:
                    filtered[rank.id] = reason
                else:
                    ranks.append(rank)
        found = Routable(tuple(ranks), filtered, min([rank.fits_tokens for rank in ranks], default=inf))
        if ranks:  # else the name may be anything a client sent
            self._routable[model, lora] = found
        return found

    # --- names

    def resolve(self, name: str) -> tuple[str, str | None] | None:
        """(public model, LoRA) for a public model name or the name of an engine's adapter. None: nobody knows it."""
        lora_of: str | None = None
        for ranks in self._members.values():
            if ranks[0].instance.model == name:
                return name, None
            if name in ranks[0].facts.loras:
                lora_of = ranks[0].instance.model
        return None if lora_of is None else (lora_of, name)

    def models(self) -> dict[str, list[Rank]]:
        """Public name -> the ranks declared for it, whatever their health."""
        models: dict[str, list[Rank]] = {}
        for rank in self:
            models.setdefault(rank.instance.model, []).append(rank)
        return models

    def _longest(self, model: str) -> float:
        """The longest prompt that some engine of the model may take; infinite if one does not tell."""
        return max((rank.facts.max_model_tokens or inf for rank in self if rank.instance.model == model), default=inf)

    def loras(self, model: str) -> frozenset[str]:
        return frozenset(lora for rank in self if rank.instance.model == model for lora in rank.facts.loras)

    def max_model_tokens(self, model: str) -> int | None:
        """The longest context any engine of the model offers."""
        lengths = [rank.facts.max_model_tokens for rank in self if rank.instance.model == model]
        return max([length for length in lengths if length], default=None)

    def unseen_counts(self, model: str, now: float) -> bool:
        """Whether a prompt that was never seen here may find a cache all the same.

        For a while after an engine showed blocks that we had not sent it; and always where all we know of an engine's
        cache is what we sent, so that every prompt has to be known for the next one's sake.
        """
        until, counts = self._unseen.get(model, _LONG_AGO)
        if now >= until:
            counts = any(
                rank.slot_is_assumed or now - rank.inherited_at < INHERITED_S
                for rank in self
                if rank.instance.model == model
            )
            self._unseen[model] = (now + UNSEEN_LOOK_S, counts)
        return counts

    def block_sizes(self, model: str) -> frozenset[int]:
        """Those that keys are needed for. Asked for every request; what events show is taken up with the next poll."""
        sizes = self._sizes.get(model)
        if sizes is None:
            sizes = frozenset(rank.block_size for rank in self if rank.instance.model == model)
            if sizes:
                self._sizes[model] = sizes
        return sizes

    # --- the live view

    def rows(self, now: float) -> Iterator[dict[str, Any]]:
        """One row a rank, as `core.Live.fleet` gives it. A row takes some 10 µs: with hundreds, pause between them."""
        return (self._row(rank, now) for rank in list(self))

    def _row(self, rank: Rank, now: float) -> dict[str, Any]:
        suspicion = self._suspicion(rank, now) if self._suspects else ""
        return {
            "instance": rank.instance.id,
            "rank": rank.rank,
            "model": rank.instance.model,
            "served": rank.served(None),
            "engine": rank.instance.engine,
            "version": rank.facts.version,
            "health": rank.health.value,
            "reason": suspicion or rank.reason,
            "suspect": bool(suspicion),
            "since_s": round(now - rank.since, 1),
            "running": rank.load.running,
            "waiting": rank.load.waiting,
            "kv_usage": rank.load.kv_usage,
            "load_age_s": round(now - rank.load.at, 1),
            "capacity_tokens": rank.capacity_tokens,
            "max_running_requests": None if rank.max_running == inf else int(rank.max_running),
            "block_size": rank.block_size,
            "booked_requests": rank.booked.requests,
            "booked_prefills": len(rank.booked.prefills),
            "booked_prefill_ms": round(rank.booked.prefill_ms(now), 1),
            "booked_kv_tokens": rank.booked.kv_tokens,
            "index_blocks": rank.slot.blocks if rank.slot is not None else 0,
            "last_seq": rank.last_seq,
            "events": rank.has_events,
            "confidence": round(rank.confidence.value, 3) if rank.confidence is not None else 0.0,
            "doubts": rank.confidence.reasons() if rank.confidence is not None else [],
            "prefill_factor": round(rank.factor.value, 3),
            "answers": rank.hits.answers,
            "predicted_hit_tokens": rank.hits.predicted_tokens,
            "delivered_hit_tokens": rank.hits.delivered_tokens,
            "notes": list(rank.facts.notes),
            "labels": dict(rank.instance.labels),
            "isolation": rank.isolation,
            "price_per_hour": rank.price_per_hour,
        }


def _in_whole_blocks(rule: HitRule, block_size: int) -> HitRule:
    """A cache of blocks is hit in whole blocks, whether or not the adapter says so."""
    if rule.alignment_tokens >= block_size:
        return rule
    return HitRule(block_size, rule.drop_tokens, rule.minimum_tokens)


def _unfit(rank: Rank, lora: str | None) -> str:
    """Why a rank cannot be routed to; empty if it can."""
    if rank.health is not Health.READY:
        return f"{rank.health.value}: {rank.reason}" if rank.reason else rank.health.value
    name = rank.served(lora)
    if lora is not None and lora not in rank.facts.loras:
        return f"does not serve the adapter {lora!r}"
    if lora is None and rank.facts.served and name not in rank.facts.served:
        return f"does not serve {name!r}"
    return ""


def _busy_starting(rank: Rank) -> str:
    return "starting: as many requests as it may have for now" if rank.booked.requests >= rank.window else ""


def _prefer(
    ranks: Sequence[Rank], objection: Callable[[Rank], str], filtered: dict[str, str], *, least: float = 0.0
) -> Sequence[Rank]:
    """Those nothing is said against; all, if that leaves nobody, or less than the share `least`."""
    objections = {rank.id: reason for rank in ranks if (reason := objection(rank))}
    left = len(ranks) - len(objections)
    if not objections or not left or left < least * len(ranks):
        return ranks
    filtered |= objections
    return [rank for rank in ranks if rank.id not in objections]
