from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from router.lab.bounds import hit_bounds
from router.lab.trace_formats import spread
from router.lab.traces import Trace, TraceError, TraceRequest, read_trace

WriteTrace = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteTrace:
    def write(*rows: dict[str, Any] | str, name: str = "sample.jsonl") -> Path:
        file = tmp_path / name
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return file

    return write


def mooncake(ms: float, tokens: int, ids: list[int], output: int | None = 10) -> dict[str, Any]:
    return {"timestamp": ms, "input_length": tokens, "output_length": output, "hash_ids": ids}


def turn(session: str, number: int, runs: list[list[int]], **more: Any) -> dict[str, Any]:
    tokens = 64 * sum(count for _, count in runs)
    return {"session": session, "turn": number, "input_length": tokens, "output_length": 5, "runs": runs, **more}


def by_id(trace: Trace) -> dict[str, TraceRequest]:
    assert len({request.id for request in trace.requests}) == len(trace.requests)
    return {request.id: request for request in trace.requests}


def arrivals(trace: Trace) -> list[float]:
    return [request.at for request in trace.requests]


# Mooncake


def test_mooncake(write: WriteTrace) -> None:
    file = write(mooncake(27_482, 1_100, [46, 47, 48], 500), "", mooncake(30_535, 512, [46], 0), name="day.jsonl")
    trace = read_trace(file)
    assert (trace.name, trace.block_size) == ("day", 512)
    first, second = trace.requests
    assert (first.id, first.at, first.input_tokens, first.output_tokens) == ("1", 0.0, 1_100, 500)
    assert list(first.blocks) == [46, 47, 48]
    assert (first.session, first.turn, first.tenant, first.after) == ("", 1, "", None)
    assert second.id == "3"  # the line, blank ones counted
    assert second.at == pytest.approx(3.053)
    assert second.output_tokens == 1  # whoever computes a prompt produces one token


def test_gzip_is_read_the_same(write: WriteTrace, tmp_path: Path) -> None:
    plain = write(mooncake(0, 600, [1, 2]), mooncake(700, 100, [3]))
    packed = tmp_path / "sample.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed) == read_trace(plain)


def test_rows_out_of_order_are_put_in_order_of_arrival(write: WriteTrace) -> None:
    trace = read_trace(write(mooncake(900, 10, [1]), mooncake(150, 10, [2]), mooncake(151, 10, [3])))
    assert [request.id for request in trace.requests] == ["2", "3", "1"]
    assert arrivals(trace) == pytest.approx([0, 0.001, 0.75])


def test_speed_divides_arrival_times(write: WriteTrace) -> None:
    file = write(mooncake(500, 10, [1]), mooncake(2_531, 10, [2]), mooncake(8_500, 10, [3]))
    assert arrivals(read_trace(file, speed=4)) == pytest.approx([0, 2.031 / 4, 2])


def test_skip_and_limit_cut_a_piece_that_begins_at_zero(write: WriteTrace) -> None:
    file = write(*(mooncake(1_000 * n + n, 10, [n]) for n in range(6)))
    piece = read_trace(file, skip=2, limit=3)
    assert [request.id for request in piece.requests] == ["3", "4", "5"]
    assert arrivals(piece) == pytest.approx([0, 1.001, 2.002])


def test_block_size_can_be_said(write: WriteTrace) -> None:
    trace = read_trace(write(mooncake(0, 100, [1, 2, 3, 4])), block_size=32)
    assert trace.block_size == 32
    assert trace.requests[0].blocks[3] == 4


# A coarse clock

NESTED = "[" * 100_000 + "]" * 100_000
TICKED = [0, 0, 0, 2_999, 3_000, 3_002, 9_000, 9_000]  # of 3 s, with the jitter of Mooncake's


def ticked(write: WriteTrace) -> Path:
    return write(*(mooncake(ms, 10, [n]) for n, ms in enumerate(TICKED)))


def test_ticks_are_spread_each_within_its_own_and_in_order() -> None:
    requests = [TraceRequest(str(n), 50 + ms / 1000, 10, 1, ()) for n, ms in enumerate(TICKED)]
    spread(requests, seed=0)
    at = [request.at - 50 for request in requests]
    assert [int(seconds // 3) for seconds in at] == [0, 0, 0, 1, 1, 1, 3, 3]
    assert at == sorted(at)
    assert len(set(at)) == 8


def test_places_within_ticks_are_even(write: WriteTrace) -> None:
    file = write(*(mooncake(3_000 * (n // 100), 10, [n]) for n in range(4_000)))
    at = arrivals(read_trace(file))
    gaps = [b - a for a, b in pairwise(at)]
    assert max(gaps) < 0.4  # 3 s / 100 on average; unspread it is 3
    assert at[-1] == pytest.approx(120, abs=0.5)


def test_the_seed_decides_the_places(write: WriteTrace) -> None:
    file = ticked(write)
    assert read_trace(file, seed=1) == read_trace(file, seed=1)
    assert arrivals(read_trace(file, seed=1)) != arrivals(read_trace(file, seed=2))


def test_a_piece_has_the_places_of_the_whole(write: WriteTrace) -> None:
    file = ticked(write)
    whole, piece = arrivals(read_trace(file)), arrivals(read_trace(file, skip=3, limit=4))
    assert piece == pytest.approx([at - whole[3] for at in whole[3:7]])


def test_spreading_can_be_turned_off(write: WriteTrace) -> None:
    assert arrivals(read_trace(ticked(write), spread_ticks=False)) == pytest.approx([ms / 1000 for ms in TICKED])


@pytest.mark.parametrize(
    "ms",
    [
        [0, 0, 1_400, 2_030, 3_000],  # no common tick
        [0, 0, 500, 500, 1_000],  # a fine clock
        [0, 0, 30_000, 30_000, 60_000],  # bursts
        [0, 1_000, 2_000, 3_000],  # nobody shares a tick: may be meant so
        [7, 7, 7],
    ],
)
def test_other_arrivals_stay_as_they_are(write: WriteTrace, ms: list[int]) -> None:
    trace = read_trace(write(*(mooncake(at, 10, [n]) for n, at in enumerate(ms))))
    assert arrivals(trace) == pytest.approx([(at - ms[0]) / 1000 for at in ms])


# Qwen-Bailian


def chat(id: int, parent: int, seconds: float, ids: list[int], turn: int = 1) -> dict[str, Any]:
    return {
        "chat_id": id,
        "parent_chat_id": parent,
        "timestamp": seconds,
        "input_length": 16 * len(ids),
        "output_length": 132,
        "type": "text",
        "turn": turn,
        "hash_ids": ids,
    }


def test_bailian_chats_form_sessions_at_their_recorded_times(write: WriteTrace) -> None:
    trace = read_trace(
        write(
            chat(55, -1, 0.0, [1]),
            chat(80, 7, 1.0, [2], turn=4),  # its parent came before the trace began
            chat(159, 55, 61.114, [3], turn=2),
            chat(81, 7, 61.114, [4], turn=5),
            chat(200, 159, 90.5, [5], turn=3),
        )
    )
    assert trace.block_size == 16
    assert [request.session for request in trace.requests] == ["55", "7", "55", "7", "55"]
    assert [request.turn for request in trace.requests] == [1, 4, 2, 5, 3]
    assert arrivals(trace) == pytest.approx([0, 1, 61.114, 61.114, 90.5])
    assert {request.after for request in trace.requests} == {None}


def test_bailian_names_stand_for_all_before_them(write: WriteTrace) -> None:
    trace = read_trace(write(chat(1, -1, 0, [5, 6, 7]), chat(2, -1, 1, [5, 6, 8]), chat(3, -1, 2, [9, 6, 7])))
    first, second, third = (list(request.blocks) for request in trace.requests)
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    assert not set(third) & set(first)


# Sessions


def weka(file: Path, **options: Any) -> Trace:
    return read_trace(file, **{"sessions_per_s": 1.0, **options})


def test_turns_wait_for_the_turn_before_and_a_pause(write: WriteTrace) -> None:
    trace = weka(
        write(
            turn("trace_0001", 0, [[1, 10]], t=0.0, think=0.0, api=7.5, tool_tokens=0, system_tokens=0),
            turn("trace_0001", 1, [[1, 12]], t=19.0, think=12.0, api=9.0),
            turn("trace_0001", 2, [[1, 12], [40, 3]], t=5_028.0, think=5_000.0, api=None),
            turn("trace_0001", 3, [[1, 12], [40, 4]], t=5_100.0, think=None, output_length=0),
        ),
        think_cap_s=600,
    )
    assert trace.block_size == 64
    first, second, third, fourth = trace.requests
    assert [request.turn for request in trace.requests] == [1, 2, 3, 4]
    assert {request.session for request in trace.requests} == {"trace_0001"}
    assert first.after is None
    assert (second.after, third.after, fourth.after) == (first.id, second.id, third.id)
    assert [request.think_s for request in trace.requests] == [0, 12, 600, 0]
    assert arrivals(trace) == pytest.approx([0, 19.5, 628.5, 628.5])  # the recorded pace, pauses capped
    assert fourth.output_tokens == 1
    assert [len(request.blocks) for request in trace.requests] == [10, 12, 15, 16]
    assert list(second.blocks[:10]) == list(first.blocks)
    assert third.blocks[12] - third.blocks[0] == 39


def test_speed_brings_sessions_closer_but_not_turns(write: WriteTrace) -> None:
    rows = [turn(f"s{n}", k, [[1, 1]], think=30.0, api=1.0) for n in range(5) for k in range(2)]
    file = write(*rows)
    slow, fast = by_id(weka(file)), by_id(weka(file, speed=4))
    for n in range(5):
        assert fast[f"s{n}:1"].at == pytest.approx(slow[f"s{n}:1"].at / 4)
        assert fast[f"s{n}:2"].think_s == 30
        assert fast[f"s{n}:2"].at == pytest.approx(fast[f"s{n}:1"].at + 31)


def test_sessions_begin_as_often_as_asked(write: WriteTrace) -> None:
    file = write(*(turn(f"s{n}", 0, [[1, 1]]) for n in range(2_000)))
    trace = weka(file, sessions_per_s=0.2)
    assert [request.session for request in trace.requests] == [f"s{n}" for n in range(2_000)]
    assert trace.requests[-1].at == pytest.approx(10_000, rel=0.1)
    gaps = [b - a for a, b in pairwise(arrivals(trace))]
    assert sum(gap < 5 * 0.693 for gap in gaps) == pytest.approx(1_000, rel=0.1)  # the median of an exponential
    assert weka(file, sessions_per_s=0.2) == trace
    assert arrivals(weka(file, sessions_per_s=0.2, seed=1)) != arrivals(trace)


def test_order_is_of_arrival_over_all_sessions(write: WriteTrace) -> None:
    rows = [turn(f"s{n}", k, [[1, 1]], think=3.0) for k in (2, 0, 1) for n in range(10)]
    trace = weka(write(*rows))
    assert arrivals(trace) == sorted(arrivals(trace))
    assert len({request.session for request in trace.requests[:5]}) > 1
    done: set[str] = set()
    for request in trace.requests:
        assert request.after == (None if request.turn == 1 else f"{request.session}:{request.turn - 1}")
        assert request.after is None or request.after in done
        done.add(request.id)


def agents(write: WriteTrace) -> Path:
    return write(
        turn("p", 0, [[1, 10]], t=0.0, think=0.0, api=7.0),
        turn("p/agent_001", 0, [[500, 4]], t=134.0, think=0.0, api=2.0),
        turn("p/agent_001", 1, [[500, 5]], t=140.0, think=4.0, api=2.0),
        turn("p", 1, [[1, 12]], t=153.0, think=146.0, api=20.0),
        turn("p/agent_002", 0, [[500, 3]], t=160.0, think=0.0, api=2.0),
        turn("q", 0, [[1, 10]], t=0.0),
    )


def test_sub_agents_are_released_by_the_turn_of_their_parent_they_began_in(write: WriteTrace) -> None:
    requests = by_id(weka(agents(write)))
    first, second = requests["p/agent_001:1"], requests["p/agent_001:2"]
    assert (first.session, first.turn, first.after, first.think_s) == ("p/agent_001", 1, "p:1", 127.0)
    assert (second.after, second.think_s) == ("p/agent_001:1", 4.0)
    during = requests["p/agent_002:1"]  # began while turn 2 still ran: follows as soon as that is complete
    assert (during.after, during.think_s) == ("p:2", 0.0)
    assert (requests["p:2"].after, requests["p:2"].think_s) == ("p:1", 146.0)
    assert by_id(weka(agents(write), think_cap_s=60))["p/agent_001:1"].think_s == 60


def test_a_sub_agent_without_its_parent_begins_by_itself(write: WriteTrace) -> None:
    (request,) = weka(write(turn("p/agent_001", 0, [[500, 4]], t=134.0))).requests
    assert (request.after, request.at) == (None, 0.0)


def test_skip_and_limit_count_sessions_with_their_sub_agents(write: WriteTrace) -> None:
    file = agents(write)
    assert {request.session for request in weka(file, limit=1).requests} == {"p", "p/agent_001", "p/agent_002"}
    assert {request.session for request in weka(file, skip=1).requests} == {"q"}
    with pytest.raises(TraceError, match="no requests left after skipping 2"):
        weka(file, skip=2)


def test_block_ids_are_private_to_a_session_and_its_sub_agents(write: WriteTrace) -> None:
    requests = by_id(weka(agents(write)))
    assert not set(requests["p:1"].blocks) & set(requests["q:1"].blocks)
    assert list(requests["p/agent_002:1"].blocks) == list(requests["p/agent_001:1"].blocks)[:3]


def test_sessions_with_the_same_tools_and_system_prompt_share_their_head(write: WriteTrace) -> None:
    head = {"model": "m", "tool_tokens": 300, "system_tokens": 100}  # 6 blocks of 64, and a bit
    trace = weka(
        write(
            turn("a", 0, [[1, 10]], **head),
            turn("a", 1, [[1, 12]]),
            turn("a", 2, [[1, 4], [90, 8]]),  # another tool: the head differs from its fifth block on
            turn("b", 0, [[7, 9]], **head),
            turn("c", 0, [[1, 9]], **head | {"tool_tokens": 301}),
            turn("d", 0, [[1, 9]], **head | {"model": "n"}),
        )
    )
    blocks = {id: list(request.blocks) for id, request in by_id(trace).items()}
    assert blocks["b:1"][:6] == blocks["a:1"][:6]
    assert not set(blocks["b:1"][6:]) & set(blocks["a:1"])
    assert blocks["a:2"][:10] == blocks["a:1"]
    assert blocks["a:3"][:4] == blocks["a:1"][:4]
    assert not set(blocks["a:3"][4:]) & set(blocks["a:1"])
    assert not (set(blocks["c:1"]) | set(blocks["d:1"])) & set(blocks["a:1"])
    assert not set(blocks["c:1"]) & set(blocks["d:1"])


def test_a_sub_agent_that_begins_like_another_shares_no_more_than_that(write: WriteTrace) -> None:
    """Else a shared name would stand behind two different prefixes."""
    trace = weka(
        write(
            turn("p", 0, [[1, 3]]),
            turn("p/agent_001", 0, [[50, 6]], model="m", tool_tokens=320, system_tokens=0),
            turn("p/agent_002", 0, [[50, 4], [70, 2]], model="m", tool_tokens=384, system_tokens=0),
            turn("q", 0, [[1, 7]], model="m", tool_tokens=384, system_tokens=0),
        )
    )
    blocks = {id: list(request.blocks) for id, request in by_id(trace).items()}
    assert blocks["p/agent_002:1"][:4] == blocks["p/agent_001:1"][:4]
    assert not set(blocks["q:1"]) & (set(blocks["p/agent_001:1"]) | set(blocks["p/agent_002:1"]))


def test_sessions_need_a_rate(write: WriteTrace) -> None:
    with pytest.raises(TraceError, match="sessions_per_s"):
        read_trace(agents(write))


# Texts


def test_lmcache(write: WriteTrace) -> None:
    trace = read_trace(
        write(
            {"timestamp": 1_760_000_000_500_000, "input": "a" * 256 + "tail", "output": "b" * 41, "session_id": "s"},
            {"timestamp": 1_760_000_002_000_000, "input": "a" * 64, "output": "", "session_id": "t"},
            {"timestamp": 1_760_000_000_000_000, "input": "a" * 128 + "z" * 127, "output": "bbbb", "session_id": "s"},
        )
    )
    assert trace.block_size == 16
    first, second, third = trace.requests
    assert arrivals(trace) == pytest.approx([0, 0.5, 2])
    assert [(request.session, request.turn) for request in trace.requests] == [("s", 1), ("s", 2), ("t", 1)]
    assert [request.input_tokens for request in trace.requests] == [63, 65, 16]
    assert [request.output_tokens for request in trace.requests] == [1, 10, 1]
    assert [len(request.blocks) for request in trace.requests] == [3, 4, 1]
    assert list(first.blocks[:2]) == list(second.blocks[:2])
    assert first.blocks[2] != second.blocks[2]
    assert third.blocks[0] == second.blocks[0]
    assert len(set(second.blocks)) == 4  # equal characters, but different ones before them


def test_text_is_cut_into_blocks_of_the_size_asked_for(write: WriteTrace) -> None:
    file = write({"timestamp": 0, "input": "x" * 1_000})
    assert [len(read_trace(file, block_size=size).requests[0].blocks) for size in (16, 32, 512)] == [15, 7, 0]


def test_plain_prompts_and_chats(write: WriteTrace) -> None:
    system = {"role": "system", "content": "You are careful. " * 20}
    question = {"role": "user", "content": [{"type": "text", "text": "why" * 50}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "look"}}]}
    trace = read_trace(
        write(
            {"at": 10, "messages": [system, question], "session": "s", "tenant": "acme", "output_tokens": 7},
            {"at": 10.5, "prompt": "p" * 400},
            {"at": 12, "messages": [system, question, call, {"role": "tool", "content": "it is so"}], "session": "s"},
            {"at": 13, "messages": [system, {**question, "content": "how" * 50}], "priority": 3},
        )
    )
    first, prompt, longer, other = trace.requests
    assert arrivals(trace) == pytest.approx([0, 0.5, 2, 3])
    assert (first.session, first.turn, first.tenant, first.output_tokens, first.priority) == ("s", 1, "acme", 7, 0)
    assert (longer.session, longer.turn, longer.tenant) == ("s", 2, "")
    assert (prompt.input_tokens, prompt.output_tokens, len(prompt.blocks)) == (100, 200, 6)
    assert other.priority == 3
    assert len(first.blocks) == 8
    assert list(longer.blocks[:8]) == list(first.blocks)  # a conversation that goes on begins as it did
    text = (
        f"system\n{system['content']}\n"
        f'user\n[{{"type":"text","text":"{"why" * 50}"}}]\n'
        'assistant\n{"tool_calls":[{"id":"c","function":{"name":"look"}}]}\n'
        "tool\nit is so\n"
    )
    assert longer.input_tokens == len(text) // 4
    system_blocks = len("system\n" + str(system["content"])) // 64
    assert list(other.blocks[:system_blocks]) == list(first.blocks[:system_blocks])
    assert other.blocks[-1] != first.blocks[-1]


# Lengths


def test_lengths_share_nothing(write: WriteTrace) -> None:
    trace = read_trace(
        write(
            {"timestamp": 68.5, "input_length": 580, "output_length": 46, "client": 104},
            {"timestamp": 1_068.5, "input_length": 580, "output_length": None, "client": "b"},
            {"timestamp": 1_568.75, "input_length": 32, "output_length": 3},
        )
    )
    assert trace.block_size == 16
    assert arrivals(trace) == pytest.approx([0, 1, 1.50025])
    assert [request.tenant for request in trace.requests] == ["104", "b", ""]
    assert [request.output_tokens for request in trace.requests] == [46, 1, 3]
    assert [len(request.blocks) for request in trace.requests] == [37, 37, 2]
    assert len({block for request in trace.requests for block in request.blocks}) == 76


def test_lengths_with_seconds(write: WriteTrace) -> None:
    trace = read_trace(write({"t": 5.5, "input_length": 1}, {"t": 7.25, "input_length": 2}), block_size=64)
    assert arrivals(trace) == pytest.approx([0, 1.75])
    assert [len(request.blocks) for request in trace.requests] == [1, 1]


def test_a_format_can_be_said(write: WriteTrace) -> None:
    file = write(mooncake(0, 512, [1]), mooncake(1, 512, [1]))
    trace = read_trace(file, format="lengths")
    assert (trace.block_size, hit_bounds(trace, capacity_tokens=10_000).infinite) == (16, 0)


# What is wrong is said with its place


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ('{"timestamp": 0, "input_length": 5', "truncated"),
        (mooncake(0, 0, []), r"Expected `int` >= 1 - at `\$.input_length`"),
        (mooncake(0, 10**12, []), r"Expected `int` <= .*input_length"),
        ({"timestamp": 0, "hash_ids": [1]}, "missing required field `input_length`"),
        ({"timestamp": "0", "input_length": 5, "hash_ids": [1]}, r"Expected `float`, got `str` - at `\$.timestamp`"),
        (mooncake(0, 5, [1], -1), "output_length"),
        (mooncake(0, 5, [-1]), "block id that is negative or takes more than 64 bits"),
        (mooncake(0, 5, [1 << 64]), "block id that is negative or takes more than 64 bits"),
        (mooncake(0, 1_025, [1, 2, 3, 4]), "4 block ids for 1025 input tokens; blocks of 512 make it 2 to 3"),
        (mooncake(0, 1_025, [1]), "1 block ids for 1025 input tokens"),
    ],
)
def test_a_bad_mooncake_row(write: WriteTrace, bad: dict[str, Any] | str, says: str) -> None:
    file = write(mooncake(0, 5, [1]), "", bad)
    with pytest.raises(TraceError, match=rf"sample\.jsonl:3: .*{says}"):
        read_trace(file)


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        (turn("a", 0, [[1, 2]]), turn("a", 0, [[1, 3]]), "turn 0 of session 'a' a second time"),
        (turn("a", 0, [[1, 2]]), turn("a", 1, [[1, 3]], input_length=64), "another block size"),
        (turn("a", 0, [[1, 2]]), {"session": "a", "turn": 1, "input_length": 64, "runs": [[1]]}, "array` of length 2"),
        (turn("a", 0, [[1, 2]]), turn("a", 1, [[(1 << 32) - 1, 2]]), "a block id of more than 32 bits"),
        (turn("a", 0, [[1, 2]]), turn("a", 1, [[1, 2]], think=-1), "think"),
        (chat(1, -1, 0, [1]), chat(2, 1, 5, [1], turn=0), "turn"),
        ({"at": 0, "prompt": "a"}, {"at": 1}, "either `messages` or `prompt`"),
        ({"at": 0, "prompt": "a"}, {"at": 1, "prompt": "a", "messages": []}, "either `messages` or `prompt`"),
        ({"at": 0, "prompt": "a"}, {"at": 1, "messages": "a"}, "messages"),
        ({"at": 0, "prompt": "a"}, '{"at": 1, "messages": [{"content": ' + NESTED + "}]}", "recursion"),
        ({"timestamp": 0, "input": "a"}, {"timestamp": 0, "input": ["a"]}, "input"),
        ({"t": 0, "input_length": 5}, {"input_length": 5}, "neither `timestamp`"),
    ],
)
def test_a_bad_row_of_other_formats(write: WriteTrace, good: Any, bad: Any, says: str) -> None:
    file = write(good, bad)
    with pytest.raises(TraceError, match=rf"sample\.jsonl:2: .*{says}"):
        read_trace(file, sessions_per_s=1)


def test_a_file_of_no_known_format(write: WriteTrace) -> None:
    with pytest.raises(TraceError, match=r"sample\.jsonl: no trace format known to have the fields model, when"):
        read_trace(write({"when": 1, "model": "m"}))


@pytest.mark.parametrize("rows", [[], ["", "  "]])
def test_an_empty_file(write: WriteTrace, rows: list[str]) -> None:
    with pytest.raises(TraceError, match="no requests"):
        read_trace(write(*rows))


def test_nothing_left(write: WriteTrace) -> None:
    with pytest.raises(TraceError, match="no requests left after skipping 1"):
        read_trace(write(mooncake(0, 5, [1])), skip=1)


@pytest.mark.parametrize("cut", [slice(0, 40), slice(20, None)])
def test_a_damaged_gzip_file(tmp_path: Path, cut: slice) -> None:
    file = tmp_path / "sample.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(mooncake(0, 5, [1])).encode() * 50)[cut])
    with pytest.raises(TraceError, match=r"sample\.jsonl\.gz:1: not whole gzip data"):
        read_trace(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speed", 0),
        ("speed", float("nan")),
        ("limit", 0),
        ("skip", -1),
        ("think_cap_s", -1),
        ("sessions_per_s", 0),
        ("block_size", 0),
        ("format", "csv"),
    ],
)
def test_options_that_make_no_sense(write: WriteTrace, name: str, value: Any) -> None:
    with pytest.raises(TraceError, match=f"{name} can't be {value!r}"):
        read_trace(write(mooncake(0, 5, [1])), **{name: value})


# Real files

PUBLIC = {  # requests, infinite hit ratio as published with the files
    "mooncake_conversation": (12_031, 0.373),
    "mooncake_synthetic": (3_993, 0.650),
    "toolagent_like": (23_608, 0.519),
    "lmcache_miniswe_text": (402, 0.936),
    "lmcache_magagent_text": (746, 0.837),
    "lmcache_taubench_text": (471, 0.819),
    "servegen_mmid_1h": (38_225, 0.0),
    "servegen_mlarge_1h": (32_729, 0.0),
    "servegen_r1_1h": (14_617, 0.0),
    "azure_2023_conv": (19_366, 0.0),
    "azure_2023_code": (8_819, 0.0),
    "aibrix_sharegpt_8min": (2_026, 0.0),
}


def test_public_traces() -> None:
    folder = os.environ.get("WARMROUTE_TRACES")
    if not folder:
        pytest.skip("WARMROUTE_TRACES does not name a folder with the public traces")
    for name, (requests, infinite) in PUBLIC.items():
        trace = read_trace(Path(folder) / f"{name}.jsonl.gz")
        bounds = hit_bounds(trace, capacity_tokens=8 * 440_000)
        assert len(trace.requests) == requests, name
        assert bounds.infinite == pytest.approx(infinite, abs=0.0006), name
        if name == "mooncake_conversation":
            # Published: .157 of blocks, partial ones cached and counted too. Of tokens, full blocks only: .166.
            assert bounds.pooled_lru == pytest.approx(0.166, abs=0.001)
    sessions = read_trace(Path(folder) / "weka_agentic.jsonl.gz", sessions_per_s=0.05, limit=20)
    assert len({request.session.partition("/")[0] for request in sessions.requests}) == 20
    before: dict[int, int] = {}
    for request in sessions.requests:
        previous = -1
        for block in request.blocks:
            assert before.setdefault(block, previous) == previous  # a name stands for its block and all before it
            previous = block
    assert 0.93 < hit_bounds(sessions, capacity_tokens=0).infinite < 0.98
