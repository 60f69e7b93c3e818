"""Parts of engines' answers that more than one adapter reads. Answers are never trusted to have a type."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from router.core import EventSource
from router.errors import EngineProtocolError

_WILDCARDS = frozenset(("*", "0.0.0.0", "[::]", "::", ""))
_LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1", "[::1]"))


class Kind(Enum):
    CHAT = "/chat/completions"
    COMPLETION = "/completions"


class Models(NamedTuple):
    """`GET /v1/models`, the base models apart from the LoRA adapters that hang on them."""

    served: tuple[str, ...]
    loras: tuple[str, ...]
    owner: str | None
    root: str | None
    max_model_tokens: int | None


def read_models(answer: Any) -> Models:
    """Raises `EngineProtocolError` when no model is listed."""
    listed = answer.get("data") if type(answer) is dict else None
    cards = [card for card in listed or () if type(card) is dict and type(card.get("id")) is str]
    bases = [card for card in cards if not card.get("parent")]
    if not bases:
        raise EngineProtocolError("the engine lists no model")
    return Models(
        served=tuple(card["id"] for card in bases),
        loras=tuple(card["id"] for card in cards if card.get("parent")),
        owner=text(bases[0], "owned_by"),
        root=text(bases[0], "root"),
        max_model_tokens=number(bases[0], "max_model_len"),
    )


def read_tokens(answer: Any) -> list[int]:
    """The token ids of a `/tokenize` answer. Raises `EngineProtocolError` when there are none."""
    tokens = answer.get("tokens") if type(answer) is dict else None
    if type(tokens) is not list or not all(type(token) is int for token in tokens):
        raise EngineProtocolError("the engine's answer holds no token ids")
    return tokens


def read_request_fields(page: bytes) -> dict[str, list[frozenset[str]]]:
    """Of each POST in an OpenAPI description: the properties of every form its body may have. Takes milliseconds."""
    try:
        described = orjson.loads(page)
        return {
            path: _forms_of(described, content["schema"])
            for path, methods in described["paths"].items()
            for content in methods.get("post", {}).get("requestBody", {}).get("content", {}).values()
        }
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, RecursionError):
        return {}


def _forms_of(described: Any, schema: Any) -> list[frozenset[str]]:
    if "$ref" in schema:
        return _forms_of(described, described["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return [form for choice in choices for form in _forms_of(described, choice)]
    return [frozenset(schema.get("properties", ()))]


def kind_of(path: str) -> Kind:
    """Raises `EngineProtocolError` for a path whose bodies no engine tokenizes for us."""
    for kind in Kind:
        if path.endswith(kind.value):
            return kind
    raise EngineProtocolError("only chat and completion bodies can be tokenized")


def single_prompt(body: Mapping[str, Any]) -> str | list[int]:
    """A completion body's prompt as text or ids. Raises `EngineProtocolError` when it holds several."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise EngineProtocolError("only a single prompt can be tokenized")


def text(answer: Mapping[str, Any], key: str) -> str | None:
    value = answer.get(key)
    return value if type(value) is str else None


def number(answer: Mapping[str, Any], key: str) -> int | None:
    value = answer.get(key)
    return value if type(value) is int else None


def connectable(endpoint: str, url: str) -> str:
    """`tcp://*:5557` as an engine binds it, with the host of the engine's own URL."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    return f"{scheme}://{host_of(url)}:{port}" if scheme == "tcp" and host in _WILDCARDS else endpoint


def host_of(url: str) -> str:
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def events_note(source: EventSource, url: str) -> str | None:
    """What is wrong with where a source publishes, with the mend."""
    if source.replay is None:
        return "no replay_endpoint: lost KV events cannot be asked for again; add it to --kv-events-config"
    hosts = {endpoint.partition("://")[2].rpartition(":")[0] for endpoint in (source.endpoint, source.replay)}
    if hosts & _LOOPBACK and host_of(url) not in _LOOPBACK:
        return "KV events are bound to the engine's loopback address: bind tcp://*:PORT in --kv-events-config"
    return None
