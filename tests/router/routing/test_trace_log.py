"""What is kept of served requests: the right values, in bounded memory, and nothing anybody wrote."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from router.core import Ask, Outcome, Prompt, Usage
from router.routing.trace_log import TracedRequest, TraceLog, unpack

KEYS = array("Q", range(1_000, 1_040))  # 40 blocks of 16 tokens


def ask(blocks: Sequence[int] = KEYS, *, size: int = 16, session: str | None = None, **prompt: Any) -> Ask:
    tokens = len(blocks) * size
    fields = {"tokens": tokens, "known_tokens": tokens, "keys": {size: array("Q", blocks)}} | prompt
    return Ask("r-1", "m", Prompt(**fields), tenant="acme", session=session)


def outcome(**rest: Any) -> Outcome:
    basis = Outcome(
        "r-1", "m", "acme", "a", 0, 200, "complete", Usage(640, 32), 640, 0, 0, None, "none",
        1_700_000_000.5, 0.0, 0.25, 0.5, True,
    )  # fmt: skip
    return msgspec.structs.replace(basis, **rest)


def kept(log: TraceLog) -> list[TracedRequest]:
    found: list[TracedRequest] = []
    position: int | None = 0
    while position is not None:
        rows, position = log.read(position)
        found += map(unpack, rows)
    return found


def keys_of(row: TracedRequest) -> list[int]:
    return array("Q", row.keys).tolist()


def test_a_row_is_what_a_replay_needs() -> None:
    log = TraceLog(salt=1)
    log.note(ask(turn=3), outcome())
    (row,) = kept(log)
    assert (row.at, row.input_tokens, row.output_tokens, row.turn) == (1_700_000_000.5, 640, 32, 3)
    assert (row.model, row.stream, row.ttft_s, row.instance) == ("m", True, 0.25, "a")
    assert row.block_size == 64
    assert keys_of(row) == [1_003, 1_007, 1_011, 1_015, 1_019, 1_023, 1_027, 1_031, 1_035, 1_039]  # every fourth


@pytest.mark.parametrize(
    ("size", "block_size", "first"),
    [(1, 64, 1_063), (16, 64, 1_003), (48, 96, 1_001), (64, 64, 1_000), (256, 256, 1_000)],
)
def test_blocks_are_whole_ones_of_the_engines(size: int, block_size: int, first: int) -> None:
    log = TraceLog()
    log.note(ask(array("Q", range(1_000, 1_100)), size=size), outcome())
    (row,) = kept(log)
    assert (row.block_size, keys_of(row)[0]) == (block_size, first)


def test_of_several_sizes_the_smallest_names_every_prompt_alike() -> None:
    """Whichever engine of a mixed fleet serves it, the same prompt has the same names."""
    log = TraceLog()
    log.note(ask(keys={16: KEYS, 64: array("Q", range(10))}), outcome())
    (row,) = kept(log)
    assert (row.block_size, keys_of(row)[:2]) == (64, [1_003, 1_007])


def test_a_prompt_without_keys_is_a_length_only() -> None:
    log = TraceLog()
    log.note(ask(keys={}, known_tokens=0), outcome())
    (row,) = kept(log)
    assert (row.input_tokens, row.keys, row.block_size) == (640, b"", 0)


def test_sessions_and_tenants_are_told_apart_and_not_named() -> None:
    log, other = TraceLog(), TraceLog()
    for session in ("alice", "bob", "alice", None, "half a \ud800 pair"):
        log.note(ask(session=session), outcome())
    alice, bob, again, none, odd = [row.session for row in kept(log)]
    assert alice == again
    assert len({alice, bob, odd, 0}) == 4
    assert none == 0
    assert len({row.tenant for row in kept(log)}) == 1
    other.note(ask(session="alice"), outcome())
    assert kept(other)[0].session != alice  # another process, another salt
    packed, _ = log.read(0)
    assert not any(word in row for row in packed for word in (b"alice", b"bob", b"acme"))


@pytest.mark.parametrize(
    ("ended", "is_kept"),
    [
        ({"finish": "complete", "status": 400, "error": "bad_request"}, False),  # the engine refused it
        ({"finish": "upstream_failed", "status": 502, "ttft_s": None}, False),
        ({"finish": "client_gone", "status": 499, "ttft_s": None}, False),
        ({"finish": "client_gone", "status": 499}, True),  # part of an answer is load as well
        ({"finish": "complete", "ttft_s": None, "stream": False}, True),
    ],
)
def test_what_no_engine_answered_is_no_load(ended: dict[str, Any], is_kept: bool) -> None:
    log = TraceLog()
    log.note(ask(), outcome(**ended))
    assert len(log) == is_kept


@pytest.mark.parametrize(
    ("ended", "lengths"),
    [
        ({"usage": None, "events": 7}, (640, 7)),
        ({"usage": None}, (640, 1)),
        ({"usage": Usage(0, 0), "input_tokens": 0}, (1, 1)),
        ({"usage": Usage(640, 2**70), "input_tokens": 2**70}, (100_000_000, 100_000_000)),
    ],
)
def test_lengths_are_such_as_a_request_can_have(ended: dict[str, Any], lengths: tuple[int, int]) -> None:
    log = TraceLog()
    log.note(ask(), outcome(**ended))
    assert [(row.input_tokens, row.output_tokens) for row in kept(log)] == [lengths]


# --- bounds


def test_the_oldest_go_when_there_are_too_many() -> None:
    log = TraceLog(max_requests=2_000)
    for number in range(5_000):
        log.note(ask(), outcome(started_at=float(number)))
    times = [row.at for row in kept(log)]
    assert len(log) == len(times)
    assert 1_000 < len(log) <= 2_000
    assert times == [float(number) for number in range(5_000 - len(log), 5_000)]


def test_the_oldest_go_when_they_take_too_much() -> None:
    log = TraceLog(max_bytes=1 << 20)
    long = array("Q", range(40_000))  # 10,000 names, 80 KB
    for number in range(100):
        log.note(ask(long), outcome(started_at=float(number), input_tokens=640_000))
    assert log.size_bytes <= 1 << 20
    assert [row.at for row in kept(log)] == [float(number) for number in range(87, 100)]


def test_it_takes_what_it_says() -> None:
    asked, ended = ask(array("Q", range(500)), session="s"), outcome()
    tracemalloc.start()
    log = TraceLog()
    for _ in range(5_000):
        log.note(asked, ended)
    said, taken = log.size_bytes, tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.9 < taken / said < 1.1
    assert said / len(log) < 8 * 125 + 160


# --- reading


def test_reading_goes_on_where_it_stopped_whatever_was_dropped() -> None:
    log = TraceLog(max_requests=2_000)
    for number in range(2_000):
        log.note(ask(), outcome(started_at=float(number)))
    rows, position = log.read(0)
    assert position is not None
    assert unpack(rows[-1]).at == position - 1
    log.note(ask(), outcome(started_at=2_000.0))  # drops what was just read, no more
    further, _ = log.read(position)
    assert unpack(further[0]).at == position
    for number in range(2_001, 6_000):
        log.note(ask(), outcome(started_at=float(number)))
    later, _ = log.read(position)
    assert unpack(later[0]).at == 6_000 - len(log)


def test_an_empty_record_is_read_to_its_end() -> None:
    assert TraceLog().read(0) == ([], None)
    assert TraceLog().read(7) == ([], None)


# --- prompts that become known later


FIRST_TURN = {
    "tokens": 640,
    "known_tokens": 0,
    "keys": {16: array("Q")},
    "text_keys": ((71, 300), (72, 640), (73, 650)),
}


def test_a_first_turn_gets_its_keys_from_the_second() -> None:
    log = TraceLog()
    log.note(ask(**FIRST_TURN), outcome())
    log.note(ask(range(5)), outcome())
    assert keys_of(kept(log)[0]) == []
    before = log.size_bytes
    # Its text up to the name 72 turned out to be 600 tokens: nine whole blocks of 64.
    log.note(ask(known_text_keys=((71, 280), (72, 600), (99, 640))), outcome())
    first, other, second = kept(log)
    assert keys_of(first) == keys_of(second)[:9]
    assert first.block_size == 64
    assert (first.input_tokens, first.at) == (640, 1_700_000_000.5)
    assert keys_of(other) == [3]
    assert log.size_bytes - before == 9 * 8 + len(log.read(0)[0][2]) + 48


def test_what_is_found_later_may_be_longer_never_shorter() -> None:
    log = TraceLog()
    log.note(ask(**FIRST_TURN), outcome())
    log.note(ask(known_text_keys=((71, 280),)), outcome())
    assert len(keys_of(kept(log)[0])) == 4
    log.note(ask(known_text_keys=((73, 640),)), outcome())
    assert len(keys_of(kept(log)[0])) == 10
    log.note(ask(known_text_keys=((72, 200),)), outcome())
    assert len(keys_of(kept(log)[0])) == 10


def test_siblings_that_were_all_unknown_all_get_their_keys() -> None:
    log = TraceLog()
    for _ in range(3):
        log.note(ask(**FIRST_TURN), outcome())
    log.note(ask(known_text_keys=((73, 640),)), outcome())
    assert [len(keys_of(row)) for row in kept(log)] == [10] * 4


def test_a_row_that_was_dropped_is_let_be() -> None:
    log = TraceLog(max_requests=1_000)
    log.note(ask(**FIRST_TURN), outcome())
    for _ in range(2_000):
        log.note(ask(), outcome())
    log.note(ask(known_text_keys=((73, 640),)), outcome())
    assert {len(keys_of(row)) for row in kept(log)} == {10}


def test_texts_that_never_become_known_take_bounded_memory() -> None:
    log = TraceLog(max_requests=1_000)
    for number in range(6_000):
        names = tuple((number * 8 + n, 640) for n in range(8))
        log.note(ask(**FIRST_TURN | {"text_keys": names}), outcome())
        log.note(ask(**FIRST_TURN), outcome())
    assert len(log) <= 1_000
    assert len(log._unknown) <= 1 << 14
    assert max(map(len, log._unknown.values())) <= 64
