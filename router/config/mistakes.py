"""What pydantic finds wrong, in our words and at the line where it was written."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from router.config.source import Source, Where, nearest

# What people write out of the habit of other gateways' files -> our key for it.
_HABITS = {
    "api_base": "url",
    "base_url": "url",
    "name": "id",
    "server": "listen",
    "routing": "policy",
    "model_list": "engines",
}
_OUR_WORDS = {
    "must be a valid string": "must be text (put it in quotes)",
    "must be a valid tuple": "must be a list",
    "must be a valid dictionary": "must be a mapping",
    "have at least 1 character": "not be empty",
    "have at least 1 item after validation, not 0": "not be empty",
}


def blame_invalid(source: Source, error: ErrorDetails, *, root: type[BaseModel]) -> None:
    """Adds one mistake to the source. A value already blamed is not blamed twice."""
    where = _written_path(source.data, error["loc"], missing=error["type"] == "missing")
    if where in source.blamed:
        return
    match error["type"]:
        case "extra_forbidden":
            what = _unknown_key(where, root)
        case "missing":
            what = "is missing"
        case "model_type":
            what = "must be a mapping of keys to values"
        case _:
            what = _in_our_words(error["msg"])
    source.blame(where, what)


def without(data: Any, unwanted: Iterable[Where]) -> Any:
    """A copy of the data less the values at those places, as far as they are keys of mappings."""
    rest = copy.deepcopy(data)
    for where in unwanted:
        parent: Any = rest
        for key in where[:-1]:
            parent = parent[key] if isinstance(key, int) or key in parent else {}
        if where and isinstance(parent, dict):
            parent.pop(where[-1], None)
    return rest


def _written_path(data: Any, location: Sequence[str | int], *, missing: bool) -> Where:
    """The location without what pydantic puts in between: tags of unions, "[key]"."""
    where: list[str | int] = []
    for position, key in enumerate(location):
        if isinstance(data, Mapping) and key in data:
            data = data[str(key)]
        elif isinstance(data, Sequence) and not isinstance(data, str) and isinstance(key, int) and key < len(data):
            data = data[key]
        elif not (missing and position == len(location) - 1):
            continue
        where.append(key)
    return tuple(where)


def _unknown_key(where: Where, root: type[BaseModel]) -> str:
    key = str(where[-1])
    known = list(_section_at(where[:-1], root).model_fields)
    meant = habit if (habit := _HABITS.get(key)) in known else nearest(key, known)
    return "is not a known key (" + (f"did you mean {meant!r}?" if meant else f"known: {', '.join(known)}") + ")"


def _section_at(where: Where, section: type[BaseModel]) -> type[BaseModel]:
    for key in where:
        info = section.model_fields.get(key) if isinstance(key, str) else None
        section = next(_sections_in(info.annotation), section) if info else section
    return section


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def _in_our_words(message: str) -> str:
    message = message.removeprefix("Value error, ")
    message = re.sub(r"^(Input|String|Value|Tuple) should", "must", message)
    for theirs, ours in _OUR_WORDS.items():
        message = message.replace(theirs, ours)
    return message[:1].lower() + message[1:]
