"""A YAML file as plain data, with the place every value came from.

The dialect is YAML's core schema, narrower than PyYAML's default: only `true` and `false` are booleans, so that
`parity: off` stays a word, and `12:30` or `2026-01-01` stay text. Merge keys (`<<: *base`) work; duplicate keys don't.

Values may refer to the environment: `${NAME}`, `${NAME:-default}` anywhere in a string (`$${` is a literal `${`), or
`os.environ/NAME` as a whole value, as LiteLLM's files have it. `${NAME:-}` counts as null where NAME is not set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Where = tuple[str | int, ...]
"""A value's position: keys and list indices from the top."""

_PLAIN_KEY = re.compile(r"[\w-]+\Z")
_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}|(?P<broken>\$\{)")
_LITELLM = "os.environ/"


def dotted(where: Where) -> str:
    """engines[0].url; a key that is not a plain word is quoted: models['llama-3.1'].policy."""
    text = ""
    for key in where:
        if isinstance(key, int) or not _PLAIN_KEY.match(key):
            text += f"[{key!r}]"
        else:
            text += f".{key}" if text else key
    return text


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


class Place(NamedTuple):
    """A line of a file; line 0: the whole file, or something that has no lines (a flag, the environment)."""

    name: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else self.name


@dataclass(slots=True)
class Source:
    """Plain data, where each part was written, and what is wrong with it."""

    name: str
    data: Any = field(default_factory=dict)
    places: dict[Where, Place] = field(default_factory=dict)
    blamed: set[Where] = field(default_factory=set)
    _mistakes: list[tuple[Place, str]] = field(default_factory=list)

    @property
    def mistakes(self) -> list[str]:
        """In the order of their lines."""
        return [f"{place}: {what}" for place, what in sorted(self._mistakes, key=lambda mistake: mistake[0].line)]

    def blame(self, where: Where, what: str, *, line: int | None = None) -> None:
        """Adds the mistake "place: path.to.key: what"; by default the place is that of the nearest part written."""
        self.blamed.add(where)
        path = f"{dotted(where)}: " if where else ""
        self._mistakes.append((self.place(where) if line is None else Place(self.name, line), f"{path}{what}"))

    def put(self, where: Where, value: Any, *, origin: str) -> None:
        """Sets a value that comes from elsewhere (a flag, the environment) over what the file says."""
        spot = self.data
        for key in where[:-1]:
            if not isinstance(spot.get(key), dict):
                spot[key] = {}
            spot = spot[key]
        spot[where[-1]] = value
        self.places[where] = Place(origin)

    def place(self, where: Where) -> Place:
        """Of the nearest part written."""
        while where and where not in self.places:
            where = where[:-1]
        return self.places.get(where) or Place(self.name)


def read(path: Path, environ: Mapping[str, str]) -> Source:
    """Reads one YAML document. Never raises for its content: look at `mistakes`. Values of the environment are not
    repeated in any of them."""
    source = Source(str(path))
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_CoreLoader)
    except (OSError, UnicodeDecodeError) as exc:
        source.blame((), f"cannot be read: {getattr(exc, 'strerror', None) or 'it is not UTF-8 text'}")
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark else 0
        source.blame((), f"is not YAML: {exc.problem or exc.context}", line=line)
    except yaml.YAMLError as exc:
        source.blame((), f"is not YAML: {exc}")
    except RecursionError:
        source.blame((), "is nested too deeply")
    else:
        try:
            _fill(source, root, environ)
        except RecursionError:
            source.blame((), "is nested too deeply")
    return source


def _fill(source: Source, root: yaml.Node | None, environ: Mapping[str, str]) -> None:
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        source.blame((), "must be a mapping of keys to values", line=1)
        return
    source.data = _Walk(source, environ).mapping(root, (), ())


class _CoreLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way to say which words are not strings


_FORMS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})\Z"),
    "float": re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?\Z"),
}
for _tag, _form in _FORMS.items():
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _form, None)


class _Walk:
    """Turns nodes into data, noting lines and mistakes on the way."""

    def __init__(self, source: Source, environ: Mapping[str, str]) -> None:
        self._source = source
        self._environ = environ

    def value(self, node: yaml.Node, where: Where, above: tuple[int, ...]) -> Any:
        if id(node) in above:
            self._source.blame(where, "contains itself through an alias")
            return None
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, where, above)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(child, (*where, index), above) for index, child in enumerate(node.value)]
        return self._scalar(node, where)

    def mapping(self, node: yaml.MappingNode, where: Where, above: tuple[int, ...]) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key, str):
                self._source.blame(where, "a key must be a plain word", line=line)
            elif key == "<<":
                merged |= self._merge(value_node, where, above)
            elif key in first_line:
                what = f"is given twice (first in line {first_line[key]}; keep one)"
                self._source.blame((*where, key), what, line=line)
            else:
                first_line[key] = line
                self._note((*where, key), line)
                own[key] = self.value(value_node, (*where, key), above)
        return merged | own

    def _merge(self, node: yaml.Node, where: Where, above: tuple[int, ...]) -> dict[str, Any]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for part in reversed(parts):  # YAML: an earlier one in the list wins
            value = self.value(part, where, above)
            if isinstance(value, dict):
                merged |= value
            else:
                self._source.blame((*where, "<<"), "must name a mapping (<<: *anchor)")
        return merged

    def _item(self, node: yaml.Node, where: Where, above: tuple[int, ...]) -> Any:
        self._note(where, node.start_mark.line + 1)
        return self.value(node, where, above)

    def _note(self, where: Where, line: int) -> None:
        self._source.places[where] = Place(self._source.name, line)

    def _scalar(self, node: yaml.Node, where: Where) -> Any:
        text: str = node.value
        kind = node.tag.rpartition(":")[2]
        if kind in _FORMS and not _FORMS[kind].match(text):  # only where the tag is written out
            self._source.blame(where, f"is no {kind}, as its tag says (leave the tag out)")
            return None
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "str":
                return self._resolve(text, where)
        self._source.blame(where, f"the tag {node.tag} is not known here (leave it out)")
        return None

    def _resolve(self, text: str, where: Where) -> str | None:
        if text.startswith(_LITELLM):
            return self._variable(text.removeprefix(_LITELLM), None, where)
        if "${" not in text:
            return text
        resolved = _REFERENCE.sub(lambda match: self._replace(match, where), text)
        default_alone = _REFERENCE.fullmatch(text)
        if not resolved and default_alone and default_alone["default"] == "":
            return None
        return resolved

    def _replace(self, match: re.Match[str], where: Where) -> str:
        if match["broken"]:
            self._source.blame(where, "has a broken reference (write ${NAME} or ${NAME:-default}; a literal ${ is $${)")
            return ""
        if match["name"] is None:
            return "${"
        return self._variable(match["name"], match["default"], where)

    def _variable(self, name: str, default: str | None, where: Where) -> str:
        value = self._environ.get(name)
        if default is not None:
            return value or default  # as in a shell: `:-` also replaces an empty one
        if value is None:
            self._source.blame(
                where, f"the environment has no {name!r} (export it, or give a default: ${{{name}:-default}})"
            )
            return ""
        return value
