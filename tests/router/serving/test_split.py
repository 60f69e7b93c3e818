from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from router.serving.split import Arm, arms, choose

SPLIT = arms({"base": 90, "candidate": 10})


def talk(subject: str, turns: int = 1) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": subject}]
    for turn in range(turns - 1):
        messages += [{"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": f"and {turn}?"}]
    return {"messages": messages}


def test_arms_share_the_line_by_weight() -> None:
    assert arms({"b": 1, "a": 3}) == (Arm("a", 0.75), Arm("b", 1.0))


def test_each_gets_its_share() -> None:
    chosen = Counter(choose(SPLIT, "chat", None, talk(f"subject {number}")) for number in range(4_000))
    assert chosen["candidate"] == pytest.approx(400, abs=80)


@pytest.mark.parametrize("number", range(50))
def test_a_conversation_stays_where_it_began(number: int) -> None:
    chosen = {choose(SPLIT, "chat", None, talk(f"subject {number}", turns)) for turns in range(1, 6)}
    assert len(chosen) == 1


def test_a_session_that_is_named_stays_whatever_is_said_in_it() -> None:
    fifty = arms({"a": 1, "b": 1})
    for session in ("s1", "s2", "s3"):
        assert len({choose(fifty, "chat", session, talk(f"subject {number}")) for number in range(50)}) == 1


def test_a_change_of_weights_moves_no_more_than_it_must() -> None:
    roots = [talk(f"subject {number}") for number in range(4_000)]
    before = [choose(arms({"a": 90, "b": 10}), "chat", None, root) for root in roots]
    after = [choose(arms({"a": 80, "b": 20}), "chat", None, root) for root in roots]
    moved = Counter(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    assert set(moved) == {("a", "b")}
    assert moved["a", "b"] == pytest.approx(400, abs=80)


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"prompt": "x" * 3_000}, {"prompt": "x" * 3_000 + " and so on"}),
        ({"prompt": list(range(600))}, {"prompt": list(range(900))}),
        ({"prompt": [list(range(600)), [1]]}, {"prompt": [list(range(900)), [2]]}),
        ({"prompt": ["x" * 3_000]}, {"prompt": ["x" * 3_001, "y"]}),
        ({"instructions": "be brief", "input": "hi"}, {"instructions": "be brief", "input": "hi", "stream": True}),
        (
            {"system": "s", "messages": [{"role": "user", "content": "a"}]},
            {"system": "s", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ),
    ],
)
def test_the_root_of_other_bodies(first: dict[str, Any], later: dict[str, Any]) -> None:
    many = arms({str(number): 1 for number in range(1_000)})
    assert choose(many, "chat", None, first) == choose(many, "chat", None, later)


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"messages": None}, {"messages": []}, {"messages": ["x"]}, {"prompt": []}, {"prompt": 5}, {"input": {}}),
        *({"messages": [{"role": "user", "content": "half \ud800 a character"}]}, {"prompt": [2**70]}),
    ],
)
def test_any_body_has_an_arm(fields: dict[str, Any]) -> None:
    assert choose(SPLIT, "chat", None, fields) in ("base", "candidate")
