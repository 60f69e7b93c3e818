"""The nouns, and the protocols between the parts. Imports nothing of ours.

Nouns that cross a process border (`Ask`, `Decision`, `Booking`, `Outcome` …) are `msgspec.Struct`s, so that a protocol
such as `Placement` can be called in the same process or over a Unix socket without a second set of types.

Units: times in seconds on a monotonic clock unless the name says otherwise, work in milliseconds of GPU time (`_ms`),
lengths in tokens (`_tokens`) or blocks (`_blocks`).

`gc=False`: made for every request or event, of plain values, so that no cycle can hold it; the collector need not look.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NewType, Protocol

import msgspec

if TYPE_CHECKING:
    Keys = array[int]
else:
    Keys = array  # not subscriptable at run time before Python 3.12

BlockKey = NewType("BlockKey", int)
"""Our own name of a block: a u64 chained over the root and every token before it (`routing/blocks.py`)."""
EngineHash = NewType("EngineHash", int)
"""The engine's name of a block: opaque, a u64, valid inside one (instance, rank) only."""


class Tier(StrEnum):
    """Where a block lies, fastest first."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


# ---------------------------------------------------------------------------------------------------------------------
# Engines


class EventSource(msgspec.Struct, frozen=True):
    """Where one data-parallel rank publishes its KV events."""

    rank: int
    endpoint: str  # tcp://host:port, always connectable: wildcards are already replaced
    replay: str | None = None
    topic: str = ""


class ClientTls(msgspec.Struct, frozen=True):
    """How an https engine is trusted, and what it is shown: paths of PEM files (`router/tls.py`)."""

    ca: str | None = None  # None: the system's
    cert: str | None = None
    key: str | None = None  # None: in the same file as `cert`
    server_name: str | None = None  # that its certificate must carry; None: the url's host
    verify: bool = True


Need = Literal["audio", "image", "tools", "video"]
"""What a request may need of an engine beside text."""


class Instance(msgspec.Struct, frozen=True):
    """An engine as the operator declared it or discovery found it."""

    id: str
    url: str  # http://host:port without a trailing slash
    engine: str  # the adapter's entry point name
    model: str  # the public model name whose root its blocks belong to
    served: str | None = None  # the engine's own name of the model; None: the first one it lists
    api_key: str | None = None
    labels: Mapping[str, str] = {}
    events: tuple[EventSource, ...] | None = None  # None: ask the engine; (): there are none
    block_size: int | None = None  # only for engines that do not tell
    capacity_tokens: int | None = None  # only for engines that do not tell
    hit_alignment_tokens: int | None = None  # where the operator knows better than the engine tells
    max_running_requests: int | None = None  # per rank; where the operator knows better than the engine tells
    price_per_hour: float | None = None  # money for an hour of all its ranks; None: not told
    tls: ClientTls | None = None  # None: http, or https by the system's CAs
    lacks: tuple[Need, ...] = ()  # by the operator's word; further ones by the engine's own

    def __repr__(self) -> str:  # an API key never reaches a log
        return f"Instance({self.id!r}, {self.url!r}, {self.engine!r}, model={self.model!r})"

    __str__ = __repr__


class HitRule(msgspec.Struct, frozen=True):
    """What an engine really reuses of a prefix it holds: whole units, less what it always recomputes."""

    alignment_tokens: int = 1
    drop_tokens: int = 0
    minimum_tokens: int = 0

    def usable(self, held_tokens: int, prompt_tokens: int, confidence: float = 1.0) -> int:
        """Tokens the engine will reuse of `held_tokens` it is thought to hold: doubt shortens the prefix, then the rule
        applies. At least one prompt token is always computed.
        """
        if confidence < 1:
            held_tokens = int(held_tokens * confidence)
        held = held_tokens if held_tokens < prompt_tokens else prompt_tokens - 1
        usable = held // self.alignment_tokens * self.alignment_tokens - self.drop_tokens
        return usable if usable >= self.minimum_tokens and usable > 0 else 0


class EngineFacts(msgspec.Struct, frozen=True):
    """What an adapter learned from the engine itself. None: the engine does not tell."""

    served: tuple[str, ...]  # the names it answers to, the base model first
    loras: tuple[str, ...] = ()
    version: str | None = None
    max_model_tokens: int | None = None
    block_size: int | None = None
    capacity_tokens: int | None = None  # per rank
    max_running_requests: int | None = None  # per rank, at a time; further ones wait inside it
    ranks: int = 1
    rank_targeting: bool = False  # whether a request can be steered to a rank behind this URL
    sources: tuple[EventSource, ...] = ()
    prefix_caching: bool | None = None
    reports_cached: bool | None = None
    hit_rule: HitRule = HitRule()
    boot_id: str | None = None  # changes when the process restarts
    model_path: str | None = None  # a directory that may hold tokenizer files
    open_without_key: bool | None = None
    lacks: tuple[Need, ...] = ()  # what it says it does not take
    notes: tuple[str, ...] = ()  # what the operator should mend, each with the mend
    tells_answers_late: bool = False  # the blocks of an answer may be announced some time after its end


class Load(msgspec.Struct, frozen=True):
    """What one rank last said about itself."""

    at: float  # monotonic
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1, share of KV memory that running requests pin
    sleeping: bool = False
    boot_id: str | None = None
    prompt_tokens_total: float = 0.0
    cached_tokens_total: float = 0.0
    preemptions_total: float = 0.0


class Rates(msgspec.Struct, frozen=True):
    """How long an engine takes: the linear and attention terms of prefill, and a decode step.

    prefill_ms(n, L) = c1*n + c2*n*(L - n/2) for n uncached of L tokens.
    """

    c0_ms: float = 6.66  # a step's fixed time
    c1_ms: float = 0.01983  # per uncached token
    c2_ms: float = 7.95e-7  # per uncached token and token of context
    c3_ms: float = 4.2e-5  # decode: per token of context in the batch
    c4_ms: float = 0.005  # decode: per sequence in the batch
    host_ms: float = 0.0026  # per token loaded from a tier behind the GPU (128 KiB at 50 GB/s)
    disk_ms: float = 0.02
    remote_ms: float = 0.01
    n0_tokens: int = 192  # c1 starts past this many tokens a step: up to there the step is bound by memory

    def prefill_ms(self, uncached_tokens: float, prompt_tokens: float) -> float:
        n = uncached_tokens
        return self.c1_ms * n + self.c2_ms * n * (prompt_tokens - n / 2)


# ---------------------------------------------------------------------------------------------------------------------
# KV events, as an adapter yields them


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one chain that now lie in a tier.

    `tokens` holds block_size ids for each hash; empty when the engine only announces a tier change of known hashes.
    """

    hashes: list[int]
    parent: int | None
    tokens: list[int]
    block_size: int
    tier: str = "gpu"
    lora: str | None = None
    salt: str | None = None
    group: int = 0
    media: tuple[tuple[int, str], ...] | None = None  # (block offset in this event, media id)
    reannounced: bool = False  # True: no new physical copy


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One physical copy of each block has left a tier."""

    hashes: list[int]
    tier: str = "gpu"
    group: int = 0


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The rank forgot everything, in every tier it publishes."""


KVEvent = Stored | Removed | Cleared


class EventBatch(msgspec.Struct, frozen=True, gc=False):
    """What a rank published at once."""

    seq: int
    events: list[KVEvent]
    rank: int | None = None  # as the batch itself says; None when it doesn't
    at: float | None = None  # the engine's wall clock, seconds
    skipped: int = 0  # events that could not be understood, or that must not earn credit


# ---------------------------------------------------------------------------------------------------------------------
# Who asks


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Whom a request is from, as its key says. Made once a key, when keys are read, and not for each request.

    The empty one is everybody's where the gateway runs open.
    """

    tenant: str = ""  # ids: ten_…, proj_…, key_…
    project: str = ""
    key: str = ""
    domain: str = ""  # of isolation: caches are never shared across it
    salt: str | None = None  # what engines are told as cache_salt; None: nothing keeps caches apart
    models: frozenset[str] | None = None  # public names it may use; None: all
    priority: int = 0  # of its requests by default, and the highest they may ask for
    steers: bool = False  # may set the fields that steer an engine
    labels: Mapping[str, str] = {}  # of the engines it must be placed on

    @property
    def isolated(self) -> bool:
        """Its cache is to be kept apart from everybody else's. Not so for those who share one by choice."""
        return self.salt is not None and self.domain != SHARED


SHARED = "shared"
"""The domain of those who share their caches with each other, by explicit choice."""

OPEN = Caller()


# ---------------------------------------------------------------------------------------------------------------------
# A request, once its prompt is known


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as the engine will read it.

    `keys[size]` are the chained keys of all whole blocks of the known tokens: u64s in an array('Q').
    Text that has never been seen is counted by estimate and named by `text_keys` until it is tokenized.
    """

    tokens: int  # exact, or known_tokens + an estimate of the rest
    known_tokens: int  # tokens covered exactly; keys cover known_tokens // size blocks
    keys: Mapping[int, Keys]
    text_keys: tuple[tuple[int, int], ...] = ()  # (key of the text so far, tokens so far) past known_tokens
    source: Literal["exact", "engine", "approximate", "none"] = "exact"
    reason: str = ""  # why there are no keys, or why they are not exact
    turn: int = 1  # user turns so far
    known_text_keys: tuple[tuple[int, int], ...] = ()  # within known_tokens: its names while unseen

    @property
    def exact(self) -> bool:
        return self.source in ("exact", "engine") and self.known_tokens == self.tokens


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What `Placement` is asked: everything it may know of a request. No text, no token ids."""

    request_id: str
    model: str  # public name, aliases resolved
    prompt: Prompt
    tenant: str = ""
    domain: str = ""  # isolation domain: side tables are kept per domain
    lora: str | None = None
    session: str | None = None
    request_class: str = ""
    priority: int = 0
    stream: bool = True
    choices: int = 1
    max_output_tokens: int | None = None
    exclude: tuple[str, ...] = ()  # instance ids that must not be taken again
    policy: str | None = None
    body_bytes: int = 0  # what the relay keeps of it while it waits
    labels: Mapping[str, str] = {}  # of the engines it must be placed on
    isolated_on: str = ""  # its route, if the engine must keep its cache apart there
    needs: tuple[Need, ...] = ()  # of the engine, beside text


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One (instance, rank) as it stood when the choice was made."""

    instance: str
    rank: int
    hit_tokens: int = 0  # what the engine would reuse, all tiers, HitRule and confidence applied
    held_tokens: Mapping[str, int] = {}  # raw depth per tier, cumulative: gpu, then what slower tiers add
    confidence: float = 1.0
    expected_tokens: int = 0  # part of hit_tokens that was only just dispatched there, not yet confirmed by events
    booked_requests: int = 0  # ours, not finished
    booked_prefill_ms: float = 0.0  # ours, not past their first token
    booked_prefill_tokens: int = 0
    booked_kv_tokens: int = 0
    running: int = 0  # the engine's word
    waiting: int = 0
    kv_usage: float = 0.0
    load_age_s: float = 0.0
    capacity_tokens: int = 0  # 0: unknown
    rates: Rates = Rates()
    labels: Mapping[str, str] = {}
    booked_prefills: int = 0  # of booked_requests, those not past their first token
    recent_tokens: int = 0  # uncached tokens we sent there lately, decayed: what has turned its cache over
    price_per_hour: float = 0.0  # money for an hour of this rank; 0: unknown, or free
    unreported_kv_tokens: int = 0  # what was placed there since the engine last told its kv_usage, less what ended

    @property
    def id(self) -> str:
        return f"{self.instance}/{self.rank}"


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """All a policy may know. Frozen, so that any decision can be replayed."""

    at: float
    tokens: int
    candidates: tuple[Candidate, ...]
    model: str = ""
    tenant: str = ""
    session: str | None = None
    request_class: str = ""
    turn: int = 1
    choices: int = 1
    output_tokens: int = 256  # expected
    prefix: int = 0  # a name of the prompt's first block (or text piece), 0 where nothing is known
    ttft_slo_ms: float | None = None  # first token wanted within so long from now; None: no objective

    def uncached(self, candidate: Candidate) -> int:
        return self.tokens - candidate.hit_tokens


class Cost(msgspec.Struct, frozen=True, gc=False):
    """What a policy thinks of one candidate: lower is better, value >= 0, parts sum to it."""

    value: float
    parts: Mapping[str, float]
    unit: Literal["ms", "rank"] = "ms"


class Policy(Protocol):
    """One small class, one method (policies/README.md).

    Promises, tested for every entry point: one finite cost per candidate, in order; the snapshot untouched; no I/O; no
    clock but `snapshot.at`; no dice but those given to the constructor.
    """

    def __init__(self, weights: Mapping[str, float], dice: random.Random) -> None: ...

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]: ...


class Scored(msgspec.Struct, frozen=True, gc=False):
    candidate: Candidate
    cost: Cost


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Who serves, and why. `scored` is best first: its tail is the order of further attempts."""

    policy: str
    scored: tuple[Scored, ...]
    filtered: Mapping[str, str] = {}  # instance/rank -> why it was not a candidate
    reason: str = ""  # why the choice was not made by cache ("no key: …")
    took_us: float = 0.0

    @property
    def chosen(self) -> Candidate:
        return self.scored[0].candidate

    @property
    def best_hit_tokens(self) -> int:
        return max(s.candidate.hit_tokens for s in self.scored)


class Booking(msgspec.Struct, frozen=True, gc=False):
    """A place taken on an engine. Given back exactly once, however the request ends."""

    id: int
    request_id: str
    instance: str
    rank: int
    url: str
    served: str  # the model name the engine knows (the adapter's name for a LoRA)
    engine: str
    target_rank: bool  # whether the request must be steered to `rank`
    tokens: int
    best_hit_tokens: int
    predicted_hit_tokens: int
    predicted_prefill_ms: float
    alone: bool  # nobody else of ours was on that rank
    policy: str
    attempts_left: tuple[str, ...] = ()  # further instances that can serve it
    rates: Rates = Rates()  # how long that rank takes, as learned
    blind_hit_tokens: int = 0  # what a placement that does not look at caches could expect: the mean of all candidates


Finish = Literal["complete", "client_gone", "upstream_failed"]
DeliveredSource = Literal["usage", "events", "counters", "none"]


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What the engine says it did.

    Input and output are all of it. The other counts are parts of them that do not overlap and are never more than the
    whole: `serving/usage.py` makes them so. `cached_tokens` None: it does not say.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # of the input, read from the cache
    cache_write_5m_tokens: int = 0  # of the input, written to the cache for five minutes
    cache_write_1h_tokens: int = 0
    cache_write_tokens: int = 0  # for another time, or an untold one
    media_input_tokens: int = 0  # of the input, sound and pictures
    reasoning_tokens: int = 0  # of the output
    media_output_tokens: int = 0
    doubtful: bool = False  # the parts were more than the whole, and have been cut
    raw: str = ""  # the engine's own JSON, where it says more than the first three


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How a request ended: the one record everyone listens to."""

    request_id: str
    model: str
    tenant: str
    instance: str | None
    rank: int | None
    status: int
    finish: Finish
    usage: Usage | None
    input_tokens: int  # the engine's count, else ours
    best_hit_tokens: int
    predicted_hit_tokens: int
    delivered_hit_tokens: int | None
    delivered_source: DeliveredSource
    started_at: float  # wall clock
    queue_s: float
    ttft_s: float | None
    took_s: float
    stream: bool
    prompt_source: str = "exact"
    policy: str = ""
    alone: bool = False
    attempts: int = 1
    error: str = ""  # a class of error, never a text of the engine
    events: int = 0  # stream events the client was sent: what stands for output tokens where there is no usage
    retry_after_s: float | None = None  # when the engine said it may be asked again
    asked_model: str = ""  # the name the client gave, if that is a split and `model` the arm that was chosen
    resumed: int = 0  # engines that went on with its stream where one had broken off; `usage` is of the whole answer
    caller: Caller = OPEN
    tags: tuple[str, ...] = ()  # as the client named them
    end_user: str = ""  # a pseudonym
    serial: str = ""  # a name of ours, unique where a client may choose `request_id`
    route: str = ""  # as engines know it; "": none was met
    events_after_usage: int = 0  # of `events`, those that came after the last usage
    billable: bool = True  # False: work for an engine's CPU alone
    blind_hit_tokens: int = 0


# ---------------------------------------------------------------------------------------------------------------------
# The protocols


class Placement(Protocol):
    """The only door between serving and routing. Arguments and results are small and serializable (`wire.py`)."""

    async def place(self, ask: Ask) -> Booking:
        """Choose a candidate and book it. Raises `NoEngine` when nobody can serve the model.

        Cancelled (the client has left), it leaves nothing booked.
        """
        ...

    def progress(self, booking_id: int) -> None:
        """The first token has come: the prefill is over."""
        ...

    def release(self, booking_id: int, outcome: Outcome) -> None:
        """Give the place back. A second call for the same booking does nothing."""
        ...

    async def explain(self, ask: Ask) -> Decision:
        """What `place` would decide now. Books nothing."""
        ...


class Live(Protocol):
    """What the admin side may ask of a running relay and brain."""

    async def fleet(self) -> list[dict[str, Any]]:
        """One row an (instance, rank): state, load, bookings, index, confidence, hit rate, TTFT."""
        ...

    async def explain(self, path: str, body: bytes, tenant: str | None = None) -> dict[str, Any]:
        """The decision for an OpenAI request body, without sending it; as for a tenant (id or name), if one is given.

        Raises BadRequest for a tenant that does not exist.
        """
        ...

    async def parity(self, model: str | None) -> list[dict[str, Any]]:
        """Runs the parity probe again; one row a model."""
        ...

    async def readiness(self) -> dict[str, Any]: ...

    async def instances(self) -> list[dict[str, Any]]:
        """One row an engine: what it serves, its state and why, how many requests of ours run there."""
        ...

    async def models(self) -> list[dict[str, Any]]:
        """One row a public name: its further names, where its requests may go, which engines serve it, who is ready."""
        ...

    async def policies(self) -> list[dict[str, Any]]:
        """One row a policy that is used: for which models, with which weights, as a shadow with what it found."""
        ...

    async def config(self) -> dict[str, Any]:
        """The configuration in force, secrets masked, and how its file differs by now."""
        ...

    async def drain(self, instance_id: str) -> dict[str, Any]:
        """No new requests for an engine; its row. Raises UnknownInstance."""
        ...

    async def undrain(self, instance_id: str) -> dict[str, Any]:
        """Raises UnknownInstance, and Conflict for an engine that is no longer configured."""
        ...

    async def reload(self) -> dict[str, Any]:
        """Reads the configuration again and takes it over: what changed and what needs a restart.

        {"mistakes": […]} where the old one stays in force. Raises Conflict where there is nothing to read.
        """
        ...

    async def requests(self, request_id: str | None) -> list[dict[str, Any]]:
        """Receipts of the last requests, newest first, or the one asked for."""
        ...

    async def metrics(self) -> bytes:
        """The metrics page in Prometheus text format."""
        ...

    async def isolation(self) -> dict[str, Any]:
        """How caches are kept apart: engines with how and when that was seen, domains with what they hold and lose."""
        ...

    async def trace(self, position: int) -> tuple[list[bytes], int | None]:
        """Requests served lately, packed (`routing/trace_log.py`), and the position to go on from; None: no more.

        0 is the oldest that is kept.
        """
        ...


class Upstream(msgspec.Struct, frozen=True):
    """What an adapter wants changed on the way to its engine."""

    headers: tuple[tuple[bytes, bytes], ...] = ()
    fields: Mapping[str, bytes] = {}  # top-level body fields as JSON; they replace a client's own


class Adapter(Protocol):
    """The seam to one kind of engine: bytes in, plain nouns out (adapters/README.md).

    An adapter may have `continues_messages = True`: its engines know `continue_final_message` in chats.

    All network calls raise `EngineUnreachable` or `EngineProtocolError` (router.errors), nothing of a library's own.
    """

    name: str

    async def inspect(self, instance: Instance) -> EngineFacts: ...

    async def load(self, instance: Instance) -> Mapping[int, Load]:
        """Load per rank. Cheap: it is called about once a second."""
        ...

    def events(self, instance: Instance, source: EventSource, after: int | None) -> AsyncIterator[EventBatch | Lost]:
        """Batches in order, past `after` (None: everything the engine can still replay).

        Gaps are replayed inside; what cannot be made good is said by a `Lost` before the batches that follow it.
        """
        ...

    async def tokenize(self, instance: Instance, path: str, body: Mapping[str, Any]) -> list[int]:
        """The engine's own token ids for a chat or completion body."""
        ...

    async def probe(self, instance: Instance, tokens: list[int], salt: str, rank: int | None) -> int | None:
        """Computes a prompt under a cache salt: how many of its tokens were cached. None: the engine does not say."""
        ...

    async def request_fields(self, instance: Instance) -> Mapping[str, Sequence[frozenset[str]]]:
        """Path → the top-level fields of each form its requests may have, as the engine describes itself.

        Empty: it does not.
        """
        ...

    def upstream(self, instance: Instance, rank: int | None) -> Upstream:
        """What to add to a request so that it reaches `rank` (None: any)."""
        ...

    async def aclose(self) -> None: ...


class Lost(msgspec.Struct, frozen=True, gc=False):
    """The stream of a rank cannot be continued as if whole.

    restart: the engine's process is a new one, nothing held before is held now.
    gap: batches are missing for good; what they stored or removed is unknown.
    silent: the connection is gone, or came back; whether anything is missing is not known yet.
    """

    kind: Literal["restart", "gap", "silent"]
    reason: str
    first_seq: int | None = None  # the first missing
    last_seq: int | None = None  # the last missing
