"""Which model of a split answers: the same one for a whole conversation.

A conversation is known by the session its client names, else by its root: all up to the first thing the user says. So a
split never cuts a conversation in two, whose cache would be lost, and every replica of the gateway chooses alike. Where
weights change, only as many conversations change sides as the change is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson
from xxhash import xxh3_64_intdigest

_ROOT_CHARS = 2_048  # of a prompt that is one text
_ROOT_IDS = 512


class Arm(msgspec.Struct, frozen=True):
    """upto: where its share of 0..1 ends; it begins where the arm before it ends."""

    model: str
    upto: float


def arms(weights: Mapping[str, float]) -> tuple[Arm, ...]:
    """In the order of the names. Weights are relative to each other."""
    total, sum_so_far, found = sum(weights.values()), 0.0, []
    for model in sorted(weights):
        sum_so_far += weights[model]
        found.append(Arm(model, sum_so_far / total))
    return tuple(found)


def choose(split: Sequence[Arm], name: str, session: str | None, fields: Mapping[str, Any]) -> str:
    """The model for a request that asks for the split `name`."""
    root = session.encode("utf-8", "surrogatepass") if session else _root(fields)
    at = xxh3_64_intdigest(name.encode("utf-8", "surrogatepass") + b"\0" + root) / 2**64
    return next((arm.model for arm in split if at < arm.upto), split[-1].model)


def _root(fields: Mapping[str, Any]) -> bytes:
    messages = fields.get("messages", fields.get("input"))
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        first = next((at for at, message in enumerate(messages) if _is_users(message)), 0)
        return _written([fields.get("system"), fields.get("instructions"), messages[: first + 1]])
    prompt = fields.get("prompt", messages)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # of a batch
    if isinstance(prompt, list):
        return _written(prompt[:_ROOT_IDS])
    return _written([fields.get("instructions"), prompt[:_ROOT_CHARS] if isinstance(prompt, str) else prompt])


def _is_users(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "user"


def _written(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # half a character, or an integer beyond 64 bits
        return repr(value).encode("utf-8", "surrogatepass")
