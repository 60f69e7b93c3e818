"""What may be gone on with, what another engine is sent for it, and what becomes of its chunks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.core import Usage
from router.serving.apis import CHAT, COMPLETIONS
from router.serving.attempt import Attempt
from router.serving.resume import TEXT_BYTES, Transcript, continued, continued_body, may_be_resumed

VLLM = Path(__file__).parent / "recordings" / "vllm-0.32.0"
TOOL = {"type": "function", "function": {"name": "look"}}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(content: Any, *, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if content is None else {"content": content}
    return event(id="a", created=1, model="m", choices=[{"index": 0, "delta": delta, "finish_reason": finish}], **more)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": False, "seed": None},
        {"temperature": 0.5, "top_p": 0.9, "max_tokens": 10, "stop": ["x"], "repetition_penalty": 1.1},
        {"response_format": {"type": "text"}, "tools": [TOOL], "tool_choice": "auto"},
    ],
    ids=str,
)
def test_plain_text_may_be_gone_on_with(fields: dict[str, Any]) -> None:
    assert may_be_resumed(CHAT, chat(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        *({"n": 2}, {"best_of": 2}, {"use_beam_search": True}, {"echo": True}),
        *({"logprobs": True}, {"top_logprobs": 1}, {"return_token_ids": True}, {"seed": 0}),
        *({"presence_penalty": 0.5}, {"frequency_penalty": -1}),
        *({"response_format": {"type": "json_object"}}, {"guided_regex": "a*"}, {"structured_outputs": {}}),
        *({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
        *({"continue_final_message": True}, {"add_generation_prompt": False}, {"include_reasoning": False}),
        *({"input_ids": [1]}, {"messages": None}, {"never_heard_of": 0}),
    ],
    ids=str,
)
def test_what_cannot_be_continued_exactly_may_not(fields: dict[str, Any]) -> None:
    assert not may_be_resumed(CHAT, chat(**fields))


@pytest.mark.parametrize(
    ("prompt", "may"), [("once", True), (["once"], False), ([1, 2], False), (None, False)], ids=str
)
def test_a_completions_prompt_must_be_text(prompt: Any, may: bool) -> None:
    assert may_be_resumed(COMPLETIONS, {"model": "m", "prompt": prompt, "logprobs": None}) is may


def test_other_apis_are_not_known() -> None:
    assert not may_be_resumed("/v1/messages", chat())


# -- what is kept


@pytest.mark.parametrize("cut", [1, 7, 100, 10_000])
def test_the_text_of_a_recorded_stream(cut: int) -> None:
    """One whose engine was killed."""
    recorded = (VLLM / "stream-engine-killed.sse").read_bytes()
    transcript = Transcript()
    relay = transcript.begin(hide_usage=True)
    passed = b"".join(relay.feed(recorded[at : at + cut]) for at in range(0, len(recorded), cut))
    said = [json.loads(part[6:]) for part in passed.split(b"\n\n") if part.startswith(b"data: ")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in said)
    assert relay.error is not None
    assert transcript.unfinished(None) == text
    assert transcript.events == relay.events == len(said)
    assert transcript.pieces == len(said) - 1, "the role is no text"


def kept(*events: bytes, stop: Any = None) -> str | None:
    transcript = Transcript()
    relay = transcript.begin(hide_usage=True)
    for part in events:
        relay.feed(part)
    return transcript.unfinished(stop)


@pytest.mark.parametrize(
    "odd",
    [
        event(choices=[{"index": 0, "delta": {"reasoning": "hm"}}]),
        event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}]),
        event(choices=[{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]),
        chunk(["parts"]),
        chunk("\ud800"),
        chunk("a character cut in \ufffd"),
        b'data: {"choices": [{"index": 0, "delta": {"content": "' + b"x" * (1 << 17),
    ],
    ids=range(7),
)
def test_a_stream_with_anything_beside_text_is_not_kept(odd: bytes) -> None:
    assert kept(chunk("a"), chunk("b")) == "ab"
    assert kept(chunk("a"), chunk("b"), odd) is None


@pytest.mark.parametrize(
    ("stop", "unfinished"), [("END", None), (["x", "\nEND"], None), ("NDX", "\nE"), (["E"], "\nE"), (7, "\nE")]
)
def test_a_stop_string_may_have_begun(stop: Any, unfinished: str | None) -> None:
    assert kept(chunk("\nE"), stop=stop) == unfinished


def test_a_long_text_is_dropped() -> None:
    transcript = Transcript()
    relay = transcript.begin(hide_usage=True)
    for _ in range(TEXT_BYTES // 1000 + 2):
        relay.feed(chunk("ä" * 500))
    assert transcript.unfinished(None) is None
    assert not transcript.text


# -- what another engine is sent


def test_a_chats_bytes_are_the_clients_own() -> None:
    body = b'{ "messages" : [ {"role":"user", "content":"\\ud83d"} ], "big": 123456789012345678901, "max_tokens": 50}'
    fields = json.loads(body)
    changed = continued(CHAT, fields, 'said "so"', 20)
    assert changed is not None
    sent = continued_body(body, fields, changed)
    assert b'{"role":"user", "content":"\\ud83d"} ,{"role":"assistant"' in sent
    assert b"123456789012345678901" in sent
    read = json.loads(sent)
    assert read["messages"][1:] == [{"role": "assistant", "content": 'said "so"'}]
    assert read == {**fields, **changed, "messages": changed["messages"]}
    assert (read["max_tokens"], read["continue_final_message"], read["add_generation_prompt"]) == (30, True, False)


def test_a_completions_prompt_grows() -> None:
    body = b'{"prompt": "once", "min_tokens": 5, "max_tokens": 30}'
    changed = continued(COMPLETIONS, json.loads(body), " upon", 20)
    assert changed is not None
    sent = json.loads(continued_body(body, json.loads(body), changed))
    assert sent == {"prompt": "once upon", "min_tokens": 0, "max_tokens": 10}


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_an_answer_of_all_the_tokens_it_may_have_has_no_more(limit: str) -> None:
    assert continued(CHAT, chat(**{limit: 20}), "said", 20) is None


# -- what becomes of its chunks


def gone_on(*events: bytes, hide_usage: bool = False, prompt_tokens: int | None = 10) -> tuple[list[Any], Any]:
    transcript = Transcript()
    transcript.begin(hide_usage=hide_usage).feed(chunk("a") + chunk("b"))
    transcript.prompt_tokens, transcript.tokens = prompt_tokens, 2
    relay = transcript.go_on(hide_usage=hide_usage)
    passed = relay.feed(b"".join(events))
    return [json.loads(part[6:]) for part in passed.split(b"\n\n") if part], relay


def test_chunks_become_those_of_the_first_stream() -> None:
    told, relay = gone_on(
        event(id="b", created=2, model="n", choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}]),
        event(id="b", created=2, model="n", choices=[{"index": 0, "delta": {"role": "assistant", "content": "c"}}]),
        event(id="b", created=2, model="n", choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
        event(id="b", choices=[], usage={"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}),
        b"data: [DONE]\n\n",
    )
    head = {"id": "a", "created": 1, "model": "m", "warmroute": {"resumed": 1}}
    assert told == [
        head | {"choices": [{"index": 0, "delta": {"content": "c"}}]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        head | {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}},
    ]
    assert (relay.complete, relay.tail, relay.events) == (True, b"data: [DONE]\n\n", 5)
    assert relay.usage == Usage(10, 3)


def test_usage_is_that_of_one_answer() -> None:
    counts = {"prompt_tokens": 12, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 11, "x": 1}}
    told, relay = gone_on(event(choices=[], usage=counts), prompt_tokens=None)
    assert told[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 10, "x": 1}
    assert relay.usage == Usage(10, 3, 10), "by our count of the text, where the prompt's is not known"
    told, relay = gone_on(event(choices=[], usage=counts), hide_usage=True)
    assert told == []
    assert relay.usage == Usage(10, 3, 10)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_engine_that_thinks_anew_does_not_go_on(name: str) -> None:
    told, relay = gone_on(event(choices=[{"index": 0, "delta": {name: "hm"}}]))
    assert told == []
    assert relay.error is not None


def test_a_tools_call_may_begin() -> None:
    delta = {"tool_calls": [{"index": 0, "id": "c"}]}
    told, relay = gone_on(event(choices=[{"index": 0, "delta": delta}]))
    assert told[0]["choices"][0]["delta"] == delta
    assert relay.error is None


@pytest.mark.parametrize("paused", [False, True])
def test_a_client_that_reads_slowly_makes_the_second_engine_wait_too(paused: bool) -> None:
    told: list[str] = []
    exchange = SimpleNamespace(pause=lambda: told.append("pause"), resume=lambda: told.append("resume"))
    responder = SimpleNamespace(started=True, paused=paused, on_pause=None, on_resume=None, on_probe=None)
    reply = SimpleNamespace(started=True, responder=responder)
    call = SimpleNamespace(relay=lambda: Transcript().go_on(hide_usage=True))
    attempt = Attempt(call, reply, 1, on_first_token=told.append)  # type: ignore[arg-type]
    attempt.exchange = exchange  # type: ignore[assignment]
    attempt.on_head(200, [(b"content-type", b"text/event-stream")])
    assert told == ["pause"] * paused
    responder.on_pause()
    responder.on_resume()
    assert told == [*["pause"] * paused, "pause", "resume"]
