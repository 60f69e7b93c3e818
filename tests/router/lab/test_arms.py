"""What a replay compares, as it is asked for."""

from __future__ import annotations

import pytest

from router.lab.arms import MODES, Arm, parse_arm
from router.routing.room_rule import RoomRule


def test_the_gateways_own_policy_waits_in_the_room_and_all_others_are_pushed() -> None:
    assert parse_arm("kv_aware") == Arm("kv_aware", "kv_aware", RoomRule())
    assert parse_arm("lmetric") == Arm("lmetric", "lmetric", None)
    assert parse_arm("a_strangers") == Arm("a_strangers", "a_strangers", None)


def test_the_mode_that_is_named_counts() -> None:
    assert parse_arm("lmetric:room") == Arm("lmetric:room", "lmetric", RoomRule())
    assert parse_arm("kv_aware:push") == Arm("kv_aware:push", "kv_aware", None)


def test_only_shortest_changes_the_order_in_the_engines() -> None:
    assert parse_arm("lmetric:shortest") == Arm("lmetric:shortest", "lmetric", None, "shortest_first")
    assert {mode: parse_arm(f"p:{mode}").order for mode in MODES if mode != "shortest"} == {
        "push": "first_come",
        "room": "first_come",
        "gapless": "first_come",
        "wspt": "first_come",
        "fcfs": "first_come",
        "hold": "first_come",
    }


def rule(mode: str) -> RoomRule:
    found = parse_arm(f"p:{mode}").room
    assert found is not None
    return found


def test_shortest_first_without_bound_lets_any_shorter_prompt_pass() -> None:
    wspt = rule("wspt")
    longest_s = wspt.longest_head_start_s(0.0, 600.0)
    for shorter_ms, longer_ms in ((10.0, 20.0), (10_000.0, 20_000.0)):
        late, early = wspt.place_in_line(7_200.0, shorter_ms, longest_s), wspt.place_in_line(0.0, longer_ms, longest_s)
        assert late < early
    assert (wspt.hold, wspt.gap_s) == (False, 0.0)


def test_in_the_order_of_arrival_nobody_has_a_head_start() -> None:
    for mode, holds in (("fcfs", False), ("hold", True)):
        found = rule(mode)
        assert found.place_in_line(5.0, 1e6, found.longest_head_start_s(60.0, 600.0)) == 5.0
        assert (found.hold, found.gap_s) == (holds, 0.0)


def test_without_gaps_engines_take_the_next_at_once_and_all_else_is_as_in_the_room() -> None:
    found = rule("gapless")
    assert found.rest_s(9.0, 0.5, found.gap_s, 1.0) == 0.0
    assert found == RoomRule(gap_s=0.0)
    assert RoomRule().rest_s(9.0, 0.5, RoomRule().gap_s, 1.0) > 0.0


def test_a_policy_may_be_named_by_module_and_attribute() -> None:
    assert parse_arm("our.policies:Best") == Arm("our.policies:Best", "our.policies:Best", None)
    assert parse_arm("our.policies:Best:room") == Arm("our.policies:Best:room", "our.policies:Best", RoomRule())
    assert parse_arm("best:Best:push") == Arm("best:Best:push", "best:Best", None)


@pytest.mark.parametrize("text", ["kv_aware:rooms", ":room", "", "a:b:c", "kv_aware:"])
def test_what_is_no_arm_is_said_with_what_would_be(text: str) -> None:
    with pytest.raises(ValueError, match=r":push, :shortest, :room, :gapless, :wspt, :fcfs, :hold") as caught:
        parse_arm(text)
    assert repr(text) in str(caught.value)
