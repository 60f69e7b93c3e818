"""The stream relay against recorded streams, cut at every kind of position, and against streams that are odd."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Usage
from router.serving.sse import HELD_BYTES, SseRelay

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*/*.sse"))
WHOLE = [
    path for path in RECORDINGS if "cut" not in path.stem and "killed" not in path.stem and "sigterm" not in path.stem
]
DONE = b"data: [DONE]\n\n"


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(content: str | None = "a", *, index: int = 0, finish: str | None = None, **more: object) -> bytes:
    delta = {} if content is None else {"content": content}
    return event(choices=[{"index": index, "delta": delta, "finish_reason": finish}], **more)


def usage_of(prompt: int, output: int, cached: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def run(relay: SseRelay, pieces: Iterable[bytes]) -> bytes:
    return b"".join([relay.feed(piece) for piece in pieces]) + relay.end()


def single_bytes(data: bytes) -> Iterator[bytes]:
    return (data[i : i + 1] for i in range(len(data)))


def random_pieces(data: bytes, seed: int) -> Iterator[bytes]:
    dice, position = random.Random(seed), 0
    while position < len(data):
        size = dice.choice((1, 2, 3, 7, 40, 300, 2000))
        yield data[position : position + size]
        position += size


def splits(data: bytes) -> Iterator[Iterable[bytes]]:
    yield [data]
    yield single_bytes(data)
    yield [part + b"\n\n" for part in data.split(b"\n\n") if part]
    yield [part + b"\n" for part in data.removesuffix(b"\n").split(b"\n")]
    for seed in range(20):
        yield random_pieces(data, seed)


@pytest.mark.parametrize("path", WHOLE, ids=name)
def test_a_client_that_asked_for_usage_gets_the_engines_bytes(path: Path) -> None:
    data = path.read_bytes()
    for pieces in splits(data):
        relay = SseRelay(hide_usage=False, choices=2 if "n2" in path.stem else 1)
        assert run(relay, pieces) + relay.tail == data
        assert relay.complete
        assert relay.first_token


@pytest.mark.parametrize("path", WHOLE, ids=name)
def test_a_client_that_did_not_ask_sees_no_usage_and_all_else(path: Path) -> None:
    data = path.read_bytes()
    expected = []
    for text in data.split(b"\n\n"):
        if text and b"[DONE]" not in text:
            payload = json.loads(text.removeprefix(b"data: "))
            usage = payload.pop("usage", None)
            if payload["choices"] or usage is None:
                expected.append(payload)
    for pieces in splits(data):
        relay = SseRelay(hide_usage=True, choices=2 if "n2" in path.stem else 1)
        passed = run(relay, pieces)
        assert b'"usage"' not in passed
        assert [json.loads(text.removeprefix(b"data: ")) for text in passed.split(b"\n\n") if text] == expected
        assert relay.complete


@pytest.mark.parametrize("stem", ["34-stream-usage", "35-stream-usage-continuous", "25-stream-usage"])
@pytest.mark.parametrize("hide", [True, False])
def test_usage_is_read_whether_shown_or_not(stem: str, hide: bool) -> None:
    (path,) = [path for path in RECORDINGS if path.stem == stem]
    relay = SseRelay(hide_usage=hide)
    run(relay, single_bytes(path.read_bytes()))
    assert relay.usage == Usage(input_tokens=300, output_tokens=6, cached_tokens=288)


@pytest.mark.parametrize("stem", ["stream-engine-killed", "stream-sigterm-server"])
def test_an_engines_error_ends_the_stream_and_its_done_is_dropped(stem: str) -> None:
    (path,) = [path for path in RECORDINGS if path.stem == stem]
    data = path.read_bytes()
    for pieces in splits(data):
        relay = SseRelay(hide_usage=True)
        assert run(relay, pieces) == data[: data.index(b'data: {"error"')]
        assert relay.error is not None
        assert relay.error["code"] == 500
        assert relay.tail == b""
        assert not relay.complete


@pytest.mark.parametrize("stem", ["38-stream-cut", "27-stream-cut"])
def test_a_stream_that_just_ends_is_not_complete(stem: str) -> None:
    (path,) = [path for path in RECORDINGS if path.stem == stem]
    relay = SseRelay(hide_usage=True)
    assert run(relay, [path.read_bytes()]) == path.read_bytes()
    assert not relay.complete


def test_a_torn_event_is_never_passed_on() -> None:
    relay = SseRelay(hide_usage=False)
    assert run(relay, [chunk("a"), chunk("b")[:30]]) == chunk("a")


@pytest.mark.parametrize("torn", [b"dat", b"data", b"data: [DO", b"data: {", b"\n", b"event: x\n"])
def test_what_is_no_event_yet_is_not_passed_on_either(torn: bytes) -> None:
    """Our own error event follows it, and would be read as its end."""
    relay = SseRelay(hide_usage=False)
    assert run(relay, [chunk("a") + torn]).strip() == chunk("a").strip()


def test_a_comment_at_the_end_is_closed() -> None:
    """So that it is not the beginning of the error event that follows it."""
    relay = SseRelay(hide_usage=False)
    assert run(relay, [chunk("a") + b": pin"]) == chunk("a") + b": pin\n\n"
    assert not relay.complete


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("hide", [True, False])
def test_a_whole_last_event_gets_the_blank_line_it_lacks(end: bytes, hide: bool) -> None:
    relay = SseRelay(hide_usage=hide)
    assert run(relay, [chunk("a") + chunk("b").removesuffix(b"\n\n") + end]) == chunk("a") + chunk("b").removesuffix(
        b"\n\n"
    ) + (end + b"\n" if end else b"\n\n")


def test_the_first_token_is_the_first_event_with_choices() -> None:
    relay = SseRelay(hide_usage=True)
    assert relay.feed(b": keep-alive\n\n") == b": keep-alive\n\n"
    assert relay.begun
    assert not relay.first_token
    assert relay.feed(event(choices=[], prompt_filter_results=[])) != b""
    assert not relay.first_token
    relay.feed(chunk(""))
    assert relay.first_token


def test_a_comment_inside_an_events_gap_changes_nothing() -> None:
    relay = SseRelay(hide_usage=False)
    text = b'data: {"choices":[{"index":0,"delta":{"content":"x"}'
    assert relay.feed(text) == b""
    rest = b',"finish_reason":null}]}\n\n'
    assert relay.feed(rest + DONE) == text + rest
    assert relay.tail == DONE


@pytest.mark.parametrize(
    "stream",
    [
        chunk("ok") + chunk(None, finish="stop") + chunk(None, usage=usage_of(65, 251, 64)) + DONE,
        chunk("ok") + chunk(None, finish="stop", usage=usage_of(65, 251, 64)) + DONE,
        chunk("ok", usage=None)
        + chunk(None, finish="stop", usage=None)
        + event(choices=[], usage=usage_of(65, 251, 64))
        + DONE,
        chunk("ok") + event(choices=[], usage=usage_of(65, 251, 64)) + chunk(None, finish="stop", usage=None) + DONE,
    ],
    ids=["after the finish", "on the finish chunk", "null on the others", "null afterwards"],
)
def test_the_last_usage_that_is_not_null_wins(stream: bytes) -> None:
    relay = SseRelay(hide_usage=False)
    assert run(relay, single_bytes(stream)) + relay.tail == stream
    assert relay.usage == Usage(input_tokens=65, output_tokens=251, cached_tokens=64)
    hidden = SseRelay(hide_usage=True)
    assert b"usage" not in run(hidden, [stream])
    assert hidden.usage == relay.usage


def test_cutting_usage_leaves_the_other_bytes_of_its_event() -> None:
    relay = SseRelay(hide_usage=True)
    before = b'data: {"id":"1", "choices":[{"index":0,"delta":{"content":"\\ud83d"}}] ,"usage": null, "z":1.0}\n\n'
    assert relay.feed(before) == before.replace(b',"usage": null', b"")


def test_cutting_usage_from_an_event_of_several_lines() -> None:
    relay = SseRelay(hide_usage=True)
    passed = relay.feed(b'id: 7\ndata: {"choices":[{"index":0}],\ndata: "usage":\ndata: {"prompt_tokens":1}}\n\n')
    assert passed == b'id: 7\ndata: {"choices":[{"index":0}]}\n\n'
    assert relay.usage == Usage(input_tokens=1)


def test_words_in_the_answer_are_not_markers() -> None:
    words = b"".join(chunk(text) for text in ("usage", '"usage":{"prompt_tokens":1}', "error", '"error"', "[DONE]"))
    relay = SseRelay(hide_usage=True)
    assert run(relay, [chunk("a"), words]) == chunk("a") + words
    assert relay.usage is None
    assert relay.error is None
    assert not relay.done


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("prefix", [b"data: ", b"data:"], ids=["space", "no space"])
def test_line_ends_and_prefixes(end: bytes, prefix: bytes) -> None:
    texts = [b'{"choices":[{"index":0,"finish_reason":null}]}', b'{"choices":[{"index":0,"finish_reason":"stop"}]}']
    texts += [b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}', b"[DONE]"]
    stream = b"".join(prefix + text + end for text in texts)
    for pieces in ([stream], single_bytes(stream)):
        relay = SseRelay(hide_usage=True)
        assert run(relay, pieces) == b"".join(prefix + text + end for text in texts[:2])
        assert relay.tail == prefix + b"[DONE]" + end
        assert relay.usage == Usage(input_tokens=3, output_tokens=1)


@pytest.mark.parametrize("blank", [b"\n", b"\n\n", b"\n\n\n", b"\r\n", b"\r\n\r\n\r\n"])
def test_stray_blank_lines_pass(blank: bytes) -> None:
    stream = blank + chunk("a") + blank + chunk("b", finish="stop") + blank + DONE
    for pieces in ([stream], single_bytes(stream), random_pieces(stream, 1)):
        relay = SseRelay(hide_usage=False)
        assert run(relay, pieces) + relay.tail == stream
        assert relay.done


def test_all_choices_must_finish_where_there_is_no_done() -> None:
    relay = SseRelay(hide_usage=False, choices=2)
    relay.feed(chunk("A") + chunk("B", index=1) + chunk(None, index=1, finish="stop"))
    assert not relay.complete
    relay.feed(chunk(None, index=0, finish="length"))
    assert relay.complete


def test_a_last_event_without_its_blank_line() -> None:
    relay = SseRelay(hide_usage=False)
    assert run(relay, [chunk("a"), b"data: [DONE]\n"]) == chunk("a")
    assert relay.done
    assert relay.tail == b"data: [DONE]\n"


def test_nothing_after_done_is_passed_on() -> None:
    relay = SseRelay(hide_usage=False)
    assert run(relay, [chunk("a") + DONE + chunk("b"), chunk("c"), b"data: x"]) == chunk("a")


@pytest.mark.parametrize("error", [{"error": {"message": "m", "code": 400}}, {"object": "error", "message": "m"}])
def test_an_error_as_the_first_event_is_not_passed_on(error: dict[str, object]) -> None:
    relay = SseRelay(hide_usage=True)
    assert run(relay, [event(**error) + DONE]) == b""
    assert relay.error is not None
    assert relay.error["message"] == "m"
    assert not relay.begun


def test_an_oversized_event_passes_as_it_comes_and_memory_stays_bounded() -> None:
    ids = ",".join(["151644"] * 200_000)
    first = chunk("a").replace(b"}\n\n", b', "prompt_token_ids": [' + ids.encode() + b"]}\n\n")
    stream = first + chunk("b") + chunk(None, finish="stop") + event(choices=[], usage=usage_of(9, 2, 0)) + DONE
    relay = SseRelay(hide_usage=True)
    passed = b""
    for at in range(0, len(stream), 4096):
        passed += relay.feed(stream[at : at + 4096])
        assert len(relay._held) <= HELD_BYTES + 4096
    assert passed == first + chunk("b") + chunk(None, finish="stop")
    assert relay.first_token
    assert relay.usage == Usage(input_tokens=9, output_tokens=2, cached_tokens=0)
    assert relay.complete


def test_a_stream_that_breaks_inside_an_oversized_event_says_so() -> None:
    relay = SseRelay(hide_usage=True)
    relay.feed(b"data: " + b"x" * 2 * HELD_BYTES)
    assert relay.inside


events = st.sampled_from(
    [
        chunk("a"),
        chunk("a"),
        chunk("é🌍"),
        chunk('", "usage": {"prompt_tokens": 9} [DONE]\\'),
        chunk("\n\n: \r"),
        chunk("a", usage={"prompt_tokens": 9, "completion_tokens": 2}),
        chunk("a", finish="stop"),
        chunk("b", usage=None),
        chunk("b", index=1, usage=usage_of(1, 2, 0)),
        chunk(None, finish="stop"),
        event(choices=[], usage=usage_of(5, 1, 4)),
        event(choices=[]),
        b": ping\n\n",
        b"event: x\nid: 3\ndata: no json\n\n",
        b'data: {"choices":[{"index":0}],\r\ndata: "usage":null}\r\n\r\n',
        event(error=None, choices=[{"index": 0}]),
    ]
)


@settings(max_examples=500, deadline=None)
@given(st.lists(events), st.sampled_from([b"", DONE, event(error={"message": "m"}) + DONE]), st.booleans(), st.data())
def test_what_comes_out_does_not_depend_on_how_it_came_in(
    parts: list[bytes], last: bytes, hide: bool, data: st.DataObject
) -> None:
    stream = b"".join(parts) + last
    whole = SseRelay(hide_usage=hide)
    expected = run(whole, [stream])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)))
    relay = SseRelay(hide_usage=hide)
    assert run(relay, [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]) == expected
    assert (relay.usage, relay.done, relay.error, relay.tail) == (whole.usage, whole.done, whole.error, whole.tail)
    assert (relay.complete, relay.first_token) == (whole.complete, whole.first_token)
    if not hide and whole.error is None:
        assert expected + whole.tail == stream


def test_chunks_that_differ_in_their_text_alone_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    learn = SseRelay._learn
    monkeypatch.setattr(SseRelay, "_learn", lambda relay, event: (looked.append(event), learn(relay, event))[1])
    relay = SseRelay(hide_usage=True)
    texts = ["a", "b", ' "quoted" ', "back\\slash", "\n", "é🌍", "", "x" * 2_000]
    stream = [chunk("first"), *[chunk(text) for text in texts]]
    assert [relay.feed(piece) for piece in stream] == stream
    assert looked == [chunk("a")]
    assert relay.events == len(stream)


@pytest.mark.parametrize(
    "odd",
    [
        chunk("a").replace(b'"a"', b'"a", "b": "c"'),
        chunk("a").replace(b'"a"', b'"a\n\n"'),
        chunk("a").replace(b'"a"', b'"a\\"'),
        chunk("a").replace(b'"a"', b'"a"}}]}\n\ndata: {"error": {"message": "m"}}\n\ndata: {"choices": [{"x": "'),
        chunk("a")[:-2],
        chunk("a") + chunk("b"),
        chunk("a") + DONE,
        event(choices=[{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}]),
        DONE,
        b"data: {}\n\n",
        b"\n\n",
        b"\n",
    ],
)
def test_what_comes_after_many_alike_is_looked_at_as_ever(odd: bytes) -> None:
    def states(relay: SseRelay, piece: bytes) -> list[object]:
        passed = relay.feed(piece)
        return [passed, relay.events, relay.usage, relay.done, relay.error, relay.tail, relay.complete, relay.amid]

    after_many, fresh = SseRelay(hide_usage=True), SseRelay(hide_usage=True)
    for relay in (after_many, fresh):
        for text in "abcdef":
            relay.feed(chunk(text))
    fresh._before = fresh._after = b"\0"
    fresh._in_vain = 100
    for piece in (odd, chunk("c"), odd, DONE, chunk("d")):
        assert states(after_many, piece) == states(fresh, piece)


@pytest.mark.parametrize("blank", [b"\n", b"\n\n", b"\r\n\r\n", b"\n\n\n\n"])
def test_blank_lines_before_the_first_event_are_none(blank: bytes) -> None:
    relay = SseRelay(hide_usage=True)
    relay.feed(blank)
    assert relay.events == 0
    relay.feed(chunk("a"))
    assert relay.events == 1
