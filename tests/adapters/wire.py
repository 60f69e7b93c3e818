"""Bytes as engines send them: recorded ones, and batches made for a test."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

RECORDINGS = Path(__file__).parent / "recordings"

pack = msgspec.msgpack.encode


def stored(*hashes: int | bytes, **fields: Any) -> dict[str, Any]:
    """A BlockStored of vLLM 0.24 and later, two tokens a block."""
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": list(range(2 * len(hashes))),
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event | fields


def removed(*hashes: int | bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | fields


def batch(*events: Any, at: Any = 1.5, rank: int | None = 0) -> bytes:
    return pack([at, list(events), rank])


def numbered(number: int, *, process: int = 0) -> bytes:
    """A batch like no other: what engine process `process` publishes as its batch `number`."""
    return batch(stored(number + 1), at=1000.0 * process + number)


def recorded_lines(engine: str, name: str) -> Iterator[dict[str, Any]]:
    with (RECORDINGS / engine / name).open() as file:
        yield from map(json.loads, file)


def recorded_batches(engine: str, name: str = "events.jsonl") -> list[tuple[int, bytes]]:
    lines = recorded_lines(engine, name)
    return [(line["seq"], base64.b64decode(line["payload_b64"])) for line in lines if "seq" in line]


def recorded_answer(engine: str, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((RECORDINGS / engine / f"{name}.json").read_text())
    return answer


def recorded_bytes(engine: str, name: str) -> bytes:
    return (RECORDINGS / engine / name).read_bytes()


def recorded_replies(engine: str, *, start: int = 0) -> list[tuple[int, bytes]]:
    """(sequence, payload) of the recorded answers to one replay request, read from the right; the end mark last."""
    frames = [
        [base64.b64decode(frame) for frame in line["frames_b64"]]
        for line in recorded_lines(engine, "replay.jsonl")
        if line["socket"] == "DEALER" and line["start"] == start and "frames_b64" in line
    ]
    return [(int.from_bytes(reply[-2], "big"), reply[-1]) for reply in frames]
