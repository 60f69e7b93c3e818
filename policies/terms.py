"""The terms a cost in milliseconds is summed from: pure functions of a snapshot and one of its candidates.

All return GPU time in ms, but for `money`, never negative, before the operator's weight. c0 … c4 are `core.Rates`: one
step of an engine takes `c0 + c1·new + c2·Σ new·context + c3·context + c4·sequences` (fitted to NVIDIA's operator tables
for vLLM 0.24).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.core import Candidate, Snapshot

STALE_LOAD_S = 5.0
"""An engine's word about itself that is older than this says nothing about now: it is polled about once a second."""


SHORT_TOKENS = 16_384
"""Two steps of vLLM's default size. To compute a longer prompt twice keeps an engine busy for too long, for the tenth
of a second at most that siblings gain."""

SLO_GAP_MS = 10.0
"""How far behind all others whoever is late begins: by more than costs may differ and still be a tie."""

MS_PER_HOUR = 3_600_000.0


def weights_over(defaults: Mapping[str, float], given: Mapping[str, float]) -> dict[str, float]:
    """`defaults` with the operator's weights laid over. Raises ValueError for an unknown name or a negative weight.

    A negative weight would reward load: tuners find that such a weight games their objective by dumping on one engine.
    """
    for name, weight in given.items():
        if name not in defaults:
            raise ValueError(f"unknown weight {name!r}; there are: {', '.join(sorted(defaults)) or 'none'}")
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weight {name!r} must be a finite number >= 0, not {weight!r}")
    return {**defaults, **given}


def prefill_ms(snapshot: Snapshot, candidate: Candidate) -> float:
    """Own work: c1·n + c2·n·(L - n/2) for n uncached of L tokens (SMetric, arXiv 2607.08565), plus `tier_load_ms`."""
    tokens, rates = snapshot.tokens, candidate.rates
    n = tokens - candidate.hit_tokens
    work = rates.c1_ms * n + rates.c2_ms * n * (tokens - n / 2)
    return work + tier_load_ms(candidate) if len(candidate.held_tokens) > 1 else work


def tier_load_ms(candidate: Candidate) -> float:
    """Time to bring the reused blocks up from tiers behind the GPU. `held_tokens` is cumulative, fastest tier first."""
    rates, held, hit = candidate.rates, candidate.held_tokens, candidate.hit_tokens
    per_token = {"gpu": 0.0, "host": rates.host_ms, "disk": rates.disk_ms, "remote": rates.remote_ms}
    load = 0.0
    below = 0
    for tier, depth in held.items():
        reached = min(depth, hit)
        if reached > below:
            load += (reached - below) * per_token.get(tier, rates.remote_ms)
            below = reached
    return load


def queue_ms(snapshot: Snapshot, candidate: Candidate) -> float:
    """Work before it: ours not past its first token, and requests the engine has waiting that are not ours.

    Of the latter nobody tells the length; each is taken to be as long as this one, nothing of it cached.
    """
    strangers = candidate.waiting - candidate.booked_requests
    if strangers <= 0 or candidate.load_age_s > STALE_LOAD_S:
        return candidate.booked_prefill_ms
    tokens = snapshot.tokens
    return candidate.booked_prefill_ms + strangers * candidate.rates.prefill_ms(tokens, tokens)


def decoding(candidate: Candidate) -> int:
    """Requests that decode there: ours past their first token, or the engine's own count where that is more."""
    ours = candidate.booked_requests - candidate.booked_prefills
    return candidate.running if candidate.running > ours and candidate.load_age_s <= STALE_LOAD_S else ours


def neighbours_ms(own_prefill_ms: float, decoding: int) -> float:
    """What this prefill costs those already decoding there: each of them waits for it.

    The one interaction beyond queue + prefill that is proven to help: uncached tokens × active requests has the largest
    weight in NVIDIA's learned router (ai-dynamo/dynamo, notes/learned-routing), and is what LMetric's product contains.
    """
    return own_prefill_ms * decoding


def pinned_tokens(candidate: Candidate) -> float:
    """KV memory that cannot be given away: the engine's word, which counts shared blocks once; else what we booked."""
    if candidate.kv_usage and candidate.load_age_s <= STALE_LOAD_S:
        return candidate.kv_usage * candidate.capacity_tokens + candidate.unreported_kv_tokens
    return candidate.booked_kv_tokens


def decode_ms(snapshot: Snapshot, candidate: Candidate, *, pinned: float, decoding: int) -> float:
    """E[output] × what a decode step takes at that context and batch, with this request in it: c0 + c3·K + c4·B.

    K counts a shared prefix once per sequence, since each of them reads it: what we booked, unless more is pinned.
    """
    rates, booked = candidate.rates, candidate.booked_kv_tokens
    context = (pinned if pinned > booked else booked) + snapshot.tokens
    step = rates.c0_ms + rates.c3_ms * context + rates.c4_ms * (decoding + 1)
    return snapshot.output_tokens * step


def crowding_ms(snapshot: Snapshot, candidate: Candidate) -> float:
    """What this answer costs all others booked there: each of its tokens makes their step so much longer.

    Not only those that decode now: a burst is placed while none of it does yet, and will decode together.
    """
    rates = candidate.rates
    return snapshot.output_tokens * (rates.c3_ms * snapshot.tokens + rates.c4_ms) * candidate.booked_requests


def memory_ms(snapshot: Snapshot, candidate: Candidate, *, pinned: float) -> float:
    """Computing again what does not fit: tokens beyond the KV capacity preempt a running request, or wait for one."""
    capacity = candidate.capacity_tokens
    over = pinned + snapshot.tokens + snapshot.output_tokens - capacity
    if not capacity or over <= 0:
        return 0.0
    return candidate.rates.prefill_ms(min(over, capacity), capacity)


def copied_tokens(candidates: Sequence[Candidate]) -> int:
    """The most that any of them holds of a prompt: so much of it another would have a second copy of.

    What is only being computed somewhere counts as held there, unless it is short and at least half of them have no
    prompt to compute: then siblings need not wait for the first of them and for each other's ends, and compute it
    beside it on engines that have nothing to do.
    """
    most = max([candidate.hit_tokens for candidate in candidates], default=0)
    idle = sum([not candidate.booked_prefills for candidate in candidates])
    if most > SHORT_TOKENS or 2 * idle < len(candidates):
        return most
    return max([candidate.hit_tokens - candidate.expected_tokens for candidate in candidates], default=0)


def duplication_ms(candidate: Candidate, copied_tokens: int) -> float:
    """Prefill of what another candidate already holds: a second copy pushes out other blocks (Preble, 2407.00023)."""
    missing = copied_tokens - candidate.hit_tokens
    return candidate.rates.prefill_ms(missing, copied_tokens) if missing > 0 else 0.0


def decode_share_ms(snapshot: Snapshot, candidate: Candidate, *, decoding: int) -> float:
    """GPU time of its answer: E[output] × (c0 / (B + 1) + c3·L + c4), what it adds to each step and its share of c0.

    `decode_ms` is how long the answer takes; this is how much of the engine it takes.
    """
    rates = candidate.rates
    step = rates.c0_ms / (decoding + 1) + rates.c3_ms * snapshot.tokens + rates.c4_ms
    return snapshot.output_tokens * step


def money(snapshot: Snapshot, candidate: Candidate, *, own_prefill_ms: float, decoding: int) -> float:
    """What serving it there costs: price per hour × (own prefill + its share of decode), in the operator's currency.

    Its weight is in ms: the delay that one unit of money is worth. 200 ms on a GPU at 3.60 an hour are 0.0002; with a
    weight of 1,000,000 they count as much as 200 ms of waiting.
    """
    gpu_ms = own_prefill_ms + decode_share_ms(snapshot, candidate, decoding=decoding)
    return candidate.price_per_hour * gpu_ms / MS_PER_HOUR


def late_ms(snapshot: Snapshot, *, queue_ms: float, own_prefill_ms: float) -> float:
    """By how much its first token is expected after the objective: queue + own prefill - objective, or 0."""
    if snapshot.ttft_slo_ms is None:
        return 0.0
    late = queue_ms + own_prefill_ms - snapshot.ttft_slo_ms
    return late if late > 0 else 0.0


def slo_ms(late_ms: float, *, cost_ms: float, highest_ms: float) -> float:
    """What puts those expected late behind all that are not, whatever else they cost, the least late of them first.

    cost_ms: of this candidate by all other terms; highest_ms: the highest of any candidate. Late candidates come to
    highest + gap + lateness. Where all are late that leaves the order of lateness: llm-d's, for requests that nobody
    can serve in time ("negative headroom", predicted latency).
    """
    return highest_ms - cost_ms + SLO_GAP_MS + late_ms if late_ms > 0 else 0.0
