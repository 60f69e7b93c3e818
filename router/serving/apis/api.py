"""One API that clients speak: what its requests ask for, how its answers are read, how its errors are said.

The base class is what they have in common: JSON in and out, errors in OpenAI's shape, placed by load alone. An API has
no state; there is one object for each, shared by all requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from router.core import Prompt
from router.errors import WarmrouteError
from router.serving import openai_errors
from router.serving.limits.headers import Room, openai_lines
from router.serving.sse import EventRelay, SseRelay

Fields = Mapping[str, Any]
"""A request body as parsed, or the fields of a form."""

_NO_PREFIX = "this route's prompt is not read"
_CHARACTERS_PER_TOKEN = 4
_BEYOND = 2**63


class Translation(Protocol):
    """An API by way of another route, for engines that have only that."""

    path: str

    def body(self, fields: Fields, served: str, owned: Mapping[str, bytes]) -> bytes:
        """The request, naming the model as `served` and with the fields we own. Raises BadRequest for what that route
        has no words for.
        """
        ...

    def relay(self, fields: Fields, *, prompt_tokens: int) -> EventRelay: ...

    def answer(self, fields: Fields, body: bytes) -> bytes | None:
        """A whole answer. None: it is not what that route answers."""
        ...


class Api:
    """reads_prompt    requests are placed by their prompt's prefix (`serving/prompt`)
    asks_for_usage  streams are asked for their usage, by OpenAI's `stream_options`
    is_form         bodies are multipart/form-data
    is_billed       answers without usage are billed by our own count; what costs no engine work is not
    gathers         whole answers are gathered and sent at once; if not, bytes leave as they come
    otherwise       how it is served by engines that lack its route
    id_header       where its clients look for the request id, beside `x-request-id`
    """

    reads_prompt = False
    asks_for_usage = False
    is_form = False
    is_billed = True
    gathers = True
    otherwise: Translation | None = None
    id_header = b""

    def check(self, fields: Fields) -> None:
        """Raises BadRequest for what cannot be served through a gateway. All else is the engine's to judge."""

    def choices(self, fields: Fields) -> int:
        """How many choices the answer has."""
        return 1

    def output_limit(self, fields: Fields) -> int | None:
        """The tokens an answer may have at most, where the request says so."""
        return 0

    def session(self, fields: Fields) -> str | None:
        """The conversation that the client says this belongs to."""
        return session_of(fields)

    def unread_prompt(self, fields: Fields, body_bytes: int) -> Prompt:
        """A prompt that is not read, as far as load goes."""
        return Prompt(self.rough_tokens(fields, body_bytes), 0, {}, (), "none", _NO_PREFIX)

    def rough_tokens(self, fields: Fields, body_bytes: int) -> int:
        return max(1, body_bytes // _CHARACTERS_PER_TOKEN)

    def relay(self, *, wants_usage: bool, choices: int) -> EventRelay:
        """For an answer that is an event stream."""
        return SseRelay(hide_usage=False, choices=choices)

    def status(self, error: WarmrouteError) -> int:
        return error.status

    def render(self, error: WarmrouteError, request_id: str) -> bytes:
        """The body of an error answer."""
        return openai_errors.render(error)

    def limit_lines(self, requests: Room | None, tokens: Room | None, now: float) -> bytes:
        """What is left of the client's limits, for the head of an answer. `now`: seconds since 1970."""
        return openai_lines(requests, tokens, now)

    def render_event(self, error: WarmrouteError, request_id: str, events: int) -> bytes:
        """The last words in a stream of so many events that breaks."""
        return openai_errors.render_event(error)


def written(value: Any) -> bytes:
    """As JSON: half a surrogate pair, or an integer beyond 64 bits, which a client or an engine may send, too."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


def session_of(fields: Fields, name_in_metadata: str = "session_id") -> str | None:
    key = fields.get("prompt_cache_key")
    if key is None and isinstance(metadata := fields.get("metadata"), dict):
        key = metadata.get(name_in_metadata)
    return key if isinstance(key, str) and key else None


def limit_of(value: object) -> int | None:
    """A number of any size would spoil sums, and not travel between processes."""
    return value if type(value) is int and 0 <= value < _BEYOND else None
