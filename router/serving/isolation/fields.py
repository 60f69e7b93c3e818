"""Which fields of a request are open to its key.

Fields that steer an engine are refused to everybody with a key that may not steer; fields that nobody has reviewed only
to those whose caches are kept apart from others', since nothing tells whether they would stay apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from router.core import Caller
from router.errors import BadRequest
from router.serving.form import Form
from router.serving.isolation.catalogue import OURS, SAFE, SAMPLING_SAFE, STEERING, TEMPLATE_STEERING

_SHOWN = 20
_SHOWN_CHARS = 60
_PROMPTS = ("messages", "input", "inputs", "system", "documents", "items", "query", "queries", "data_1", "data_2")
_WITH_PARTS = frozenset((*_PROMPTS, "images"))
_IDENTITIES = frozenset(("uuid", "image_embeds", "audio_embeds", "video_embeds", "image_pil", "file_id"))
"""Of a content part: they name what somebody else may have sent, or are computed already."""
_MEDIA = frozenset(("image_url", "video_url", "audio_url", "image", "video", "audio", "source", "file", "file_url"))
_TELLING = _MEDIA | _IDENTITIES
_INSIDE = ("content", "output")
_CONTAINERS = (list, dict)
_DEEPEST = 8  # a message, its parts, a tool's result, and what stands in that: five


class FieldRules:
    """safe: fields that the operator has reviewed. media_hosts: whence engines may be told to fetch media."""

    def __init__(self, *, safe: Iterable[str] = (), media_hosts: Collection[str] = ()) -> None:
        safe = frozenset(safe)
        self._steering = STEERING - safe
        self._open = SAFE | OURS | safe
        self._sampling = self._open | SAMPLING_SAFE
        self._media_hosts = frozenset(media_hosts)

    def check(self, fields: Mapping[str, Any], form: Form | None, caller: Caller) -> None:
        """Raises BadRequest with the names of all fields that are not open to the caller, who is not the open one."""
        if caller.steers:
            return
        if form is not None:
            refused = [name for name in form.names if name == "cache_salt" or self._refuses(name, caller)]
        elif caller.isolated:
            refused = [] if fields.keys() <= self._open else self._of(fields, caller)
        else:
            refused = [] if self._steering.isdisjoint(fields) else self._of(fields, caller)
        if form is None:
            refused += self._nested(fields, caller)
        if refused:
            shown = ", ".join(name[:_SHOWN_CHARS] for name in dict.fromkeys(refused[:_SHOWN]))
            message = f"This key may not set: {shown}."
            raise BadRequest(message, param=refused[0][:_SHOWN_CHARS], code="unsupported_parameter")

    def _of(self, fields: Mapping[str, Any], caller: Caller) -> list[str]:
        return [
            name
            for name, value in fields.items()
            if value is not None and self._refuses(name, caller) and not (name == "priority" and value == 0)
        ]

    def _refuses(self, name: str, caller: Caller) -> bool:
        return name not in self._open if caller.isolated else name in self._steering

    def _nested(self, fields: Mapping[str, Any], caller: Caller) -> list[str]:
        refused: list[str] = []
        sampling, template = fields.get("sampling_params"), fields.get("chat_template_kwargs")
        if isinstance(sampling, dict) and not sampling.keys() <= self._sampling:
            refused += [
                f"sampling_params.{name}"
                for name in sampling
                if name not in self._sampling and (caller.isolated or name in self._steering)
            ]
        if isinstance(template, dict) and not TEMPLATE_STEERING.isdisjoint(template):
            refused += [f"chat_template_kwargs.{name}" for name in sorted(TEMPLATE_STEERING.intersection(template))]
        if not _WITH_PARTS.isdisjoint(fields):
            for name in _PROMPTS:
                if name in fields and type(value := fields[name]) in _CONTAINERS and _tells(value, _DEEPEST):
                    refused += [f"{name}: {what}" for what in self._media(value, _DEEPEST)]
            images = fields.get("images")
            if isinstance(images, list) and not all(self._may_fetch(image) for image in images):
                refused.append("images: media by URL")
        return refused

    def _media(self, value: Any, deepest: int) -> Iterator[str]:
        """What is wrong with the parts of a prompt."""
        for part in value if isinstance(value, list) else (value,):
            if type(part) is not dict:
                if type(part) is list and deepest:
                    yield from self._media(part, deepest - 1)
                continue
            if not _TELLING.isdisjoint(part):
                yield from self._wrong_with(part)
            for name in _INSIDE:
                if deepest and type(inside := part.get(name)) in _CONTAINERS:
                    yield from self._media(inside, deepest - 1)

    def _wrong_with(self, part: Mapping[str, Any]) -> Iterator[str]:
        for name in part.keys() & _TELLING:
            value = part[name]
            if name in _IDENTITIES:
                if value is not None:
                    yield name
            elif isinstance(value, dict):
                yield from (inside for inside in value.keys() & _IDENTITIES if value[inside] is not None)
                if not self._may_fetch(value.get("url")):
                    yield f"{name} by URL"
            elif not self._may_fetch(value):
                yield f"{name} by URL"

    def _may_fetch(self, where: Any) -> bool:
        """Data are no address. Anything else may be one, a file's path too, and needs a host that is allowed."""
        if not isinstance(where, str) or where[:5].lower() == "data:":
            return True
        if not self._media_hosts:
            return False
        try:
            url = urlsplit(where)
            return url.scheme in ("http", "https") and url.hostname in self._media_hosts
        except ValueError:
            return False


def _tells(value: Any, deepest: int) -> bool:
    """Whether some part of a prompt is more than text: mostly none is, and that is told in 0.2 µs a message."""
    for part in value if type(value) is list else (value,):
        if type(part) is dict:
            if not _TELLING.isdisjoint(part):
                return True
            for name in _INSIDE:
                if (
                    name in part
                    and type(inside := part[name]) in _CONTAINERS
                    and deepest
                    and _tells(inside, deepest - 1)
                ):
                    return True
        elif type(part) is list and deepest and _tells(part, deepest - 1):
            return True
    return False
