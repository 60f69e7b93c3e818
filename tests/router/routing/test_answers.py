"""An answer is held before its engine's events say so, and is credited only where the next turn brings it back."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import pytest

from router.core import EngineFacts, EventSource, Instance, Prompt, Removed, Stored
from router.routing.answers import LIKELY, SURE, Answers
from router.routing.blocks import chain, root_key
from router.routing.fleet import Fleet, Rank
from router.routing.index import BlockIndex

SIZE = 16
SECRET = b"deployment secret"
ROOT = root_key(SECRET, "m", None, None)
TRAIL = [7, 8, 9]  # what asks the model to answer
CLOSING = [5, 6]  # what the template writes behind an answer
ANSWER = list(range(2000, 2010))
HELD, WHOLE = 288, 304  # whole blocks of the first prompt, and with the answer
ENOUGH, OFTEN = LIKELY


def prompt(*pieces: Sequence[int]) -> Prompt:
    tokens: list[int] = []
    names = []
    for piece in pieces:
        tokens += piece
        names.append((chain(ROOT + 1, array("I", tokens), len(tokens))[0], len(tokens)))
    keys = chain(ROOT, array("I", tokens), SIZE)
    return Prompt(len(tokens), len(tokens), {SIZE: keys}, known_text_keys=tuple(names))


class Talk:
    """A turn of 300 tokens and its answer, and the next turn, in which the answer came back like this."""

    def __init__(self, number: int = 0, *, came_back: Sequence[int] = ANSWER) -> None:
        system, asked = list(range(40)), [1000 + number, *range(256)]
        self.tokens = [*system, *asked, *TRAIL]
        self.first = prompt(system, asked, TRAIL)
        self.next = prompt(system, asked, [*TRAIL, *came_back, *CLOSING], [3, 4, *range(30)], TRAIL)


class World:
    def __init__(self, clock) -> None:
        self.clock = clock
        self.index = BlockIndex(SECRET, clock=clock)
        self.answers = Answers(clock=clock)
        self.learned = 0
        self.sent: dict[tuple[str, int], int] = {}
        fleet = Fleet()
        fleet.add(Instance("a", "http://a:8000", "sglang", "m"), now=clock(), rates=None)
        sources = (EventSource(0, "tcp://a:5557"),)
        facts = EngineFacts(served=("m",), block_size=SIZE, sources=sources, tells_answers_late=True)
        fleet.learn("a", facts, now=clock())
        self.rank: Rank = fleet.ranks("a")[0]
        self.rank.slot = self.index.open("a", 0, model="m", block_size=SIZE)

    def tell(self, tokens: Sequence[int], *, after: int = 0) -> None:
        """Events of the blocks that come after so many tokens."""
        slot = self.rank.slot
        assert slot is not None
        ends = range(after + SIZE, len(tokens) + 1, SIZE)
        parent = _hash(tokens[:after]) if after else None
        self.index.apply(slot, Stored([_hash(tokens[:e]) for e in ends], parent, list(tokens[after : ends[-1]]), SIZE))
        if parent is not None and (key := slot.key_of(parent)) is not None:
            self.rank.tell_after(key, self.clock())

    def answer(self, talk: Talk, answer: Sequence[int] = ANSWER, *, told: bool) -> None:
        self.tell(talk.tokens)
        self.answers.ended(
            self.rank, talk.first, since=self.clock(), input_tokens=len(talk.tokens), output_tokens=len(answer)
        )
        if told:
            self.tell([*talk.tokens, *answer], after=HELD)

    def expected(self, talk: Talk) -> int:
        """Tokens of the next turn, by the answer alone."""
        slot = self.rank.slot
        held = {
            slot: {tier: n * SIZE for tier, n in d.items()} for slot, d in self.index.match(talk.next.keys[SIZE], SIZE)
        }
        return self.answers.expected(talk.next, held, self.sent).get(("a", 0), 0) if slot is not None else 0

    def learn(self, times: int = ENOUGH, answer: Sequence[int] = ANSWER) -> None:
        """Answers of which events had told when their next turn came."""
        for _ in range(times):
            self.learned += 1
            talk = Talk(100 + self.learned)
            self.answer(talk, answer, told=True)
            assert not self.expected(talk)


@pytest.fixture
def world(clock) -> World:
    return World(clock)


def _hash(tokens: Sequence[int]) -> int:
    return hash(tuple(tokens)) & (1 << 64) - 1


def test_an_answer_nobody_has_told_of_is_held_once_others_came_back_whole(world: World) -> None:
    world.answer(talk := Talk(), told=False)
    assert world.expected(talk) == 0
    world.learn(ENOUGH - 1)
    assert world.expected(talk) == 0
    world.learn(1)
    assert world.expected(talk) == WHOLE


def test_what_events_have_told_of_is_left_to_them(world: World) -> None:
    world.learn()
    world.answer(talk := Talk(), told=True)
    assert world.expected(talk) == 0
    assert len(world.answers) == 0


def test_events_may_come_before_the_end_of_the_answer(world: World) -> None:
    world.learn()
    talk = Talk()
    began = world.clock()
    world.tell(talk.tokens)
    world.tell([*talk.tokens, *ANSWER], after=HELD)
    world.clock.advance(1)
    world.answers.ended(world.rank, talk.first, since=began, input_tokens=300, output_tokens=10)
    assert world.expected(talk) == 0
    world.answers.ended(world.rank, talk.first, since=world.clock(), input_tokens=300, output_tokens=10)
    assert world.expected(talk) == WHOLE  # those were of an earlier answer to the same prompt


@pytest.mark.parametrize("came_back", [ANSWER[:-1], [*ANSWER, 1], ANSWER[:3], [*ANSWER, *range(40)]])
def test_an_answer_of_another_length_is_another(world: World, came_back: list[int]) -> None:
    """Its reasoning is left out, the client changed it, or its text has other tokens than were sampled."""
    world.learn()
    world.answer(talk := Talk(came_back=came_back), told=False)
    assert world.expected(talk) == 0


def test_as_is_one_whose_prompt_is_read_otherwise_by_then(world: World) -> None:
    world.learn()
    talk, other = Talk(), Talk(1)
    world.answer(talk, told=False)
    world.tell(other.tokens)
    talk.next = msgspec.structs.replace(talk.next, keys=other.next.keys)
    assert world.expected(talk) == 0


def test_lengths_that_prove_nothing_are_not_credited(world: World) -> None:
    """Of as many tokens as were sampled, but of others."""
    sampled = [2000, 1, *ANSWER[2:]]
    world.learn(OFTEN)
    world.learn(2, sampled)
    world.answer(talk := Talk(), told=False)
    assert world.expected(talk) == 0
    world.learn(OFTEN)
    assert world.expected(talk) == WHOLE


def test_an_engine_says_what_it_reused_before_its_events_do(world: World) -> None:
    """Where others decode, no next turn comes after the events of an answer."""
    for number in range(ENOUGH):
        world.answer(talk := Talk(number), told=False)
        assert world.expected(talk) == 0
        world.answers.delivered(world.rank, talk.next, WHOLE)
        assert len(world.answers) == 0
    world.answer(talk := Talk(1000), told=False)
    assert world.expected(talk) == WHOLE
    world.answers.delivered(world.rank, talk.next, HELD)
    world.answer(talk, told=False)
    assert world.expected(talk) == 0


def test_what_is_missing_of_an_old_answer_may_have_been_evicted(world: World) -> None:
    world.learn()
    world.answer(old := Talk(came_back=[2000, 1, *ANSWER[2:]]), told=True)
    world.clock.advance(61)
    assert world.expected(old) == 0
    world.answers.delivered(world.rank, old.next, HELD)
    world.answer(talk := Talk(1), told=False)
    assert world.expected(talk) == WHOLE


def test_what_another_engine_reused_says_nothing_of_an_answer(world: World) -> None:
    other = World(world.clock).rank
    world.answer(talk := Talk(), told=False)
    world.answers.delivered(other, talk.next, HELD)
    assert len(world.answers) == 1


def test_only_where_hardly_any_has_changed_more_than_a_block_is_credited(world: World) -> None:
    """So that one that did is not thought to be held for more than one block too many."""
    longer = list(range(2000, 2040))
    world.learn()
    world.answer(talk := Talk(came_back=longer), longer, told=False)
    assert world.expected(talk) == 304
    world.learn(SURE[0] - ENOUGH)
    assert world.expected(talk) == 336
    world.learn(2, [2000, 1, *ANSWER[2:]])
    assert world.expected(talk) == 304


def test_what_was_sent_lately_is_a_prompt_events_need_not_have_told_of(world: World) -> None:
    world.learn()
    talk = Talk()
    world.answers.ended(world.rank, talk.first, since=world.clock(), input_tokens=300, output_tokens=10)
    assert world.expected(talk) == 0
    world.sent = {("a", 0): HELD}
    assert world.expected(talk) == WHOLE


def test_what_is_no_longer_held_is_not_credited(world: World) -> None:
    world.learn()
    world.answer(talk := Talk(), told=False)
    assert world.expected(talk) == WHOLE
    assert world.rank.slot is not None
    world.index.apply(world.rank.slot, Removed([_hash(talk.tokens[:HELD])]))
    assert world.expected(talk) == 0


def test_nor_is_what_events_ought_to_have_told_of(world: World) -> None:
    world.learn()
    world.answer(talk := Talk(), told=False)
    world.clock.advance(4.9)
    assert world.expected(talk) == WHOLE
    world.clock.advance(0.2)
    assert world.expected(talk) == 0


@pytest.mark.parametrize(("input_tokens", "output_tokens"), [(300, 4), (301, 10), (299, 10)])
def test_only_what_fills_a_block_of_a_prompt_both_count_alike(
    world: World, input_tokens: int, output_tokens: int
) -> None:
    """Of 300 + 4 tokens the last has not been computed, and the 19th block is not whole."""
    world.answers.ended(world.rank, Talk().first, since=0.0, input_tokens=input_tokens, output_tokens=output_tokens)
    assert len(world.answers) == 0
    world.answers.ended(world.rank, Talk().first, since=0.0, input_tokens=300, output_tokens=5)
    assert len(world.answers) == 1


def test_an_answer_of_nothing_fills_no_block(world: World) -> None:
    """Nor is the last token of its prompt computed."""
    exactly = prompt(list(range(40)), list(range(245)), TRAIL)
    world.answers.ended(world.rank, exactly, since=0.0, input_tokens=288, output_tokens=0)
    world.answers.ended(world.rank, exactly, since=0.0, input_tokens=288, output_tokens=1)
    assert len(world.answers) == 0
    world.answers.ended(world.rank, exactly, since=0.0, input_tokens=288, output_tokens=17)
    assert len(world.answers) == 1


def test_memory_is_bounded(world: World) -> None:
    answers = Answers(clock=world.clock, max_entries=3)
    for number in range(10):
        answers.ended(world.rank, Talk(number).first, since=0.0, input_tokens=300, output_tokens=10)
    assert len(answers) == 3
    for key in range(5000):
        world.rank.tell_after(key, 1.0)
    assert world.rank.continued is not None
    assert len(world.rank.continued) == 1024
    assert (world.rank.told_after(0), world.rank.told_after(4999)) == (float("-inf"), 1.0)
