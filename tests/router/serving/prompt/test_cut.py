from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, trainers

from router.serving.prompt.cut import KINDS, LEAST, PROBES, Cutter, make_cutter, turn_starts
from router.serving.prompt.template import ChatTemplate, ChatTemplates
from router.serving.prompt.tokenizer import HuggingFaceTokenizer, Tokenizer

WORDS = [
    "hello",
    "wörld",
    "don't",
    "x=1",
    "世界",
    "。你好，",
    "\n",
    "\n\n",
    " ",
    "  ",
    "\t",
    "<|turn|>",
    "<|end|>",
    "<|",
    "é",
    "1234",
]
WORDS += ["🙂", "👨‍👩‍👧", "مرحبا", "a", "I", "\r\n", ".", "user\n", "{}", "\u200b", "e\u0301", "ab cd"]
TEXTS = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(WORDS), max_size=60).map("".join))


def ids(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    return [token for encoded in tokenizer.encode(pieces) for token in encoded]


def test_what_the_demo_tokenizer_respects(cutter: Cutter) -> None:
    assert cutter.turn_starts == ("<|turn|>",)
    assert cutter.kinds == tuple(KINDS)


@given(text=TEXTS, least=st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_the_pieces_tokens_are_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str, least: int) -> None:
    pieces = Cutter(["<|turn|>"], KINDS, least=least).cut(text)
    assert "".join(pieces) == text
    assert "" not in pieces
    assert ids(tokenizer, pieces) == ids(tokenizer, [text])


@given(text=TEXTS, more=TEXTS, least=st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_a_text_that_grows_keeps_its_cuts(text: str, more: str, least: int) -> None:
    cut = Cutter(["<|turn|>"], KINDS, least=least).cut
    before = cut(text)
    assert cut(text + more)[: len(before[:-1])] == before[:-1]


@pytest.mark.parametrize("probe", PROBES[:-1])
def test_long_texts_are_cut_again_and_again(cutter: Cutter, tokenizer: Tokenizer, probe: str) -> None:
    text = probe * (20 * LEAST // len(probe))
    pieces = cutter.cut(text)
    assert ids(tokenizer, pieces) == ids(tokenizer, [text])
    assert all(len(piece) >= LEAST for piece in pieces[:-1])


def test_prose_and_chinese_are_cut_about_every_two_thousand_characters(cutter: Cutter) -> None:
    for sentence in ("The engineer reads the report. ", "同样的前缀只需要计算一次，后面的请求可以直接命中缓存。"):
        text = sentence * (40_000 // len(sentence))
        assert max(map(len, cutter.cut(text))) < LEAST + 64


def test_text_without_a_place_to_cut_stays_whole(cutter: Cutter) -> None:
    assert cutter.cut("x" * 50_000) == ["x" * 50_000]
    assert cutter.cut("") == []


def test_a_tokenizer_whose_tokens_cross_words_is_not_cut_there() -> None:
    bpe = FastTokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=800, show_progress=False, special_tokens=["<|t|>"])
    bpe.train_from_iterator(
        [*PROBES, *["of the most in order to be one of the way at the end of the day"] * 50], trainer
    )
    respectless = HuggingFaceTokenizer(bpe)
    template = ChatTemplate("{% for m in messages %}<|t|>{{ m.content }}{% endfor %}<|t|>")
    cutter = make_cutter(respectless, [template])
    assert "word" not in cutter.kinds
    text = "".join(f"<|t|>{probe}" for probe in PROBES * 3)
    assert ids(respectless, cutter.cut(text)) == ids(respectless, [text])


@pytest.mark.parametrize(
    ("source", "specials", "expected"),
    [
        (
            "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
            "{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
            {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
            ["<|start_header_id|>"],
        ),
        (
            "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
            "{{ m.content }}</s>{% endif %}{% endfor %}",
            {"<s>", "</s>", "[INST]", "[/INST]"},
            ["[INST]"],
        ),
        (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
            {"<|user|>", "<|system|>", "<|assistant|>", "<|end|>"},
            ["<|user|>", "<|assistant|>"],
        ),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {"<s>"}, []),
    ],
)
def test_turn_starts_are_found_by_rendering(source: str, specials: set[str], expected: list[str]) -> None:
    assert sorted(turn_starts(ChatTemplate(source), frozenset(specials))) == sorted(expected)


def test_turn_starts_of_the_demo_model(templates: ChatTemplates, tokenizer: Tokenizer) -> None:
    assert turn_starts(templates.default, tokenizer.specials) == ["<|turn|>"]
