"""Workload traces from files: JSON lines, plain or gzipped, told apart by their fields.

| format   | fields that tell it             | blocks                  | arrivals                                    |
| -------- | ------------------------------- | ----------------------- | ------------------------------------------- |
| mooncake | hash_ids                        | 512 or `block_size`     | recorded, in ms                             |
| bailian  | hash_ids, chat_id               | 16 tokens, chained      | recorded, in seconds                        |
| weka     | runs                            | 64 tokens, as recorded  | Poisson sessions, turns wait for each other |
| lmcache  | input (text)                    | 16 tokens, of the text  | recorded, in µs                             |
| plain    | at and messages or prompt       | 16 tokens, of the text  | recorded, in seconds                        |
| lengths  | input_length and none of these  | 16 tokens, never shared | recorded, in ms or seconds                  |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from router.lab.trace_formats import mooncake_block_size, read_bailian, read_lengths, read_mooncake, spread
from router.lab.trace_lines import first_fields
from router.lab.trace_request import Trace, TraceError, TraceRequest
from router.lab.trace_sessions import read_sessions
from router.lab.trace_text import read_lmcache, read_plain

__all__ = ["Format", "Trace", "TraceError", "TraceRequest", "read_trace"]

Format = Literal["auto", "mooncake", "bailian", "weka", "lmcache", "plain", "lengths"]

_BLOCK_SIZES = {"mooncake": 512, "bailian": 16, "weka": 64, "lmcache": 16, "plain": 16, "lengths": 16}
_RECORDED: dict[str, Callable[[Path, int], list[TraceRequest]]] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "lmcache": read_lmcache,
    "plain": read_plain,
    "lengths": read_lengths,
}
_MAY_HAVE_TICKS = ("mooncake", "lengths")


def read_trace(
    path: str | Path,
    *,
    speed: float = 1.0,
    limit: int | None = None,
    skip: int = 0,
    seed: int = 0,
    format: Format = "auto",
    think_cap_s: float = 600.0,
    sessions_per_s: float | None = None,
    spread_ticks: bool = True,
    block_size: int | None = None,
) -> Trace:
    """Reads a trace; its first request arrives at 0.

    speed: divides arrival times, not think times; 4 is four times the load.
    skip, limit: requests in the order of arrival; of weka sessions in the file's order, with their sub-agents.
    seed: decides the places within ticks, and when sessions begin.
    think_cap_s, sessions_per_s: of weka, which needs the latter.
    spread_ticks: see `trace_formats.spread`.
    block_size: tokens; for block ids it has to be the one they were recorded with. None: as in the table above, where a
        `block_size` in the first row counts.

    Raises TraceError with file, line and fault, and OSError for a file that cannot be opened.
    """
    path = Path(path)
    for name, value, fits in (
        ("speed", speed, 0 < speed < math.inf),
        ("limit", limit, limit is None or limit >= 1),
        ("skip", skip, skip >= 0),
        ("think_cap_s", think_cap_s, think_cap_s >= 0),
        ("sessions_per_s", sessions_per_s, sessions_per_s is None or 0 < sessions_per_s < math.inf),
        ("block_size", block_size, block_size is None or block_size >= 1),
        ("format", format, format in get_args(Format)),
    ):
        if not fits:
            raise TraceError(f"{path}: {name} can't be {value!r}")
    kind = _told_by_fields(path) if format == "auto" else format
    if block_size is None and kind == "mooncake":
        block_size = mooncake_block_size(path)
    size = _BLOCK_SIZES[kind] if block_size is None else block_size
    if kind == "weka":
        requests = read_sessions(
            path,
            size,
            sessions_per_s=None if sessions_per_s is None else sessions_per_s * speed,
            think_cap_s=think_cap_s,
            seed=seed,
            skip=skip,
            limit=limit,
        )
    else:
        requests = _RECORDED[kind](path, size)
        if spread_ticks and kind in _MAY_HAVE_TICKS:
            spread(requests, seed)
        requests = requests[skip : None if limit is None else skip + limit]
    if not requests:
        raise TraceError(f"{path}: no requests" + (f" left after skipping {skip}" if skip else ""))
    start, divisor = requests[0].at, 1.0 if kind == "weka" else speed
    for request in requests:
        request.at = (request.at - start) / divisor
    return Trace(path.name.removesuffix(".gz").removesuffix(".jsonl"), size, requests)


def _told_by_fields(path: Path) -> Format:
    fields = first_fields(path)
    if "runs" in fields:
        return "weka"
    if "hash_ids" in fields:
        return "bailian" if "chat_id" in fields else "mooncake"
    if "input" in fields:
        return "lmcache"
    if "messages" in fields or "prompt" in fields:
        return "plain"
    if "input_length" in fields:
        return "lengths"
    raise TraceError(f"{path}: no trace format known to have the fields {', '.join(sorted(fields)) or '(none)'}")
