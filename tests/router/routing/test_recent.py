from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.blocks import chain
from router.routing.recent import GRID, RecentDispatches, Target

SIZE = 16
A: Target = ("A", 0)
B: Target = ("B", 1)


@pytest.fixture
def recent(clock) -> RecentDispatches:
    return RecentDispatches(clock=clock)


def prompt(root: int, blocks: int) -> array[int]:
    return chain(root, list(range(blocks * SIZE)), SIZE)


def test_a_sibling_finds_the_common_prefix(recent: RecentDispatches) -> None:
    system = prompt(1, 40)
    recent.insert("d", A, array("Q", [*system, *prompt(7, 5)]), SIZE)
    assert recent.match("d", array("Q", [*system, *prompt(8, 5)]), SIZE) == {A: 40 * SIZE}
    assert recent.match("d", system[:3], SIZE) == {A: 3 * SIZE}
    assert recent.match("d", prompt(2, 40), SIZE) == {}
    assert recent.match("d", array("Q"), SIZE) == {}


def test_domains_do_not_see_each_other(recent: RecentDispatches) -> None:
    recent.insert("tenant-1", A, prompt(1, 40), SIZE)
    assert recent.match("tenant-2", prompt(1, 40), SIZE) == {}


def test_targets_are_apart(recent: RecentDispatches) -> None:
    recent.insert("d", A, prompt(1, 10), SIZE)
    recent.insert("d", B, prompt(1, 20), SIZE)
    recent.insert("d", ("A", 1), prompt(3, 20), SIZE)
    assert recent.match("d", prompt(1, 30), SIZE) == {A: 10 * SIZE, B: 20 * SIZE}


@pytest.mark.parametrize("blocks", [1, 63, 64, 65, 1001, 6250])
def test_the_next_turn_finds_all_of_the_last_one(recent: RecentDispatches, blocks: int) -> None:
    keys = prompt(1, blocks + 40)
    recent.insert("d", A, keys[:blocks], SIZE)
    recent.insert("d", B, keys[: blocks // 2], SIZE)
    assert recent.match("d", keys, SIZE)[A] == blocks * SIZE
    assert recent.match("d", keys[:blocks], SIZE)[A] == blocks * SIZE


def test_what_differs_past_the_last_entry_is_not_taken_for_the_same(recent: RecentDispatches) -> None:
    """67 blocks are written down as 64 and the end: another 67th block is another end."""
    common = prompt(1, 64)
    recent.insert("d", A, array("Q", [*common, 7, 8, 9]), SIZE)
    assert recent.match("d", array("Q", [*common, 7, 8, 9, 10]), SIZE) == {A: 67 * SIZE}
    assert recent.match("d", array("Q", [*common, 7, 8, 5, 6]), SIZE) == {A: 64 * SIZE}
    assert recent.match("d", array("Q", [*common, 7, 8]), SIZE) == {A: 64 * SIZE}


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_a_common_prefix_is_found_but_for_a_sixteenth(common: int, mine: int, theirs: int) -> None:
    recent = RecentDispatches(clock=lambda: 0.0)
    recent.insert("d", A, array("Q", range(1, common + 1)) + array("Q", range(10**6, 10**6 + mine)), SIZE)
    other = array("Q", range(1, common + 1)) + array("Q", range(10**7, 10**7 + theirs))
    found = recent.match("d", other, SIZE)[A] // SIZE
    assert common * 15 / 16 < found <= common


def test_a_long_prompt_is_written_down_in_few_entries(recent: RecentDispatches) -> None:
    recent.insert("d", A, prompt(1, 6250), SIZE)
    assert len(recent) < 200
    assert GRID[:64] == list(range(1, 65))


def test_unseen_text_is_known_by_its_text_keys(recent: RecentDispatches) -> None:
    text = ((901, 700), (902, 900), (903, 1200))
    recent.insert("d", A, prompt(1, 30), SIZE, text_keys=text)
    assert recent.match("d", prompt(1, 30), SIZE, text_keys=text) == {A: 1200}
    assert recent.match("d", prompt(1, 30), SIZE, text_keys=(*text[:2], (999, 1300))) == {A: 900}
    assert recent.match("d", prompt(1, 30), SIZE, text_keys=((999, 700),)) == {A: 30 * SIZE}
    assert recent.match("d", prompt(2, 30), SIZE, text_keys=((999, 700),)) == {}
    recent.insert("d", B, array("Q"), SIZE, text_keys=text)
    assert recent.match("d", array("Q"), SIZE, text_keys=text[:1]) == {A: 700, B: 700}


def test_entries_live_for_seconds(recent: RecentDispatches, clock) -> None:
    recent.insert("d", A, prompt(1, 10), SIZE)
    clock.advance(3)
    recent.insert("d", B, prompt(1, 10), SIZE)  # in the same quarter
    clock.advance(8)
    assert set(recent.match("d", prompt(1, 10), SIZE)) == {A, B}
    clock.advance(4)
    assert recent.match("d", prompt(1, 10), SIZE) == {}
    assert len(recent) == 0


def test_the_deepest_of_several_dispatches_counts(recent: RecentDispatches, clock) -> None:
    recent.insert("d", A, prompt(1, 100), SIZE)
    clock.advance(5)
    recent.insert("d", A, prompt(1, 10), SIZE)
    assert recent.match("d", prompt(1, 100), SIZE) == {A: 100 * SIZE}
    clock.advance(10)
    assert recent.match("d", prompt(1, 100), SIZE) == {A: 10 * SIZE}


def test_too_many_entries_shorten_their_life(clock) -> None:
    recent = RecentDispatches(clock=clock, max_entries=4000)
    for root in range(2000):
        recent.insert(f"domain-{root}", A, prompt(root, 20), SIZE)
        assert len(recent) <= 4000 + 4 * 20
    assert recent.match("domain-1999", prompt(1999, 20), SIZE) == {A: 20 * SIZE}
    assert recent.match("domain-0", prompt(0, 20), SIZE) == {}


def test_text_keys_are_bounded(recent: RecentDispatches) -> None:
    text = [(n, n) for n in range(1, 10_000)]
    recent.insert("d", A, array("Q"), SIZE, text_keys=text)
    assert len(recent) == 256
    assert recent.match("d", array("Q"), SIZE, text_keys=text) == {A: 256}


def test_a_target_is_forgotten_at_once(recent: RecentDispatches) -> None:
    recent.insert("d", A, prompt(1, 10), SIZE)
    recent.insert("d", B, prompt(1, 10), SIZE)
    recent.forget(A)
    recent.forget(("never", 0))
    assert recent.match("d", prompt(1, 10), SIZE) == {B: 10 * SIZE}
    recent.insert("d", A, prompt(2, 10), SIZE)
    assert recent.match("d", prompt(1, 10), SIZE) == {B: 10 * SIZE}


def test_bits_are_used_again_but_never_too_early(recent: RecentDispatches, clock) -> None:
    for n in range(300):
        target = (f"engine-{n}", 0)
        recent.insert("d", target, prompt(n, 3), SIZE)
        assert recent.match("d", prompt(n, 3), SIZE) == {target: 3 * SIZE}
        recent.forget(target)
        assert recent.match("d", prompt(n, 3), SIZE) == {}
        clock.advance(1)
    recent.insert("d", A, prompt(0, 3), SIZE)
    assert recent.bits_in_use <= 20


prompts = st.tuples(
    st.integers(0, 1),  # whose prefix it begins with
    st.sampled_from([0, 3, 3, 6]),  # blocks of it
    st.integers(0, 2),  # texts that follow
)
dispatches = st.tuples(
    st.sampled_from(["d", "d", "d", "other"]),
    st.sampled_from([A, B]),
    prompts,
    st.sampled_from([0.0, 1.0, 4.0]),  # seconds until the next
    st.sampled_from(["insert", "insert", "insert", "insert", "withdraw", "forget"]),
)


def written_down(family: int, blocks: int, texts: int) -> tuple[array[int], tuple[tuple[int, int], ...]]:
    keys = array("Q", range(1000 * family + 1, 1000 * family + 1 + blocks))
    return keys, tuple((10**6 + 1000 * family + 50 * blocks + i, blocks * SIZE + 10 * (i + 1)) for i in range(texts))


@settings(max_examples=1000)
@given(st.lists(dispatches, min_size=3, max_size=30), prompts)
def test_short_prompts_are_found_as_long_ones_are(
    history: list[tuple[str, Target, tuple[int, int, int], float, str]], asked: tuple[int, int, int]
) -> None:
    """The way for short prompts skips what cannot add anything: it must find the same."""
    now = 0.0
    recent = RecentDispatches(clock=lambda: now)
    for domain, target, prompt, pause, what in history:
        keys, texts = written_down(*prompt)
        if what == "insert":
            recent.insert(domain, target, keys, SIZE, text_keys=texts)
            found = recent.match(domain, keys, SIZE, text_keys=texts).get(target, 0)
            assert found == (texts[-1][1] if texts else len(keys) * SIZE), "at once, and all of it"
        elif what == "withdraw":
            recent.withdraw(domain, target, keys, text_keys=texts)
            assert target not in recent.match(domain, keys, SIZE, text_keys=texts)
        else:
            recent.forget(target)
        now += pause
        keys, texts = written_down(*asked)
        assert recent.match("d", keys, SIZE, text_keys=texts) == recent._match_long("d", keys, SIZE, texts)


def test_a_withdrawn_prompt_is_forgotten_there_and_nothing_else(recent: RecentDispatches, clock) -> None:
    text = ((901, 400),)
    recent.insert("d", A, prompt(1, 20), SIZE, text_keys=text)
    recent.insert("d", B, prompt(1, 20), SIZE, text_keys=text)
    recent.insert("d", A, prompt(2, 20), SIZE)
    clock.advance(5)  # in another quarter
    recent.insert("d", A, prompt(1, 20), SIZE)
    recent.withdraw("d", A, prompt(1, 20), text_keys=text)
    recent.withdraw("d", ("never", 0), prompt(1, 20))
    recent.withdraw("unheard of", A, prompt(1, 20))
    assert recent.match("d", prompt(1, 20), SIZE, text_keys=text) == {B: 400}
    assert recent.match("d", prompt(2, 20), SIZE) == {A: 20 * SIZE}
    recent.insert("d", A, prompt(1, 20), SIZE)
    assert recent.match("d", prompt(1, 20), SIZE) == {A: 20 * SIZE, B: 20 * SIZE}


def test_a_withdrawn_prompt_leaves_no_end_of_it_behind(recent: RecentDispatches) -> None:
    recent.insert("d", A, prompt(1, 67), SIZE)  # written down as 64 blocks and the end
    recent.withdraw("d", A, prompt(1, 67))
    recent.insert("d", A, prompt(1, 64), SIZE)
    assert recent.match("d", prompt(1, 67), SIZE) == {A: 64 * SIZE}


def test_what_was_noted_as_text_is_found_by_its_text_once_its_tokens_are_known() -> None:
    recent = RecentDispatches(clock=lambda: 0.0)
    recent.insert("", ("a", 0), [], 16, text_keys=[(101, 900), (102, 1800), (103, 2700)])
    recent.insert("", ("b", 0), [], 16, text_keys=[(101, 900)])
    assert recent.match_text("", [(101, 910), (102, 1790), (999, 2500)]) == {("a", 0): 1790}
    assert recent.match_text("", [(101, 910), (998, 1790)]) == {("a", 0): 910, ("b", 0): 910}
    assert recent.match_text("", [(997, 910)]) == {}
    assert recent.match_text("other", [(101, 910)]) == {}
