from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from router.serving.prompt import ModelPrompts
from router.serving.prompt.asked import BodyReader
from router.serving.prompt.cut import LEAST, make_cutter
from router.serving.prompt.dialect import DIALECTS, SHAPING_FIELDS, Dialect
from router.serving.prompt.load import read_with
from router.serving.prompt.reason import TooLong, Unreadable
from router.serving.prompt.template import ChatTemplate, ChatTemplates
from router.serving.prompt.tokenizer import HuggingFaceTokenizer, Ids, demo_model

CHAT = "/v1/chat/completions"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = {
    "demo": (demo_model() / "chat_template.jinja").read_text("utf-8"),
    "chatml": CHATML,
    "a default system text": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
    ),
    "bos, headers, trimmed": (
        "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] | trim }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
    ),
    "only answers trimmed": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ m.content.strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    ),
    "a mark for each role": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{% endfor %}<|assistant|>\n"
    ),
    "thoughts are cut out of answers": (
        "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and '</think>' in text %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>{{ m.role }}\n{{ text }}"
        "<|im_end|>\n{% endfor %}<|im_start|>assistant\n<think>\n"
    ),
    "the last answer is shown otherwise": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>"
        "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
    "texts in parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
        "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
    "no system": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    ),
    "the system in the first turn": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}<|im_start|>{{ m.role }}\n"
        "{% if messages[0].role == 'system' and loop.index0 == 1 %}{{ messages[0].content }}\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
}  # fmt: skip
OTHER = {
    "no special tokens": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    "today": CHATML + "{{ strftime_now('%d %b %Y') }}",
    "upper case": CHATML.replace("m.content", "m.content | upper"),
    "as JSON": CHATML.replace("m.content", "m.content | tojson"),
    "numbered": CHATML.replace("{{ m.content", "{{ loop.index }}{{ m.content"),
    "the last five": CHATML.replace("in messages", "in messages[-5:]"),
    "lines joined": CHATML.replace("m.content", "m.content.split('\n') | join(' ')"),
    "answers only when last": CHATML.replace("m.content", "m.content if m.role != 'assistant' or loop.last else ''"),
    "long ones shortened": CHATML.replace("m.content", "m.content[:4000]"),
    "always refuses": "{{ raise_exception('no') }}",
}
SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<|bos|>"),
    *("<|user|>", "<|system|>", "<|assistant|>"),
)


@pytest.fixture(scope="module")
def fast() -> HuggingFaceTokenizer:
    tokenizer = FastTokenizer.from_file(str(demo_model() / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return HuggingFaceTokenizer(tokenizer)


@pytest.fixture(scope="module")
def readers(fast: HuggingFaceTokenizer) -> Mapping[str, BodyReader]:
    """One for each template, with vLLM's dialect."""
    return {name: reader_of(fast, source) for name, source in {**PLAIN, **OTHER}.items()}


def reader_of(tokenizer: HuggingFaceTokenizer, source: str) -> BodyReader:
    template = ChatTemplate(source, specials={"bos_token": "<|bos|>"}, clock=lambda: datetime(2024, 7, 26))
    return read_with(tokenizer, ChatTemplates(default=template), "vllm", {})


def chat(*contents: str, system: bool = True, **fields: Any) -> dict[str, Any]:
    roles = [*(["system"] if system else []), *("user", "assistant") * len(contents)]
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **fields}


def read_plain(reader: BodyReader, body: Mapping[str, Any]) -> Any:
    assert reader._plain_chat is not None
    return reader._plain_chat.read(body)


# --- it reads like a rendering ----------------------------------------------------------------------------------------

MARKS = ("</think>", "<think>", "<|im_start|>", "<|im_end|>", "<|turn|>", "<|user|>", "<|head|>", "<|bos|>", "<|", "|>")
EDGES = ("", " ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\x1f", "\n\n", "x-anthropic-billing-header: 1\n")
CONTENTS = st.tuples(
    st.sampled_from(EDGES),
    st.one_of(st.text(max_size=40), st.sampled_from([*MARKS, "word " * 600, "字。" * 1_500, "x" * 5_000])),
    st.sampled_from(EDGES),
).map("".join)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": CONTENTS},
        optional={"name": st.just("n")},
    ),
    max_size=6,
)  # fmt: skip
IN_TURNS = st.builds(
    lambda contents, system: chat(*contents, system=system)["messages"], st.lists(CONTENTS, max_size=9), st.booleans()
)


@pytest.mark.parametrize("name", PLAIN)
@given(messages=st.one_of(IN_TURNS, MESSAGES), dialect=st.sampled_from(DIALECTS))
@settings(deadline=None, max_examples=60)
def test_what_is_read_plainly_is_what_rendering_gives(
    readers: Mapping[str, BodyReader], name: str, messages: list[dict[str, Any]], dialect: Dialect
) -> None:
    reader = readers[name].with_dialect(dialect)
    body = {"messages": messages}
    plain = reader._plain_chat.read(body) if reader._plain_chat is not None else None
    try:
        rendered = reader.read_any(CHAT, body)
    except Unreadable:
        rendered = None
    if plain is not None:  # which of the rendered text is the model's, is not told by the text
        assert rendered is not None
        assert (plain.answered > 0) == (rendered.answered > 0)
        assert msgspec.structs.replace(plain, answered=rendered.answered) == rendered
    if rendered is not None:
        assert reader.read(CHAT, body) == (plain or rendered)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_conversations_are_read_without_rendering(readers: Mapping[str, BodyReader], name: str) -> None:
    reader = readers[name]
    with_system = name not in ("no system", "the system in the first turn")
    for texts in (("one",), ("one", "two", "three"), ("one ", " two", "\nthree" * 900, "four", "five")):
        assert read_plain(reader, chat(*texts, system=False)) is not None
        assert (read_plain(reader, chat("system", *texts)) is not None) is with_system


def test_what_the_model_wrote_ends_with_its_last_answer(readers: Mapping[str, BodyReader]) -> None:
    reader = readers["chatml"]
    for talk, answer in ((("s", "u", "one", "v"), "one"), (("s", "u", "one", "v", "two" * 2_000, "w" * 5_000), "two")):
        asked = read_plain(reader, chat(*talk))
        assert asked is not None
        written, new = "".join(map(str, asked.pieces[: asked.answered])), asked.pieces[asked.answered :]
        assert written.rpartition("assistant")[2].lstrip().startswith(answer)
        assert new
        assert answer not in "".join(map(str, new))
    assert read_plain(reader, chat("s", "u")).answered == 0


@pytest.mark.parametrize("name", OTHER)
def test_other_templates_are_not_taken_for_plain(readers: Mapping[str, BodyReader], name: str) -> None:
    assert readers[name]._plain_chat is None


@pytest.mark.parametrize("field", sorted(SHAPING_FIELDS))
def test_fields_that_may_change_the_prompt_are_left_to_rendering(readers: Mapping[str, BodyReader], field: str) -> None:
    assert read_plain(readers["demo"], chat("s", "u", **{field: None})) is None


OTHER_FIELDS = {
    "model": "m", "stream": True, "temperature": 0.5, "max_tokens": 5, "stop": ["x"], "user": "u", "n": 1, "seed": 4,
    "tool_choice": "none", "stream_options": {"include_usage": True}, "cache_salt": "s", "logprobs": True,
    "response_format": {"type": "json_object"}, "metadata": {"a": "b"}, "session_id": "x", "parallel_tool_calls": True,
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_other_fields_do_not_change_it(readers: Mapping[str, BodyReader], dialect: Dialect) -> None:
    reader = readers["demo"].with_dialect(dialect)
    body = chat("s", "u", **OTHER_FIELDS)
    assert read_plain(reader, body) == reader.read_any(CHAT, body) == reader.read_any(CHAT, chat("s", "u"))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "system", "content": "s"}],
        [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "u"}, {"role": "user", "content": "u"}],
        [{"role": "user", "content": [{"type": "text", "text": "u"}]}],
        [{"role": "user", "content": "u", "name": "n"}],
        [{"role": "tool", "content": "u"}],
        [{"role": ["user"], "content": "u"}],
        [{"role": "user"}, {"role": "user"}],
        [{"role": "user", "name": "u"}],
        [{"role": "user", "content": ""}],
        [["role", "content"]],
        ["ab"],
        [7],
        "user",
        None,
        3,
    ],
)
def test_what_is_no_plain_conversation(readers: Mapping[str, BodyReader], messages: Any) -> None:
    assert read_plain(readers["demo"], {"messages": messages}) is None
    assert read_plain(readers["demo"], {}) is None


def test_what_an_engine_drops_from_system_texts(readers: Mapping[str, BodyReader]) -> None:
    header = "x-anthropic-billing-header: v=1\nYou help."
    vllm, plain = (readers["demo"].with_dialect(dialect) for dialect in DIALECTS if dialect.name != "sglang")
    assert read_plain(vllm, chat(header, "u")) is None
    assert vllm.read(CHAT, chat(header, "u")) == vllm.read(CHAT, chat("You help.", "u"))
    assert read_plain(plain, chat(header, "u")) is not None
    assert read_plain(vllm, chat("s", header)) is not None


def test_a_conversation_too_long_for_the_loop(readers: Mapping[str, BodyReader]) -> None:
    reader, body = readers["demo"], chat("s", "word " * LEAST)
    for read in (reader.read, lambda path, body, at_most: reader.read(path, {**body, "tools": None}, at_most)):
        with pytest.raises(TooLong):
            read(CHAT, body, 5_000)
        assert read(CHAT, body, 20_000) == reader.read_any(CHAT, body)


def test_a_turn_start_made_of_a_content_and_what_follows(fast: HuggingFaceTokenizer) -> None:
    """The text behind a content may complete a mark that the content begins."""
    assert reader_of(fast, CHATML.replace("<|im_end|>", "im_start|>"))._plain_chat is None


# --- with a memo ------------------------------------------------------------------------------------------------------


async def test_a_conversation_that_is_rendered_later_is_still_known(make_prompts: Callable[..., ModelPrompts]) -> None:
    """And the other way round: pieces, and so all that is remembered, are the same."""
    for first, second in (({}, {"add_generation_prompt": True}), ({"add_generation_prompt": True}, {})):
        prompts = make_prompts()
        body = chat("s", "word " * 3_000, "answer", "and now?")
        before = await prompts.prepare(CHAT, {**body, **first})
        tokenizer = prompts._tokenizer
        assert tokenizer is not None

        def refuse(texts: object) -> list[Ids]:
            raise AssertionError("known text is tokenized again")

        tokenizer.encode = refuse  # type: ignore[method-assign]
        assert await prompts.prepare(CHAT, {**body, **second}) == before


def test_cutting_follows_the_same_turn_starts(fast: HuggingFaceTokenizer) -> None:
    template = ChatTemplate(PLAIN["bos, headers, trimmed"], specials={"bos_token": "<|bos|>"})
    cutter = make_cutter(fast, [template])
    pieces = reader_of(fast, template.source).read(CHAT, chat("s", "u")).pieces
    assert pieces == cutter.cut("".join(map(str, pieces)))
    assert [str(piece)[:10] for piece in pieces] == ["<|bos|>", "<|head|>sy", "<|head|>us", "<|head|>as"]
