"""Prompt lengths in bands: what long contexts cost beside short ones."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

BANDS = (1_024, 4_096, 16_384, 65_536, 262_144)
"""The longest prompt of each band, in tokens; one band more is for what is longer."""

INPUT_CLASSES = (
    "uncached_input", "cache_read", "cache_write_5m", "cache_write_1h", "cache_write", "media_input",
)  # fmt: skip
"""The token classes that make a prompt; the others are output."""


def band(prompt_tokens: int) -> int:
    """0 up to 1,024 tokens, 1 up to 4,096 …"""
    return bisect_left(BANDS, prompt_tokens)


def _names() -> tuple[str, ...]:
    ends = [f"{tokens // 1024}k" for tokens in BANDS]
    return (f"≤{ends[0]}", *(f"{low}-{high}" for low, high in pairwise(ends)), f">{ends[-1]}")


BAND_NAMES = _names()
"""≤1k, 1k-4k … >256k"""
