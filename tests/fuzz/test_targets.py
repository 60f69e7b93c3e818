"""Every target with 2,000 inputs made of its words and of its corpus, the same ones each time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fuzz.source import Source
from tests.fuzz.targets import CORPUS, SHARES, Target, load


def inputs(name: str, target: Target) -> Iterator[bytes]:
    """By plain dice: hypothesis would take longer to draw an input than most targets take to read it."""
    seeds = [path.read_bytes() for path in target.corpus()]
    dice = random.Random(name)
    for _ in range(2000):
        yield _made(Source(dice.randbytes(dice.randint(24, 100))), target.words, seeds)


def _made(source: Source, words: Sequence[bytes], seeds: Sequence[bytes]) -> bytes:
    """Words one after the other, behind some bytes of choices; or a seed with edits."""
    if source.flag():
        made = source.take(source.number(24))
        while not source.empty:
            made += source.pick(words) if source.number(8) else source.take(source.number(3))
        return made
    made = source.pick(seeds)
    for _ in range(source.number(5)):
        place, removed = source.number(4096) % (len(made) + 1), source.pick((0, 0, 1, 3, 30))
        made = made[:place] + source.pick(words) + made[place + removed :]
    return made


@pytest.mark.parametrize("name", SHARES)
def test_made_inputs(name: str) -> None:
    target = load(name)
    for data in inputs(name, target):
        try:
            target.run(data)
        except BaseException as failure:
            failure.add_note(f"with {data!r}")
            raise


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_corpus(path: Path) -> None:
    load(path.parent.name).run(path.read_bytes())


def test_every_target_has_a_corpus_and_its_share() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(SHARES)
    assert sum(SHARES.values()) == 100
