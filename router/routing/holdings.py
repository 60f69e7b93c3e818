"""Who holds how much of one prompt, asked once and read for every candidate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from router.core import Ask, Candidate
from router.routing.answers import Answers
from router.routing.fleet import Rank
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches, Target
from router.routing.slots import GPU, SLOWER, Slot

Tiers = Mapping[str, int]
"""Tokens held per tier, cumulative, fastest tier first."""

_NOTHING: Tiers = {}


class Holdings:
    """The index speaks in blocks of every size in use, recent dispatches in tokens."""

    __slots__ = ("_expected", "_held", "_tokens")

    def __init__(self, ask: Ask, index: BlockIndex, recent: RecentDispatches, answers: Answers | None = None) -> None:
        prompt = ask.prompt
        self._tokens = prompt.tokens
        self._held: dict[Slot | None, Tiers] = {}
        self._expected: dict[Target, int] = {}
        for size, keys in prompt.keys.items():
            matches = index.match(keys, size)
            if matches:
                self._note_held(matches, size)
            self._expect(recent.match(ask.domain, keys, size, text_keys=prompt.text_keys))
        if prompt.known_text_keys:
            self._expect(recent.match_text(ask.domain, prompt.known_text_keys))
        if not prompt.keys and prompt.text_keys:
            self._expect(recent.match(ask.domain, (), 1, text_keys=prompt.text_keys))
        if answers and prompt.known_text_keys:
            self._expect(answers.expected(prompt, self._held, self._expected))

    def candidates(self, ranks: Iterable[Rank], now: float) -> tuple[Candidate, ...]:
        """The ranks as they stand, in their order.

        The hit of each: what the engine holds times how far that is believed, or what it was just sent, whichever is
        more.
        """
        tokens, held_by, expected_of = self._tokens, self._held, self._expected
        candidates: list[Candidate] = []
        for rank in ranks:
            instance, booked, load, doubted = rank.instance, rank.booked, rank.load, rank.confidence
            recent = rank.recent
            confidence = 0.0 if doubted is None else doubted.believed if now < doubted.until else doubted.at(now)
            held, hit, expected = _NOTHING, 0, 0
            if held_by:
                held = self._held_by_any(rank) if rank.peers else held_by.get(rank.slot, _NOTHING)
                if held and rank.caches:
                    hit = rank.hit_rule.usable(max(held.values()), tokens, confidence)
            if expected_of and rank.caches and (sent := expected_of.get(rank.target, 0)) > hit:
                if rank.peers:  # it goes to any of them
                    sent //= 1 + len(rank.peers)
                usable = rank.hit_rule.usable(sent, tokens, rank.hits.keeps_promises)
                expected = usable - hit if usable > hit else 0
            candidates.append(
                Candidate(  # by position: by keyword it takes nine times as long, 1.2 µs
                    instance.id,
                    rank.rank,
                    hit + expected,
                    held,
                    confidence,
                    expected,
                    booked.requests,
                    booked.prefill_ms(now) if booked.prefills else 0.0,
                    booked.prefill_tokens,
                    booked.kv_tokens,
                    load.running,
                    load.waiting,
                    load.kv_usage,
                    now - load.at,
                    rank.capacity_tokens,
                    rank.factor.rates,
                    instance.labels,
                    len(booked.prefills),
                    int(recent.faded if now < recent.until else recent.tokens(now)),
                    rank.price_per_hour,
                    booked.fresh_tokens - rank.fresh_tokens_then,
                )
            )
        return tuple(candidates)

    def _note_held(self, matches: list[tuple[Slot, dict[str, int]]], size: int) -> None:
        blocks: Mapping[str, int] = _NOTHING
        tokens = _NOTHING
        for slot, depths in matches:
            if depths is not blocks:  # slots that hold equally much share one mapping
                blocks, tokens = depths, {tier: depth * size for tier, depth in depths.items()}
            self._held[slot] = tokens

    def _expect(self, tokens: dict[Target, int]) -> None:
        if not self._expected:
            self._expected = tokens
            return
        for target, count in tokens.items():
            if count > self._expected.get(target, 0):
                self._expected[target] = count

    def _held_by_any(self, rank: Rank) -> Tiers:
        """It may end up on any of its peers: what is held is what they hold on average.

        Where a tier adds nothing it is not named, and the depth of the faster ones stands.
        """
        held = [self._held.get(each.slot, _NOTHING) for each in (rank, *rank.peers)]
        named = {tier for tiers in held for tier in tiers}
        depths = [0] * len(held)
        averages: dict[str, int] = {}
        for tier in (GPU, *SLOWER):
            if tier in named:
                depths = [max(depth, tiers.get(tier, 0)) for depth, tiers in zip(depths, held, strict=True)]
                averages[tier] = sum(depths) // len(held)
        return averages


def promised_tokens(rank: Rank, held_tokens: Tiers, prompt_tokens: int) -> int:
    """What the index alone promises of a prompt, before it is doubted."""
    if not held_tokens or not rank.caches:
        return 0
    return rank.hit_rule.usable(max(held_tokens.values()), prompt_tokens)
