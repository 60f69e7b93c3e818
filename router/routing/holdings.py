"""Who holds how much of one prompt, asked once and read for every candidate."""

from __future__ import annotations

from collections.abc import Mapping

from router.core import Ask
from router.routing.decide import usable_tokens
from router.routing.fleet import Rank
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches
from router.routing.slots import Slot

Tiers = Mapping[str, int]
"""Tokens held per tier, cumulative, fastest tier first."""

_NOTHING: Tiers = {}


class Hit:
    """What one candidate's cache is worth to the prompt, in tokens."""

    __slots__ = ("confidence", "expected_tokens", "held_tokens", "hit_tokens", "promised_tokens")

    def __init__(self, held_tokens: Tiers, confidence: float) -> None:
        self.held_tokens = held_tokens
        self.confidence = confidence
        self.promised_tokens = 0  # by the index alone, before it is doubted
        self.hit_tokens = 0  # to be counted on
        self.expected_tokens = 0  # part of `hit_tokens` that is owed to recent dispatches only


class Holdings:
    """The index speaks in blocks of every size in use, recent dispatches in tokens."""

    __slots__ = ("_expected", "_held", "_tokens")

    def __init__(self, ask: Ask, index: BlockIndex, recent: RecentDispatches) -> None:
        prompt = ask.prompt
        self._tokens = prompt.tokens
        self._held: dict[Slot, Mapping[str, int]] = {}
        self._expected: dict[tuple[str, int], int] = {}
        for size, keys in prompt.keys.items():
            self._held.update(index.match(keys, size))
            self._expect(recent.match(ask.domain, keys, size, text_keys=prompt.text_keys))
        if not prompt.keys and prompt.text_keys:
            self._expect(recent.match(ask.domain, (), 1, text_keys=prompt.text_keys))

    def hit(self, rank: Rank) -> Hit:
        """What the engine holds times how far that is believed, or what it was just sent, whichever is more."""
        held = self._held_by(rank)
        hit = Hit(held, rank.confidence.value if rank.confidence is not None else 0.0)
        if not rank.caches:
            return hit
        rule, tokens = rank.hit_rule, self._tokens
        if held:
            depth = max(held.values())
            hit.promised_tokens = usable_tokens(rule, depth, tokens, confidence=1.0)
            hit.hit_tokens = usable_tokens(rule, depth, tokens, confidence=hit.confidence)
        expected = self._expected.get(rank.target, 0)
        if expected > hit.hit_tokens:
            expected = usable_tokens(
                rule, expected // (1 + len(rank.peers)), tokens, confidence=rank.hits.keeps_promises
            )
            hit.expected_tokens = max(0, expected - hit.hit_tokens)
            hit.hit_tokens += hit.expected_tokens
        return hit

    def _expect(self, tokens: Mapping[tuple[str, int], int]) -> None:
        if not self._expected:
            self._expected.update(tokens)
            return
        for target, count in tokens.items():
            if count > self._expected.get(target, 0):
                self._expected[target] = count

    def _held_by(self, rank: Rank) -> Tiers:
        if not rank.peers:
            return self._held_in(rank.slot)
        ranks = (rank, *rank.peers)  # it may end up on any of them: what is held is what they hold on average
        sums: dict[str, int] = {}
        for each in ranks:
            for tier, tokens in self._held_in(each.slot).items():
                sums[tier] = sums.get(tier, 0) + tokens
        return {tier: total // len(ranks) for tier, total in sums.items()}

    def _held_in(self, slot: Slot | None) -> Tiers:
        blocks = self._held.get(slot) if slot is not None else None
        if slot is None or blocks is None or slot.block_size is None:
            return _NOTHING
        size = slot.block_size
        return {tier: depth * size for tier, depth in blocks.items()}
