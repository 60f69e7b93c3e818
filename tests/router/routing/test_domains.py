"""No domain of isolation finds what another has computed, whatever they do and in whatever order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Ask, Cleared, EngineFacts, Instance, Prompt, Removed, Stored
from router.routing.blocks import chain, root_key
from router.routing.fleet import Fleet
from router.routing.holdings import Holdings
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches
from router.serving.isolation.salts import Salts, salt_within

SECRET, MODEL, SIZE = b"test", "m", 4
SALTS = Salts(b"s" * 32)
DOMAINS = ("tenant:a", "tenant:b", "key:a", "group:a", "shared")
CLIENTS_OWN = (None, "x", "tenant:a", str(SALTS.of("tenant:a")))
PROMPTS = ([1] * 16, [1] * 8 + [2] * 8, [3] * 16)

whose = st.tuples(st.sampled_from(DOMAINS), st.sampled_from(CLIENTS_OWN))
steps = st.lists(st.tuples(whose, st.integers(0, len(PROMPTS) - 1), st.sampled_from("sdrc")), max_size=25)


def salt_of(domain: str, own: str | None) -> str:
    salt = str(SALTS.of(domain))
    return salt if own is None else salt_within(salt, own)


@settings(max_examples=150)
@given(steps)
def test_look_ups_across_domains_find_nothing(done: list[tuple[tuple[str, str | None], int, str]]) -> None:
    """s: an engine stores a prompt; d: it is dispatched; r: its blocks are removed; c: all are."""
    index = BlockIndex(SECRET, clock=lambda: 0.0)
    recent = RecentDispatches(clock=lambda: 0.0)
    slot = index.open("e", 0, model=MODEL)
    fleet = Fleet()
    fleet.add(Instance("e", "http://e", "vllm", MODEL), now=0.0)
    fleet.learn("e", EngineFacts(served=(MODEL,), block_size=SIZE), now=0.0)
    (rank,) = fleet
    rank.slot, rank.slot_is_assumed = slot, True
    asked: dict[tuple[str, str | None], set[int]] = {}
    for number, (who, which, what) in enumerate(done):
        tokens, salt = PROMPTS[which], salt_of(*who)
        # An engine's hashes differ by salt, as its blocks do.
        hashes = [hash((salt, which, block)) & (2**64 - 1) for block in range(len(tokens) // SIZE)]
        if what == "s":
            index.apply(slot, Stored(hashes, None, tokens, SIZE, salt=salt))
            asked.setdefault(who, set()).add(which)
        elif what == "d":
            keys = chain(root_key(SECRET, MODEL, None, salt), tokens, SIZE)
            recent.insert(who[0], rank.target, keys, SIZE, text_keys=[(number, len(tokens))])
            asked.setdefault(who, set()).add(which)
        elif what == "r":
            index.apply(slot, Removed(hashes))
        else:
            index.apply(slot, Cleared())
    for domain in DOMAINS:
        for own in CLIENTS_OWN:
            if (domain, own) in asked:
                continue
            for tokens in PROMPTS:
                keys = chain(root_key(SECRET, MODEL, None, salt_of(domain, own)), tokens, SIZE)
                assert index.match(keys, SIZE) == []
                ask = Ask("r", MODEL, Prompt(len(tokens), len(tokens), {SIZE: keys}), domain=domain)
                (candidate,) = Holdings(ask, index, recent).candidates([rank], 0.0)
                assert (candidate.hit_tokens, candidate.held_tokens) == (0, {})
    for tokens in PROMPTS:  # nor does who has no salt
        assert index.match(chain(root_key(SECRET, MODEL, None, None), tokens, SIZE), SIZE) == []
