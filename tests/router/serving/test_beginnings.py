"""What is parsed by way of an earlier body is what a parser makes of the whole."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest

from router.errors import BadRequest
from router.serving import beginnings
from router.serving.beginnings import Beginnings
from router.serving.call import parse_body
from router.serving.prompt.pieces import Beginning

TEXT = "It is the engine that holds what was computed. "


def chat(*texts: str, separators: tuple[str, str] = (",", ":"), **fields: Any) -> bytes:
    roles = ["system", *("user", "assistant") * len(texts)]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return written({"messages": messages, **fields}, separators)


def written(body: Any, separators: tuple[str, str] = (",", ":")) -> bytes:
    return json.dumps(body, separators=separators, ensure_ascii=False).encode()


@pytest.fixture
def known() -> Beginnings:
    return Beginnings(shortest=1_000)


def parsed(known: Beginnings, body: bytes, domain: str = "") -> Beginning | None:
    """As it should be, whole or by way of another."""
    fields, beginning = known.parse(body, domain, parse_body)
    assert fields == parse_body(body)
    assert beginning is None or fields["messages"][: len(beginning.messages)] == list(beginning.messages)
    return beginning


class Whole:
    """Counts what is parsed from its beginning on."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, body: bytes) -> dict[str, Any]:
        self.bytes += len(body)
        return parse_body(body)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_turn_is_parsed_from_the_last_messages_of_the_one_before(
    known: Beginnings, separators: tuple[str, str]
) -> None:
    talk, counted = [TEXT * 200], Whole()
    for turn in range(12):
        talk.append(f"question {turn}")
        body = chat(*talk, separators=separators, model="m", stream=bool(turn % 2))
        fields, beginning = known.parse(body, "", counted)
        assert fields == orjson.loads(body)
        assert beginning is not None
        assert len(beginning.messages) == len(talk) - 1
        if not turn:
            first = counted.bytes
        talk.append(f'answer {turn} with "quotes", \\ and é 你好 {{"role": "user"}}')
    assert counted.bytes == first, "only the first was parsed whole"
    assert known.bytes < len(body), "a turn takes the place of the one before it"


def test_branches_of_a_conversation_begin_alike(known: Beginnings) -> None:
    whole = [parsed(known, chat(TEXT * 100, "a", "b", f"branch {n}", model="m", n=n)) for n in range(5)]
    assert len({id(beginning) for beginning in whole}) == 1


def test_fields_before_the_messages_belong_to_what_is_known(known: Beginnings) -> None:
    def body(model: str, last: str) -> bytes:
        roles = ("system", "user", "assistant", "user")
        texts = (TEXT * 100, "a", "b", last)
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
        return written({"model": model, "seed": 7, "messages": messages, "stream": True})

    assert parsed(known, body("one", "x")) is parsed(known, body("one", "y"))
    assert parsed(known, body("two", "x")) is not parsed(known, body("one", "z"))


def test_no_domain_is_parsed_by_way_of_anothers(known: Beginnings) -> None:
    body = chat(TEXT * 100, "a", "b", "c")
    counted = Whole()
    for domain in ("", "one", "two", "one"):
        known.parse(body, domain, counted)
    assert counted.bytes == 3 * len(body)


@pytest.mark.parametrize(
    "end",
    [
        b'{"role":"user","content":"x"}],"messages":[{"role":"user","content":"y"}]}',
        b'{"role":"user","content":"x"}],"mess\\u0061ges":[{"role":"user","content":"y"}]}',
        b'{"role":"user","content":"x"}],"messages":null}',
        b'{"role":"user","content":"x"}],"messages":[]}',
        b'{"role":"user","content":"x"}],"metadata":{"messages":[{"role":"user"}]}}',
        b"7]}",
        b'{"role":"user","content":[{"type":"text","text":"x"}]},null],"model":"m"}',
    ],
)
def test_an_end_that_says_otherwise_counts(known: Beginnings, end: bytes) -> None:
    start = chat(TEXT * 100, "a", "b", "")
    start = start[: start.rindex(b'{"role"')]
    parsed(known, start + b'{"role":"user","content":"c"}]}')
    for _ in range(3):
        parsed(known, start + end)
    parsed(known, start + b'{"role":"user","content":"d"}]}')


@pytest.mark.parametrize("end", [b"", b'{"role":"user"', b'{"role":"user","content":"x"}]', b"]}", b"\xff]}"])
def test_what_is_no_json_is_refused_in_the_same_words(known: Beginnings, end: bytes) -> None:
    start = chat(TEXT * 100, "a", "b", "")
    start = start[: start.rindex(b'{"role"')]
    parsed(known, start + b'{"role":"user","content":"c"}]}')
    with pytest.raises(BadRequest) as by_way_of_another:
        known.parse(start + end, "", parse_body)
    with pytest.raises(BadRequest) as whole:
        parse_body(start + end)
    assert str(by_way_of_another.value) == str(whole.value)


@pytest.mark.parametrize(
    "body",
    [
        written({"x": [{"role": "user", "content": TEXT * 60}, {"role": "u"}], "messages": [{"content": "a"}]}),
        b'{"messages":[%b],"messages":[{"role":"user","content":"b"}]}'
        % b",".join([written({"role": "user", "content": TEXT * 30})] * 3),
        written({"messages": [{"content": TEXT * 60, "role": "user"}, {"content": "b", "role": "user"}]}),
        written({"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT * 60}]}, {"role": "user"}]}),
        written({"messages": [{"role": "assistant", "reasoning": TEXT * 60}, {"role": "user", "content": "b"}]}),
        written({"messages": TEXT * 60}),
        written({"prompt": TEXT * 60}),
    ],
)
def test_bodies_that_are_written_otherwise_are_parsed_whole(known: Beginnings, body: bytes) -> None:
    for _ in range(3):
        assert parsed(known, body) is None


def test_memory_is_bounded() -> None:
    known = Beginnings(shortest=1_000, max_bytes=100_000)
    sizes = []
    for n in range(200):
        parsed(known, chat(f"{n} " * 1_000, "a", "b", "c"))
        sizes.append(known.bytes)
    assert max(sizes) <= 100_000
    assert sizes[-1] > 90_000
    alike = Beginnings(shortest=1_000)
    for n in range(200):
        parsed(alike, chat(TEXT * 200, f"conversation {n}", "b", "c"))
    assert alike.bytes <= 16 * 10_000


def test_made_up_conversations_are_read_as_they_are(known: Beginnings) -> None:
    dice = random.Random(5)
    words = ['"', "\\", "{", "}", "[", "]", ",", '{"role"', '"messages":[', "é", "你", "\n", "\u2028", " ", "a" * 50]
    talks: list[list[str]] = [[TEXT * 30]]
    for _ in range(600):
        talk = list(dice.choice(talks))
        if dice.random() < 0.2:
            talk = talk[: dice.randrange(1, len(talk) + 1)]
        talk.extend("".join(dice.choices(words, k=dice.randrange(12))) for _ in range(dice.randrange(1, 4)))
        talks.append(talk)
        parsed(known, chat(*talk, model=dice.choice("ab"), separators=dice.choice([(",", ":"), (", ", ": ")])))
    assert beginnings._MARK.bit_length() > 40


def test_what_is_very_long_is_parsed_once() -> None:
    known, counted = Beginnings(), Whole()
    body = chat("x" * (beginnings.LONGEST + 1), "a", "b", "c")
    for _ in range(2):
        assert known.parse(body, "", counted)[1] is None
    assert counted.bytes == 2 * len(body)
    assert known.bytes == 0
