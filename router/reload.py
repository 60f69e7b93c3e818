"""What another configuration means for a gateway that runs: what is taken over, and what has to wait for a restart.

Taken over: the sections in `TAKEN_OVER`, the waiting room's limits, and listen.drain. Everything else belongs to
sockets and memory that are made once; it stays as it was, and every reload says so anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from router.config import Config, Section
from router.config.source import Where, dotted

TAKEN_OVER = ("engines", "models", "policy", "prompt", "timeouts", "failover")


class Reload(NamedTuple):
    """The keys that differ, as "policy.weights"."""

    in_force: Config
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def compare(running: Config, read: Config) -> Reload:
    """`running`: what is in force. `read`: the file as it is now."""
    in_force = running.model_copy(
        update={
            **{name: getattr(read, name) for name in TAKEN_OVER},
            "listen": running.listen.model_copy(update={"drain": read.listen.drain}),
            "waiting_room": read.waiting_room.model_copy(update={"enabled": running.waiting_room.enabled}),
        }
    )
    return Reload(
        in_force,
        changed=tuple(dict.fromkeys(map(dotted, _differing(running, in_force)))),
        needs_restart=tuple(map(dotted, _differing(in_force, read))),
    )


def _differing(before: Section, after: Section, where: Where = ()) -> Iterator[Where]:
    """Positions of values that differ; of `engines`, only that they do."""
    for name in type(before).model_fields:
        old, new, here = getattr(before, name), getattr(after, name), (*where, name)
        if isinstance(old, Section) and isinstance(new, Section):
            yield from _differing(old, new, here)
        elif name == "models" and isinstance(old, Mapping):
            yield from ((*here, key) for key in {**old, **new} if old.get(key) != new.get(key))
        elif old != new:
            yield here
