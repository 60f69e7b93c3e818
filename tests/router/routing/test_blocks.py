from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.blocks import chain, chain_list, root_key

ROOT = 0x0123456789ABCDEF
GOLDEN = {
    "root": 900307544544879665,
    "root with adapter and salt": 12262882878014612780,
    "two blocks": [953048757453077216, 3688195893466530197],
    "media in the second": [953048757453077216, 7070695463883619558],
}


def test_keys_are_what_they_were_in_earlier_versions() -> None:
    """A saved index, and relays of another version, rest on these values."""
    root = root_key(b"secret", "m-chat", None, None)
    assert root == GOLDEN["root"]
    assert root_key(b"secret", "m-chat", "adapter", "salt") == GOLDEN["root with adapter and salt"]
    assert list(chain(root, list(range(1, 9)), 4)) == GOLDEN["two blocks"]
    assert list(chain(root, list(range(1, 9)), 4, [(1, "image-1")])) == GOLDEN["media in the second"]


def test_a_chain_can_be_continued_from_any_of_its_keys() -> None:
    tokens = list(range(100, 164))
    whole = chain(ROOT, tokens, 16)
    assert len(whole) == 4
    assert chain(whole[1], tokens[32:], 16) == whole[2:]


def test_the_rest_of_a_block_has_no_key() -> None:
    assert chain(ROOT, list(range(47)), 16) == chain(ROOT, list(range(32)), 16)
    assert chain(ROOT, list(range(15)), 16) == array("Q")
    assert chain(ROOT, [], 16) == array("Q")


def test_a_key_tells_of_everything_before_it() -> None:
    one = chain(ROOT, [1, 2, 3, 4, 5, 6, 7, 8], 4)
    other = chain(ROOT, [0, 2, 3, 4, 5, 6, 7, 8], 4)
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_equal_blocks_in_a_row_have_different_keys() -> None:
    assert len(set(chain(ROOT, [7] * 64, 16))) == 4


def test_block_sizes_do_not_meet() -> None:
    tokens = list(range(32))
    assert not set(chain(ROOT, tokens, 16)) & set(chain(ROOT, tokens, 32))


@pytest.mark.parametrize(
    "other",
    [
        (b"other", "m", "l", "s"),
        (b"secret", "n", "l", "s"),
        (b"secret", "m", None, "s"),
        (b"secret", "m", "", "s"),
        (b"secret", "m", "l", None),
        (b"secret", "m", "l", ""),
        (b"secret", "m", "s", "l"),
        (b"secret", "ml", "", "s"),
        (b"secretm", "", "l", "s"),
    ],
)
def test_every_field_of_the_root_counts(other: tuple[bytes, str, str | None, str | None]) -> None:
    assert root_key(*other) != root_key(b"secret", "m", "l", "s")


def test_a_lone_surrogate_in_a_name_is_a_name_like_any_other() -> None:
    assert root_key(b"secret", "\ud800", None, None) != root_key(b"secret", "?", None, None)


def test_media_ids_enter_the_block_that_holds_them_and_all_after_it() -> None:
    tokens = list(range(12))
    plain = chain(ROOT, tokens, 4)
    one = chain(ROOT, tokens, 4, [(1, "image-1")])
    other = chain(ROOT, tokens, 4, [(1, "image-2")])
    assert plain[0] == one[0] == other[0]
    for position in (1, 2):
        assert len({plain[position], one[position], other[position]}) == 3
    assert chain(ROOT, tokens, 4, ()) == plain


def test_media_ids_of_one_block_do_not_run_together() -> None:
    tokens = list(range(4))
    assert chain(ROOT, tokens, 4, [(0, "ab"), (0, "c")]) != chain(ROOT, tokens, 4, [(0, "a"), (0, "bc")])
    assert chain(ROOT, tokens, 4, [(0, "a"), (0, "b")]) != chain(ROOT, tokens, 4, [(0, "b"), (0, "a")])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_u32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        chain(ROOT, [token] * 4, 4)


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 2**32 - 1), max_size=70),
    st.integers(1, 17),
    st.lists(st.tuples(st.integers(0, 4), st.just("m")), max_size=2),
)
def test_list_array_and_pieces_agree(parent: int, tokens: list[int], size: int, media: list[tuple[int, str]]) -> None:
    keys = chain_list(parent, tokens, size, media)
    assert list(chain(parent, array("I", tokens), size, media)) == keys
    one_by_one = []
    for number in range(len(tokens) // size):
        inside = [(0, name) for offset, name in media if offset == number]
        parent = chain_list(parent, tokens[number * size : (number + 1) * size], size, inside)[0]
        one_by_one.append(parent)
    assert one_by_one == keys
