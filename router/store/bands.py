"""Prompt lengths in bands: what long contexts cost beside short ones."""

from __future__ import annotations

from bisect import bisect_left

BANDS = (1_024, 4_096, 16_384, 65_536, 262_144)
"""The longest prompt of each band, in tokens; one band more is for what is longer."""

INPUT_CLASSES = (
    "uncached_input", "cache_read", "cache_write_5m", "cache_write_1h", "cache_write", "media_input",
)  # fmt: skip
"""The token classes that make a prompt; the others are output."""


def band(prompt_tokens: int) -> int:
    """0 up to 1,024 tokens, 1 up to 4,096 …"""
    return bisect_left(BANDS, prompt_tokens)


def band_name(band: int) -> str:
    """E.g. "1k-4k", ">256k"."""
    names = [f"{tokens // 1024}k" for tokens in BANDS]
    if band == 0:
        return f"≤{names[0]}"
    return f">{names[-1]}" if band == len(BANDS) else f"{names[band - 1]}-{names[band]}"
