"""What a client asks for: a completion request, read as far as the gateway needs it and no further.

Only what is needed is checked: a JSON object, a model that exists. Everything else is the engine's call.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from router.core import Ask, Prompt
from router.errors import BadRequest, BodyTooLarge
from router.http.messages import Header, Headers
from router.serving.encoding import decode_body
from router.serving.models import Models, Named
from router.serving.splice import splice, value_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_MOST_CHOICES = 16_384  # vLLM refuses more; a number of any size would spoil sums, and not travel between processes
_BEYOND = 2**63
_ASK_FOR_USAGE = b'{"include_usage":true}'
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_SESSION_HEADERS = (
    b"x-session-id", b"x-litellm-session-id", b"x-session-affinity", b"x-claude-code-session-id",
    b"session-id", b"session_id", b"thread-id", b"conversation_id",
)  # fmt: skip
"""Where clients already say which conversation a request belongs to; the first that is there counts."""

_RARE_HEADERS = frozenset((*_TRACE_HEADERS, *_SESSION_HEADERS))
_RARE_FIELDS = frozenset(("stream_options", "n", "prompt", "cache_salt", "extra_key", "prompt_cache_key", "metadata"))
"""Most requests have none: one look spares a look for each."""


class HttpRequest(Protocol):
    """The parts of `router/http` requests that are read here."""

    @property
    def named(self) -> Headers: ...
    @property
    def body(self) -> bytes: ...


class Call:
    """One request. `body` is the client's, decoded of any content coding; `fields` is what a parser makes of it."""

    __slots__ = ("body", "choices", "fields", "named", "path", "salt", "session", "stream", "trace", "wants_usage")

    def __init__(self, path: str, body: bytes, *, headers: Headers, models: Models) -> None:
        """`headers`: the first value of each. Raises BadRequest and UnknownModel."""
        self.path = path
        self.body = body
        self.fields = fields = parse_body(body)
        self.named: Named = models.resolve(fields.get("model"))
        self.stream: bool = fields.get("stream") is True
        self.wants_usage = False
        self.choices = 1
        self.salt: str | None = None
        self.session: str | None = None
        self.trace: Sequence[Header] = ()
        if not _RARE_FIELDS.isdisjoint(fields):
            self._read_rare_fields(path, fields)
        if not _RARE_HEADERS.isdisjoint(headers):
            self._read_rare_headers(headers)

    def _read_rare_fields(self, path: str, fields: Mapping[str, Any]) -> None:
        self.wants_usage = _wants_usage(fields.get("stream_options"))
        self.choices = _choices(path, fields)
        self.salt = _salt(
            fields.get("cache_salt"),
            value_of(self.body, "extra_key", present=fields) if fields.get("extra_key") else None,
        )
        self.session = _session(fields)

    def _read_rare_headers(self, headers: Headers) -> None:
        for name in _SESSION_HEADERS:
            if name in headers:
                self.session = headers[name].decode("latin-1")
                break
        self.trace = [(name, headers[name]) for name in _TRACE_HEADERS if name in headers]

    def ask(self, request_id: str, prompt: Prompt, *, exclude: tuple[str, ...] = ()) -> Ask:
        fields = self.fields
        model, lora = self.named
        limit = fields["max_completion_tokens"] if "max_completion_tokens" in fields else fields.get("max_tokens")
        return Ask(  # by position: keywords cost a struct several times as much
            request_id,
            model.name,
            prompt,
            "",  # tenant
            "",  # domain
            lora,
            self.session,
            "",  # request_class
            0,  # priority
            self.stream,
            self.choices,
            limit if type(limit) is int and 0 <= limit < _BEYOND else None,  # max_output_tokens
            exclude,
            None,  # policy
            len(self.body),
        )

    def upstream_body(self, served: str, rank_fields: Mapping[str, bytes]) -> bytes:
        """The body for an engine that knows the model as `served`: the client's bytes with the fields we own."""
        owned = dict(rank_fields)
        if self.fields.get("model") != served:
            owned["model"] = orjson.dumps(served)
        if self.stream and not self.wants_usage:
            owned["stream_options"] = self._stream_options()
        return splice(self.body, owned, present=self.fields) if owned else self.body

    def _stream_options(self) -> bytes:
        """The client's other options stay; usage is asked for, since nothing can be accounted for without it."""
        if not self.fields.get("stream_options"):
            return _ASK_FOR_USAGE
        return splice(value_of(self.body, "stream_options", present=self.fields) or b"{}", {"include_usage": b"true"})


def read_call(request: HttpRequest, path: str, *, models: Models, body_limit: int) -> Call | Awaitable[Call]:
    """Raises ClientError for what cannot be served."""
    headers, body = request.named, request.body
    if b"content-encoding" in headers:
        return _read_encoded(headers, body, path, models, body_limit)
    if len(body) > body_limit:
        raise BodyTooLarge(f"The request body is larger than {body_limit} bytes.")
    return Call(path, body, headers=headers, models=models)


async def _read_encoded(headers: Headers, body: bytes, path: str, models: Models, limit: int) -> Call:
    body = await decode_body(body, headers[b"content-encoding"], limit=limit)
    if len(body) > limit:
        raise BodyTooLarge(f"The request body is larger than {limit} bytes.")
    return Call(path, body, headers=headers, models=models)


def parse_body(body: bytes) -> dict[str, Any]:
    """A lone surrogate escape, which orjson refuses, is accepted: the bytes are relayed and the engine decides."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        fields = _parse_leniently(body)
    if not isinstance(fields, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    return fields


def _parse_leniently(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRequest("The request body is not valid UTF-8.", code="invalid_unicode") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest("The request body is not valid JSON.", code="invalid_json") from error


def _wants_usage(options: object) -> bool:
    """Whether the client asked for usage in its stream.

    Anything but false, null or absent counts as asked, and is left to the engine to accept or refuse.
    """
    if options is None:
        return False
    return not isinstance(options, dict) or options.get("include_usage") not in (None, False)


def _choices(path: str, fields: Mapping[str, Any]) -> int:
    """How many choices the answer has: n, times the prompts of a batch."""
    n = fields.get("n")
    choices = min(n, _MOST_CHOICES) if type(n) is int and n > 0 else 1
    prompt = fields.get("prompt") if path == COMPLETIONS else None
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        choices *= len(prompt)
    return choices


def _salt(salt: object, extra: bytes | None) -> str | None:
    """What keeps this prompt's blocks apart from the same text of others.

    SGLang's `extra_key` separates its cache too, but its events don't show it: such a prompt gets a root that no event
    has, so that public blocks earn it no credit. `extra`: as the client wrote it, since it may be any JSON value.
    """
    own = salt if isinstance(salt, str) else ""
    return f"{own}\0extra_key\0{extra.decode()}" if extra is not None else own or None


def _session(fields: Mapping[str, Any]) -> str | None:
    key = fields.get("prompt_cache_key")
    if key is None and isinstance(metadata := fields.get("metadata"), dict):
        key = metadata.get("session_id")
    return key if isinstance(key, str) and key else None
