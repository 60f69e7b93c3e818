"""The engines of a replay as they are named on the command line, and those that a file adds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from router.config.source import nearest, read
from router.core import Rates
from router.errors import ConfigError
from router.lab.fleet_model import EngineSpec
from router.lab.profiles import PROFILES, Profile
from router.lab.replay import Outage

DEFAULT_ENGINE = "llama-3.1-8b-h100"
DEFAULT_COUNT = 8
MOST_ENGINES = 1_000

_Tokens = Annotated[int, Meta(ge=1)]
_Ms = Annotated[float, Meta(ge=0)]


class EngineEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One engine of an engine file; what it leaves out is as in the engine that it is `like`."""

    like: str = DEFAULT_ENGINE
    rates: dict[str, _Ms] = {}  # some of core.Rates
    capacity_tokens: _Tokens | None = None
    max_batched_tokens: _Tokens | None = None
    max_num_seqs: _Tokens | None = None


def engine_specs(
    named: Sequence[str], count: int | None, known: Mapping[str, Profile], *, chunk: int | None
) -> list[EngineSpec]:
    """`named`: NAME or COUNTxNAME each. `count`: how many of the only one. Raises ConfigError."""
    counted = [_counted(text) for text in named or [DEFAULT_ENGINE]]
    if len(counted) == 1 and counted[0][0] is None:
        counted = [(DEFAULT_COUNT if count is None else count, counted[0][1])]
    elif count is not None:
        raise ConfigError([f"--engines {count} is for one engine's name; here it is --engine COUNTxNAME for each"])
    specs: list[EngineSpec] = []
    for how_many, name in counted:
        if name not in known:
            raise ConfigError([f"no engine {name!r}{_close(name, known)}; known: {', '.join(known)}"])
        specs += [EngineSpec(known[name], max_batched_tokens=chunk)] * (1 if how_many is None else how_many)
    if not 1 <= len(specs) <= MOST_ENGINES:
        raise ConfigError([f"{len(specs)} engines; it has to be 1 to {MOST_ENGINES:,}"])
    return specs


def known_engines(file: Path | None) -> dict[str, Profile]:
    """Ours and those of an engine file, by name. Raises ConfigError with every mistake in the file.

    The file is YAML or JSON: a mapping of names to EngineEntry, each like one of ours or one further up in it.
    """
    known = dict(PROFILES)
    if file is None:
        return known
    source = read(file, {})
    if not source.mistakes:
        for name, entry in source.data.items():
            try:
                known[name] = _profile(name, msgspec.convert(entry, EngineEntry), known)
            except ValueError as error:
                source.blame((name,), str(error))
    if source.mistakes:
        raise ConfigError(source.mistakes)
    return known


def parse_outage(text: str, engines: int) -> Outage:
    """ENGINE:AT:BACK. Raises ConfigError."""
    try:
        number, at, back = text.split(":")
        outage = Outage(int(number), float(at), float(back))
    except ValueError:
        raise ConfigError([f"--outage {text}: it has to be ENGINE:AT:BACK, as in 0:60:90"]) from None
    if not 0 <= outage.engine < engines:
        raise ConfigError([f"--outage {text}: engines are numbered from 0 to {engines - 1}"])
    if not 0 <= outage.at_s < outage.back_s < math.inf:
        raise ConfigError([f"--outage {text}: it has to end after it began, in seconds from the start"])
    return outage


def _counted(text: str) -> tuple[int | None, str]:
    found = re.fullmatch(r"(\d{1,6})x(.+)", text)
    return (int(found[1]), found[2]) if found else (None, text)


def _profile(name: str, entry: EngineEntry, known: Mapping[str, Profile]) -> Profile:
    if entry.like not in known:
        raise ValueError(f"like: no engine {entry.like!r}{_close(entry.like, known)}; known: {', '.join(known)}")
    strange = entry.rates.keys() - set(Rates.__struct_fields__)
    if strange:
        raise ValueError(f"rates: no {', '.join(sorted(strange))}; known: {', '.join(Rates.__struct_fields__)}")
    like = known[entry.like]
    rates = msgspec.convert({**msgspec.structs.asdict(like.rates), **entry.rates}, Rates, strict=False)
    tokens = entry.max_batched_tokens or like.max_batched_tokens
    seqs = entry.max_num_seqs or min(like.max_num_seqs, tokens)
    if seqs > tokens:
        raise ValueError(f"max_num_seqs: {seqs:,} can't all have a token of max_batched_tokens, {tokens:,}")
    return Profile(name, rates, entry.capacity_tokens or like.capacity_tokens, tokens, seqs)


def _close(name: str, known: Mapping[str, Profile]) -> str:
    meant = nearest(name, known)
    return f" (did you mean {meant!r}?)" if meant else ""
