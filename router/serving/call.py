"""What a client asks for: a request for an engine, read as far as the gateway needs it and no further.

Only what is needed is checked: a JSON object, a model that exists. Everything else is the engine's call.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Awaitable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

import orjson

from router.core import OPEN, Ask, Caller, Prompt
from router.errors import BadRequest, BodyTooLarge, Forbidden
from router.http.messages import Header, Headers
from router.serving.apis import APIS, CHAT, FORMS
from router.serving.beginnings import Beginnings
from router.serving.deadlines import TimeLimits
from router.serving.encoding import decode_body
from router.serving.form import Form, read_form
from router.serving.isolation.salts import WITHOUT_PREFIX, salt_within
from router.serving.labels import END_USER_FIELDS, END_USER_HEADERS, TAG_HEADERS, end_user_in, end_user_of, tags_of
from router.serving.models import Models, Named
from router.serving.needs import needs_of
from router.serving.prompt.pieces import Beginning
from router.serving.resume import Transcript, continued, continued_body, may_be_resumed
from router.serving.splice import splice, value_of
from router.serving.sse import EventRelay

_DEEPEST = 1024  # levels of a body, as orjson has it
_ASK_FOR_USAGE = b'{"include_usage":true}'
TRACE_HEADERS = frozenset((b"traceparent", b"tracestate"))
_SESSION_HEADERS = (
    b"x-session-id", b"x-litellm-session-id", b"x-session-affinity", b"x-claude-code-session-id",
    b"session-id", b"session_id", b"thread-id", b"conversation_id",
)  # fmt: skip
"""Where clients already say which conversation a request belongs to; the first that is there counts."""

_TOTAL_HEADERS = (b"x-warmroute-timeout", b"x-litellm-timeout")
_FIRST_TOKEN_HEADER = b"x-warmroute-first-token-timeout"
"""Seconds. They lower the model's limits, and never raise them."""

_RARE_HEADERS = frozenset((*_SESSION_HEADERS, *_TOTAL_HEADERS, _FIRST_TOKEN_HEADER, *TAG_HEADERS, *END_USER_HEADERS))
_RARE_FIELDS = frozenset(
    (
        *("stream_options", "n", "prompt", "cache_salt", "extra_key", "prompt_cache_key", "metadata"),
        *("sampling_params", "previous_response_id", "conversation", "background", *END_USER_FIELDS),
    )
)
"""Most requests have none: one look spares a look for each."""


class HttpRequest(Protocol):
    """The parts of `router/http` requests that are read here."""

    @property
    def named(self) -> Headers: ...
    @property
    def body(self) -> bytes: ...


class Call:
    """One request.

    caller     whom it is from
    body       the client's, decoded of any content coding
    fields     what a parser makes of it
    beginning  of the body, as one before it had it
    form       if it is one, and no JSON
    transcript of its answer's stream, where another engine might have to go on with it
    salt       what keeps its blocks apart from the same text of others, for the engine and for our index
    forwarded  the client's headers that its engine gets: `forward`, unless Connection says that they are for us alone
    end_user   as the client names it
    output_limit  tokens that each of its answers may have, as far as it says
    """

    __slots__ = (
        "api", "beginning", "body", "caller", "choices", "end_user", "fields", "form", "forwarded", "limits", "named",
        "output_limit", "path", "salt", "session", "stream", "tags", "transcript", "wants_usage",
    )  # fmt: skip

    def __init__(
        self,
        path: str,
        body: bytes,
        *,
        headers: Headers,
        models: Models,
        forward: frozenset[bytes] = TRACE_HEADERS,
        form: Form | None = None,
        caller: Caller = OPEN,
        beginnings: Beginnings | None = None,
    ) -> None:
        """`path`: as engines know it. `headers`: the first value of each. Raises ClientError."""
        self.path = path
        self.caller = caller
        self.api = APIS[path]
        self.body = body
        self.form = form
        self.beginning: Beginning | None = None
        if form is not None:
            fields = form.fields
        elif beginnings is None:
            fields = parse_body(body)
        else:
            fields, self.beginning = beginnings.parse(body, caller.domain, parse_body)
        self.fields: Mapping[str, Any] = fields
        self.named: Named = models.resolve(fields.get("model")) if caller.models is None else self._allowed(models)
        self.limits = self.named.model.limits
        self.stream: bool = fields.get("stream") is True
        self.output_limit = self.api.output_limit(fields)
        self.transcript: Transcript | None = None
        self.wants_usage = False
        self.choices = 1
        self.salt = caller.salt
        self.session: str | None = None
        self.tags: tuple[str, ...] = ()
        self.end_user = ""
        self.forwarded: Sequence[Header] = () if form is None else ((b"content-type", form.content_type),)
        if form is None and not _RARE_FIELDS.isdisjoint(fields):
            self._read_rare_fields(fields)
        if not _RARE_HEADERS.isdisjoint(headers):
            self._read_rare_headers(headers)
        if not forward.isdisjoint(headers):
            self.forwarded = (*self.forwarded, *_passed_on(headers, forward))

    def _allowed(self, models: Models) -> Named:
        allowed = self.caller.models
        assert allowed is not None
        if self.fields.get("lora_path") is not None:  # SGLang's other way to name an adapter
            raise Forbidden("This key may name models only by model.", param="lora_path", code="model_not_allowed")
        return models.resolve_for(allowed, self.fields.get("model"))

    def _read_rare_fields(self, fields: Mapping[str, Any]) -> None:
        self.api.check(fields)
        self.wants_usage = _wants_usage(fields.get("stream_options"))
        self.choices = self.api.choices(fields)
        if self.caller.salt is None:
            self.salt = _clients_salt(
                fields.get("cache_salt"),
                value_of(self.body, "extra_key", present=fields) if fields.get("extra_key") else None,
            )
        elif fields.get("cache_salt"):
            self.salt = salt_within(self.caller.salt, fields["cache_salt"])
        self.session = self.api.session(fields)
        self.end_user = end_user_in(fields)

    def _read_rare_headers(self, headers: Headers) -> None:
        for name in _SESSION_HEADERS:
            if name in headers:
                self.session = headers[name].decode("latin-1")
                break
        self.limits = _lowered(self.limits, headers)
        self.tags = tags_of(headers)
        self.end_user = end_user_of(headers) or self.end_user

    def asked_of(self, named: Named) -> Call:
        """The same request, to be answered by another model."""
        call = copy.copy(self)
        call.named = named
        call.transcript = None
        return call

    def relay(self) -> EventRelay:
        """For its answer, which is an event stream."""
        if self.named.model.failover.resume:
            if self.transcript is not None and self.transcript.events:
                return self.transcript.go_on(hide_usage=not self.wants_usage)
            if may_be_resumed(self.path, self.fields):
                self.transcript = Transcript()
                return self.transcript.begin(hide_usage=not self.wants_usage)
        return self.api.relay(wants_usage=self.wants_usage, choices=self.choices)

    def continued(self) -> Call | None:
        """The same request for an engine that goes on where its stream broke off; None where that would not be sound.

        Takes as long as it takes to read its prompt twice: for a thread.
        """
        transcript, prompts = self.transcript, self.named.model.prompts
        text = transcript.unfinished(self.fields.get("stop")) if transcript is not None else None
        if transcript is None or text is None:
            return None
        if not text:
            return self
        transcript.tokens = prompts.count_tokens(text) or transcript.pieces
        changed = continued(self.path, self.fields, text, transcript.tokens)
        if changed is None:
            return None
        call = copy.copy(self)
        call.body = continued_body(self.body, self.fields, changed)
        call.fields = {**self.fields, **changed}
        call.beginning = None
        call.output_limit = call.api.output_limit(call.fields)
        if self.path == CHAT and not prompts.is_continued(self.fields, call.fields, text):
            return None
        return call

    def ask(self, request_id: str, prompt: Prompt, *, exclude: tuple[str, ...] = ()) -> Ask:
        model, lora = self.named
        caller = self.caller
        return Ask(  # by position: keywords cost a struct several times as much
            request_id,
            model.name,
            prompt,
            caller.tenant,
            caller.domain,
            lora,
            self.session if self.session is None or not caller.domain else f"{caller.domain}\0{self.session}",
            "",  # request_class
            caller.priority,
            self.stream,
            self.choices,
            self.output_limit,
            exclude,
            None,  # policy
            len(self.body),
            caller.labels,
            self.path if caller.isolated and self.path not in WITHOUT_PREFIX else "",
            needs_of(self.fields, is_text=prompt.source == "exact"),
        )

    def upstream_body(self, served: str, owned_fields: Mapping[str, bytes]) -> bytes:
        """The body for an engine that knows the model as `served`: the client's bytes with the fields we own.

        A form has room for none of these but the model.
        """
        if self.form is not None:
            return self.form.naming(served, self.body)
        owned = dict(owned_fields)
        if self.fields.get("model") != served:
            owned["model"] = orjson.dumps(served)
        if self.stream and not self.wants_usage and self.api.asks_for_usage:
            owned["stream_options"] = self._stream_options()
        return splice(self.body, owned, present=self.fields) if owned else self.body

    def _stream_options(self) -> bytes:
        """The client's other options stay; usage is asked for, since nothing can be accounted for without it."""
        if not self.fields.get("stream_options"):
            return _ASK_FOR_USAGE
        return splice(value_of(self.body, "stream_options", present=self.fields) or b"{}", {"include_usage": b"true"})


def read_call(
    request: HttpRequest,
    path: str,
    *,
    models: Models,
    body_limit: int,
    forwarded: frozenset[bytes] = TRACE_HEADERS,
    caller: Caller = OPEN,
    beginnings: Beginnings | None = None,
) -> Call | Awaitable[Call]:
    """`forwarded`: headers that go on to the engine. `beginnings`: of bodies before this one.

    Raises ClientError for what cannot be served.
    """
    headers, body = request.named, request.body
    if b"content-encoding" in headers:
        return _read_encoded(headers, body, path, models, body_limit, forwarded, caller)
    if len(body) > body_limit:
        raise BodyTooLarge(f"The request body is larger than {body_limit} bytes.")
    if path in FORMS:
        return _read_form(headers, body, path, models, forwarded, caller)
    return Call(path, body, headers=headers, models=models, forward=forwarded, caller=caller, beginnings=beginnings)


async def _read_encoded(
    headers: Headers, body: bytes, path: str, models: Models, limit: int, forwarded: frozenset[bytes], caller: Caller
) -> Call:
    body = await decode_body(body, headers[b"content-encoding"], limit=limit)
    if len(body) > limit:
        raise BodyTooLarge(f"The request body is larger than {limit} bytes.")
    if path in FORMS:
        return await _read_form(headers, body, path, models, forwarded, caller)
    return Call(path, body, headers=headers, models=models, forward=forwarded, caller=caller)


async def _read_form(
    headers: Headers, body: bytes, path: str, models: Models, forwarded: frozenset[bytes], caller: Caller
) -> Call:
    form = await read_form(body, headers.get(b"content-type", b""))
    return Call(path, body, headers=headers, models=models, forward=forwarded, form=form, caller=caller)


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
        parsed = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadRequest("The request body is not valid UTF-8.", code="invalid_unicode") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest("The request body is not valid JSON.", code="invalid_json") from error
    if _nests_deeper_than(_DEEPEST, parsed):
        raise BadRequest("The request body nests too deeply.", code="invalid_json")
    return parsed


def _nests_deeper_than(levels: int, parsed: Any) -> bool:
    """How deep json itself goes depends on the version of Python."""
    level = [parsed]
    for _ in range(levels):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _passed_on(headers: Headers, names: frozenset[bytes]) -> list[Header]:
    only_for_us = {name.strip().lower() for name in headers.get(b"connection", b"").split(b",")}
    return [(name, headers[name]) for name in sorted(names - only_for_us) if name in headers]


def _lowered(limits: TimeLimits, headers: Headers) -> TimeLimits:
    """Raises BadRequest for what is no time."""
    total = min([_seconds(headers, name) for name in _TOTAL_HEADERS])
    first = _seconds(headers, _FIRST_TOKEN_HEADER)
    if total == first == inf:
        return limits
    total = min(total, limits.total_s or inf)
    return TimeLimits(min(first, limits.first_byte_s), limits.between_s, None if total == inf else total)


def _seconds(headers: Headers, name: bytes) -> float:
    value = headers.get(name)
    if value is None:
        return inf
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        raise BadRequest(f"{name.decode()} must be a number of seconds above 0.", code="invalid_timeout")
    return seconds


def _wants_usage(options: object) -> bool:
    """Whether the client asked for usage in its stream.

    Anything but false, null or absent counts as asked, and is left to the engine to accept or refuse.
    """
    if options is None:
        return False
    return not isinstance(options, dict) or options.get("include_usage") not in (None, False)


def _clients_salt(salt: object, extra: bytes | None) -> str | None:
    """Of a caller of no domain.

    SGLang's `extra_key` separates its cache too, but its events don't show it: such a prompt gets a root that no event
    has, so that public blocks earn it no credit. `extra`: as the client wrote it, since it may be any JSON value.
    """
    own = salt if isinstance(salt, str) else ""
    return f"{own}\0extra_key\0{extra.decode()}" if extra is not None else own or None
