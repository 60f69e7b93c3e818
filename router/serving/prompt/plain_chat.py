"""Conversations that a template only writes down one message after the other.

Most chat bodies have nothing but texts by the system, the user and the assistant, and of these most templates make the
same thing: a fixed text, the content, a fixed text, for each message. Which texts these are is learned when a template
is loaded; then it is tried on some hundred conversations that the pieces are those of the rendered text, and if they
ever differ, the template is not one of this kind. What is left to be read by rendering are

    bodies with tools, documents, template variables …                  (`SHAPING_FIELDS`)
    messages with more than a role and a text, or in another order of roles
    contents in which the template or the engine looks for something    (`content_marks.py`), and empty ones

Read so, a message costs a microsecond; rendered, ten or more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias

from router.serving.prompt.cut import PROBES, Cutter
from router.serving.prompt.dialect import SHAPING_FIELDS
from router.serving.prompt.pieces import NO_IDS, Asked, Begun
from router.serving.prompt.reason import TooLong, Unreadable

Body: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Body], str]

_TALK = ("user", "assistant", "user", "assistant", "user")
_OPENINGS = (("system", *_TALK), _TALK)
ROLES = ("system", "user", "assistant")


Hints: TypeAlias = "tuple[tuple[str, tuple[str, ...]], ...]"
"""A character, and the marks that hold it: to look for one character is 30 times as fast as to look for a text."""


@dataclass(slots=True)
class Frame:
    """What the template writes around a content."""

    before: str
    after: str
    lead: Sequence[str] = ()  # pieces before this one
    trims: bool = False
    hints: Hints = ()  # marks that make a content read otherwise
    following: dict[str, Frame] = field(default_factory=dict, repr=False)  # by the role that may come next


class PlainChat:
    """Reads plain conversations of one template, by one engine's dialect."""

    def __init__(self, openings: Mapping[str, Frame], trail: Sequence[str], cutter: Cutter) -> None:
        """`openings`: for the first message. `trail`: the pieces behind the last."""
        self._openings = openings
        self._trail = trail
        self._least = cutter.least
        self._cut_long = cutter.cut_long

    def read(
        self, body: Body, at_most: float = math.inf, begun: Begun | None = None, *, pause_at: int = -1
    ) -> Asked | None:
        """The same pieces as if rendered and cut; None where that has to be done.

        `begun`: how this reader has read the same first messages, so that the pieces begin with the next. `pause_at`:
        the index of a message; what it says when it comes there can be made into a `Begun`.
        Raises `TooLong` for a conversation of more new characters than `at_most`.
        """
        if not SHAPING_FIELDS.isdisjoint(body):
            return None
        pieces: list[str] = []
        frames, least, length, before = self._openings, self._least, 0, 0
        paused: tuple[int, Any] | None = None
        skipped = 0
        if begun is not None:
            skipped, frames = begun.messages, begun.state
        try:
            messages = body["messages"]
            for number, message in enumerate(messages[skipped:], skipped):
                before = len(pieces)
                if number == pause_at:
                    paused = before, frames
                frame = frames[message["role"]]
                content = _plain_content(message, frame)
                if not content:
                    return None
                pieces += frame.lead
                turn = f"{frame.before}{content}{frame.after}"
                length += len(turn)
                if length > at_most:
                    raise TooLong
                if len(turn) > least:
                    self._cut_long(turn, 0, len(turn), pieces)
                else:
                    pieces.append(turn)
                frames = frame.following
        except (KeyError, TypeError):  # not a conversation, or not of these roles: the general reader says what it is
            return None
        if "assistant" not in frames:  # the last word is not the user's
            return None
        pieces += self._trail
        known = begun.hashes if begun is not None else ()
        count = len(messages)
        answered = len(known) + before if count > 2 else 0  # what the user says last comes after an answer
        return Asked(pieces, NO_IDS, answered, (count + 1) // 2, "", known, paused)


def _plain_content(message: Mapping[str, Any], frame: Frame) -> str | None:
    """Raises KeyError or TypeError for what is no message."""
    content = message["content"]
    if len(message) != 2 or type(content) is not str:
        return None
    for hint, marks in frame.hints:
        if hint in content and _holds_one_of(marks, content):
            return None
    return content.strip() if frame.trims else content


def _holds_one_of(marks: Iterable[str], content: str) -> bool:
    return any(mark in content for mark in marks)


def learn_plain_chat(render: Render, cutter: Cutter, marks: Mapping[str, Iterable[str]]) -> PlainChat | None:
    """How `render` writes plain conversations; None: not message by message, each with a turn start of its own.

    `marks`: for each role, what the template and the engine look for in its contents. Takes some 10 ms.
    """
    hints = {role: _by_hint({*cutter.turn_starts, *texts}) for role, texts in marks.items()}
    probes = list(_probes(sorted({mark for of_role in hints.values() for _, group in of_role for mark in group})))
    for trims in product((False, True), repeat=len(ROLES)):
        chat = _framed(render, cutter, hints, dict(zip(ROLES, trims, strict=True)))
        if chat is not None and _agrees(chat, render, cutter, probes):
            return chat
    return None


def _framed(render: Render, cutter: Cutter, hints: Mapping[str, Hints], trims: Mapping[str, bool]) -> PlainChat | None:
    """As one conversation of each opening is written. Whether all others are, is not yet tried."""
    openings: dict[str, Frame] = {}
    trail: Sequence[str] = ()
    for roles in _OPENINGS:
        around = _around_contents(render, cutter, roles)
        if around is None:
            continue
        lead, pairs, trail = around
        frames = [
            Frame(before, after, trims=trims[role], hints=hints[role])
            for role, (before, after) in zip(roles, pairs, strict=True)
        ]
        if any(_may_make_a_turn_start(frame, mark) for frame in frames for mark in cutter.turn_starts):
            return None
        first, *_, assistant, user = frames
        first.lead = lead
        first.following = {"user": user} if roles[1] == "user" else {"assistant": assistant}
        assistant.following, user.following = {"user": user}, {"assistant": assistant}
        openings[roles[0]] = first
    return PlainChat(openings, trail, cutter) if openings else None


_Around: TypeAlias = tuple[Sequence[str], list[tuple[str, str]], Sequence[str]]


def _around_contents(render: Render, cutter: Cutter, roles: Sequence[str]) -> _Around | None:
    """Pieces before the first turn, (before, after) of each content, pieces behind the last; None: not so made."""
    texts = [f"Xq{n}qX" for n in range(len(roles))]
    try:
        rendered = render(_conversation(roles, texts))
    except Unreadable:
        return None
    gaps = re.split("|".join(texts), rendered)
    turns = [_at_turn_start(gap, cutter.turn_starts) for gap in gaps[1:]]
    if len(gaps) != len(texts) + 1 or any(not before for _, before in turns[:-1]):
        return None
    *lead, first = cutter.cut(gaps[0]) or [""]
    befores = [first, *(before for _, before in turns[:-1])]
    return lead, list(zip(befores, (after for after, _ in turns), strict=True)), cutter.cut(turns[-1][1])


def _at_turn_start(gap: str, turn_starts: Iterable[str]) -> tuple[str, str]:
    """What ends one turn, and what starts the next."""
    at = min((at for mark in turn_starts if (at := gap.find(mark)) >= 0), default=len(gap))
    return gap[:at], gap[at:]


def _may_make_a_turn_start(frame: Frame, mark: str) -> bool:
    """Whether a content could make `mark` out of its neighbours' ends, though it does not hold it."""
    behind = frame.after + mark
    return any(frame.before.endswith(mark[:n]) or behind.startswith(mark[n:]) for n in range(1, len(mark)))


def _by_hint(marks: Iterable[str]) -> Hints:
    grouped: dict[str, list[str]] = {}
    for mark in sorted(marks):
        hint = next((c for c in mark if not (c.isalnum() or c.isspace())), mark)
        grouped.setdefault(hint, []).append(mark)
    return tuple((hint, tuple(group)) for hint, group in grouped.items())


# ---------------------------------------------------------------------------------------------------------------------
# The conversations it is tried on


def _agrees(chat: PlainChat, render: Render, cutter: Cutter, probes: Iterable[Body]) -> bool:
    """Whether it reads like a rendering, wherever it reads; and it reads something."""
    read = 0
    for body in probes:
        asked = chat.read(body)
        if asked is not None:
            read += 1
            try:
                if asked.pieces != cutter.cut(render(body)):
                    return False
            except Unreadable:
                return False
    return read > 0


def _probes(marks: Sequence[str]) -> Iterator[Body]:
    contents = [*_EDGES, *_WORDS, *PROBES, *marks, *(f"a {mark} b" for mark in marks), *_LONG]
    for content in contents:
        for roles in _OPENINGS:
            for length in range(1, len(roles) + 1):
                yield _conversation(roles[:length], [content] * length)
    for at in range(len(contents)):  # next to other contents
        for roles in _OPENINGS:
            yield _conversation(roles, (contents * 2)[at : at + len(roles)])
    for roles in _OPENINGS:
        many = [*roles, *roles[-2:] * 20]
        yield _conversation(many, [f"text {n}" for n in range(len(many))])


def _conversation(roles: Sequence[str], contents: Sequence[str]) -> Body:
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]}


_EDGES = ("a", " a", "a ", "\na", "a\n", "\n\na\n\n", "\ta\t", "\r\na\r\n", "\u00a0a\u3000", " ", "\n")
_WORDS = (
    *("<think>\nhm\n</think>\n\nSo.", "<tool_call>\n{}\n</tool_call>", "[INST] a [/INST]", "<|x|>", "<s>", "/no_think"),
    *("{{ x }}{% if y %}{# z #}", "<b>&amp; 'a' \"b\"</b>", '{"role": "tool"}', "[1, 2]", "a\\nb\\\\", "%s {0} $x"),
    *("none", "None", "null", "true", "False", "0", "-1.5e3", "user", "assistant", "system", "tool", "ÀÉ ß ǅ", "\x00"),
)
_LONG = ("word " * 1_000, "x" * 5_000, "字。" * 2_000)
