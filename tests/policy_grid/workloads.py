"""What the cells of the grid replay: parts of recorded traces, and traces made to a recipe.

Every maker takes the folder of trace files and a seed. Of recorded traces each seed has a part of its own, so that
seeds are independent of each other; all arms of a cell replay the same parts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from router.lab.traces import Trace, TraceError, TraceRequest, read_trace

Make = Callable[[Path, int], Trace]

CONVERSATION = "mooncake_conversation"
SYNTHETIC = "mooncake_synthetic"
TOOL_AGENT = "toolagent_like"
WEKA = "weka_agentic"

WEKA_BLOCKS_MERGED = 8
"""512 tokens, as the other traces have: an eighth of the work, and the same hit rates to half a point."""


class Segment(msgspec.Struct, frozen=True):
    """`length` requests of a trace, those of seed s from `first + s * apart` on. length None: all from there."""

    file: str
    length: int | None
    first: int = 0
    apart: int = 0


def trace_file(folder: Path, name: str) -> Path | None:
    """Plain or gzipped; None where there is neither."""
    return next((file for end in ("jsonl", "jsonl.gz") if (file := folder / f"{name}.{end}").is_file()), None)


def segment(part: Segment, speed: float) -> Make:
    """At `speed` times the recorded load."""

    def make(folder: Path, seed: int) -> Trace:
        skip = part.first + seed * part.apart
        return read_trace(_file(folder, part.file), speed=speed, skip=skip, limit=part.length, seed=seed)

    return make


def sessions(count: int, per_s: float) -> Make:
    """Agentic sessions, `count` for each seed, as long as new ones begin.

    The longest sessions go on for ten hours after the last has begun, alone: that would be an idle fleet.
    """

    def make(folder: Path, seed: int) -> Trace:
        file = _file(folder, WEKA)
        trace = read_trace(file, sessions_per_s=per_s, skip=seed * count, limit=count, seed=seed)
        return merged_blocks(while_sessions_begin(trace), WEKA_BLOCKS_MERGED)

    return make


def while_sessions_begin(trace: Trace) -> Trace:
    """Without what comes, by the recorded pace, after the last session's beginning."""
    last = max(request.at for request in trace.requests if request.after is None)
    return _with(trace, [request for request in trace.requests if request.at <= last])


def merged_blocks(trace: Trace, count: int) -> Trace:
    """`count` blocks become one. It has the name of the last of them, which stands for all before it."""
    requests = [
        msgspec.structs.replace(request, blocks=request.blocks[count - 1 :: count]) for request in trace.requests
    ]
    return Trace(trace.name, trace.block_size * count, requests)


def overload_then_recovery(part: Segment, *, high: float, high_s: float, low: float) -> Make:
    """At `high` times the recorded load for `high_s` seconds, then at `low` times."""
    recorded = segment(part, 1.0)

    def at(recorded_at: float) -> float:
        over = recorded_at - high_s * high
        return recorded_at / high if over <= 0 else high_s + over / low

    def make(folder: Path, seed: int) -> Trace:
        trace = recorded(folder, seed)
        requests = [msgspec.structs.replace(request, at=at(request.at)) for request in trace.requests]
        return _with(trace, requests)

    return make


def only_tenant(trace: Trace, tenant: str) -> Trace:
    return _with(trace, [request for request in trace.requests if request.tenant == tenant])


def _with(trace: Trace, requests: list[TraceRequest]) -> Trace:
    return msgspec.structs.replace(trace, requests=requests)


def _file(folder: Path, name: str) -> Path:
    file = trace_file(folder, name)
    if file is None:
        raise TraceError(f"{folder}: no {name}.jsonl or {name}.jsonl.gz")
    return file
