"""Every target with 2,000 inputs made of its words and of its corpus, the same ones each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import CORPUS, SHARES, Target, load

EDITS = st.lists(st.tuples(st.integers(0, 2000), st.sampled_from([0, 0, 1, 3, 30]), st.integers(0, 255)), max_size=4)


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    word = st.sampled_from(target.words) | st.binary(max_size=3)
    soup = st.tuples(st.binary(max_size=40), st.lists(word, max_size=12)).map(
        lambda parts: parts[0] + b"".join(parts[1])
    )
    seeds = st.sampled_from([path.read_bytes() for path in target.corpus()])
    return soup | st.tuples(seeds, EDITS).map(lambda made: _edited(*made, target.words))


def _edited(data: bytes, edits: list[tuple[int, int, int]], words: tuple[bytes, ...]) -> bytes:
    for place, removed, word in edits:
        place %= len(data) + 1
        data = data[:place] + words[word % len(words)] + data[place + removed :]
    return data


@pytest.mark.parametrize("name", SHARES)
def test_made_inputs(name: str) -> None:
    target = load(name)

    @settings(max_examples=2000)
    @given(inputs(target))
    def check(data: bytes) -> None:
        target.run(data)

    check()


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_corpus(path: Path) -> None:
    load(path.parent.name).run(path.read_bytes())


def test_every_target_has_a_corpus_and_its_share() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(SHARES)
    assert sum(SHARES.values()) == 100
