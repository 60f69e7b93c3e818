from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.blocks import chain
from router.serving.prompt.memo import Link, Memo, joined_keys
from router.serving.prompt.seen import SeenTexts

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@settings(deadline=None)
@given(st.lists(IDS, min_size=1, max_size=8), st.sets(st.integers(1, 40), min_size=1, max_size=3))
def test_keys_of_the_parts_are_the_keys_of_the_whole(parts: list[list[int]], sizes: set[int]) -> None:
    in_use = tuple(sorted(sizes))
    link, links = Link.root(7, in_use), []
    for part in parts:
        link = link.extend(array("I", part))
        links.append(link)
    whole = array("I", [token for part in parts for token in part])
    assert link.tokens == len(whole)
    assert joined_keys(links, in_use) == {size: chain(7, whole, size) for size in in_use}


def links_of(count: int, start: int = 0) -> list[Link]:
    link, links = Link.root(start, (4,)), []
    for n in range(count):
        link = link.extend(array("I", [n] * 6))
        links.append(link)
    return links


def test_the_longest_known_beginning_is_found() -> None:
    memo = Memo(1 << 20)
    links = links_of(5)
    memo.put([1, 2, 3, 4, 5], links)
    assert memo.known([1, 2, 3, 9, 10], (4,)) == links[:3]
    assert memo.known([8], (4,)) == []
    assert memo.known([1, 2, 3], (8,)) == [], "links made for other block sizes are of no use"


def test_memory_is_bounded_and_beginnings_outlive_ends() -> None:
    links = links_of(10)
    memo = Memo(sum(link.cost for link in links))
    memo.put(list(range(10)), links)
    assert len(memo) == 10
    memo.known([0, 1, 2], (4,))
    memo.put(list(range(100, 106)), links_of(6, start=1))
    assert memo.bytes <= sum(link.cost for link in links)
    known = memo.known(list(range(10)), (4,))
    assert known == links[: len(known)]
    assert 3 <= len(known) < 10
    memo.put([500], links_of(1))
    memo.put([500], links_of(1))
    assert memo.bytes == sum(link.cost for link in memo._links.values())


def test_extending_keeps_the_beginning_younger_than_the_end() -> None:
    links = links_of(6)
    memo = Memo(3 * max(link.cost for link in links))
    memo.put([0, 1], links[:2])
    memo.put([0, 1, 2, 3], links[2:4])
    assert memo.known([0, 1, 2, 3], (4,)) == links[:3]


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=200))
def test_what_was_added_has_been_seen(keys: list[int]) -> None:
    seen = SeenTexts()
    seen.add(keys)
    assert all(key in seen for key in keys)


def test_adding_tells_where_the_unseen_begins() -> None:
    keys = [n * 0x9E3779B97F4A7C15 % 2**64 for n in range(1, 6)]
    for capacity in (3, 100):  # 3: the generation changes in between
        seen = SeenTexts(capacity)
        assert seen.add(keys[:3]) == 0
        assert seen.add(keys) == 3
        assert seen.add(keys, 2) == 5
        assert seen.add(keys, 5) == 5
        assert seen.add([keys[0], keys[3], 99, keys[4]], 1) == 2


def test_few_others_seem_to_have_been_seen() -> None:
    seen = SeenTexts()
    step = 0x9E3779B97F4A7C15  # spreads counters over 64 bits
    seen.add([n * step % 2**64 for n in range(100_000)])
    assert sum(n * step % 2**64 in seen for n in range(200_000, 210_000)) < 100


def test_what_is_old_is_forgotten_after_two_generations() -> None:
    seen = SeenTexts(capacity=100)
    step = 0x9E3779B97F4A7C15
    seen.add([step])
    for generation in range(4):
        assert (step in seen) is (generation < 3)
        seen.add([n * step % 2**64 for n in range(1_000 * generation + 5, 1_000 * generation + 105)])
