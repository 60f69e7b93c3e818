"""Traces of agentic sessions: turns that wait for the turn before them, as `weka_agentic` records them.

A row: `session`, `turn`, `t` (when it was sent, seconds from the start of its session), `think` (seconds the client
paused before it), `api` (seconds the recorded server took), `model`, lengths, `runs` = [[first, count], ...] of block
ids; the first row of a session also `tool_tokens` and `system_tokens`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from router.lab.trace_lines import BadRow, InputTokens, OutputTokens, at_line, check_blocks, produced, rows
from router.lab.trace_request import TraceError, TraceRequest

_ID_BITS = 32
_SHARED = 1 << 63  # names of prefixes that sessions share, apart from those of their own
_Seconds = Annotated[float, Meta(ge=0)]
_Tokens = Annotated[int, Meta(ge=0)]
_Id = Annotated[int, Meta(ge=0, lt=1 << _ID_BITS)]


class _TurnRow(msgspec.Struct):
    session: str
    turn: Annotated[int, Meta(ge=0)]
    input_length: InputTokens
    runs: list[tuple[_Id, _Id]]
    t: _Seconds = 0.0
    think: _Seconds | None = None
    api: _Seconds | None = None
    output_length: OutputTokens = None
    model: str = ""
    tool_tokens: _Tokens = 0
    system_tokens: _Tokens = 0


_Session = list[_TurnRow]
_Group = dict[str, _Session]
"""A session and its sub-agents, by name."""


def read_sessions(
    path: Path,
    block_size: int,
    *,
    sessions_per_s: float | None,
    think_cap_s: float,
    seed: int,
    skip: int,
    limit: int | None,
) -> list[TraceRequest]:
    """Sessions begin by a Poisson process of `sessions_per_s`, in the file's order; `skip` and `limit` count them.

    Turn k+1 is released min(think, think_cap_s) after turn k is complete. A sub-agent (`trace_0003/agent_001`) is a
    session of its own that comes along with its parent: its first turn is released by the parent's turn during or after
    which it began, after the recorded pause under the same cap; with its parent where none had begun. The parent does
    not wait for it, since its recorded pause has that time in it already.

    Block ids are private to the part of the name before "/". Sessions whose first turns have equal (model, tool_tokens,
    system_tokens) share the first (tool_tokens + system_tokens) // block_size blocks of those, wherever they reappear.
    """
    if sessions_per_s is None:
        raise TraceError(f"{path}: its sessions have no arrival times; say how many begin in a second (sessions_per_s)")
    groups = _read_groups(path, block_size)
    rng, names, start = random.Random(seed), _Names(block_size), 0.0
    requests: list[TraceRequest] = []
    chosen = islice(enumerate(groups.items()), skip, None if limit is None else skip + limit)
    for index, (root, group) in chosen:
        start += rng.expovariate(sessions_per_s)
        names.enter(index, group.values())
        requests += _requests(root, group, names, start, think_cap_s)
    requests.sort(key=lambda request: request.at)  # stable: a turn of the same instant stays behind the one before it
    return requests


def _read_groups(path: Path, block_size: int) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    seen: set[tuple[str, int]] = set()
    for number, row in rows(path, _TurnRow):
        try:
            check_blocks(sum(count for _, count in row.runs), row.input_length, block_size)
            if any(first + count > 1 << _ID_BITS for first, count in row.runs):
                raise BadRow(f"a block id of more than {_ID_BITS} bits")
            if (row.session, row.turn) in seen:
                raise BadRow(f"turn {row.turn} of session {row.session!r} a second time")
        except BadRow as error:
            raise at_line(path, number, error) from None
        seen.add((row.session, row.turn))
        groups.setdefault(_root(row.session), {}).setdefault(row.session, []).append(row)
    for group in groups.values():
        for session in group.values():
            session.sort(key=lambda row: row.turn)
    return groups


def _requests(root: str, group: _Group, names: _Names, start: float, think_cap_s: float) -> Iterable[TraceRequest]:
    parents: list[tuple[_TurnRow, TraceRequest]] = []
    for name, session in sorted(group.items()):  # by name: sub-agents behind their parent
        before = None if name == root else _begun_by(session[0].t, parents)
        first_pause = 0.0 if before is None else max(0.0, session[0].t - before[0].t - _took(before[0]))
        pauses = [first_pause, *(row.think or 0.0 for row in session[1:])]
        for row, pause in zip(session, pauses, strict=True):
            think = min(pause, think_cap_s)
            request = TraceRequest(
                id=f"{name}:{row.turn + 1}",
                at=start if before is None else before[1].at + _took(before[0]) + think,
                input_tokens=row.input_length,
                output_tokens=produced(row.output_length),
                blocks=names.of(row),
                session=name,
                turn=row.turn + 1,
                think_s=think,
                after=None if before is None else before[1].id,
            )
            before = row, request
            if name == root:
                parents.append(before)
            yield request


def _begun_by(t: float, parents: Sequence[tuple[_TurnRow, TraceRequest]]) -> tuple[_TurnRow, TraceRequest] | None:
    """The last of the parent's turns that had begun by then."""
    return next((parent for parent in reversed(parents) if parent[0].t <= t), None)


def _took(row: _TurnRow) -> float:
    """Seconds the recorded server took, 0 where that is not known."""
    return row.api or 0.0


def _root(session: str) -> str:
    return session.partition("/")[0]


class _Names:
    """Names for the blocks of one group of sessions after another, in one space for all."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._shared: dict[tuple[str, int, int], int] = {}
        self._heads: dict[int, int] = {}  # name of its own -> shared name, of the group at hand
        self._own = 0

    def enter(self, index: int, sessions: Iterable[_Session]) -> None:
        """The `index`-th group of the file is at hand."""
        self._own = index << _ID_BITS
        self._heads = {}
        for session in sessions:
            first = session[0]
            head = self._of_runs(first.runs)[: (first.tool_tokens + first.system_tokens) // self._block_size]
            if not head or head[0] in self._heads:
                continue  # it begins like a session before it in this group, and shares what that one shares
            kind = (first.model, first.tool_tokens, first.system_tokens)
            base = _SHARED | self._shared.setdefault(kind, len(self._shared)) << _ID_BITS
            self._heads.update((name, base + depth) for depth, name in enumerate(head))

    def of(self, row: _TurnRow) -> array[int]:
        names = self._of_runs(row.runs)
        for depth, name in enumerate(names):
            shared = self._heads.get(name)
            if shared is None:
                break
            names[depth] = shared
        return names

    def _of_runs(self, runs: Iterable[tuple[int, int]]) -> array[int]:
        names = array("Q")
        for first, count in runs:
            names.extend(range(self._own + first, self._own + first + count))
        return names
