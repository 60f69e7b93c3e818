"""What an engine has answered counts as held by it until its events tell.

SGLang has an answer's tokens in its cache as the answer ends, but announces them only at the next prefill, at the 40th
decode step after the last time, or when it has nothing left to do (0.5.23): while others decode there, a second later.
A tool's result or a hasty user is back before that.

Of an answer only its length is known here. That the next turn brings back the very tokens is told by counting: from the
end of the old prompt to where the answer's turn ends in the new one, there are those the engine generated and the few
with which the template closes a turn. How many these are is learned from what engines then held or said they reused. An
answer whose reasoning was left out, that was changed, or whose text has other tokens than were sampled, is of another
length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from router.core import Prompt
from router.routing.fleet import Rank
from router.routing.slots import Slot

Target = tuple[str, int]
"""(instance, rank)"""

CREDITED_S = 5.0
"""After its end an answer nobody tells of counts as held for so long."""
TELLING_S = 60.0
"""What is missing of an answer by then, its engine may have evicted."""
MOST_CLOSING_TOKENS = 8
REMEMBERED = 512
"""Answers with so many closing tokens; then half of what they showed counts."""
LIKELY = (8, 10)
"""So many answers came back whole, as their engines then showed, and no more than one in so many did not: the next is
credited with one block, which is the most that can be too much."""
SURE = (200, 200)
"""The same for all of its blocks: what a model says nearly always has the tokens that were sampled."""


class _Answer(NamedTuple):
    rank: Rank
    since: float  # when its prompt was placed
    size: int  # of a block
    blocks: int  # whole ones of its prompt
    last_key: int  # of these
    end: int  # tokens of prompt and answer
    ended: float


class _Closing:
    """How answers came back that a number of tokens seemed to close."""

    __slots__ = ("changed", "whole")

    def __init__(self) -> None:
        self.whole = 0
        self.changed = 0

    def add(self, *, whole: bool) -> None:
        if whole:
            self.whole += 1
        else:
            self.changed += 1
        if self.whole + self.changed >= REMEMBERED:
            self.whole //= 2
            self.changed //= 2

    def blocks(self, of: int) -> int:
        """So many of the blocks that an answer has filled are credible."""
        return of if self._shows(*SURE) else 1 if self._shows(*LIKELY) else 0

    def _shows(self, enough: int, often: int) -> bool:
        return self.whole >= enough and self.whole >= often * self.changed


class Answers:
    """The last answers of ranks that announce them late. `clock`: monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float], max_entries: int = 4096) -> None:
        self._clock = clock
        self._max_entries = max_entries
        self._answers: OrderedDict[int, _Answer] = OrderedDict()  # by the key of the text before the last piece
        self._closings: dict[tuple[str, int], _Closing] = {}  # (model, tokens)

    def __len__(self) -> int:
        return len(self._answers)

    def ended(self, rank: Rank, prompt: Prompt, *, since: float, input_tokens: int, output_tokens: int) -> None:
        """`rank` has answered `prompt`, placed at `since`, to the end. The counts are its own."""
        size = rank.block_size
        keys, names, end = prompt.keys.get(size), prompt.known_text_keys, input_tokens + output_tokens
        if not keys or len(names) < 2 or names[-1][1] != input_tokens or (end - 1) // size <= len(keys):
            return  # it is not known where the answer begins, or it has filled no block
        answers = self._answers
        name = names[-2][0]  # the last piece ends within what will be the answer's turn
        answers.pop(name, None)
        answers[name] = _Answer(rank, since, size, len(keys), keys[-1], end, self._clock())
        if len(answers) > self._max_entries:
            answers.popitem(last=False)

    def expected(
        self, prompt: Prompt, held: Mapping[Slot | None, Mapping[str, int]], sent: Mapping[Target, int]
    ) -> dict[Target, int]:
        """Tokens of this prompt that an engine holds by its answer, where its events have not yet told.

        `held`: what events have told, tokens by tier. `sent`: what was sent there lately.
        """
        found = self._find(prompt)
        if found is None:
            return {}
        name, answer, whole, record = found
        rank, size, asked = answer.rank, answer.size, answer.blocks
        tiers, target = held.get(rank.slot), rank.target
        told = max(tiers.values()) if tiers else 0
        if told < asked * size and sent.get(target, 0) < asked * size:
            return {}  # not even its prompt is known to be held any more
        if rank.told_after(answer.last_key) >= answer.since:
            record.add(whole=told >= whole * size)
            del self._answers[name]
            return {}
        blocks = record.blocks(whole - asked)
        return {target: (asked + blocks) * size} if blocks and self._clock() - answer.ended < CREDITED_S else {}

    def delivered(self, rank: Rank, prompt: Prompt, tokens: int) -> None:
        """So much of this prompt `rank` says it has reused."""
        found = self._find(prompt)
        if found is not None and found[1].rank is rank:
            name, answer, whole, record = found
            record.add(whole=tokens >= whole * answer.size)
            del self._answers[name]

    def _find(self, prompt: Prompt) -> tuple[int, _Answer, int, _Closing] | None:
        """The answer this prompt goes on from, the blocks that were whole at its end, and what its length has shown."""
        answers = self._answers
        if not answers:
            return None
        names = prompt.known_text_keys
        for at in range(len(names) - 2, -1, -1):
            name = names[at][0]
            answer = answers.get(name)
            if answer is not None:
                break
        else:
            return None
        end = answer.end
        for _, tokens in names[at + 1 :]:
            if tokens >= end:
                closing = tokens - end
                break
        else:
            return None
        keys = prompt.keys.get(answer.size, ())
        whole = (end - 1) // answer.size  # the last token sampled was not computed
        if closing > MOST_CLOSING_TOKENS or len(keys) < whole or keys[answer.blocks - 1] != answer.last_key:
            return None
        if self._clock() - answer.ended > TELLING_S:
            return None
        record = self._closings.get((answer.rank.instance.model, closing))
        if record is None:
            record = self._closings[answer.rank.instance.model, closing] = _Closing()
        return name, answer, whole, record
