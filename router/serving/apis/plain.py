"""Routes that answer with one JSON object and generate nothing: they are relayed as they are, and placed by load."""

from __future__ import annotations

from typing import Any

from router.serving.apis.api import Api, Fields

_INPUTS = (
    *("input", "messages", "inputs", "texts", "query", "queries", "documents", "items"),
    *("text_1", "text_2", "data_1", "data_2"),
)


class Pooling(Api):
    """Embeddings, scores, classes: the whole input is computed, whatever it is called."""

    def rough_tokens(self, fields: Fields, body_bytes: int) -> int:
        """Four characters a token; ids count as they are, and what is neither by the length of the body."""
        for name in _INPUTS:
            ids = _ids(fields.get(name))
            if ids:
                return ids
        return super().rough_tokens(fields, body_bytes)


class Light(Api):
    """Work for an engine's CPU alone: tokenizing, counting."""

    is_billed = False

    def rough_tokens(self, fields: Fields, body_bytes: int) -> int:
        return 1


def _ids(value: Any) -> int:
    """How many token ids these are: one list of them, or one for each of a batch."""
    if not isinstance(value, list) or not value:
        return 0
    if isinstance(value[0], int):
        return len(value)
    return sum(map(len, value)) if isinstance(value[0], list) and all(isinstance(one, list) for one in value) else 0
