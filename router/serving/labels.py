"""What a client says about a request for its own accounts: tags, and for which of its users it is.

Labels, never identity: whoever has a key may write what they like here.
"""

from __future__ import annotations

from router.http.messages import Headers
from router.serving.apis.api import Fields

TAG_HEADERS = (b"x-warmroute-tags", b"x-litellm-tags")
END_USER_HEADERS = (b"x-warmroute-end-user", b"x-litellm-end-user-id")
END_USER_FIELDS = ("safety_identifier", "user")
"""OpenAI's; the first that is there counts. Anthropic has `metadata.user_id`."""

MOST_TAGS = 10
TAG_CHARACTERS = 100
_SESSION = "_session_"  # Claude Code appends one to its user's id


def tags_of(headers: Headers) -> tuple[str, ...]:
    """A comma-separated list. What is beyond the limits, or cannot be printed, is left out."""
    found: dict[str, None] = {}
    for name in TAG_HEADERS:
        for part in headers.get(name, b"").decode("utf-8", "replace").split(","):
            tag = part.strip()[:TAG_CHARACTERS]
            if tag and tag.isprintable():
                found[tag] = None
    return tuple(found)[:MOST_TAGS]


def end_user_of(headers: Headers) -> str:
    """ "Empty: nobody was named."""
    for name in END_USER_HEADERS:
        if headers.get(name):
            return headers[name].decode("utf-8", "replace")
    return ""


def end_user_in(fields: Fields) -> str:
    """ "Empty: nobody was named."""
    for name in END_USER_FIELDS:
        said = fields.get(name)
        if isinstance(said, str) and said:
            return said
    metadata = fields.get("metadata")
    said = metadata.get("user_id") if isinstance(metadata, dict) else None
    return said.partition(_SESSION)[0] if isinstance(said, str) else ""
