"""What isolation costs in hits: prompts seen once more, as if nobody kept anything apart.

A second chain of hashes over the text, under one root for all, tells how far somebody has asked the same lately, and
how far the caller's own domain has. The difference would have been hits without isolation, at most: it takes all that
was asked lately for held. It is for the operator's report alone, and nothing a caller could notice depends on it.

note ──up to so many a second──> some ms later, between requests ──> two depths ──> counts of the domain
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from router.serving.prompt.pieces import Piece
from router.serving.prompt.search import chain_hashes

PACE_S = 0.02
"""All requests up to 50 a second; of more, a sample, which then finds less than there is."""
BURST_S = 1.0
AFTER_S = 0.02
WAITING_MAX = 16
"""Prompts that wait to be looked at; they are those of requests that run anyway."""
TEXTS = 65_536
"""Beginnings that are remembered, those asked last."""
DOMAINS = 1_024
"""Further ones are left out."""


class ShadowCounts(msgspec.Struct):
    """Of one domain, since the start, of the requests that were looked at. Tokens by estimate."""

    requests: int = 0
    prompt_tokens: int = 0
    own_tokens: int = 0  # asked by the domain itself before
    shared_tokens: int = 0  # asked by anybody before

    @property
    def lost_tokens(self) -> int:
        return self.shared_tokens - self.own_tokens


class _Noted(NamedTuple):
    domain: str
    root: str
    pieces: Sequence[Piece]
    bytes_per_token: float


class IsolationShadow:
    """`call_at(when, call)` calls back once at time `when` of `clock`, or as soon as possible after it."""

    def __init__(
        self, *, call_at: Callable[[float, Callable[[], None]], object], clock: Callable[[], float], texts: int = TEXTS
    ) -> None:
        self.counts: dict[str, ShadowCounts] = {}
        self._call_at = call_at
        self._clock = clock
        self._texts = texts
        self._bits: dict[str, int] = {}
        self._asked: OrderedDict[int, int] = OrderedDict()  # text so far → mask of the domains that asked it
        self._waiting: deque[_Noted] = deque()
        self._due = -inf

    def note(self, domain: str, root: str, pieces: Sequence[Piece], bytes_per_token: float) -> None:
        """A domain asks this. root: what tells models apart."""
        now = self._clock()
        if self._due > now or len(self._waiting) >= WAITING_MAX:
            return
        self._due = max(self._due, now - BURST_S) + PACE_S
        self._waiting.append(_Noted(domain, root, pieces, bytes_per_token))
        if len(self._waiting) == 1:
            self._call_at(now + AFTER_S, self._work)

    def _work(self) -> None:
        """One prompt a turn of the loop: hashing half a megabyte takes a tenth of a millisecond."""
        noted = self._waiting.popleft()
        if self._waiting:
            self._call_at(self._clock(), self._work)
        bit = self._bits.get(noted.domain)
        if bit is None:
            if len(self._bits) >= DOMAINS:
                return
            bit = self._bits[noted.domain] = 1 << len(self._bits)
            self.counts[noted.domain] = ShadowCounts()
        try:
            hashes = chain_hashes(noted.pieces, xxh3_64_intdigest(noted.root.encode("utf-8", "surrogatepass")))
        except UnicodeEncodeError:
            return
        self._count(self.counts[noted.domain], noted, hashes, bit)

    def _count(self, counts: ShadowCounts, noted: _Noted, hashes: Sequence[int], bit: int) -> None:
        asked, tokens = self._asked, 0.0
        own_tokens = shared_tokens = 0.0
        own = shared = True
        for key, piece in zip(hashes, noted.pieces, strict=True):
            tokens += len(piece) / noted.bytes_per_token if isinstance(piece, str) else len(piece)
            mask = asked.pop(key, 0)
            shared = shared and bool(mask)
            own = own and bool(mask & bit)
            if shared:
                shared_tokens = tokens
            if own:
                own_tokens = tokens
            asked[key] = mask | bit
        while len(asked) > self._texts:
            asked.popitem(last=False)
        counts.requests += 1
        counts.prompt_tokens += round(tokens)
        counts.own_tokens += round(own_tokens)
        counts.shared_tokens += round(shared_tokens)
