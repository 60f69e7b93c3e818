from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from router.lab import train_demo_model
from router.serving.prompt.tokenizer import HuggingFaceTokenizer, Tokenizer, demo_model, load_tokenizer


def test_the_demo_tokenizer_is_small_and_loses_nothing(tokenizer: Tokenizer) -> None:
    path = demo_model() / "tokenizer.json"
    assert sum(file.stat().st_size for file in demo_model().iterdir()) < 300_000
    fast = FastTokenizer.from_file(str(path))
    text = "Hello, wörld! 你好世界 🙂\n\tdef f(x): return {'a': 1}"
    assert fast.decode(tokenizer.encode([text])[0].tolist()) == text
    english = "The customer reads the original document because the assistant explains the price of bread. " * 10
    assert len(tokenizer.encode([english])[0]) < len(english) / 3


def test_the_training_script_makes_the_file_that_is_shipped() -> None:
    trained = json.loads(train_demo_model.train().to_str())
    shipped = json.loads((demo_model() / "tokenizer.json").read_text("utf-8"))
    assert trained["model"]["vocab"] == shipped["model"]["vocab"]
    assert trained["model"]["merges"] == shipped["model"]["merges"]


def test_each_text_is_encoded_by_itself(tokenizer: Tokenizer) -> None:
    together = tokenizer.encode(["one", " two", "<|turn|>"])
    assert [ids.typecode for ids in together] == ["I"] * 3
    assert together == [tokenizer.encode([text])[0] for text in ("one", " two", "<|turn|>")]
    assert len(together[2]) == 1


def test_what_goes_around_a_completion_prompt() -> None:
    fast = FastTokenizer.from_file(str(demo_model() / "tokenizer.json"))
    begin, end = fast.token_to_id("<|endoftext|>"), fast.token_to_id("<|end|>")
    fast.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|end|>", special_tokens=[("<|endoftext|>", begin), ("<|end|>", end)]
    )
    fast.enable_truncation(3)
    both = HuggingFaceTokenizer(fast)
    assert (both.opening.tolist(), both.closing.tolist()) == ([begin], [end])
    assert len(both.encode(["a b c d e f g"])[0]) == 7, "a truncation stored in the file is not applied"


def test_tiktoken_ranks_are_read_from_a_file(tmp_path: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b" w"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (tmp_path / "ranks").write_bytes(b"\n".join(lines) + b"\n")
    loaded = load_tokenizer(f"tiktoken:cl100k_base@{tmp_path / 'ranks'}")
    assert [ids.tolist() for ids in loaded.encode(["hello w", "<|endoftext|>"])] == [[258, ord("o"), 259], [100257]]
    assert "<|endoftext|>" in loaded.specials
    named = load_tokenizer(f"tiktoken:gpt-4o@{tmp_path / 'ranks'}")
    assert named.encode(["hell"])[0].tolist() == [258]


@pytest.mark.parametrize("source", ["/nonexistent", "tiktoken:cl100k_base@/nonexistent"])
def test_a_missing_file_is_an_os_error(source: str) -> None:
    with pytest.raises(OSError, match="nonexistent"):
        load_tokenizer(source)


def test_files_that_are_something_else_are_value_errors(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        load_tokenizer(str(tmp_path))
    for name, content in (("cl100k_base", "no ranks"), ("unheard-of", ""), ("gpt2", ""), ("r50k_base", "")):
        (tmp_path / "ranks").write_text(content)
        with pytest.raises(ValueError):  # noqa: PT011 - each says something else
            load_tokenizer(f"tiktoken:{name}@{tmp_path / 'ranks'}")
