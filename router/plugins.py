"""Policies and adapters by name: through entry points, ours like a stranger's, or straight as "module:attr".

A name nobody installed, and a plugin that is installed but broken, are told apart: the first is a spelling mistake, the
second a bug in somebody's module, whose own error is kept as the cause.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from router.config.source import nearest
from router.errors import ConfigError

POLICIES = "warmroute.policies"
ADAPTERS = "warmroute.adapters"
DISCOVERY = "warmroute.discovery"


def names(group: str) -> list[str]:
    """The installed names of a group, sorted."""
    return sorted({entry_point.name for entry_point in entry_points(group=group)})


def load(group: str, name: str) -> Any:
    """The object behind an entry point's name or "module:attr". Raises ConfigError, one mistake, saying which it is."""
    if ":" in name:
        return _import(name, name)
    found = {entry_point.value: entry_point for entry_point in entry_points(group=group, name=name)}
    if not found:
        raise ConfigError([_unknown(group, name)])
    if len(found) > 1:
        raise ConfigError([f"{name!r} is installed twice in {group}, by {_sources(list(found.values()))}: remove one"])
    return _import(name, next(iter(found)))


def _import(name: str, value: str) -> Any:
    module_name, _, attributes = value.partition(":")
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name and (module_name == exc.name or module_name.startswith(f"{exc.name}.")):
            raise ConfigError([f"{name!r}: there is no module {exc.name!r} (is its package installed?)"]) from exc
        raise ConfigError([_broken(name, module_name, exc)]) from exc
    except Exception as exc:  # whatever a module does while it is imported is its own error, and ours to report
        raise ConfigError([_broken(name, module_name, exc)]) from exc
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise ConfigError(
                [f"{name!r}: module {module_name!r} has no {attributes!r}" + _close(attribute, dir(found))]
            )
        found = getattr(found, attribute)
    return found


def _broken(name: str, module_name: str, error: Exception) -> str:
    return f"{name!r} is there but module {module_name!r} cannot be imported: {type(error).__name__}: {error}"


def _unknown(group: str, name: str) -> str:
    known = names(group)
    if not known:
        return f"no {name!r} in {group}: none is installed (install warmroute itself: pip install -e .)"
    return f"no {name!r} in {group}{_close(name, known)}; installed: {', '.join(known)}; or write module:attr"


def _close(name: str, known: list[str]) -> str:
    meant = nearest(name, known)
    return f" (did you mean {meant!r}?)" if meant else ""


def _sources(found: list[EntryPoint]) -> str:
    return " and ".join(sorted(f"{entry.dist.name if entry.dist else '?'} ({entry.value})" for entry in found))
