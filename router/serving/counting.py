"""What of a request is counted, and what of that is billed: one rule for the ledger and for limits.

complete, 200               the engine's usage, explicit zeros included. Where there is none, our own count of the
                            prompt and a token for each stream event, marked `estimated`
client_gone, sent           what reached the gateway: the prompt; the engine's usage as far as it came, and a token
                            for each event after it. `estimated`, unless the usage covers every event
upstream_failed             nothing is billed, failed attempts neither. A stream that broke off counts as above, so
                            that its work is seen
refused, or never sent      nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from router.core import Outcome, Usage
from router.serving.pricing import Tokens, UnknownCached
from router.store.schema import TOKEN_CLASSES

_NOTHING = Usage(0, 0, 0)


class Ended(Protocol):
    """What counting needs to know of a request: an Outcome, or its record in the ledger."""

    @property
    def instance(self) -> str | None: ...
    @property
    def status(self) -> int: ...
    @property
    def finish(self) -> str: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def events_after_usage(self) -> int: ...
    @property
    def billable(self) -> bool: ...


class Counted(msgspec.Struct, frozen=True, gc=False):
    usage: Usage
    estimated: bool = False

    @property
    def cached_known(self) -> bool:
        """False: a prompt was read, and its engine did not say what of it was cached."""
        return self.usage.cached_tokens is not None or not self.usage.input_tokens


def count(ended: Ended, usage: Usage | None) -> Counted:
    """`usage`: as the engine told it; None: it did not."""
    is_broken_off = ended.finish == "client_gone" or (ended.finish == "upstream_failed" and ended.events > 0)
    if ended.finish == "complete" and ended.status == 200:
        if usage is not None:
            return Counted(usage, usage.doubtful)
    elif not is_broken_off or ended.instance is None:
        return Counted(_NOTHING)
    if not ended.billable:
        return Counted(_NOTHING)
    if usage is None:
        return Counted(Usage(ended.input_tokens, ended.events), estimated=True)
    output = usage.output_tokens + ended.events_after_usage
    return Counted(
        msgspec.structs.replace(usage, output_tokens=output), estimated=usage.doubtful or ended.events_after_usage > 0
    )


def is_billed(finish: str) -> bool:
    return finish in ("complete", "client_gone")


def billed_counts(outcome: Outcome) -> dict[str, int]:
    """Tokens by class, of what is billed: those classes that have any."""
    if not is_billed(outcome.finish):
        return {}
    tokens = Tokens.of(count(outcome, outcome.usage).usage)
    return {name: number for name, number in zip(TOKEN_CLASSES, tokens.counts, strict=True) if number}


def as_priced(counts: Mapping[str, int], outcome: Outcome, unknown_cached: UnknownCached) -> Mapping[str, int]:
    """Of `billed_counts`, what money is charged for: as in the ledger where an engine does not say what was cached."""
    is_known = outcome.usage is not None and outcome.usage.cached_tokens is not None
    if unknown_cached == "full_price" or is_known:
        return counts
    uncached = counts.get("uncached_input", 0)
    read = min(outcome.predicted_hit_tokens, uncached)
    return {**counts, "uncached_input": uncached - read, "cache_read": counts.get("cache_read", 0) + read}
