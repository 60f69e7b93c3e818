"""The block index: events applied a second, look-up time, bytes a block.

python -m tests.bench.index
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from router.core import Removed, Stored
from router.routing.blocks import chain, root_key
from router.routing.index import BlockIndex
from router.routing.recent import RecentDispatches
from router.routing.sent import SentIndex
from router.routing.slots import Slot
from tests.bench.table import Row, report

TAKES_S = 18
SECRET = b"bench"
SIZE = 16


def run() -> dict[str, Any]:
    """CPU time, and the best of some rounds: the machine may be shared."""
    return {
        "chain_ns_per_block": chain_ns_per_block(),
        "stored_32_blocks_per_s": stored_blocks_per_s(),
        "single_events_per_s": single_events_per_s(),
        "single_events_per_s_after_2m_blocks": single_events_per_s(after=2_000_000),
        **match_us(),
        **bytes_per_block(),
        **side_tables_us(),
    }


def chain_ns_per_block() -> float:
    tokens = array("I", _tokens(100_000))
    return round(_best(lambda: chain(1, tokens, SIZE), rounds=20) / (100_000 // SIZE) * 1e9, 1)


def stored_blocks_per_s(events: int = 2_000) -> float:
    """32 blocks an event, keyed and stored: a prefill chunk of 512 tokens."""
    hashes = count(1)
    made = [
        Stored([_mix(next(hashes)) for _ in range(32)], None, _tokens(32 * SIZE), SIZE, salt=str(n % 8))
        for n in range(events)
    ]

    def once() -> None:
        index, slot = _index()
        for event in made:
            index.apply(slot, event)

    return round(events * 32 / _best(once, rounds=5))


def single_events_per_s(events: int = 20_000, *, after: int = 0) -> float:
    """One block stored, one removed, in turn: a full engine at work. Two events a pair."""
    index, slot = _index()
    _fill(index, slot, after)
    made: list[Stored | Removed] = []
    for n in range(events // 2):
        name = _mix(n + 10**9)
        made += [Stored([name], None, _tokens(SIZE), SIZE), Removed([name])]

    def once() -> None:
        for event in made:
            index.apply(slot, event)

    return round(events / _best(once, rounds=5))


def match_us() -> dict[str, float]:
    """A prompt of 100,000 tokens among 8 ranks that hold different parts of it, and short ones."""
    index = BlockIndex(SECRET, clock=time.perf_counter)
    tokens = _tokens(100_000)
    keys = chain(root_key(SECRET, "m", None, None), tokens, SIZE)
    for rank in range(8):
        slot = index.open("e", rank, model="m")
        depth = len(keys) * (rank + 1) // 8
        names = [_mix(n) for n in range(depth)]
        index.apply(slot, Stored(names, None, tokens[: depth * SIZE], SIZE))
    stranger = chain(7, tokens, SIZE)
    return {
        "match_6250_keys_8_slots_us": _us(lambda: index.match(keys, SIZE)),
        "match_16_keys_8_slots_us": _us(lambda: index.match(keys[:16], SIZE)),
        "match_6250_keys_nobody_us": _us(lambda: index.match(stranger, SIZE)),
    }


def bytes_per_block(blocks: int = 200_000) -> dict[str, float]:
    """Traced size of one block that one rank holds, and of the same block on each further rank."""
    gc.collect()
    tracemalloc.start()
    index, slot = _index()
    empty = tracemalloc.get_traced_memory()[0]
    _fill(index, slot, blocks)
    one = tracemalloc.get_traced_memory()[0]
    other = index.open("e", 1, model="m")
    _fill(index, other, blocks)
    two = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "bytes_per_block_first_rank": round((one - empty) / blocks, 1),
        "bytes_per_block_second_rank": round((two - one) / blocks, 1),
        "bytes_per_block_estimated": round(index.stats().bytes / blocks, 1),
    }


def side_tables_us() -> dict[str, float]:
    keys = chain(1, _tokens(100_000), SIZE)
    recent = RecentDispatches(clock=time.perf_counter)
    index = BlockIndex(SECRET, clock=time.perf_counter)
    sent = SentIndex(index, clock=time.perf_counter)
    slot = sent.open("e", 0, model="m", block_size=SIZE, capacity_tokens=400_000)
    return {
        "recent_insert_6250_keys_us": _us(lambda: recent.insert("d", ("e", 0), keys, SIZE)),
        "recent_match_6250_keys_us": _us(lambda: recent.match("d", keys, SIZE)),
        "sent_6250_keys_us": _us(lambda: sent.sent(slot, keys), repeat=20),
    }


def _index() -> tuple[BlockIndex, Slot]:
    index = BlockIndex(SECRET, clock=time.perf_counter)
    return index, index.open("e", 0, model="m")


def _fill(index: BlockIndex, slot: Slot, blocks: int) -> None:
    for first in range(0, blocks, 32):
        names = [_mix(first + n) for n in range(32)]
        index.apply(slot, Stored(names, None, [first, *range(32 * SIZE - 1)], SIZE))


def _tokens(n: int) -> list[int]:
    return random.Random(n).choices(range(150_000), k=n)


def _mix(n: int) -> int:
    return (n + 1) * 0x9E3779B97F4A7C15 % 2**64  # names as spread out as an engine's


def _best(action: Callable[[], object], *, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        action()
        best = min(best, time.process_time() - began)
    return best


def _us(action: Callable[[], object], *, repeat: int = 200) -> float:
    def block() -> None:
        for _ in range(repeat):
            action()

    return round(_best(block, rounds=5) / repeat * 1e6, 2)


def rows(figures: dict[str, Any]) -> Iterator[Row]:
    """Steps of ours beside the one they build on."""
    against = {
        "single_events_per_s_after_2m_blocks": "single_events_per_s",
        "match_6250_keys_8_slots_us": "match_6250_keys_nobody_us",
        "bytes_per_block_second_rank": "bytes_per_block_first_rank",
        "bytes_per_block_estimated": "bytes_per_block_first_rank",
    }
    for name, value in figures.items():
        unit = next(unit for mark, unit in UNITS.items() if mark in name)
        baseline = against.get(name)
        label = (baseline or "").replace("_", " ")
        yield Row(name.replace("_", " "), value, unit, figures[baseline] if baseline else None, label)


UNITS = {"_ns_": "ns", "_us": "µs", "bytes_": "B", "_per_s": "/s"}


if __name__ == "__main__":
    report(__doc__, run, rows)
