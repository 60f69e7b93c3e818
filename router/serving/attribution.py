"""What a client says its request is for: tags, and the end user. Both are of its own making, so they are bounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TAG_HEADERS = (b"x-warmroute-tags", b"x-litellm-tags")
_MOST_TAGS = 10
_TAG_CHARS = 64
_USER_CHARS = 256
_USER_FIELDS = ("safety_identifier", "user")


def tags_of_fields(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """`metadata.tags`, as LiteLLM's clients write them."""
    metadata = fields.get("metadata")
    tags = metadata.get("tags") if isinstance(metadata, dict) else None
    return _bounded(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else ()


def tags_of_header(value: bytes) -> tuple[str, ...]:
    """Separated by commas."""
    return _bounded(value.decode("latin-1").split(","))


def end_user_of(fields: Mapping[str, Any]) -> str:
    """OpenAI's `safety_identifier` or `user`, Anthropic's `metadata.user_id`; "" for none."""
    for name in _USER_FIELDS:
        if isinstance(value := fields.get(name), str) and value:
            return value[:_USER_CHARS]
    metadata = fields.get("metadata")
    value = metadata.get("user_id") if isinstance(metadata, dict) else None
    return value[:_USER_CHARS] if isinstance(value, str) else ""


def _bounded(tags: Iterable[str]) -> tuple[str, ...]:
    """What every store can hold, each once."""
    printable = ("".join(filter(str.isprintable, tag)).strip()[:_TAG_CHARS] for tag in tags)
    return tuple(dict.fromkeys(tag for tag in printable if tag))[:_MOST_TAGS]
