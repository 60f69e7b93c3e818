"""Finished runs, and the file that keeps them: one JSON line each, so that a grid goes on where it was stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import msgspec

from router.lab.measures import Measures


class Key(msgspec.Struct, frozen=True):
    cell: str
    arm: str
    seed: int


class Run(msgspec.Struct, frozen=True):
    """tag: of the code it was made with. tenant_p90_s: TTFT by tenant, with "NAME alone" for one without the others."""

    cell: str
    arm: str
    seed: int
    tag: str
    took_s: float
    measures: Measures
    tenant_p90_s: dict[str, float | None] = {}

    @property
    def key(self) -> Key:
        return Key(self.cell, self.arm, self.seed)


class State(msgspec.Struct):
    """unreadable: lines of an earlier shape, or cut off when the machine went down."""

    runs: dict[Key, Run]
    other_tags: int
    unreadable: int


def read(file: Path, tag: str) -> State:
    """What was done with the same code. Raises OSError for a file that is there and cannot be read."""
    state = State({}, 0, 0)
    if not file.exists():
        return state
    for line in file.read_bytes().splitlines():
        try:
            run = msgspec.json.decode(line, type=Run)
        except (msgspec.DecodeError, UnicodeDecodeError):
            state.unreadable += 1
            continue
        if run.tag == tag:
            state.runs[run.key] = run
        else:
            state.other_tags += 1
    return state


def append(file: Path, run: Run) -> None:
    """In one write, since several processes do it at once."""
    line = msgspec.json.encode(run) + b"\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def end_last_line(file: Path) -> None:
    """A line that was cut off must not swallow the next one. Raises OSError where it cannot be written."""
    with open(file, "a+b") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read() != b"\n":
                stream.write(b"\n")


def code_tag(packages: Iterable[str]) -> str:
    """A name for the source of all modules that are loaded from these packages."""
    sources = {
        name: file
        for name, module in sys.modules.items()
        if name.partition(".")[0] in packages or name in packages
        if (file := getattr(module, "__file__", None))
    }
    digest = sha256()
    for name in sorted(sources):
        digest.update(name.encode() + b"\0" + Path(sources[name]).read_bytes())
    return digest.hexdigest()[:12]
