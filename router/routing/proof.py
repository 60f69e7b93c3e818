"""Does an engine honour cache salts? It is asked, since a field that an engine does not know is ignored in silence.

A prompt that no cache can hold is computed under one salt, then under another. What tells, in this order:

    events     the blocks are announced under the first salt
    usage      under the second salt nothing was cached, under the first one once more something was
    counters   the same by the engine's own totals, while it has nothing to do but our probes

Anything cached under the second salt refutes it, whatever the others say: such as an external cache that knows no
salts. Three probes as a rule, of one token each.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from router.core import Adapter, EngineFacts, Instance, Load
from router.errors import EngineError

Method = Literal["events", "usage", "counters", "none"]
SawSalt = Callable[[list[int], str, float], Awaitable[bool]]
"""Whether events have told of these tokens under this salt, and not without it: waits so many seconds for them."""

_EXTERNAL_UNIT = 256
"""External caches keep whole chunks of so many tokens (LMCache): a shorter probe would not find them."""
_IDS = range(200, 1_000)  # in every vocabulary, and special tokens in none that is known
_COUNTER_ATTEMPTS = 3
_EVENTS_SOON_S, _EVENTS_LATE_S = 0.3, 3.0
_SETTLE_S = 0.3
"""An engine's totals may lag behind its answers."""
_IGNORES = "reuses across cache salts ({} of {} tokens): use an engine that honours cache_salt, and no external cache"
_SILENT = "neither its events nor its answers nor its counters tell whether it honours cache_salt: start it with "
_MENDS = {
    "vllm": "--kv-events-config (vLLM 0.17 or newer) or --enable-prompt-tokens-details",
    "sglang": "--kv-events-config (SGLang 0.5.20 or newer) or --enable-cache-report",
}
_ANY_MEND = "what makes it report cached tokens, or allow it by isolation.unverified"


class Proof(msgspec.Struct, frozen=True):
    """detail: what was seen; if it is not verified, with the mend."""

    verified: bool
    method: Method
    detail: str


_BY_EVENTS = Proof(True, "events", "its events name the salt of the blocks it stores")


async def prove(instance: Instance, adapter: Adapter, facts: EngineFacts, saw_salt: SawSalt) -> Proof:
    """Raises EngineError where the engine does not answer the probes."""
    if not hasattr(adapter, "probe"):
        return Proof(False, "none", f"the adapter {adapter.name!r} has no probe")
    tokens = _new_prompt(facts)
    ours, other = secrets.token_hex(32), secrets.token_hex(32)
    rank = 0 if facts.rank_targeting else None
    await adapter.probe(instance, tokens, ours, rank)
    crossed = await adapter.probe(instance, tokens, other, rank)
    if crossed:
        return Proof(False, "usage", _IGNORES.format(crossed, len(tokens)))
    if await saw_salt(tokens, ours, _EVENTS_SOON_S):
        return _BY_EVENTS
    again = await adapter.probe(instance, tokens, ours, rank)
    if again:
        return Proof(True, "usage", f"{again} of {len(tokens)} tokens cached under the same salt, none under another")
    if await saw_salt(tokens, ours, _EVENTS_LATE_S):
        return _BY_EVENTS
    found = await _by_counters(instance, adapter, facts)
    return found or Proof(False, "none", _SILENT + _MENDS.get(instance.engine, _ANY_MEND))


async def _by_counters(instance: Instance, adapter: Adapter, facts: EngineFacts) -> Proof | None:
    """None: they tell nothing, or others used the engine meanwhile."""
    rank = 0 if facts.rank_targeting else None
    for _ in range(_COUNTER_ATTEMPTS):
        tokens, ours, other = _new_prompt(facts), secrets.token_hex(32), secrets.token_hex(32)
        before = await _totals(instance, adapter)
        if before is None:
            continue
        await adapter.probe(instance, tokens, ours, rank)
        await adapter.probe(instance, tokens, other, rank)
        between = await _totals(instance, adapter)
        await adapter.probe(instance, tokens, ours, rank)
        after = await _totals(instance, adapter)
        if between is None or after is None:
            continue
        n = len(tokens)
        if (between[0] - before[0], after[0] - between[0]) != (2 * n, n):
            continue  # not ours alone
        crossed, again = between[1] - before[1], after[1] - between[1]
        if crossed:
            return Proof(False, "counters", _IGNORES.format(int(crossed), n))
        if again:
            return Proof(True, "counters", f"{int(again)} of {n} tokens hit under the same salt, none under another")
        return None
    return None


async def _totals(instance: Instance, adapter: Adapter) -> tuple[float, float] | None:
    """Prompt tokens and cached ones since its start. None: it is busy, or does not answer."""
    await asyncio.sleep(_SETTLE_S)
    try:
        loads: list[Load] = list((await adapter.load(instance)).values())
    except EngineError:
        return None
    if any(load.running or load.waiting for load in loads):
        return None
    return sum(load.prompt_tokens_total for load in loads), sum(load.cached_tokens_total for load in loads)


def _new_prompt(facts: EngineFacts) -> list[int]:
    tokens = max(2 * (facts.block_size or 1), _EXTERNAL_UNIT) + 1
    longest = (facts.max_model_tokens or tokens + 2) - 2
    return [secrets.choice(_IDS) for _ in range(max(1, min(tokens, longest)))]
