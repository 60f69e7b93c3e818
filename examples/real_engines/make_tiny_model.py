#!/usr/bin/env python3
"""Write a tiny chat model with random weights, so that a real engine runs on any machine, without a GPU or a download.

    VENV/bin/python make_tiny_model.py OUT_DIR [--layers 2] [--hidden 128] [--seed 0]

VENV is the engine's environment: it has torch and transformers. The architecture is Qwen3, the tokenizer and the chat
template are the gateway's own demo files. The same seed gives the same weights, so replicas answer alike at
temperature 0. The text it writes is noise; its cache, its events and its counters are real.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

DEMO_MODEL = Path(__file__).resolve().parents[2] / "router" / "lab" / "demo_model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HEAD_DIM = 64  # a size that every attention kernel takes
CONTEXT = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, options.out / name)
    config = model_config(layers=options.layers, hidden=options.hidden)
    torch.manual_seed(options.seed)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    model.save_pretrained(options.out)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    print(f"{options.out}: {millions:.1f}M random weights, {config.vocab_size} token ids, context {CONTEXT}")


def model_config(*, layers: int, hidden: int) -> Qwen3Config:
    end = special_tokens()["<|end|>"]
    return Qwen3Config(
        vocab_size=vocabulary_size(),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )


def special_tokens() -> dict[str, int]:
    return {token["content"]: token["id"] for token in _tokenizer()["added_tokens"]}


def vocabulary_size() -> int:
    """Rounded up to a multiple of 64, as kernels like it."""
    highest = max(*_tokenizer()["model"]["vocab"].values(), *special_tokens().values())
    return (highest // 64 + 1) * 64


def _tokenizer() -> dict:
    return json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
